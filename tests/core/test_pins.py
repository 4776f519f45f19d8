"""Pins: what callers want kept stays, within a share of the memory, and nothing else changes. Against a slow and obvious ledger."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.index.hints import ALL_SHARE, MOST_PINS, MOST_REQUESTS, TENANT_SHARE, Hints, Pin, Pins
from megatron_hybrid_prefix.index.settings import CacheSettings

BLOCK = 4
PAGE_BLOCKS = 2


class Caller:
    """Runs prompts on a cache whose memory has 100 blocks: 50 states, or less with KV."""

    def __init__(self, **settings):
        sizes = {"kv_blocks": 100, "page_blocks": PAGE_BLOCKS, "retention_interval_tokens": 0, "live_states": False}
        self.cache = HybridPrefixCache(CacheSettings(block_tokens=BLOCK, **sizes | settings))
        self.next_id = 0

    def run(self, tokens, *pins, salt=None, now_s=None, counted=0):
        """Returns the reused tokens."""
        cache, self.next_id = self.cache, self.next_id + 1
        match = cache.match(cache.chain(tokens, salt=salt))
        breakpoints = [pin.tokens for pin in pins if pin.tokens]
        hints = Hints(pins=pins, tenant=salt, now_s=now_s)
        admission = cache.admit(self.next_id, match, hints=hints, breakpoints=breakpoints, counted_tokens=counted)
        cache.publish(cache.plan(self.next_id, admission.resume_tokens, len(tokens)))
        cache.take_copies()
        cache.release(self.next_id)
        cache.check_integrity()
        return admission.resume_tokens

    def crowd(self, seed, count=40, **more):
        """Prompts that come once and need all of the memory."""
        for number in range(count):
            self.run([1000 * seed + number] * (3 * BLOCK + 1), **more)


def prompt(name, blocks=2):
    return [name] * (blocks * BLOCK + 1)


@pytest.mark.parametrize("policy", ["lru", "recompute_cost"])
@pytest.mark.parametrize("host_pages", [0, 6])
@pytest.mark.parametrize("pin", [Pin(uses=2), Pin(requests=84), Pin(seconds=2.0)], ids=["uses", "requests", "seconds"])
def test_it_stays_as_long_as_it_was_said(policy, host_pages, pin):
    caller = Caller(eviction_policy=policy, host_pages=host_pages)
    for name, pins in ((1, [pin]), (2, [])):
        caller.run(prompt(name), *pins, now_s=0)
    caller.crowd(1, now_s=1)
    assert caller.run(prompt(2), now_s=1) == 0, "the other one went"
    assert caller.run(prompt(1), now_s=1) == 2 * BLOCK
    caller.crowd(2, now_s=1.9)
    assert caller.run(prompt(1), now_s=1.9) == 2 * BLOCK
    caller.crowd(3, now_s=2)
    reused = caller.run(prompt(1), now_s=2)  # this policy keeps what was used
    assert reused == 0 or policy == "recompute_cost" or host_pages, "it is over"
    assert not caller.cache._device.pins.kept
    stats = caller.cache.stats().pins
    assert stats["pinned"] == 1 and stats["spared"] > 0 and stats["no_room"] == stats["evicted"] == 0


def test_a_beginning_stays_and_the_rest_does_not():
    caller = Caller()
    caller.run(prompt(1, blocks=8), Pin(requests=1000, tokens=4 * BLOCK + 1))
    caller.crowd(1)
    assert caller.run(prompt(1, blocks=8)) == 4 * BLOCK


def test_a_prompt_of_whole_blocks_stays_where_it_can_be_resumed():
    caller = Caller()
    caller.run([1] * (4 * BLOCK), Pin(uses=1))
    caller.crowd(1)
    assert caller.run([1] * (4 * BLOCK)) == 3 * BLOCK


def test_a_pin_above_the_state_that_is_used_keeps_that_one():
    caller = Caller()
    caller.run(prompt(1, blocks=8))
    caller.run(prompt(1, blocks=8), Pin(requests=1000, tokens=4 * BLOCK))  # resumes behind it, writes no state there
    caller.crowd(1)
    assert caller.run(prompt(1, blocks=8)) == 8 * BLOCK


def test_a_preempted_request_counts_once():
    caller = Caller()
    caller.run(prompt(1), Pin(uses=1))
    caller.run(prompt(1), counted=2)
    caller.crowd(1)
    assert caller.run(prompt(1)) == 2 * BLOCK


@pytest.mark.parametrize("how", ["invalidate", "reset"])
def test_nothing_is_pinned_after_new_weights(how):
    caller = Caller()
    caller.run(prompt(1), Pin(requests=1000))
    getattr(caller.cache, how)()
    assert not caller.cache._device.pins.kept


def test_all_memory_is_there_for_requests():
    """A prompt that needs everything evicts pinned states, the last ones."""
    caller = Caller()
    for name in range(4):
        caller.run(prompt(name), Pin(requests=1000))
    assert caller.run([99] * (100 * BLOCK)) == 0
    assert caller.cache.stats().pins["evicted"] == 4


def test_uses_beyond_the_share_give_way_to_later_ones_and_pins_do_not():
    caller, each = Caller(), 2 + PAGE_BLOCKS
    fit = int(100 * TENANT_SHARE / each)
    for name in range(fit + 2):
        caller.run(prompt(name), Pin(uses=5))
    cache, pins = caller.cache, caller.cache._device.pins
    assert len(pins.kept) == fit
    for name in range(100, 100 + fit):
        caller.run(prompt(name), Pin(requests=1000))
    assert all(kept.until_request for kept in pins.kept.values()) and len(pins.kept) == fit
    caller.run(prompt(200), Pin(uses=5))
    asked = Hints(pins=(Pin(requests=1000),))
    with pytest.raises(ValueError, match=r"2 blocks and a state have no room in the tenant's share for pins"):
        cache.reserve_pin(cache.chain(prompt(200)), asked)
    cache.reserve_pin(cache.chain(prompt(100)), asked)  # it is pinned already
    assert cache.stats().pins["no_room"] == 1 and len(pins.kept) == fit
    cache.reserve_pin(cache.chain(prompt(200)), replace(asked, tenant="another"))
    assert len(pins.kept) == fit + 1


def test_a_pin_that_is_refused_tells_the_time():
    """Or a client that sends nothing else would never have room again."""
    caller = Caller()
    chain = caller.cache.chain(prompt(1, blocks=20))
    for start_s in (0.0, 5.0):
        caller.cache.reserve_pin(chain, Hints(pins=(Pin(seconds=4),), now_s=start_s))
        other = Hints(pins=(Pin(seconds=4),), now_s=start_s + 3)
        with pytest.raises(ValueError, match="no room"):
            caller.cache.reserve_pin(caller.cache.chain(prompt(2, blocks=20)), other)


def test_a_guess_that_is_pinned_is_an_ordinary_state():
    """Guesses go before all else."""
    caller = Caller(retention_interval_tokens=BLOCK)
    caller.run(prompt(1, blocks=6))
    caller.run(prompt(1, blocks=6), Pin(requests=1000, tokens=2 * BLOCK))
    caller.crowd(1)
    assert caller.run(prompt(1, blocks=2)) == 2 * BLOCK


def test_what_pins_gained_is_counted():
    caller = Caller()
    caller.run(prompt(1), Pin(requests=1000))
    caller.run(prompt(1))
    assert caller.cache.stats().pins["reused_tokens"] == 0, "it would have been there without"
    caller.crowd(1)
    caller.run(prompt(1))
    stats = caller.cache.stats().pins
    assert (stats["spared"], stats["reused_tokens"]) == (1, 2 * BLOCK)


def test_tenants_and_pins_are_bounded():
    pins = Pins(10**6, 1)
    for number in range(3 * MOST_PINS):
        pins.came(0, [b"%d" % number], str(number))
        pins.put([b"%d" % number], str(number), Pin(uses=1))
    assert len(pins.kept) == MOST_PINS == len(pins._tenants) - 1
    for _ in range(MOST_REQUESTS):
        pins.came(0, [b"other"], str(3 * MOST_PINS - 1))
    assert len(pins.kept) == len(pins._tenants) == MOST_PINS - 1, "who says uses and never comes"


class Ledger:
    """The rules, slowly. A list of pins, said longest ago first."""

    def __init__(self, blocks, state_blocks):
        self.blocks, self.state_blocks = blocks, state_blocks
        self.pins, self.requests, self.now_s = [], {}, -math.inf

    def is_firm(self, pin):
        return self.requests[pin["tenant"]] < pin["request"] or self.now_s < pin["s"]

    def size(self, tenant, more=()):
        keys = {pin["keys"] for pin in self.pins if pin["tenant"] == tenant} | {*more}
        return len({key for each in keys for key in each}) + self.state_blocks * len(keys)

    def came(self, now_s, keys, tenant):
        self.now_s = max(self.now_s, now_s)
        if tenant in self.requests:
            self.requests[tenant] += 1
        for pin in self.pins:
            pin["uses"] -= pin["uses"] > 0 and pin["keys"][-1] in keys
        self.pins = [pin for pin in self.pins if pin["uses"] or self.is_firm(pin)]
        left = {pin["tenant"] for pin in self.pins}
        self.requests = {name: count for name, count in self.requests.items() if name in left}

    def put(self, keys, tenant, pin):
        self.requests.setdefault(tenant, 0)
        mine, before = [each for each in self.pins if each["keys"] == keys], [*self.pins]
        while not mine:
            sizes = {name: self.size(name) for name in self.requests} | {tenant: self.size(tenant, [keys])}
            giver = max(sizes, key=sizes.get)
            if sizes[tenant] > TENANT_SHARE * self.blocks:
                giver = tenant
            elif sum(sizes.values()) <= ALL_SHARE * self.blocks:
                break
            gives = [each for each in self.pins if each["tenant"] == giver]
            gives = [each for each in gives if giver != tenant or not self.is_firm(each)]
            if not gives:
                self.pins = before
                return False
            self.pins.remove(gives[0])
        made = mine[0] if mine else {"keys": keys, "tenant": tenant, "uses": 0, "request": 0, "s": -math.inf}
        self.pins = [*(each for each in self.pins if each is not made), made]
        made["uses"] = max(made["uses"], pin.uses)
        if pin.requests:
            made["request"] = max(made["request"], self.requests[tenant] + pin.requests)
        if pin.seconds:
            made["s"] = max(made["s"], self.now_s + pin.seconds)
        return True


def compare(pins, ledger, dice, steps=300):
    """Random prompts of five tenants, whose prompts begin alike. Returns what happened."""
    seen = Counter()
    for now_s in range(steps):
        tenant = dice.choice("abcde"[: dice.choice([1, 2, 5])])
        name = tenant + dice.choice("xyz")
        keys = tuple(f"{name}{depth}".encode() for depth in range(dice.randint(1, 9)))
        keys = (*keys, f"{keys[-1]}{dice.randrange(6)}".encode()) if dice.random() < 0.7 else keys
        for each in (pins, ledger):
            each.came(now_s, keys, tenant)
        if dice.random() < 0.6:
            pin = dice.choice([Pin(uses=2), Pin(requests=dice.randint(1, 30)), Pin(seconds=dice.randint(1, 60))])
            before, kept = [*pins.kept], ledger.put(keys, tenant, pin)
            assert pins.put(keys, tenant, pin) == kept
            seen["refused"] += not kept
            seen["displaced"] += not {*before} <= {*pins.kept}
        of = {pin["keys"][-1]: pin["tenant"] for pin in ledger.pins}
        assert pins.kept.keys() == of.keys()
        for name in "abcde":
            assert [*getattr(pins._tenants.get(name), "pins", ())] == [key for key in of if of[key] == name]
            assert ledger.size(name) <= TENANT_SHARE * ledger.blocks
        assert sum(map(ledger.size, "abcde")) <= ALL_SHARE * ledger.blocks
    return seen


@pytest.mark.parametrize("seed", range(10))
def test_random_pins_against_a_ledger(seed):
    dice = random.Random(seed)
    blocks, state_blocks = dice.choice([40, 100, 200]), dice.choice([0.25, 2, 5])
    seen = compare(Pins(blocks, state_blocks), Ledger(blocks, state_blocks), dice)
    assert seen["displaced"] and (seen["refused"] or blocks > 40)


def every_use_is_the_last(self, now_s, keys=(), tenant=None):
    for key in keys:
        if key in self.kept:
            self.kept[key].uses = min(1, self.kept[key].uses)
    CAME(self, now_s, keys, tenant)


CAME = Pins.came
MUTANTS = [
    ("_is_firm", lambda self, kept: True),
    ("_size", lambda self, tenant: len(tenant.blocks)),
    ("came", every_use_is_the_last),
]


@pytest.mark.parametrize(("name", "wrong"), MUTANTS)
def test_mutants_are_found(monkeypatch, name, wrong):
    monkeypatch.setattr(Pins, name, wrong)
    with pytest.raises(AssertionError):
        compare(Pins(100, 2), Ledger(100, 2), random.Random(1))
