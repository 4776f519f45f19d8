"""With the cache on, several ranks give the answers of one rank without it, and decide alike at every step.

Pipeline stages may have different numbers of recurrent layers, or none.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from typing import Any

import pytest

from tests.harness.engine_helpers import assert_damaged, assert_same, random_tokens
from tests.harness.lifecycle_helpers import BLOCK, MODES, tokens
from tests.harness.named_models import named
from tests.harness.selection import mostly_slow, nightly_rows
from tests.harness.workers import scenario
from tests.harness.workers.launch import need_ranks, run_play

pytestmark = pytest.mark.multi

# (tp, pp): where the stages are cut. One with three times as many layers; one where nothing recurs; layers of several kinds,
# some of them on one stage only.
PATTERNS = {
    (2, 1): ("G*-MG*-", "M*-MG*-"),
    (1, 2): ("M*-|M*-M-M-", "G*-|MG*-", "M*-|M*-M-", "M*-M-|*-"),
    (2, 2): ("*-|M*-M-",),
}
PAIRS = ("M*-MG*-", "M*-M*-M-")  # M layers are Gated Delta Product
CASES = mostly_slow(
    [(layout, pattern) for layout, patterns in PATTERNS.items() for pattern in patterns], ((2, 1), "G*-MG*-")
)
CASES += nightly_rows([CASES.pop(4).values])
LAYOUTS = mostly_slow(PATTERNS, (2, 1))
# Both scheduling modes for one pattern with and one without stages.
ONE_MODE = {"M*-|M*-M-M-": ("legacy",), "G*-|MG*-": ("async",), "M*-M-|*-": ("legacy",), "*-|M*-M-": ("async",)}
ONE_MODE |= {"M*-MG*-": ("async",), "M*-|M*-M-": ("legacy",)}


def tails() -> list[Any]:
    """1 to 4 tokens after a restored prefix, alone and in a batch beside decodes; junctions."""
    prefix = tokens(3, 0, seed=1)
    events: list[Any] = [["sends", [prefix[: BLOCK + 1]]], ["sends", [prefix[: 2 * BLOCK]]]]
    events += [["sends", [prefix[: 2 * BLOCK] + random_tokens(own, seed=10 + own)]] for own in (1, 2, 3, 4)]
    for number in range(6):
        own = random_tokens(1 + 9 * number, seed=20 + number)
        events += [["ask", prefix[: BLOCK * (number % 4)] + own, 3 + number], ["go", 1 + number % 2]]
    return [*events, ["run"]]


def chunked() -> list[Any]:
    """Prefills cut by a token budget that has no common divisor with blocks or chunks; three slots."""
    events: list[Any] = [["budget", 101]]
    prefixes = [tokens(4, 0, seed=seed) for seed in (2, 3)]
    for number in range(10):
        own = random_tokens(1 + number % 4, seed=40 + number)
        events += [["ask", prefixes[number % 3 % 2][: BLOCK * (1 + number % 4)] + own], ["go", number % 4]]
    return [*events, ["run"], ["sends", [[*prefixes[0][:-1], 7], prefixes[0][: 2 * BLOCK + 3]]]]


def preempted() -> list[Any]:
    """Few KV blocks: cached blocks are evicted and decodes are preempted. They resume from what is still cached."""
    prompts = [random_tokens(BLOCK + 54 + number, seed=50 + number) for number in range(6)]
    return [
        ["sends", [prompts[0][: BLOCK + 1], prompts[1][: BLOCK + 2]]],
        ["sends", prompts[:4], 12],
        ["sends", [[*prompt, number] for number, prompt in enumerate(prompts)], 80],
    ]


def host() -> list[Any]:
    """Prompts that come back from the host; then two for which the last rank alone has other data."""
    prompts = [tokens(3, 9 + number, seed=60 + number) for number in range(5)]
    on_device = ["sends", prompts[2:], 6]
    return [
        ["sends", prompts],
        ["sends", prompts, 6],
        on_device,
        ["last: spoil_host", prompts[:2]],
        ["sends", prompts[:2], 8],
    ]


def pressed() -> list[Any]:
    """Prompts that come back from the host, some of them pinned, beside decodes that need more blocks than there are."""
    shared, events = tokens(2, 0, seed=70), []
    for turn, number in product(range(3), range(6)):
        prompt = (shared if number % 2 else []) + random_tokens(BLOCK + 5 + 9 * number, seed=71 + number)
        hints = {"cache_pin": {"seconds": 2.5, "tokens": BLOCK}} if not number else {"cache_uses": number % 2}
        events += [["ask", prompt, 3 + 6 * (number % 3), hints | {"cache_now": turn + number / 6}]]
        events += [["go", (number + turn) % 3]]
    return [*events, ["run"]]


# Events, memory, and fields. The last ones also compare as the check for users does.
CHECKED: dict[str, Any] = {"check_ranks": True}
SCENARIOS: dict[str, tuple[list[Any], dict[str, int], dict[str, Any]]] = {
    "tails": (tails(), {"slots": 40}, {}),
    "chunked": (chunked(), {"slots": 3}, {"enable_chunked_prefill": True, "max_tokens": 256}),
    "preempted": (preempted(), {"slots": 3, "blocks": 8}, CHECKED),
    "host": (host(), {"slots": 3, "blocks": 12}, CHECKED | {"host_gb": 0.05}),
    "pressed": (pressed(), {"slots": 3, "blocks": 5}, CHECKED | {"host_gb": 0.05}),
}


def model_of(pattern: str, pp: int) -> dict[str, Any]:
    """The model with this pattern; with one stage its layers are in one."""
    preset, whole = "tiny-gdn" if "G" in pattern else "tiny", pattern.replace("|", "")
    model = {"name": preset, "layer_pattern": pattern if pp > 1 else whole}
    return model | ({"name": "tiny-gdp-gdn", "gdp_num_householder": 3} if whole in PAIRS else {})


def session(
    pattern: str, tp: int, pp: int, events: Any, mode: str = "legacy", *, without: bool = False, **own: Any
) -> dict[str, Any]:
    """A session with room for 8 states; ``own`` may have its memory, and fields; ``without``: without a cache."""
    sizes = {name: own.pop(name) for name in ("slots", "blocks") if name in own}
    memory = scenario.memory_for(named(**model_of(pattern, pp)), tp, **{"slots": 8} | sizes)
    off = {"slots": None} if without else {}
    return {"engine": memory | {"async_sched_mode": mode} | own | off, "events": events}


def named_session(name: str, pattern: str, tp: int, pp: int, mode: str, *before: Any) -> dict[str, Any]:
    events, memory, fields = SCENARIOS[name]
    return session(pattern, tp, pp, [*before, *events], mode, **memory, **fields)


def modes_of(pattern: str) -> tuple[str, ...]:
    return ONE_MODE.get(pattern, MODES)


def parts_of(pattern: str, tp: int, pp: int) -> dict[str, Any]:
    """All that the ranks of a layout play."""
    parts: dict[str, Any] = {
        f"{mode} {name}": named_session(name, pattern, tp, pp, mode) for mode in modes_of(pattern) for name in SCENARIOS
    }
    # The last tensor-parallel rank of the stage where most layers recur; a stage without any cannot be wrong.
    layers = [stage.count("M") + stage.count("G") for stage in model_of(pattern, pp)["layer_pattern"].split("|")]
    damage = [f"rank {layers.index(max(layers)) * tp + tp - 1}: damage"]
    prefix, prompt, again = tokens(2, 0, seed=80), tokens(1, 2, seed=1), ["sends", [tokens(2, 2, seed=1)]]
    spoilt = [["first: spoil_key", 1], ["sends", [[*prefix, 5], [*prefix, 6]]], ["sends", [[*prefix, 6]]]]
    differ = [["sends", [prompt]], ["rest: ask", prompt], ["last: ask", prompt, 4, {"cache_read": False}], ["run"]]
    refit = [again, again, ["last: new_weights"], again, again]
    most = max(state for state, _ in scenario.sizes_of(named(**model_of(pattern, pp)), tp))
    return parts | {
        "damaged": named_session("tails", pattern, tp, pp, "legacy", damage),
        "spoilt": session(pattern, tp, pp, spoilt, modes_of(pattern)[0]),
        "int8": session(pattern, tp, pp, host(), slots=3, blocks=12, host_gb=0.05, checkpoint_dtype="int8", **CHECKED),
        "agreed": ["agreed"],
        "disagreement": session(pattern, tp, pp, differ, **CHECKED) | {"raises": True},
        "noticed": session(pattern, tp, pp, refit, **CHECKED),
        # Live states that only fit on some stages. Last, because ranks may get out of step.
        "refused": {
            "engine": {"mamba_gb": 0.01, "max_requests": 4, "buffer_size_gb": 4 * most / 2**30},
            "events": [],
            "raises": True,
        },
    }


def name_of(layout: tuple[int, int]) -> str:
    return "tp{}-pp{}".format(*layout)


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Each rank's findings of a layout and a pattern. Ranks that fail are not started again for every test."""

    @cache
    def outcome(layout: tuple[int, int], pattern: str) -> Any:
        tp, pp = layout
        play = {"sizes": {"tp": tp, "pp": pp}, "model": model_of(pattern, pp), "parts": parts_of(pattern, tp, pp)}
        try:
            return run_play(tmp_path_factory.mktemp("ranks"), play, tp * pp)
        except AssertionError as error:
            return error

    def start(layout: tuple[int, int], pattern: str | None = None) -> Any:
        need_ranks(layout[0] * layout[1])
        found = outcome(layout, pattern or PATTERNS[layout][0])
        if isinstance(found, AssertionError):
            raise found
        return found

    return start


@pytest.fixture(scope="module")
def alone(platform):
    """Findings of one process, by pattern, mode, scenario, and with or without the cache. Stages do not matter to it.

    Without the cache, both modes are compared with the answers of one: they must be the same.
    """
    model = cache(lambda pattern: scenario.build(**model_of(pattern, 1), platform=platform))

    @cache
    def findings(pattern: str, mode: str, name: str, cached: bool) -> dict[str, Any]:
        part = named_session(name, pattern, 1, 1, mode)
        return scenario.play(model(pattern), part["engine"] | ({} if cached else {"slots": None}), part["events"])

    def found(pattern: str, mode: str, name: str, *, cached: bool) -> dict[str, Any]:
        return findings(pattern.replace("|", ""), mode if cached else MODES[0], name, cached)

    return found


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{name_of(case[0])}-{case[1]}")
def case(request, launch):
    """Layout, pattern, and each rank's findings."""
    return *request.param, launch(*request.param)


@pytest.mark.parametrize("name", SCENARIOS)
def test_answers_are_those_of_one_rank_without_a_cache(case, alone, name):
    _, pattern, ranks = case
    for mode in modes_of(pattern):
        right = alone(pattern, mode, name, cached=False)["answers"]
        most = max(assert_same(rank[f"{mode} {name}"]["answers"], right) for rank in ranks)
        print(f"{mode}: log-probs within {most:.1e} of one rank's")


# Of a tier, each rank's own: bytes and seconds, and what its folder gave up.
OWN_TIER_STATS = ("bytes_budget", "bytes_loaded", "bytes_stored", "bytes_used", "faults", "seconds", "seconds_waited")


def alike(stats: dict[str, Any]) -> dict[str, Any]:
    """Statistics without what depends on one rank's memory and time."""
    tiers = {
        name: {figure: value for figure, value in figures.items() if figure not in OWN_TIER_STATS}
        for name, figures in stats["tiers"].items()
    }
    return {name: value for name, value in stats.items() if name != "bytes_budget"} | {"tiers": tiers}


@pytest.mark.parametrize("name", SCENARIOS)
def test_all_ranks_decide_alike_and_as_one_alone(case, alone, name):
    """The same blocks, slots, moves and cached prefixes after every step. Stages that are not alike may have other pages than one."""
    _, pattern, ranks = case
    for mode in modes_of(pattern):
        first, one = ranks[0][f"{mode} {name}"], alone(pattern, mode, name, cached=True)
        for right in [first, one] if one["layout"] == first["layout"] else [first]:
            for found in (rank[f"{mode} {name}"] for rank in ranks):
                for what in ("layout", "decisions", "present", "preempted", "moved"):
                    assert found[what] == right[what], what
                # What slots and entries take is each rank's own; how many there are is not.
                assert alike(found["stats"]) == alike(right["stats"])
                assert [a["cached_tokens"] for a in found["answers"]] == [a["cached_tokens"] for a in right["answers"]]


def test_scenarios_do_what_they_are_for(case):
    for mode in modes_of(case[1]):
        tails, chunked, preempted, host, pressed = (case[2][0][f"{mode} {name}"] for name in SCENARIOS)
        cached = [answer["cached_tokens"] for answer in tails["answers"]]
        assert cached[2:6] == [2 * BLOCK] * 4
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
    sizes = scenario.sizes_of(named(**model_of(pattern, pp)), tp)
    page = scenario.page_of(sizes)
    for mode, name in product(modes_of(pattern), SCENARIOS):
        for number, rank in enumerate(ranks):
            found = rank[f"{mode} {name}"]
            assert found["slot_bytes"] == sizes[number // tp][0]
            assert found["layout"][1:] == [page.page_blocks, page.page_states]
            assert found["stats"]["slots_total"] == SCENARIOS[name][1]["slots"]


def test_a_wrong_state_on_one_rank_shows(case, alone):
    _, pattern, ranks = case
    right = alone(pattern, "legacy", "tails", cached=False)["answers"]
    for rank in ranks:
        answers = rank["damaged"]["answers"]
        assert any(answer["cached_tokens"] for answer in answers)
        assert_damaged(answers, right)


def test_ranks_whose_checkpoints_are_in_int8(case, alone):
    """Stages encode other layers, or none, and decide alike; their answers are close to those without a cache."""
    _, pattern, ranks = case
    first, right = ranks[0]["int8"], alone(pattern, "legacy", "host", cached=False)["answers"]
    assert first["stats"]["reused_tokens_host"] > 0 and first["stats"]["fallbacks"]["host_load_failed"] > 0
    for found in (rank["int8"] for rank in ranks):
        assert [found[what] for what in ("decisions", "present")] == [first[what] for what in ("decisions", "present")]
        gaps = [abs(a["log_probs"][0] - b["log_probs"][0]) for a, b in zip(found["answers"], right, strict=True)]
        assert 1e-5 < max(gaps) < 0.1


def test_what_is_not_finite_on_one_rank_fails_its_request_on_all(case):
    """On the first rank: the others see it in the logits only."""
    _, _, ranks = case
    for rank in ranks:
        failed, *others, again = rank["spoilt"]["answers"]
        assert failed["failed"] and not failed["tokens"]
        assert not any(other["failed"] for other in others) and len(others) == 1
        assert others[0]["tokens"] == again["tokens"] and len(again["tokens"]) == 4
        assert again["cached_tokens"] == 2 * BLOCK
        assert rank["spoilt"]["present"] == ranks[0]["spoilt"]["present"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_the_least_value_of_all_ranks_is_agreed_on(launch, layout):
    for rank in launch(layout):
        assert rank["agreed"] == [[least, least] for least in (4, 4)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_a_budget_that_is_too_small_on_one_stage_is_refused_on_all(launch, layout):
    for rank in launch(layout, PATTERNS[layout][-1 if layout[1] > 1 else 0]):
        said = rank["refused"]["error"]
        assert said.startswith("ValueError: buffer_size_gb=") and "is too small" in said


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_ranks_that_decide_differently_stop_with_both_decisions(launch, layout):
    ranks = [found["disagreement"]["error"] for found in launch(layout)]
    assert len(set(ranks)) == 1
    last = len(ranks) - 1
    assert "\n" not in ranks[0]
    assert re.fullmatch(
        r"RankDisagreementError: ranks decide differently: rank 0: request 2 shares KV blocks \[\d+\], gets \[\d+\], computes "
        rf"\[64, 66\) from slot \d+, keeps \[\]; rank {last}: request 2 shares KV blocks \[\], gets \[\d+, \d+\], computes "
        r"\[0, 66\) from slot None, keeps \[\]",
        ranks[0],
    ), ranks[0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_new_weights_of_one_rank_are_noticed_by_all(launch, layout):
    """They decide alike, without a word of the trainer."""
    for found in launch(layout):
        cached = [answer["cached_tokens"] for answer in found["noticed"]["answers"]]
        assert cached == [0, 2 * BLOCK, 0, 2 * BLOCK]
