"""Log-probs beside cached blocks and boundaries: what is kept, what is matched, and what goes first."""

from __future__ import annotations

import random

import pytest

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.index.settings import CacheSettings
from megatron_hybrid_prefix.index.tree import NO_BLOCK, PrefixTree
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.requests.book import StepPlan
from megatron_hybrid_prefix.requests.matcher import Match
from megatron_hybrid_prefix.requests.scores import Kept, ScoreTable
from tests.harness.selection import mostly_slow

BLOCK = 4
SCORES, LOGITS = 10, 30  # bytes of a value, and of one more per likeliest token


def whole(tokens: int) -> StepPlan:
    """A prompt in one forward."""
    return StepPlan(request_id=0, start_tokens=0, end_tokens=tokens, source_slot=None, checkpoints=())


class Prompts:
    """A cache, and an engine that computes nothing. A value says whose it is: key of its block, and likeliest tokens."""

    def __init__(self, scores_bytes: int, **options: int) -> None:
        self.table = ScoreTable(scores_bytes, BLOCK)
        options = {"block_tokens": BLOCK, "kv_blocks": 40, "state_slots": 20} | options
        self.cache = HybridPrefixCache(CacheSettings(beside=self.table, **options))
        self.sent = self.lost_tokens = 0

    def match(self, chain: KeyChain, top_n: int | None, limit: int | None = None) -> Match:
        resume_at = None if top_n is None else self.table.positions(chain, top_n)
        return self.cache.match(chain, max_resume_tokens=limit, resume_at=resume_at)

    def check(self) -> None:
        self.cache.check_integrity()
        self.table.check({node.key for node in self.cache.nodes()})

    def send(self, tokens: list[int], top_n: int | None, *, salt: str | None = None, chunk: int = 1000) -> int:
        """A prompt from its arrival to its end. Returns the tokens that it skipped."""
        cache, self.sent = self.cache, self.sent + 1
        chain = cache.chain(tokens, salt=salt)
        match = self.match(chain, top_n, min(chunk, len(tokens)) - 1)
        admission = cache.admit(self.sent, match, load=True, length_tokens=len(tokens))
        cache.take_copies()
        assert admission is not None
        self.lost_tokens += admission.reuse.state_tokens - admission.reuse.resume_tokens
        blocks = admission.resume_tokens // BLOCK
        *scores, logits = self._take(chain, admission.resume_tokens, top_n) or (None,)
        if logits is not None:
            assert [item.value[0] for item in scores] == chain.keys[:blocks]
            assert all(item.value[1] == item.top_n >= top_n for item in scores)
            assert logits.value == (chain.keys[blocks - 1], "logits")
        start = admission.resume_tokens
        while start < len(tokens):
            end = min(len(tokens), start + chunk)
            plan = cache.plan(self.sent, start, end)
            writing = [chain.keys[checkpoint.position_tokens // BLOCK - 1] for checkpoint in plan.checkpoints]
            captured = self.table.wanted_logits(chain, plan, cache.node, writing) if top_n is not None else []
            assert cache.publish(plan)
            if top_n is not None:
                promises = self.table.promise(chain, plan, cache.node, top_n=top_n, captured=captured)
                values = []
                for promise in promises:
                    key = chain.keys[promise.position_tokens // BLOCK - 1]
                    assert promise.key == key and promise.position_tokens <= end
                    value = (key, "logits") if promise.is_logits else (key, top_n)
                    values.append((promise, value, LOGITS if promise.is_logits else SCORES * (1 + top_n)))
                self.table.fill(chain, values)
            start = end
            self.check()
        cache.release(self.sent)
        self.check()
        return admission.resume_tokens

    def _take(self, chain: KeyChain, resume_tokens: int, top_n: int | None) -> tuple[Kept, ...]:
        return () if top_n is None else self.table.take(chain, resume_tokens, top_n)


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
    assert prompts.table.used_bytes == 0
    assert prompts.send([*context, 9], 0) == 0
    assert prompts.lost_tokens == 24


def test_a_promise_that_is_withdrawn_is_gone_and_one_that_is_not_filled_is_an_error():
    prompts = Prompts(scores_bytes=1000)
    cache = prompts.cache
    chain = cache.chain(list(range(5)))
    cache.admit(1, prompts.match(chain, 0))
    plan = cache.plan(1, 0, 5)
    cache.publish(plan)
    promises = prompts.table.promise(chain, plan, cache.node, top_n=0, captured=[BLOCK])
    assert [promise.is_logits for promise in promises] == [False, True]
    with pytest.raises(CacheCorruptionError, match="never filled"):
        _ = prompts.table.take(chain, prompts.match(chain, 0).resume_tokens, 0)[0].value
    prompts.table.withdraw(promises)
    assert prompts.match(chain, 0).resume_tokens == 0


def test_the_deepest_block_of_the_prompt_used_longest_ago_goes_first():
    prompts = Prompts(scores_bytes=3 * SCORES, retention_interval_tokens=0)
    table = prompts.table

    def kept(first: int) -> list[bool]:
        chain = prompts.cache.chain([first] * (2 * BLOCK))
        return [table.block(key, 0) is not None for key in chain.keys]

    def score(first: int, length: int) -> KeyChain:
        chain = prompts.cache.chain([first] * length)
        prompts.send([first] * length, None)
        promises = table.promise(chain, whole(length), prompts.cache.node, top_n=0, captured=())
        table.fill(chain, [(promise, "value", SCORES) for promise in promises])
        return chain

    one = score(1, 2 * BLOCK)
    score(2, BLOCK)
    assert (kept(1), kept(2)) == ([True, True], [True, False])
    table.use(one.keys)
    score(3, BLOCK)
    assert (kept(1), kept(2), table.evictions) == ([True, True], [False, False], 1)
    table.use(prompts.cache.chain([3] * BLOCK).keys)
    score(4, BLOCK)
    assert (kept(1), kept(3), table.evictions) == ([True, False], [True, False], 2)


def test_what_leaves_the_tree_leaves_the_table():
    chain = KeyChain([b"a", b"b"], 2 * BLOCK)
    table = ScoreTable(1000, BLOCK)
    tree = PrefixTree(beside=table)
    path = [tree.insert(chain.keys[0], None, 0)]
    path.append(tree.insert(chain.keys[1], path[0], 1))
    for node in path:
        node.reason = CheckpointReason.TAIL
    positions = [BLOCK, 2 * BLOCK]
    assert table.wanted_logits(chain, whole(2 * BLOCK), tree.get, ()) == positions
    table.promise(chain, whole(2 * BLOCK), tree.get, top_n=0, captured=positions)
    assert table.positions(chain, 0) == (BLOCK, 2 * BLOCK)
    tree.state_left(path[0])
    assert table.positions(chain, 0) == (2 * BLOCK,)
    path[1].block_id = NO_BLOCK
    tree.prune(path[1])
    assert [table.block(key, 0) is not None for key in chain.keys] == [True, False]
    tree.clear()
    assert table.block(chain.keys[0], 0) is None


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
        assert prompts.table.used_bytes <= budget
        if dice.random() < 0.01:
            prompts.cache.invalidate()
    stats = prompts.cache.stats()
    assert not host_pages or stats.reused_tokens_host > 0
    assert skipped > 0 or budget == 60 or stats.slots_total == 3, "in so little memory it may be 0"
    assert (prompts.table.evictions > 0) == (budget < 5000)


def test_a_state_on_the_host_without_scores_is_lost_for_them():
    prompts = Prompts(kv_blocks=8, state_slots=2, host_pages=60, retention_interval_tokens=0, scores_bytes=10_000)
    for number in range(1, 6):  # pushes the first one to the host
        prompts.send([number] * (2 * BLOCK + 1), None)
    assert prompts.send([1] * (2 * BLOCK + 1), 1) == 0
    assert (prompts.lost_tokens, prompts.cache.stats().lost_tokens_no_state) == (2 * BLOCK, 0)


def test_a_hit_on_the_host_uses_its_scores():
    """With room for the scores of two prompts, those that came back from the host stay; those of another prompt go."""
    each = 2 * SCORES * 2 + LOGITS  # two blocks with one likeliest token, and the logits of one boundary
    prompts = Prompts(kv_blocks=8, state_slots=2, host_pages=60, retention_interval_tokens=0, scores_bytes=2 * each)
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
