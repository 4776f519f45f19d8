"""Policy lab: recorded requests, replayed through the cache without a model, and what memory holds. No torch."""
