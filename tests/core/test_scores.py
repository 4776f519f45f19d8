"""Log-probs beside cached blocks and boundaries: what is kept, what is matched, and what goes first."""

from __future__ import annotations

import random

import pytest

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.index.scores import ScoreTable
from megatron_hybrid_prefix.index.tree import PrefixTree
from tests.harness.selection import mostly_slow

BLOCK = 4
SCORES, LOGITS = 10, 30  # bytes of a value, and of one more per likeliest token


class Prompts:
    """A cache, and an engine that computes nothing. A value says whose it is: key of its block, and likeliest tokens."""

    def __init__(self, **options: int) -> None:
        self.cache = HybridPrefixCache(**{"block_tokens": BLOCK, "kv_blocks": 40, "state_slots": 20} | options)
        self.sent = 0

    def send(self, tokens: list[int], top_n: int | None, *, salt: str | None = None, chunk: int = 1000) -> int:
        """A prompt from its arrival to its end. Returns the tokens that it skipped."""
        cache, self.sent = self.cache, self.sent + 1
        chain = cache.chain(tokens, salt=salt)
        match = cache.match(chain, top_n=top_n, max_resume_tokens=min(chunk, len(tokens)) - 1)
        match = cache.loads.begin_load_back(self.sent, match) or match
        cache.take_copies()
        admission = cache.admit(self.sent, match, length_tokens=len(tokens))
        assert admission is not None
        blocks = admission.resume_tokens // BLOCK
        if top_n is None or not blocks:
            assert admission.scores == ()
        else:
            *scores, logits = admission.scores
            assert [item.value[0] for item in scores] == chain.keys[:blocks]
            assert all(item.value[1] == item.top_n >= top_n for item in scores)
            assert logits.value == (chain.keys[blocks - 1], "logits")
        start = admission.resume_tokens
        while start < len(tokens):
            end = min(len(tokens), start + chunk)
            plan = cache.plan(self.sent, start, end)
            captured = cache.scores.wanted_logits(chain, start, end) if top_n is not None else []
            assert cache.publish(plan)
            if top_n is not None:
                promises = cache.scores.promise(chain, start, end, top_n=top_n, captured=captured)
                values = []
                for promise in promises:
                    key = chain.keys[promise.position_tokens // BLOCK - 1]
                    assert promise.node.key == key and promise.position_tokens <= end
                    value = (key, "logits") if promise.is_logits else (key, top_n)
                    values.append((promise, value, LOGITS if promise.is_logits else SCORES * (1 + top_n)))
                cache.scores.fill(chain, values)
            start = end
            cache.check_integrity()
        cache.release(self.sent)
        cache.check_integrity()
        return admission.resume_tokens


def test_a_hit_reaches_as_deep_as_the_log_probs():
    prompts = Prompts(scores_bytes=10_000)
    context = list(range(12))
    assert prompts.send([*context, 1], None) == 0
    assert prompts.send([*context, 2], None) == 12
    assert prompts.send([*context, 3], 1) == 0, "there are none"
    assert prompts.send([*context, 4], 1) == 12
    assert prompts.send([*context, 5], 0) == 12, "fewer are a part of them"
    assert prompts.send([*context, 6], 2) == 0, "more are not"
    assert prompts.send([*context, 7], 2) == 12
    assert prompts.send([*context, 8], 2, salt="other") == 0
    prompts.cache.invalidate()
    assert prompts.cache.stats().scores_bytes_used == 0
    assert prompts.send([*context, 9], 0) == 0
    assert prompts.cache.stats().lost_tokens_no_scores == 24


def test_without_a_budget_nothing_is_kept():
    prompts = Prompts(scores_bytes=0)
    for last in range(3):
        assert prompts.send([*range(12), last], 0) == 0
    assert not prompts.cache.scores.is_on


def test_a_promise_that_is_withdrawn_is_gone_and_one_that_is_not_filled_is_an_error():
    cache = Prompts(scores_bytes=1000).cache
    chain = cache.chain(list(range(5)))
    cache.admit(1, cache.match(chain, top_n=0))
    cache.publish(cache.plan(1, 0, 5))
    promises = cache.scores.promise(chain, 0, 5, top_n=0, captured=[BLOCK])
    assert [promise.is_logits for promise in promises] == [False, True]
    with pytest.raises(CacheCorruptionError, match="never filled"):
        _ = cache.match(chain, top_n=0).scores[0].value
    cache.scores.withdraw(promises)
    assert cache.match(chain, top_n=0).resume_tokens == 0


def test_the_deepest_block_of_the_prompt_used_longest_ago_goes_first():
    table, tree = ScoreTable(3 * SCORES), PrefixTree()
    one = [tree.insert(b"a", None, 0)]
    one.append(tree.insert(b"b", one[0], 1))
    other = tree.insert(b"c", None, 2)
    for node in (one[0], one[1], other):
        promised = table.promise_block(node, 0)
        assert promised is not None
        table.fill(node, promised, "value", SCORES)
    table.use(one)
    table.budget_bytes = 2 * SCORES
    table.trim()
    assert [table.block(node, 0) is not None for node in (*one, other)] == [True, True, False]
    table.budget_bytes = SCORES
    table.trim()
    assert [table.block(node, 0) is not None for node in one] == [True, False]


@pytest.mark.parametrize("host_pages", [0, 30])
@pytest.mark.parametrize("seed", mostly_slow(range(12), 0, 1))
def test_random_prompts(seed, host_pages):
    """Whatever is evicted: a hit's log-probs are those of its own blocks, and bytes stay within the budget."""
    dice = random.Random(seed)
    budget = (300, 5000, 60)[seed % 3]
    prompts = Prompts(
        scores_bytes=budget,
        kv_blocks=12 if host_pages else dice.choice((12, 40)),
        state_slots=3 if host_pages else dice.choice((3, 20)),
        host_pages=host_pages,
    )
    trunks = [[dice.randrange(50) for _ in range(30)] for _ in range(3)]
    skipped = 0
    for _ in range(120):
        tokens = dice.choice(trunks)[: dice.randrange(1, 30)] + [
            dice.randrange(50) for _ in range(dice.randrange(1, 8))
        ]
        top_n = dice.choice((None, 0, 0, 1, 2))
        resumed = prompts.send(tokens, top_n, salt=dice.choice((None, None, "s")), chunk=dice.choice((4, 7, 1000)))
        skipped += resumed * (top_n is not None)
        assert prompts.cache.stats().scores_bytes_used <= budget
        if dice.random() < 0.01:
            prompts.cache.invalidate()
    stats = prompts.cache.stats()
    assert not host_pages or stats.reused_tokens_host > 0
    assert skipped > 0 or budget == 60 or stats.slots_total == 3, "in so little memory it may be 0"
    assert (stats.scores_evictions > 0) == (budget < 5000)


def test_a_hit_on_the_host_uses_its_scores():
    """With room for the scores of two prompts, those that came back from the host stay; those of another prompt go."""
    each = 2 * SCORES * 2 + LOGITS  # two blocks with one likeliest token, and the logits of one boundary
    prompts = Prompts(kv_blocks=5, state_slots=2, host_pages=60, retention_interval_tokens=0, scores_bytes=2 * each)
    first, second, third = ([number] * (2 * BLOCK) for number in (1, 2, 3))
    for prompt in (first, second):
        prompts.send([*prompt, 9], 1)
    for number in range(4, 8):  # pushes both to the host
        prompts.send([number] * (4 * BLOCK + 1), None)
    assert prompts.send([*first, 8], 1) == 2 * BLOCK
    assert prompts.cache.stats().reused_tokens_host == 2 * BLOCK
    prompts.send([*third, 9], 1)  # the scores of one prompt have to go
    assert prompts.send([*first, 7], 1) == 2 * BLOCK
    assert prompts.send([*second, 7], 1) == 0
