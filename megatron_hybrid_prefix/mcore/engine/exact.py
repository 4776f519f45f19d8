"""What ``exact="bits"`` changes in an engine: the layers of its model, and no kernel is tuned."""

from __future__ import annotations

from megatron_hybrid_prefix.layers.invariant import invariant_problem, use_invariant_layers
from megatron_hybrid_prefix.platform import replace_names
from megatron_hybrid_prefix.platform.patches import AUTOTUNERS
from megatron_hybrid_prefix.upstream.names import TextGenerationController


def make_exact(controller: TextGenerationController) -> None:
    """Puts invariant layers on the controller's model, and lets no kernel of an exact step be tuned.

    Raises:
        ValueError: The model, or this machine, cannot compute so.
    """
    model = controller.inference_wrapped_model.model
    problem = invariant_problem(model)
    if problem is not None:
        raise ValueError(f"exact='bits': {problem}")
    use_invariant_layers(model)
    replace_names(AUTOTUNERS)
