"""Experts over several ranks, tensor- and expert-parallel: with the cache on and off, all say what one rank says.

Each data-parallel rank has requests of its own. Answers are compared with one rank's, and with a float64 recompute.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest

from megatron_hybrid_prefix.models import load_checkpoint, save_checkpoint
from tests.harness.engine_helpers import assert_matches
from tests.harness.lifecycle_helpers import EngineHarness, tokens
from tests.harness.naive_model import NaiveHybridModel
from tests.harness.workers import expert_parallel as worker
from tests.harness.workers.launch import need_ranks, run_ranks


def by_layout(layout):
    """A parameter; only tensor parallelism is in the default run."""
    marks = [pytest.mark.multi] if layout == (2, 1, 2) else [pytest.mark.multi, pytest.mark.slow]
    return pytest.param(layout, marks=marks, id="tp{}-ep{}-etp{}".format(*layout))


class Alone:
    """One rank's model of a layout, its answers, and a float64 recompute of them."""

    def __init__(self, layout, platform):
        self.model = worker.build(layout, platform)
        reference = NaiveHybridModel(self.model, self.model.hybrid_config)
        self.answers = cache(lambda rank: worker.answers(self.model, rank, "legacy", None)["answers"])
        self._log_probs = cache(lambda given: reference.log_probs(list(given)))
        self._noise = cache(lambda given: reference.noise(list(given)))

    def log_probs(self, given):
        return self._log_probs(tuple(given))

    def noise(self, given):
        return self._noise(tuple(given))

    def check(self, answers, rank):
        """Tokens and log-probs, within 1e-5, are the recompute's."""
        prompts = sent(rank)
        assert len(answers) == len(prompts)
        for prompt, answer in zip(prompts, answers, strict=True):
            request = SimpleNamespace(
                prompt_tokens=prompt, generated_tokens=answer["tokens"], generated_log_probs=answer["log_probs"]
            )
            assert_matches(self, request)


def sent(rank):
    """Prompts of a data-parallel rank, in the order of their requests."""
    return worker.prompts(rank) * 2 + worker.herd(rank)


@pytest.fixture(scope="module")
def alone(platform):
    return cache(lambda layout: Alone(layout, platform))


@pytest.fixture(scope="module")
def ranks_of(alone, tmp_path_factory):
    """Findings of a layout's ranks by layout, and the checkpoint that they saved."""

    @cache
    def start(layout):
        ranks = worker.ranks_of_layout(*layout)
        need_ranks(ranks)
        folder = tmp_path_factory.mktemp("ranks")
        save_checkpoint(alone(layout).model, folder / "checkpoint")
        found = run_ranks("expert_parallel.py", folder / "found.json", folder / "checkpoint", *layout, ranks=ranks)
        return found, folder / "checkpoint-again"

    return start


@pytest.fixture(params=[by_layout(layout) for layout in worker.LAYOUTS])
def layout(request):
    return request.param


def test_one_rank_says_what_the_reference_says(alone):
    served = EngineHarness(alone((1, 2, 1)).model)
    shared = tokens(2, 0, seed=1)
    served.send([*shared, 1, 2])
    assert served.send([*shared, 3], [*shared, 4, 5, 6]).num_cached_tokens == len(shared)
    served.check()


@pytest.mark.parametrize("engine", ["off", *worker.MODES])
def test_ranks_say_what_one_says_without_a_cache(layout, alone, ranks_of, engine):
    found, reference = ranks_of(layout)[0], alone(layout)
    for number, rank in enumerate(found):
        answers, own = rank[engine]["answers"], number // layout[0]
        right = reference.answers(own)
        assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in right]
        reference.check(answers, own)


def test_experts_and_refusals(layout, ranks_of):
    tp, ep, etp = layout
    ranks = worker.ranks_of_layout(*layout)
    for rank in ranks_of(layout)[0]:
        # Two layers; every tensor-parallel rank has a part of each expert, or experts of its own.
        assert rank["local_experts"] == 2 * worker.LAYOUTS[layout].num_moe_experts // ep
        own = "" if etp == tp else f" etp={etp}"
        assert rank["platform"].endswith(f"tp={tp} pp=1 ep={ep}{own} dp={ranks // tp}")
        needed, whole = (4 * tp * ep if etp > 1 else 2 * max(tp, ep)), 2 * max(tp, ep)
        said = f"tp={2 * tp} pp=1 ep={2 * ep}{' etp=1' * (etp == 1)} needs a multiple of {needed} processes, and {ranks} were started"
        hint = f"; with etp=1 (whole experts) it needs a multiple of {whole}"
        assert rank["refusal"] == said + hint * (whole < needed)


@pytest.mark.parametrize("mode", worker.MODES)
def test_each_rank_reuses_its_own_prefix_also_after_it_was_idle(layout, ranks_of, mode):
    tp, *_ = layout
    shared = 3 * worker.BLOCK_TOKENS
    for number, rank in enumerate(ranks_of(layout)[0]):
        found = rank[mode]
        cached = [answer["cached_tokens"] for answer in found["answers"]]
        if number // tp == 0:  # the last three came at once: two waited for the first, while other ranks were idle
            assert cached[-3:] == [0, 5 * worker.BLOCK_TOKENS, 5 * worker.BLOCK_TOKENS]
            del cached[-3:]
        assert cached[0] == 0 and min(cached[1:]) >= shared, (number, cached)
        assert found["idle_forwards"] == 0 if number // tp == 0 else found["idle_forwards"] > 10
        assert rank["off"]["answers"][1]["cached_tokens"] == 0


def test_what_is_wrong_is_seen(layout, alone, ranks_of):
    """Wrong states on the last rank alone; parts that are not added; rows that come back in another order."""
    tp, ep, etp = layout
    found = ranks_of(layout)[0]
    last = len(found) - 1
    assert len(found[0]["mutants"]) == 1 + (tp > 1) + (ep > 1) + (etp < tp)
    for name in found[0]["mutants"]:
        for number, rank in enumerate(found):
            right = alone(layout).answers(number // tp)[: len(worker.prompts(number // tp))]
            for answer, reference in zip(rank["mutants"][name]["answers"], right, strict=True):
                wrong = name != "states" or (number // tp == last // tp and answer["cached_tokens"] > 0)
                gap = max(abs(a - b) for a, b in zip(answer["log_probs"], reference["log_probs"], strict=True))
                assert (gap >= 1e-3) == wrong, (name, number, gap)


def test_new_weights_of_one_rank_are_noticed_by_all(layout, ranks_of):
    for rank in ranks_of(layout)[0]:
        assert rank["noticed"] == [0, 2 * worker.BLOCK_TOKENS, 0]


def test_checkpoints_pass_between_layouts(layout, alone, ranks_of, platform):
    """One rank's is loaded by several, and the other way round."""
    found, again = ranks_of(layout)
    assert [rank["unequal"] for rank in found] == [[]] * len(found)
    other = worker.build(layout, platform, seed=1)
    assert worker.unequal(other, alone(layout).model)
    load_checkpoint(other, again)
    assert worker.unequal(other, alone(layout).model) == []
