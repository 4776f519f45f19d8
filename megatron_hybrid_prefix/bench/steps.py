"""Steps of an engine: what making room cost in each, and how much longer it took than the same step of another engine.

Two ways to see what it costs if memory changes between KV and states:

- Directly: the time of the calls that make room, and of the copies that they cause. It has little noise, unless another process
  has the processor. It counts more than the change itself, because a fixed split evicts, too.
- By comparison with the same steps of a fixed split. That has all effects in it, and the noise of the host. Noise only adds
  time, so of each step the fastest of all repeats is compared. The steps without a change show how much noise is left.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_hybrid_prefix.bench.stats import Metric, Sample, median, percentile

GOAL_MS = 5.0
_MS = 1e3
_KINDS = {"prompt": "that compute a prompt", "decode": "that only decode"}
_CHANGES = {"changing": "that change owners", "other": "that do not (noise)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of an engine.

    Attributes:
        gap_ms: From the end of the step before to its own.
        work: Prompt tokens that it computed, and its requests.
        changed_gib: GiB that changed between KV and states in it.
        moved_gib: GiB of KV blocks that moved in it.
        room_ms: The CPU's time for making room: see `RoomTimes`.
        copy_ms: The device's time for copies of blocks that moved.
    """

    gap_ms: float
    work: tuple[int, int]
    changed_gib: float = 0.0
    moved_gib: float = 0.0
    room_ms: float = 0.0
    copy_ms: float = 0.0

    @property
    def cost_ms(self) -> float:
        """What making room cost the CPU and the device, one after the other."""
        return self.room_ms + self.copy_ms

    @property
    def changes(self) -> bool:
        """Whether memory changed its owner, or blocks moved; their copies may run in the next step."""
        return max(self.changed_gib, self.moved_gib, self.copy_ms) > 0


class RoomTimes:
    """Measures what making room costs an engine with this package's cache. Nothing for other engines.

    The CPU's time is by the clock, and has all that finds blocks and slots: eviction, the choice of pages, new places of
    blocks that move, and launching their copies. So a call that waited for the device would be seen. The device's time is
    from before the upload of the ids to the end of the copy; it is read after the traffic.

    On the CPU the copies run while they are launched, and are counted as copies alone.
    """

    def __init__(self) -> None:
        self._seconds = {"room": 0.0, "copies": 0.0}
        self._events: list[tuple[Any, Any]] = []

    @contextmanager
    def watch(self, engine: Any) -> Iterator[None]:
        """A context in which the engine is measured."""
        from megatron_hybrid_prefix.index.inspect import watched_calls

        context = engine.context
        cache, moves = getattr(context, "prefix_cache", None), getattr(context, "moves", None)
        memory = getattr(context, "shared_memory", None)
        making_room = partial(self._timed, "room")
        with ExitStack() as stack:
            if cache is not None:
                stack.enter_context(cache.inspect.watched_room(making_room))
            if moves is not None:
                stack.enter_context(watched_calls(moves, ("launch",), making_room))
            if memory is not None:
                copying = self._copying_on_gpu if memory.buffer.is_cuda else partial(self._timed, "copies")
                stack.enter_context(watched_calls(memory, ("move_blocks",), copying))
            yield

    def take(self) -> tuple[float, Callable[[], float]]:
        """What was measured since the last call: the CPU's ms, and a function that waits for the copies and returns theirs."""
        events, copies_ms = self._events, _MS * self._seconds["copies"]
        room_ms = _MS * (self._seconds["room"] - self._seconds["copies"])
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._events = []

        def copied_ms() -> float:
            for _, end in events:
                end.synchronize()
            on_gpu_ms: float = sum(start.elapsed_time(end) for start, end in events)
            return copies_ms + on_gpu_ms

        return room_ms, copied_ms

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self._seconds[part] += time.perf_counter() - start_s

    @contextmanager
    def _copying_on_gpu(self) -> Iterator[None]:
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._events.append((start, end))


def step_metrics() -> list[Metric]:
    """What `room_sample` and `compared_sample` give."""
    of_all = partial(Metric, ratios=False, over_repeats=True)
    ms = partial(of_all, digits=2)
    shares = {"median": "median", "p99": "p99", "max": "most"}
    found = [
        ms(name=f"{name}_{which}_ms", label=f"steps that change owners, {text}: {label}, ms")
        for name, text in (("room", "CPU for making room"), ("copy", "copies on the device"))
        for which, label in shares.items()
    ]
    found += [
        ms(name="cost_max_ms", label="both together: most, ms"),
        ms(name="cost_fastest_max_ms", label="... in the fastest repeat of a step", goal=f"<= {GOAL_MS:g}"),
        of_all(name="costly_steps", label=f"... steps with more than {GOAL_MS:g} ms", digits=0, goal="0"),
        ms(name="cost_total_ms", label="all steps of a repeat together, ms"),
        of_all(name="changed_max_gib", label="most GiB that changed in a step", digits=3),
        of_all(name="moved_max_gib", label="most GiB of KV blocks moved in a step", digits=3),
    ]
    for kind, kind_text in _KINDS.items():
        for change, change_text in _CHANGES.items():
            name, text = f"{kind}_{change}", f"steps {kind_text}, {change_text}"
            found += [
                of_all(name=f"{name}_steps", label=text, digits=0),
                *(
                    ms(name=f"{name}_over_split_{which}_ms", label=f"... longer than with split: {label}, ms")
                    for which, label in shares.items()
                ),
                of_all(name=f"slower_{name}_steps", label=f"... more than {GOAL_MS:g} ms longer", digits=0),
            ]
    return [*found, of_all(name="not_compared", label="steps not compared (other work, or too few repeats)", digits=0)]


def room_sample(repeats: Sequence[Sequence[Step]], changes: Sequence[Sequence[bool]]) -> Sample:
    """What making room cost.

    Args:
        repeats: The steps of each repeat.
        changes: The steps that count, likewise.
    """
    of_number: Mapping[int, list[Step]] = defaultdict(list)
    pairs = list(zip(repeats, changes, strict=False))  # an engine that crashed has fewer
    for steps, chosen_steps in pairs:
        for number, (step, is_chosen) in enumerate(zip(steps, chosen_steps, strict=True)):
            if is_chosen:
                of_number[number].append(step)
    chosen = [step for same_step in of_number.values() for step in same_step]
    costs = [step.cost_ms for step in chosen]
    fastest = [min(step.cost_ms for step in same_step) for same_step in of_number.values()]
    return {
        **_spread("room", [step.room_ms for step in chosen]),
        **_spread("copy", [step.copy_ms for step in chosen]),
        "cost_max_ms": max(costs, default=None),
        "cost_fastest_max_ms": max(fastest, default=None),
        "costly_steps": sum(ms > GOAL_MS for ms in fastest),
        "cost_total_ms": sum(costs) / len(pairs) if pairs else None,
        "changed_max_gib": max((step.changed_gib for step in chosen), default=None),
        "moved_max_gib": max((step.moved_gib for step in chosen), default=None),
    }


def compared_sample(repeats: Sequence[Sequence[Step]], baseline: Sequence[Sequence[Step]]) -> Sample:
    """How much longer steps took than the same steps of the baseline, each the fastest of some repeats.

    A step is compared over the repeats in which both engines did the same work and memory changed its owner, and over those
    in which it did not; of both engines the same repeats. With several repeats there must be at least two.

    Args:
        repeats: The steps of each repeat.
        baseline: Those of the baseline.
    """
    pairs = list(zip(repeats, baseline, strict=False))  # an engine that crashed has fewer
    least_repeats = min(2, len(pairs))
    longer: dict[str, list[float]] = {f"{kind}_{change}": [] for kind in _KINDS for change in _CHANGES}
    not_compared = 0
    for same_step in zip(*(zip(own, other, strict=True) for own, other in pairs), strict=True):
        groups: Mapping[Any, list[tuple[Step, Step]]] = defaultdict(list)
        for own, other in same_step:
            if own.work == other.work:
                groups[own.work, own.changes].append((own, other))
        compared = {key: group for key, group in groups.items() if len(group) >= least_repeats}
        not_compared += not compared
        for (work, changes), group in compared.items():
            name = f"{'prompt' if work[0] else 'decode'}_{'changing' if changes else 'other'}"
            fastest, fastest_other = (min(step.gap_ms for step in steps) for steps in zip(*group, strict=True))
            longer[name].append(fastest - fastest_other)
    found: Sample = {"not_compared": not_compared}
    for name, all_ms in longer.items():
        found |= _spread(f"{name}_over_split", all_ms)
        found |= {f"{name}_steps": len(all_ms), f"slower_{name}_steps": sum(ms > GOAL_MS for ms in all_ms)}
    return found


def _spread(name: str, all_ms: Sequence[float]) -> Sample:
    return {
        f"{name}_median_ms": median(all_ms),
        f"{name}_p99_ms": percentile(all_ms, 0.99),
        f"{name}_max_ms": max(all_ms, default=None),
    }
