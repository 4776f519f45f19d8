"""With the cache on, several ranks give the answers of one rank without it, and decide alike at every step.

Pipeline stages may have different numbers of recurrent layers, or none.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from typing import Any

import pytest

from tests.harness.engine_helpers import LOG_PROB_NOISE, assert_same
from tests.harness.rank_stats import alike_on_ranks
from tests.harness.selection import mostly_slow
from tests.harness.workers import prefix_parallel as worker
from tests.harness.workers.launch import need_ranks, run_ranks

pytestmark = pytest.mark.multi

# (tp, pp): where the stages are cut. One with three times as many layers; one where nothing recurs; layers of several kinds,
# some of them on one stage only.
PATTERNS = {(2, 1): ("G*-MG*-",), (1, 2): ("M*-|M*-M-M-", "G*-|MG*-", "M*-M-|*-"), (2, 2): ("*-|M*-M-",)}


CASES = mostly_slow(
    [(layout, pattern) for layout, patterns in PATTERNS.items() for pattern in patterns], ((2, 1), "G*-MG*-")
)
LAYOUTS = mostly_slow(PATTERNS, (2, 1))


def name_of(layout):
    return "tp{}-pp{}".format(*layout)


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Starts a layout's ranks, once per pattern. Returns each rank's findings, and its error for an impossible budget."""

    outcomes: dict[Any, Any] = {}

    def start(layout: tuple[int, int], pattern: str) -> tuple[list[Any], list[str]]:
        case = layout, pattern
        need_ranks(layout[0] * layout[1])
        if case not in outcomes:
            tp, pp = layout
            out = tmp_path_factory.mktemp("ranks") / "found.json"
            try:
                ranks = run_ranks("prefix_parallel.py", out, tp, pp, pattern, ranks=tp * pp)
            except AssertionError as error:  # not started again for every test
                outcomes[case] = error
            else:
                refusals = [out.with_name(f"{out.name}.refusal{rank}").read_text() for rank in range(tp * pp)]
                outcomes[case] = ranks, refusals
        if isinstance(outcomes[case], AssertionError):
            raise outcomes[case]
        return outcomes[case]

    return start


@pytest.fixture(scope="module")
def alone(platform):
    """Findings of one process, by pattern, mode, scenario, and with or without the cache. Stages do not matter to it.

    Without the cache, both modes are compared with the answers of one: they must be the same.
    """

    @cache
    def model(pattern: str) -> Any:
        return worker.build(pattern, 1, 1, platform)

    @cache
    def findings(pattern: str, mode: str, name: str, cached: bool) -> dict[str, Any]:
        return worker.run_scenario(name, model(pattern), pattern, 1, 1, mode, cached=cached)

    def found(pattern: str, mode: str, name: str, *, cached: bool) -> dict[str, Any]:
        return findings(worker.one_rank(pattern), mode if cached else worker.MODES[0], name, cached)

    return found


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{name_of(case[0])}-{case[1]}")
def case(request, launch):
    """Layout, pattern, and each rank's findings."""
    layout, pattern = request.param
    return layout, pattern, [found["runs"] for found in launch(layout, pattern)[0]]


@pytest.mark.parametrize("name", worker.SCENARIOS)
def test_answers_are_those_of_one_rank_without_a_cache(case, alone, name):
    _, pattern, ranks = case
    for mode in worker.modes_of(pattern):
        right = alone(pattern, mode, name, cached=False)["answers"]
        most = max(assert_same(rank[mode][name]["answers"], right) for rank in ranks)
        print(f"{mode}: log-probs within {most:.1e} of one rank's")


@pytest.mark.parametrize("name", worker.SCENARIOS)
def test_all_ranks_decide_alike_and_as_one_alone(case, alone, name):
    """The same blocks, slots, moves and cached prefixes after every step. Stages that are not alike may have other pages than one."""
    _, pattern, ranks = case
    for mode in worker.modes_of(pattern):
        first, one = ranks[0][mode][name], alone(pattern, mode, name, cached=True)
        for right in [first, one] if one["layout"] == first["layout"] else [first]:
            for found in (rank[mode][name] for rank in ranks):
                for what in ("layout", "decisions", "present", "preempted", "moved"):
                    assert found[what] == right[what], what
                # What slots and entries take is each rank's own; how many there are is not.
                assert alike_on_ranks(found["stats"]) == alike_on_ranks(right["stats"])
                assert [a["cached_tokens"] for a in found["answers"]] == [a["cached_tokens"] for a in right["answers"]]


def test_scenarios_do_what_they_are_for(case):
    for mode in worker.modes_of(case[1]):
        tails, chunked, preempted, host, pressed = (case[2][0][mode][name] for name in worker.SCENARIOS)
        cached = [answer["cached_tokens"] for answer in tails["answers"]]
        assert cached[2:6] == [2 * worker.BLOCK_TOKENS] * 4
        assert tails["stats"]["evictions"] == 0
        assert chunked["stats"]["evictions"] > 3 and chunked["stats"]["reused_tokens"] > 0
        assert host["stats"]["tiers"]["host"]["loads"] > 5 and host["stats"]["reused_tokens_host"] > 0
        assert host["stats"]["fallbacks"]["host_load_failed"] in (1, 2)
        assert preempted["stats"]["kv_evictions"] > 3 and preempted["stats"]["reused_tokens"] > 0
        assert preempted["preempted"] > 0
        assert pressed["stats"]["tiers"]["host"]["loads"] > 0 and pressed["stats"]["kv_evictions"] > 3


def test_as_many_slots_as_the_tightest_rank_can_hold(case):
    """Stages have blocks and states of other sizes, and the same blocks and pages."""
    (tp, pp), pattern, ranks = case
    sizes = worker.sizes_of(pattern, tp, pp)
    page = worker.page_of(sizes)
    for mode, name in product(worker.modes_of(pattern), worker.SCENARIOS):
        for number, rank in enumerate(ranks):
            found = rank[mode][name]
            assert found["slot_bytes"] == sizes[number // tp][0]
            assert found["layout"][1:] == [page.page_blocks, page.page_states]
            assert found["stats"]["slots_total"] == worker.SLOTS[name]


def test_a_wrong_state_on_one_rank_shows(case, alone):
    """Otherwise equal answers would not show that every rank's states are right."""
    _, pattern, ranks = case
    right = alone(pattern, "legacy", "tails", cached=False)["answers"]
    for rank in ranks:
        answers = rank["damaged"]["answers"]
        assert any(answer["cached_tokens"] for answer in answers)
        for answer, reference in zip(answers, right, strict=True):
            off = max(abs(a - b) for a, b in zip(answer["log_probs"], reference["log_probs"], strict=True))
            assert off > 1e-3 if answer["cached_tokens"] else off <= LOG_PROB_NOISE


def test_what_is_not_finite_on_one_rank_fails_its_request_on_all(case, alone):
    """On the first rank: the others see it in the logits only."""
    _, _, ranks = case
    for rank in ranks:
        found = rank["spoilt"]
        (failed, tokens), *others = found["answers"]
        assert failed and not tokens
        assert not any(failed for failed, _ in others) and others[0] == others[1] and len(others[0][1]) == 4
        assert found["cached"] == 2 * worker.BLOCK_TOKENS
        assert found == ranks[0]["spoilt"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_the_least_value_of_all_ranks_is_agreed_on(launch, layout):
    for rank in launch(layout, PATTERNS[layout][0])[0]:
        assert rank["agreements"] == [[least, least] for least in (4, 4)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_a_budget_that_is_too_small_on_one_stage_is_refused_on_all(launch, layout):
    uneven = PATTERNS[layout][-1 if layout[1] > 1 else 0]
    refusals = launch(layout, uneven)[1]
    assert len(refusals) == layout[0] * layout[1]
    assert all(line.startswith("ValueError: buffer_size_gb=") and "is too small" in line for line in refusals)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_ranks_that_decide_differently_stop_with_both_decisions(launch, layout):
    ranks = [found["disagreement"] for found in launch(layout, PATTERNS[layout][0])[0]]
    assert len(set(ranks)) == 1
    last = len(ranks) - 1
    assert "\n" not in ranks[0]
    assert re.fullmatch(
        r"ranks decide differently: rank 0: request 1 shares KV blocks \[\d+\], gets \[\d+\], computes \[64, 66\) from "
        rf"slot \d+, keeps \[\]; rank {last}: request 1 shares KV blocks \[\], gets \[\d+, \d+\], computes \[0, 66\) "
        r"from slot None, keeps \[\]",
        ranks[0],
    ), ranks[0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_new_weights_of_one_rank_are_noticed_by_all(launch, layout):
    """They decide alike, without a word of the trainer."""
    hit = 2 * worker.BLOCK_TOKENS
    for found in launch(layout, PATTERNS[layout][0])[0]:
        assert found["noticed"] == [0, hit, 0, hit]
