"""Policy lab: replays of recorded requests without a model, and capacity planning. Needs no torch."""
