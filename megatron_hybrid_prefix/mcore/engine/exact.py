"""`make_exact`: a model's steps compute the same bits for a token in any batch."""

from __future__ import annotations

from megatron_hybrid_prefix.layers.invariant import invariant_problem, use_invariant_layers
from megatron_hybrid_prefix.upstream.names import TextGenerationController


def make_exact(controller: TextGenerationController) -> None:
    """Puts invariant layers on the controller's model.

    Raises:
        ValueError: The model, or this machine, cannot compute so.
    """
    model = controller.inference_wrapped_model.model
    problem = invariant_problem(model)
    if problem is not None:
        raise ValueError(f"exact='bits': {problem}")
    use_invariant_layers(model)
    if next(model.parameters()).is_cuda:
        from megatron_hybrid_prefix.layers.invariant_cuda import pin_kernels

        pin_kernels()
