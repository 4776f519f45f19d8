"""Mutants: wrong states on purpose. A parity test must notice each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

MUTANTS = ("ssm_zeroed", "conv_zeroed", "other_depth")
# Components of a state that a mutant zeroes: of all layer kinds what accumulates over tokens, and the last inputs.
ZEROED = {"ssm_zeroed": ("ssm", "state"), "conv_zeroed": ("conv",), "other_depth": ()}  # ends of their names


@contextmanager
def mutated_resume(engine: Any, mutant: str | None) -> Iterator[None]:
    """A context in which every state that a request resumes from is made wrong just before the forward that reads it.

    "other_depth" uses the deepest state that the engine has when the context opens. No request may resume at that
    depth.
    """
    context = engine.context
    original = context.transfer_bookkeeping_to_gpu  # by its end, loaded states are there
    deepest = max([node for node in context.prefix_cache.nodes() if node.slot >= 0], key=lambda n: n.depth_blocks)
    others = {name: tensor.clone() for name, tensor in context.shared_memory.state(deepest.slot).items()}

    def damaging(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        for plan in context._step.plans():
            if plan.source_slot is None:
                continue
            assert plan.start_tokens != deepest.depth_blocks * context.block_size_tokens
            for name, tensor in context.shared_memory.state(plan.source_slot).items():
                if mutant == "other_depth":
                    tensor.copy_(others[name])
                elif name.endswith(ZEROED[mutant]):
                    tensor.zero_()
        return result

    assert mutant is None or mutant in MUTANTS
    if mutant is not None:
        context.transfer_bookkeeping_to_gpu = damaging
    try:
        yield
    finally:
        context.__dict__.pop("transfer_bookkeeping_to_gpu", None)


def check_answers(served: Any, mutant: str | None) -> None:
    """Checks that all answers of an `EngineHarness` are right; with a mutant, that some are wrong."""
    if mutant is None:
        served.check()
    else:
        with pytest.raises(AssertionError):
            served.check()
