"""Engines under test: built side by side in one process, timed, and out of the race once one of them raises."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from megatron_hybrid_prefix.bench.forced import forced_answers
from megatron_hybrid_prefix.console.engine_options import ENGINES, cache_figures
from megatron_hybrid_prefix.console.terminal import (
    InputError,
    Stopped,
    as_input_errors,
    no_garbage_collection,
    one_line,
)


@contextmanager
def timed_round() -> Iterator[None]:
    """Garbage is collected before and not during what is timed, the same for every engine."""
    gc.collect()
    with no_garbage_collection():
        yield


class Contestant:
    """One engine, its results, and how it ended.

    Attributes:
        name: Of `ENGINES`.
        fields: What it was built with.
        engine: The engine; None if it could not be built.
        crash: What it raised, in one line; None while it runs.
        trace: The traceback of that.
    """

    def __init__(self, name: str, fields: dict[str, Any], should_stop: Callable[[], bool]) -> None:
        self.name, self.fields, self.should_stop = name, fields, should_stop
        self.engine: Any = None
        self.crash: str | None = None
        self.trace: str | None = None

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Inside, what the engine raises puts it out of the race, and the others go on.

        In inference mode, as megatron's scripts run their engines: capturing CUDA graphs resets the engine in it, and what
        that makes anew, such as megatron's list of free state slots, cannot be written outside.
        """
        import torch

        try:
            with torch.inference_mode():
                yield
        except (InputError, Stopped):
            raise
        except Exception as error:
            self.crash = f"{type(error).__name__}: {one_line(error)}"
            self.trace = traceback.format_exc()

    def send(
        self,
        prompts: Sequence[list[int]],
        generate: int,
        *,
        attributes: Sequence[Mapping[str, Any]] | None = None,
        answers: Sequence[list[int]] | None = None,
    ) -> tuple[list[Any], float]:
        """Send prompts at once, greedy, to the end of exactly ``generate`` tokens each.

        Args:
            prompts: Token ids of each.
            generate: Length of each answer.
            attributes: What each sets on its sampling parameters beside that; an engine that does not know it ignores it.
            answers: ``generate`` tokens for each, that it answers with in place of what it would.

        Returns:
            A `RequestResult` a prompt, and the seconds that all took.

        Raises:
            RuntimeError: An answer is not the one it was to give.
        """
        from megatron_hybrid_prefix.mcore.runner import run_batch

        sampling = [greedy(generate) for _ in prompts]
        for params, own in zip(sampling, attributes or (), strict=attributes is not None):
            params.add_attributes(dict(own))
        with nullcontext() if answers is None else forced_answers(self.engine, answers):
            synchronize()
            started_s = time.perf_counter()
            results = run_batch(self.engine, prompts, sampling, should_stop=self.should_stop)
            wall_s = time.perf_counter() - started_s
        if any(result.status == "stopped" for result in results):
            raise Stopped
        for result, answer in zip(results, answers or (), strict=answers is not None):
            if result.status == "completed" and result.generated != answer:
                raise RuntimeError("an answer is not the one that was forced")
        return results, wall_s

    def counters(self) -> dict[str, Any]:
        """The counters of our cache; none for the other engines."""
        return cache_figures(self.engine) or {}

    def room(self) -> dict[str, int]:
        """What it can hold: KV blocks, and slots of kept states."""
        from megatron_hybrid_prefix.upstream.blocks import block_counts

        context = self.engine.context
        allocator = getattr(context, "mamba_slot_allocator", None)
        return {
            "kv_blocks": block_counts(context.kv_block_allocator).total - 1,
            "state_slots": self.counters().get("slots_total", 0 if allocator is None else allocator.max_slots),
        }


def greedy(generate: int) -> Any:
    """Sampling parameters: ``generate`` tokens, none ends it earlier."""
    from megatron_hybrid_prefix.upstream.names import SamplingParams

    return SamplingParams(num_tokens_to_generate=generate, top_k=1, termination_id=-1)


def synchronize() -> None:
    """Wait for the device."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def contestants(
    names: Sequence[str],
    make_model: Callable[[], Any],
    make_fields: Callable[[Any], dict[str, Any]],
    cache_of: Callable[[Any], tuple[float, float, str | None]],
    *,
    cuda_graphs: bool,
    crash_when_built: bool,
    should_stop: Callable[[], bool],
) -> Iterator[list[Contestant]]:
    """Build all engines; their CUDA graphs go at the end.

    Args:
        names: Of `ENGINES`.
        make_model: Builds a model, the same each time. CUDA graphs are tied to the model's modules, so with them each
            engine has a model of its own; else all share one.
        make_fields: Fields that all engines share, given the model.
        cache_of: GiB for kept states, GiB of host memory behind them, and the tier behind that, given the model.
        cuda_graphs: Whether engines capture graphs.
        crash_when_built: An engine that cannot be built is out of the race; else that is an `InputError`.
        should_stop: Whether Ctrl-C was noticed.
    """
    from megatron_hybrid_prefix.mcore import build_engine, build_upstream_engine
    from megatron_hybrid_prefix.mcore.runner import release_engine
    from megatron_hybrid_prefix.mcore.state.layout import mamba_state_config, needs_this_package

    found: list[Contestant] = []
    graphs = _GraphRecords() if cuda_graphs else None
    model: Any = None
    try:
        for name in names:
            if should_stop():
                raise Stopped
            if graphs is not None:
                graphs.begin()
            if model is None or graphs is not None:
                model = make_model()
            contestant = Contestant(name, make_fields(model) | ENGINES[name](*cache_of(model)), should_stop)
            found.append(contestant)
            with contestant.attempt(), as_input_errors(*_refusals(crash_when_built), prefix=f"engine {name}: "):
                # The others are megatron's own classes: "off" is what this package has to keep up with. Where megatron
                # cannot run the model, "off" is this package's engine without its cache.
                off = not contestant.fields.get("enable_prefix_caching")
                own = "prefix" in contestant.fields or (off and needs_this_package(mamba_state_config(model)))
                build = build_engine if own else build_upstream_engine
                contestant.engine = build(model, **contestant.fields)
            if graphs is not None:
                graphs.end()
        # What is there by now stays: collecting before each round need not look at it.
        gc.collect()
        gc.freeze()
        yield found
    finally:
        gc.unfreeze()
        if graphs is not None:
            graphs.put_back()
        for contestant in found:
            if contestant.engine is not None:
                release_engine(contestant.engine)


def _refusals(crash_when_built: bool) -> tuple[type[Exception], ...]:
    """What says that the user asked for an engine that cannot be had."""
    import torch

    return () if crash_when_built else (ValueError, torch.OutOfMemoryError)


class _GraphRecords:
    """Lets several engines capture CUDA graphs in one process as if each were alone.

    Megatron looks for the buffer of the previous layer in one record of the process, and finds the first engine's: the
    graphs of a second one would copy their input in every layer, and share the first one's memory pool.
    """

    def __init__(self) -> None:
        self._captured: list[Any] = []

    def begin(self) -> None:
        """Before a model is made: no graphs are known, and the next manager makes a pool."""
        from megatron_hybrid_prefix.upstream.graphs import forget_graph_pool, set_captured_graphs

        set_captured_graphs([])
        forget_graph_pool()

    def end(self) -> None:
        """After its engine is built (the next one may use another stream)."""
        from megatron_hybrid_prefix.upstream.graphs import captured_graphs

        self._captured += captured_graphs()
        synchronize()

    def put_back(self) -> None:
        """Make all graphs known, so that they can be deleted."""
        from megatron_hybrid_prefix.upstream.graphs import set_captured_graphs

        set_captured_graphs(self._captured)
