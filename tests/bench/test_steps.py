"""How the steps of several repeats become figures: on steps that are made up, and with wrong ways to do it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_hybrid_prefix.bench import steps as steps_module
from megatron_hybrid_prefix.bench.stats import summarise
from megatron_hybrid_prefix.bench.steps import RoomTimes, Step, compared_sample, room_sample, step_metrics
from megatron_hybrid_prefix.cache import HybridPrefixCache

PROMPT, DECODE = (300, 9), (0, 9)


def step(gap_ms: float, work: tuple[int, int] = DECODE, changed_gib: float = 0.0, **more: float) -> Step:
    return Step(gap_ms=gap_ms, work=work, changed_gib=changed_gib, **more)


# Two repeats of five steps. The host disturbs each engine in another repeat, by 20 ms.
SPLIT = [
    [step(10, PROMPT), step(5), step(30, PROMPT), step(5), step(40, PROMPT)],
    [step(30, PROMPT), step(25), step(10, PROMPT), step(5), step(20, PROMPT)],
]
OURS = [
    [step(32, PROMPT, 0.5), step(26), step(11, PROMPT), step(5.5), step(50, (310, 9), 0.5)],
    [step(12, PROMPT, 0.25), step(6), step(31, PROMPT), step(25), step(20, (310, 9), 0.5)],
]


def figures(ours: list[list[Step]] = OURS, split: list[list[Step]] = SPLIT) -> dict[str, Any]:
    return compared_sample(ours, split)


def check_least_of_repeats() -> None:
    """A step is compared by its fastest repeat, of each engine, so what disturbs one repeat is not seen."""
    found = figures()
    assert found["prompt_changing_steps"] == 1 and found["prompt_changing_over_split_max_ms"] == 2
    assert found["prompt_other_steps"] == 1 and found["prompt_other_over_split_max_ms"] == 1
    assert found["decode_other_steps"] == 2 and found["decode_other_over_split_max_ms"] == 1
    assert found["decode_other_over_split_median_ms"] == 0.75
    assert found["decode_changing_steps"] == 0 and found["decode_changing_over_split_max_ms"] is None
    assert found["slower_prompt_changing_steps"] == found["slower_decode_other_steps"] == 0


def check_other_work_is_left_out() -> None:
    """The last step computed other tokens than with the split."""
    assert figures()["not_compared"] == 1


def check_same_repeats() -> None:
    """A step that changed owners in some repeats is compared over these, of both engines, if they are two or more."""
    ours = [[step(20, PROMPT, 0.5)], [step(18, PROMPT, 0.5)], [step(10, PROMPT)]]
    split = [[step(11, PROMPT)], [step(12, PROMPT)], [step(5, PROMPT)]]
    found = figures(ours, split)
    assert found["prompt_changing_steps"] == 1 and found["prompt_changing_over_split_max_ms"] == 7
    assert found["slower_prompt_changing_steps"] == 1
    assert found["prompt_other_steps"] == 0 and found["not_compared"] == 0  # one repeat without a change is too few
    assert figures(ours[1:], split[1:])["not_compared"] == 1


CHECKS = (check_least_of_repeats, check_other_work_is_left_out, check_same_repeats)


@pytest.mark.parametrize("check", CHECKS)
def test_comparison(check: Callable[[], None]) -> None:
    check()


def slowest_of_repeats(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(steps_module, "min", lambda values, *more: min(values, *more) if more else max(values), raising=False)


def one_repeat_is_enough(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(steps_module, "min", lambda *values: 1 if values[0] == 2 else min(*values), raising=False)


def all_work_is_the_same(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Step, "work", PROMPT)


def no_step_changes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Step, "changes", False)


MUTANTS = {
    slowest_of_repeats: check_least_of_repeats,
    one_repeat_is_enough: check_same_repeats,
    all_work_is_the_same: check_other_work_is_left_out,
    no_step_changes: check_least_of_repeats,
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_comparison_is_found(mutant: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        MUTANTS[mutant]()


def test_with_one_repeat_it_is_compared() -> None:
    found = figures(OURS[:1], SPLIT[:1])
    assert found["prompt_changing_over_split_max_ms"] == 22 and found["slower_prompt_changing_steps"] == 1


def test_an_engine_that_crashed_in_the_second_repeat() -> None:
    assert figures(OURS, SPLIT[:1]) == figures(OURS[:1], SPLIT[:1])
    assert figures(OURS, [])["prompt_changing_steps"] == 0


def test_direct_cost() -> None:
    """Of the steps that change owners, in all repeats; the CPU's and the device's times add up step by step."""
    repeats = [
        [step(9, room_ms=1.0, copy_ms=0.5, changed_gib=0.5, moved_gib=0.25), step(9, room_ms=70.0), step(9)],
        [step(9, room_ms=0.25), step(9, room_ms=2.0, copy_ms=4.0, changed_gib=1.5, moved_gib=1.0), step(9)],
    ]
    changes = [[one.changes for one in steps] for steps in repeats]
    assert changes == [[True, False, False], [False, True, False]]
    found = room_sample(repeats, changes)
    assert (found["room_median_ms"], found["room_max_ms"]) == (1.5, 2.0)
    assert (found["copy_median_ms"], found["copy_p99_ms"]) == (2.25, 4.0)
    assert (found["cost_max_ms"], found["costly_steps"], found["cost_total_ms"]) == (6.0, 1, 3.75)
    assert (found["changed_max_gib"], found["moved_max_gib"]) == (1.5, 1.0)
    assert found["cost_fastest_max_ms"] == 6.0
    # The engine whose changes count crashed: nothing is said of the repeats that it lacks.
    assert room_sample(repeats, changes[:1])["cost_total_ms"] == 1.5
    assert room_sample(repeats, [])["cost_total_ms"] is None
    assert room_sample([], [])["cost_max_ms"] is room_sample([], [])["cost_fastest_max_ms"] is None


def check_direct_cost_of_the_fastest_repeat() -> None:
    """Each of two steps is disturbed in another repeat."""
    repeats = [
        [step(9, room_ms=9.0, changed_gib=0.5), step(9, room_ms=2.0, changed_gib=0.5)],
        [step(9, room_ms=1.0, changed_gib=0.5), step(9, room_ms=8.0, changed_gib=0.5)],
    ]
    found = room_sample(repeats, [[True, True]] * 2)
    assert (found["cost_max_ms"], found["cost_fastest_max_ms"], found["costly_steps"]) == (9.0, 2.0, 0)


def test_direct_cost_of_the_fastest_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    check_direct_cost_of_the_fastest_repeat()
    slowest_of_repeats(monkeypatch)
    with pytest.raises(AssertionError):
        check_direct_cost_of_the_fastest_repeat()


def test_copies_of_moves_of_the_step_before_count() -> None:
    assert step(9, copy_ms=0.5).changes and step(9, moved_gib=0.5).changes and not step(9, room_ms=0.5).changes


def test_every_figure_has_a_row_and_the_rows_have_one_value() -> None:
    overall = {"ours": room_sample(OURS, [[True] * 5] * 2) | figures()}
    assert set(overall["ours"]) == {metric.name for metric in step_metrics()}
    report = summarise(step_metrics(), {"ours": [{}, {}], "split": [{}, {}]}, overall=overall)
    assert report["prompt_changing_over_split_max_ms"]["samples"] == {"ours": [2], "split": []}
    assert report["prompt_changing_over_split_max_ms"]["median"] == {"ours": 2, "split": None}


# --- Measuring -------------------------------------------------------------------------------------------------------


class Clock:
    """Time goes on when `spend` says so."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        patch.setattr(steps_module, "time", SimpleNamespace(perf_counter=lambda: self.now_s))

    def spend(self, call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def slow(*args: Any) -> Any:
            self.now_s += seconds
            return call(*args)

        return slow


def test_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking blocks and slots and launching copies; on the CPU, the copies are left out of the latter."""
    clock = Clock(monkeypatch)
    cache = HybridPrefixCache(block_tokens=4, cache_bytes=8, block_bytes=1, state_bytes=2)

    class Memory:
        buffer = torch.empty(1)
        move_blocks = staticmethod(clock.spend(lambda moves: None, 4.0))

    class Moves:
        launch = staticmethod(clock.spend(lambda: memory.move_blocks([]), 2.0))

    memory, moves, times = Memory(), Moves(), RoomTimes()
    engine = SimpleNamespace(context=SimpleNamespace(prefix_cache=cache, moves=moves, shared_memory=memory))
    monkeypatch.setattr(cache._store.slots, "reserve", clock.spend(cache._store.slots.reserve, 1.0))
    monkeypatch.setattr(cache._store.blocks, "take", clock.spend(cache._store.blocks.take, 0.5))
    with times.watch(engine):
        admission = cache.admit(1, cache.match(cache.chain([1] * 8)))
        assert admission is not None and len(admission.block_ids) == 2
        room_ms, copied_ms = times.take()
        assert (room_ms, copied_ms()) == (1500.0, 0.0)  # a slot for its own state, and blocks
        moves.launch()
        room_ms, copied_ms = times.take()
        assert (room_ms, copied_ms()) == (2000.0, 4000.0)
        assert times.take()[0] == 0.0
    assert not vars(moves) and not vars(memory)
    cache.admit(2, cache.match(cache.chain([2] * 4)))
    assert times.take()[0] == 0.0


def test_engines_without_this_cache_have_nothing_to_measure() -> None:
    times = RoomTimes()
    with times.watch(SimpleNamespace(context=SimpleNamespace())):
        assert times.take()[0] == 0.0
