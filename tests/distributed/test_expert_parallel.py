"""Experts over several ranks, tensor- and expert-parallel: with the cache on and off, all say what one rank says.

Each data-parallel rank has requests of its own, and takes part in the others' forwards when it has none. Answers are compared
with one rank's, and with a float64 recompute.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core import parallel_state

from megatron_hybrid_prefix.models import build_hybrid_model, load_checkpoint, save_checkpoint
from tests.harness.engine_helpers import assert_matches, random_tokens, unequal
from tests.harness.lifecycle_helpers import BLOCK, MODES, EngineHarness, tokens
from tests.harness.naive_model import NaiveHybridModel
from tests.harness.named_models import named
from tests.harness.workers import scenario
from tests.harness.workers.launch import need_ranks, run_play

CACHE = {"mamba_gb": 0.002, "retention_interval_tokens": None}
# Room for all requests; an engine fills it with zeros, and each check goes through all of its blocks.
SIZES = {"max_sequence_length": 512, "max_requests": 8, "max_tokens": 4096, "buffer_size_gb": 0.02}
# A gate, several experts a token, a width of their own, a shared expert with its gate: as Qwen3-Next, and smaller.
SHARED = {
    "activation": "swiglu",
    "num_moe_experts": 16,
    "moe_router_topk": 5,
    "moe_ffn_hidden_size": 48,
    "moe_shared_expert_intermediate_size": 96,
    "moe_shared_expert_gate": True,
}
MOE = {"name": "tiny-moe"}
LATENT = MOE | SHARED | {"num_query_groups": 2, "moe_latent_size": 32}
# (tp, ep, etp): the model. With the second one both ranks have the same key/value head. With the last ones experts are whole.
LAYOUTS: dict[tuple[int, int, int], dict[str, Any]] = {
    (1, 2, 1): MOE,
    (2, 1, 2): {"name": "tiny-qwen3-next", "layer_pattern": "GE*E", "num_query_groups": 1},
    (2, 2, 2): LATENT,
    (2, 1, 1): MOE,
    (2, 2, 1): LATENT,
    (2, 4, 1): LATENT,
}


def by_layout(layout):
    """A parameter; only tensor parallelism is in the default run."""
    marks = [pytest.mark.multi] if layout == (2, 1, 2) else [pytest.mark.multi, pytest.mark.slow]
    return pytest.param(layout, marks=marks, id="tp{}-ep{}-etp{}".format(*layout))


def prompts(rank: int) -> list[list[int]]:
    """Prompts of one data-parallel rank, with a prefix per rank. Rank 1 has fewer, and is idle at the end."""
    tails = (1, 2, 60, 130, 3) if rank == 0 else (2, 70)
    return [tokens(3, 0, seed=rank) + random_tokens(own, seed=10 * rank + own) for own in tails]


def herd(rank: int) -> list[list[int]]:
    """Prompts of rank 0 that arrive at once, with a long new prefix."""
    return [tokens(5, 0, seed=77) + random_tokens(9 + n, seed=80 + n) for n in range(3)] if rank == 0 else []


def session(mode: str, *before: Any, cached: bool = True, only_first: bool = False, **fields: Any) -> dict[str, Any]:
    """Each rank's requests one by one (``only_first``: no others), then all at once, then a herd."""

    def events(rank: int) -> list[Any]:
        found: list[Any] = [["in_lockstep"], *before]
        found += [*(["sends", [prompt], 3] for prompt in prompts(rank)), ["serve_others"]]
        later = [["sends", prompts(rank), 3], ["serve_others"], ["sends", herd(rank), 3], ["serve_others"]]
        return found if only_first else found + later

    own = CACHE if cached else {"slots": None}
    engine = SIZES | {"async_sched_mode": mode} | own | fields
    return {"engine": engine, "events": {str(rank): events(rank) for rank in range(2)}}


def with_routes(_: Any, given: dict[str, Any], rank: int | None = None, **fields: Any) -> list[Any]:
    """Answers of a data-parallel rank's first requests (by default of this one), with the routes of experts."""
    model = build_hybrid_model(
        named(**given), transformer_impl="local", cuda_graph_impl="none", moe_enable_routing_replay=True
    )
    rank = parallel_state.get_data_parallel_rank() if rank is None else rank
    return scenario.play(model, **session("legacy", only_first=True, **fields), rank=rank)["answers"]


def refit() -> dict[str, Any]:
    """Whether the last rank's new weights are noticed by all when they resume."""
    again = ["sends", [tokens(2, 3, seed=5)], 3]
    rounds = [["suspend"], ["resume"], again] * 2
    rounds += [["suspend"], ["last: new_weights", "linear_fc1_weight"], ["resume"], again]
    return {"engine": SIZES | CACHE | {"keep_on_resume": True}, "events": rounds}


def mutants_of(tp: int, ep: int, etp: int) -> dict[str, Any]:
    """Something is wrong: the states of the last rank alone, the sum of experts, the exchange of rows, a rank's share of them."""
    wrong = {"states": ["last: damage"]}
    wrong |= {
        name: ["mutant", name]
        for name, applies in {"sum": tp > 1, "exchange": ep > 1, "share": etp < tp}.items()
        if applies
    }
    return {f"mutant {name}": session("legacy", event, only_first=True) for name, event in wrong.items()}


class Alone:
    """One rank's model of a layout, its answers, and a float64 recompute of them."""

    def __init__(self, layout, platform):
        self.model = scenario.build(**LAYOUTS[layout], platform=platform)
        reference = NaiveHybridModel(self.model, self.model.hybrid_config)
        off = session("legacy", cached=False)
        self.answers = cache(lambda rank: scenario.play(self.model, **off, rank=rank)["answers"])
        self._log_probs = cache(lambda given: reference.log_probs(list(given)))
        self._noise = cache(lambda given: reference.noise(list(given)))

    def log_probs(self, given):
        return self._log_probs(tuple(given))

    def noise(self, given):
        return self._noise(tuple(given))

    def check(self, answers, rank):
        """Tokens and log-probs, within 1e-5, are the recompute's."""
        sent = prompts(rank) * 2 + herd(rank)
        assert len(answers) == len(sent)
        for prompt, answer in zip(sent, answers, strict=True):
            request = SimpleNamespace(
                prompt_tokens=prompt, generated_tokens=answer["tokens"], generated_log_probs=answer["log_probs"]
            )
            assert_matches(self, request)


@pytest.fixture(scope="module")
def alone(platform):
    return cache(lambda layout: Alone(layout, platform))


@pytest.fixture(scope="module")
def ranks_of(alone, tmp_path_factory):
    """Findings of a layout's ranks by layout, and the checkpoint that they saved."""

    @cache
    def start(layout):
        tp, ep, etp = layout
        ranks = max(tp, ep * etp)
        need_ranks(ranks)
        folder = tmp_path_factory.mktemp("ranks")
        save_checkpoint(alone(layout).model, folder / "checkpoint")
        play = {
            "sizes": {"tp": tp, "ep": ep, "etp": etp},
            "refused": {"tp": 2 * tp, "ep": 2 * ep, "etp": 2 * tp if etp > 1 else 1},
            "model": LAYOUTS[layout],
            "parts": {
                "off": session("legacy", cached=False),
                **{mode: session(mode) for mode in MODES},
                **mutants_of(*layout),
                "shard": ["shard"],
                "unequal": ["checkpoint", str(folder / "checkpoint"), LAYOUTS[layout]],
                "noticed": refit(),
                "routes": ["tests.distributed.test_expert_parallel:with_routes", LAYOUTS[layout]],
            },
        }
        return run_play(folder, play, ranks), folder / "checkpoint-again"

    return start


@pytest.fixture(params=[by_layout(layout) for layout in LAYOUTS])
def layout(request):
    return request.param


def test_one_rank_says_what_the_reference_says(alone):
    served = EngineHarness(alone((1, 2, 1)).model)
    shared = tokens(2, 0, seed=1)
    served.send([*shared, 1, 2])
    assert served.send([*shared, 3], [*shared, 4, 5, 6]).num_cached_tokens == len(shared)
    served.check()


@pytest.mark.parametrize("engine", ["off", *MODES])
def test_ranks_say_what_one_says_without_a_cache(layout, alone, ranks_of, engine):
    found, reference = ranks_of(layout)[0], alone(layout)
    for number, rank in enumerate(found):
        answers, own = rank[engine]["answers"], number // layout[0]
        right = reference.answers(own)
        assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in right]
        reference.check(answers, own)


def test_experts_and_refusals(layout, ranks_of):
    tp, ep, etp = layout
    found = ranks_of(layout)[0]
    ranks = len(found)
    for rank in found:
        # Two layers; every tensor-parallel rank has a part of each expert, or experts of its own.
        assert rank["shard"]["local_experts"] == 2 * named(**LAYOUTS[layout]).num_moe_experts // ep
        own = "" if etp == tp else f" etp={etp}"
        assert rank["platform"].endswith(f"tp={tp} pp=1 ep={ep}{own} dp={ranks // tp}")
        needed, whole = (4 * tp * ep if etp > 1 else 2 * max(tp, ep)), 2 * max(tp, ep)
        said = f"tp={2 * tp} pp=1 ep={2 * ep}{' etp=1' * (etp == 1)} needs a multiple of {needed} processes, and {ranks} were started"
        hint = f"; with etp=1 (whole experts) it needs a multiple of {whole}"
        assert rank["refusal"] == said + hint * (whole < needed)


@pytest.mark.parametrize("mode", MODES)
def test_each_rank_reuses_its_own_prefix_also_after_it_was_idle(layout, ranks_of, mode):
    tp, *_ = layout
    for number, rank in enumerate(ranks_of(layout)[0]):
        found = rank[mode]
        cached = [answer["cached_tokens"] for answer in found["answers"]]
        if number // tp == 0:  # the last three came at once: two waited for the first, while other ranks were idle
            assert cached[-3:] == [0, 5 * BLOCK, 5 * BLOCK]
            del cached[-3:]
        assert cached[0] == 0 and min(cached[1:]) >= 3 * BLOCK, (number, cached)
        assert found["idle_forwards"] == 0 if number // tp == 0 else found["idle_forwards"] > 10
        assert rank["off"]["answers"][1]["cached_tokens"] == 0


def test_what_is_wrong_is_seen(layout, alone, ranks_of):
    """Wrong states on the last rank alone; parts that are not added; rows that come back in another order."""
    tp, ep, etp = layout
    found = ranks_of(layout)[0]
    last = len(found) - 1
    assert len(mutants_of(*layout)) == 1 + (tp > 1) + (ep > 1) + (etp < tp)
    for name in mutants_of(*layout):
        for number, rank in enumerate(found):
            right = alone(layout).answers(number // tp)[: len(prompts(number // tp))]
            for answer, reference in zip(rank[name]["answers"], right, strict=True):
                wrong = name != "mutant states" or (number // tp == last // tp and answer["cached_tokens"] > 0)
                gap = max(abs(a - b) for a, b in zip(answer["log_probs"], reference["log_probs"], strict=True))
                assert (gap >= 1e-3) == wrong, (name, number, gap)


def test_routes_of_ranks_are_those_of_one_without_a_cache(layout, ranks_of):
    """Each rank has the routes of its own requests: of all tokens, wherever a token's experts are."""
    for number, rank in enumerate(ranks_of(layout)[0]):
        right = with_routes(None, LAYOUTS[layout], number // layout[0], cached=False)
        assert [answer["routes"] for answer in rank["routes"]] == [answer["routes"] for answer in right]
        assert all(answer["cached_tokens"] >= 3 * BLOCK for answer in rank["routes"][1:]) and right[0]["routes"]


def test_new_weights_of_one_rank_are_noticed_by_all(layout, ranks_of):
    for rank in ranks_of(layout)[0]:
        assert [answer["cached_tokens"] for answer in rank["noticed"]["answers"]] == [0, 2 * BLOCK, 0]


def test_checkpoints_pass_between_layouts(layout, alone, ranks_of, platform):
    """One rank's is loaded by several, and the other way round."""
    found, again = ranks_of(layout)
    assert [rank["unequal"] for rank in found] == [[]] * len(found)
    other = scenario.build(**LAYOUTS[layout], platform=platform, seed=1)
    assert unequal(other, alone(layout).model)
    load_checkpoint(other, again)
    assert unequal(other, alone(layout).model) == []
