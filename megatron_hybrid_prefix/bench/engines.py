"""The engines under test. They are built in one process and timed in turn. One that raises is excluded."""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from megatron_hybrid_prefix.bench.forced import forced_answers
from megatron_hybrid_prefix.console import terminal
from megatron_hybrid_prefix.console.running import cache_figures, greedy, send
from megatron_hybrid_prefix.console.terminal import InputError, Stopped


@contextmanager
def timed_round() -> Iterator[None]:
    """Collects garbage before the timed round, and disables the collector during it, for every engine."""
    gc.collect()
    with terminal.no_garbage_collection():
        yield


class Contestant:
    """One engine under test, and how it ended.

    Attributes:
        name: Its name in the report.
        kind: Its name in `ENGINES`.
        args: Its options.
        fields: The arguments it was built with.
        engine: The engine; None if it could not be built.
        crash: The exception it raised, in one line; None while it runs.
        trace: The traceback of that exception.
    """

    def __init__(self, name: str, kind: str, args: argparse.Namespace) -> None:
        self.name, self.kind, self.args = name, kind, args
        self.fields: dict[str, Any] = {}
        self.engine: Any = None
        self.crash: str | None = None
        self.trace: str | None = None
        self.should_stop: Callable[[], bool] = lambda: False

    def build(self, model: Any) -> None:
        """Builds the engine: megatron's own for "off" and "upstream", as far as megatron can run the model."""
        from megatron_hybrid_prefix.mcore import build_engine, build_upstream_engine
        from megatron_hybrid_prefix.mcore.state.layout import mamba_state_config, needs_this_package

        needed = self.kind == "off" and needs_this_package(mamba_state_config(model))
        build = build_engine if self.kind == "ours" or needed else build_upstream_engine
        self.engine = build(model, **self.fields)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """A context in which an exception of the engine excludes this engine, and the others continue.

        But a lack of memory ends the benchmark: the engines share it, so that figures of the others would not be those of
        these budgets.

        It runs in inference mode, as megatron's scripts run their engines. Capturing CUDA graphs resets the engine in
        inference mode. Tensors created there, such as megatron's list of free state slots, cannot be written outside of
        it.
        """
        import torch

        try:
            with terminal.as_memory_errors(f"engine {self.name}"), torch.inference_mode():
                yield
        except (InputError, Stopped):
            raise
        except Exception as error:
            self.crash = f"{type(error).__name__}: {terminal.one_line(error)}"
            self.trace = traceback.format_exc()

    def send(
        self,
        prompts: Sequence[list[int]],
        generate: int,
        *,
        attributes: Sequence[Mapping[str, Any]] | None = None,
        answers: Sequence[list[int]] | None = None,
        on_step: Callable[[], None] = lambda: None,
    ) -> tuple[list[Any], float]:
        """Sends prompts at once with greedy sampling, until each has exactly ``generate`` tokens.

        Args:
            prompts: Token ids of each prompt.
            generate: Length of each answer.
            attributes: Attributes to set on the sampling parameters of each. An engine ignores those it does not know.
            answers: For each prompt, ``generate`` tokens to use as its answer instead of the sampled ones.
            on_step: Called after each step.

        Returns:
            A `RequestResult` per prompt, and the total seconds.

        Raises:
            RuntimeError: An answer differs from the forced one.
        """
        sampling = [greedy(generate) for _ in prompts]
        for params, own in zip(sampling, attributes or (), strict=attributes is not None):
            params.add_attributes(dict(own))
        with nullcontext() if answers is None else forced_answers(self.engine, answers):
            synchronize()
            started_s = time.perf_counter()
            results = send(self.engine, prompts, sampling, self.should_stop, lambda count: on_step())
            wall_s = time.perf_counter() - started_s
        for result, answer in zip(results, answers or (), strict=answers is not None):
            if result.status == "completed" and result.generated != answer:
                raise RuntimeError("an answer differs from the forced one")
        return results, wall_s

    def counters(self) -> dict[str, Any]:
        """Counters of this package's cache; empty for the other engines."""
        return cache_figures(self.engine) or {}

    def room(self) -> dict[str, int]:
        """Capacity: KV blocks and state slots. If they share memory: how many there are if there are none of the others."""
        from megatron_hybrid_prefix.upstream.blocks import block_counts

        context = self.engine.context
        allocator = getattr(context, "mamba_slot_allocator", None)
        return {
            "kv_blocks": block_counts(context.kv_block_allocator).total - 1,
            "state_slots": self.counters().get("slots_total", 0 if allocator is None else allocator.max_slots),
        }


def synchronize() -> None:
    """Waits for the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


class GraphRecords:
    """Lets several engines in one process capture CUDA graphs, as if each were alone.

    Megatron looks up the buffer of the previous layer in one record per process, and would find the first engine's.
    Then a second engine's graphs would copy their input in every layer, and share the first engine's memory pool.
    """

    def __init__(self) -> None:
        self._captured: list[Any] = []

    def begin(self) -> None:
        """Call before a model is made. Clears megatron's record, so that the next graphs get a new pool."""
        from megatron_hybrid_prefix.upstream.graphs import forget_graph_pool, set_captured_graphs

        set_captured_graphs([])
        forget_graph_pool()

    def end(self) -> None:
        """Call after the model's engine is built (the next engine may use another stream)."""
        from megatron_hybrid_prefix.upstream.graphs import captured_graphs

        self._captured += captured_graphs()
        synchronize()

    def put_back(self) -> None:
        """Puts all graphs back into megatron's record, so that they can be deleted."""
        from megatron_hybrid_prefix.upstream.graphs import set_captured_graphs

        set_captured_graphs(self._captured)
