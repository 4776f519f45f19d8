"""Sessions: what only ended ones used goes first, and nothing else does. Against a slow and obvious ledger."""

from __future__ import annotations

import random

import pytest

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.index import tree
from megatron_hybrid_prefix.index.hints import Hints
from megatron_hybrid_prefix.index.settings import CacheSettings
from megatron_hybrid_prefix.pool.slots import NO_SLOT

BLOCK = 4


def made(**settings):
    sizes = {
        "block_tokens": BLOCK,
        "kv_blocks": 200,
        "page_blocks": 2,
        "retention_interval_tokens": 0,
        "live_states": False,
    }
    return HybridPrefixCache(CacheSettings(**sizes | settings))


class Caller:
    """Runs prompts. Remembers who used each state: a set of sessions, or None once somebody without one did."""

    def __init__(self, cache):
        self.cache, self.users, self.next_id = cache, {}, 0

    def run(self, tokens, name=None, *, end=False, salt=None, comes_back=False):
        cache, self.next_id = self.cache, self.next_id + 1
        chain = cache.chain(tokens, salt=salt)
        here = {node.key for node in cache.nodes() if node.reason is not None}
        admission = cache.admit(self.next_id, cache.match(chain), hints=Hints(session=name, ends_session=end))
        cache.publish(cache.plan(self.next_id, admission.resume_tokens, len(tokens)))
        cache.take_copies()
        there = {node.key for node in cache.nodes() if node.reason is not None}
        for key in (chain.seed, *chain.keys):
            if key in there:
                known = self.users.get(key, set()) if key in here else set()
                self.users[key] = None if name is None or known is None else known | {(salt, name)}
        cache.release(self.next_id, comes_back=comes_back)
        if end and not comes_back:
            self.end(name, salt)
        cache.check_integrity()
        return admission.resume_tokens

    def end(self, name, salt=None):
        for users in self.users.values():
            if users is not None:
                users.discard((salt, name))

    def ended(self):
        """Keys of the states that should go first."""
        kept = {node.key for node in self.cache.nodes() if node.slot != NO_SLOT}
        return {key for key, users in self.users.items() if users == set() and key in kept}


def keys_of_ended(cache):
    return {node.key for node in cache._device.blocks.ended}


@pytest.mark.parametrize("seed", range(20))
def test_random_requests_against_a_ledger(seed):
    dice = random.Random(seed)
    caller = Caller(made(state_slots=dice.choice([4, 100]), host_pages=dice.choice([0, 40])))
    known, seen = [[1] * BLOCK], 0
    for _ in range(80):
        tokens = dice.choice(known[-8:])[: dice.choice([BLOCK, 100])] + dice.choices(range(3), k=dice.randint(1, 9))
        known.append(tokens[:40])
        name = dice.choice(["a", "b", "c", None]) if seed % 2 else dice.choice("abc")
        back = dice.random() < 0.1
        caller.run(
            tokens, name, end=name is not None and dice.random() < 0.3, salt=dice.choice([None, "x"]), comes_back=back
        )
        if dice.random() < 0.1:
            salt, name = dice.choice([None, "x"]), dice.choice("abc")
            caller.run([7], name, end=True, salt=salt)
        assert keys_of_ended(caller.cache) == caller.ended()
        seen += bool(caller.ended())
    assert seen or seed % 2, "no state of an ended session was there"
    caller.cache.invalidate()
    assert not keys_of_ended(caller.cache) and not caller.cache._device.tree.sessions._states


@pytest.mark.parametrize("policy", ["lru", "recompute_cost"])
@pytest.mark.parametrize("host_pages", [0, 40])
def test_an_ended_session_goes_before_older_ones_and_not_to_the_host(policy, host_pages):
    caller = Caller(made(state_slots=3, eviction_policy=policy, host_pages=host_pages))
    prompts = {name: [ord(name)] * (2 * BLOCK + 1) for name in "abcd"}
    for name in "abc":
        caller.run(prompts[name], name, end=name == "c")  # the newest ends
    caller.run(prompts["d"], "d")
    stats = caller.cache.stats()
    assert (stats.sessions_ended, stats.evictions, stats.evictions_ended, stats.tiers["host"].stores) == (1, 1, 1, 0)
    assert [caller.run(prompts[name], name) for name in "abd"] == [2 * BLOCK] * 3
    assert caller.run(prompts["c"], "c") == 0


@pytest.mark.parametrize("other", ["b", None])
@pytest.mark.parametrize("running", ["before", "since"])
def test_what_running_requests_use_is_not_over(running, other):
    """A shared prefix stays while requests that use it run, though another session is over that used it, too."""
    caller = Caller(made(state_slots=4))
    cache, shared = caller.cache, [1] * (2 * BLOCK)

    def start():
        admission = cache.admit(99, cache.match(cache.chain([*shared, 7])), hints=Hints(session=other))
        cache.publish(cache.plan(99, admission.resume_tokens, len(shared) + 1))

    if running == "before":
        start()
    caller.run([*shared, 8], "a")
    if running == "since":
        start()
    caller.run([*shared, 9], "a", end=True)
    assert not keys_of_ended(cache)
    cache.release(99)
    assert not keys_of_ended(cache) and caller.run([*shared, 3], "c") == 2 * BLOCK


def test_sessions_that_never_end_take_bounded_memory(monkeypatch):
    monkeypatch.setattr(tree, "_MOST_SESSIONS", 20)
    caller = Caller(made(state_slots=100))
    for number in range(60):
        caller.run([number] * 5, str(number))
        caller.run([100] * 5, str(number))  # a state that all of them use
        assert len(caller.cache._device.tree.sessions._states) <= 20
    caller.run([59] * 5, "59", end=True)
    assert len(keys_of_ended(caller.cache)) == 1, "the latest are known"
    caller.run([0] * 9, "0", end=True)
    assert [node.depth_blocks for node in caller.cache._device.blocks.ended] == [1, 2], "of the first its new state"


def test_a_session_that_goes_on_after_its_end_is_open_again():
    caller = Caller(made(state_slots=4))
    caller.run([1] * 9, "a", end=True)
    assert keys_of_ended(caller.cache)
    assert caller.run([1] * 13, "a") == 8 and not keys_of_ended(caller.cache)
    assert caller.cache.stats().uses_of_ended == 1


def test_others_states_stay_whoever_says_that_a_session_is_over():
    caller = Caller(made(state_slots=4))
    caller.run([1] * 9, "a", salt="x")
    caller.run([2] * 9)
    caller.run([2] * 13, "b", end=True)  # resumes from what anybody may use
    caller.run([3] * 9, "a", end=True)  # an "a" of no salt
    shared = [node.depth_blocks for node in caller.cache._device.blocks.ended]
    assert shared == [3, 2] and keys_of_ended(caller.cache) == caller.ended(), "its own third block, and its own prompt"


def test_a_preempted_request_does_not_end_its_session():
    caller = Caller(made(state_slots=4))
    caller.run([1] * 9, "a", end=True, comes_back=True)
    assert not keys_of_ended(caller.cache) and not caller.cache.stats().sessions_ended
