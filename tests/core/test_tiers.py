"""What every tier does, whatever it keeps entries in: one set of tests for all kinds. What is special of a kind has a file of its own."""

from __future__ import annotations

import logging
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron_hybrid_prefix.tiers.base import HEADER_BYTES, Entry
from megatron_hybrid_prefix.tiers.behind import TierBehind
from tests.core import tier_kinds
from tests.core.entries import BLOCK, KV, NAME, SIZE, STATE, checksum, data, get, holds, keys, prompt_tags, put, tag
from tests.core.tier_kinds import wait_for_namespace
from tests.harness.limits import HANG_S, wait_until

STORED = ["Folder", "Mooncake"]
SHARED = ["Dictionary", *STORED]
READ = [*SHARED, "ShortReads", "ByteReads"]
OTHER = b"m" * 16  # a namespace


@pytest.fixture
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return getattr(tier_kinds, request.param)(tmp_path / "entries", monkeypatch)


def over(kinds: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", kinds, indirect=True)


def has(tier: Any, of: Any) -> bool:
    """What the tier says."""
    depth = of.depth_tokens // BLOCK
    prompt = keys(of.key[0], depth)
    if of.kind == KV:
        return tier.kv_depth(NAME, prompt, depth - 1) == depth
    return tier.state_depth(NAME, prompt, depth - 1, depth) == depth


# -- entries -----------------------------------------------------------------------------------------------------------


@over(SHARED)
def test_what_is_put_is_found(kind):
    """By this process, by others, and by those that start when these have ended."""
    one, tags, prompt = kind.tier(), prompt_tags(1, 3), keys(1, 5)
    assert put(one, *tags) == [True] * 4
    other = kind.tier()
    for tier in (one, other, None):
        if tier is None:
            one.close()
            other.close()
            tier = kind.tier()
        assert [tier.kv_depth(NAME, prompt, first) for first in (0, 2, 4)] == [3, 3, 4]
        assert [tier.state_depth(NAME, prompt, *span) for span in ((0, 5), (3, 5), (0, 2))] == [3, 3, 0]
        assert all(holds(tier, each) for each in tags) and not tier.counts
        assert not holds(tier, tag(KV, 2, 1)) and not tier.counts.keys() - {"gone"}


@over(READ)
@pytest.mark.parametrize("ends", [(), (500,), (500, 500, 2999)])
def test_entries_are_read_into_pieces(kind, ends):
    """Of four entries one is not there."""
    tier, tags = kind.tier(), [*prompt_tags(1, 2), tag(KV, 9, 9)]
    put(tier, *tags[:-1])
    memory = [bytearray(SIZE[each.kind]) for each in tags]
    for of, one in zip(tags, memory, strict=True):
        within = (0, *(end for end in ends if end < len(one)), len(one))
        pieces = [memoryview(one)[start:end] for start, end in pairwise(within)]
        assert tier.get(NAME, of, pieces) == (None if of is tags[-1] else checksum(of))
    assert memory == [*(data(each) for each in tags[:-1]), bytes(SIZE[KV])]


@over([*SHARED, "ByteReads"])
def test_an_entry_without_bytes(kind):
    """As on a pipeline stage that has no such layers."""
    tier, of = kind.tier(), tag(KV, 1, 1)
    assert tier.put(NAME, Entry(of, memoryview(b""), 7)) and tier.get(NAME, of, [memoryview(bytearray())]) == 7


@over(SHARED)
@pytest.mark.parametrize("its", [tag(STATE, 2, 2), tag(STATE, 1, 3), tag(KV, 1, 2)], ids=["prompt", "depth", "kind"])
def test_another_entry_never_matches(kind, its):
    """Also where it is in the place of the one that is asked for."""
    tier, wanted = kind.tier(), tag(STATE, 1, 2)
    put(tier, *prompt_tags(1, 2), *prompt_tags(2, 2), tag(KV, 1, 3), tag(STATE, 1, 3))
    kind.give(wanted, kind.content(its))
    assert get(tier, wanted)[0] is None
    kind.settle(tier)
    tier.remove(NAME, [wanted])
    assert put(tier, wanted) == [True] and holds(tier, wanted)


@over(SHARED)
def test_another_namespace_never_matches(kind):
    one, another, wanted = kind.tier(), kind.tier(OTHER), tag(STATE, 1, 2)
    put(one, *prompt_tags(1, 2))
    assert another.kv_depth(OTHER, keys(1, 2), 0) == 0 and not holds(another, wanted, name=OTHER)
    put(another, *prompt_tags(1, 2), writer=1, name=OTHER)
    assert holds(one, wanted) and holds(another, wanted, 1, name=OTHER)
    if isinstance(kind, tier_kinds.Stored):
        kind.give(wanted, kind.content(wanted, OTHER))
        assert get(one, wanted)[0] is None


@over(SHARED)
def test_new_weights_have_another_namespace(kind):
    old, new, of = b"a" * 16, b"b" * 16, tag(KV, 1, 1)
    weights, tier = [old], kind.tier(name=b"")
    behind = TierBehind(tier)
    assert not behind.namespace() and behind.kv_depth(keys(1, 1), 0) == 0 and not tier.counts
    behind.name_entries(lambda: weights[0])
    assert put(tier, *prompt_tags(1, 1), name=old) == [True] * 2 and behind.kv_depth(keys(1, 1), 0) == 1
    weights[0] = new
    behind.invalidate(1)
    assert behind.kv_depth(keys(1, 1), 0) == 0 and not holds(tier, of, name=new)
    assert behind.namespace(0) == b"" and behind.namespace(1) == behind.namespace() == new
    wait_for_namespace(tier, new)
    assert behind.kv_depth(keys(1, 1), 0) == 0 and not holds(tier, of, name=new)
    weights[0] = old
    behind.invalidate(0)
    wait_until(lambda: behind.kv_depth(keys(1, 1), 0) == 1, "the first namespace is open again")
    assert holds(tier, of, name=old) and behind.namespace(0) == old and behind.namespace(1) == b""


@over(SHARED)
def test_two_writers_of_one_key_with_other_bytes(kind):
    """All readers get the bytes of one of them, with its checksum."""
    one, other, of = kind.tier(), kind.tier(), tag(KV, 1, 1)
    assert put(one, of) == [True] == put(other, of, writer=1)
    for tier in (one, other):
        assert holds(tier, of, writer=getattr(kind, "kept", 1)) and not tier.counts


@over(SHARED)
def test_a_full_tier_takes_what_fits(kind):
    """What it says it has can be read."""
    tier = kind.tier(room_bytes=20_000)
    stored = [put(tier, *prompt_tags(number, 2)) for number in range(9)]
    tags = [each for number in range(9) for each in prompt_tags(number, 2)]
    here = [each for each in tags if has(tier, each)]
    assert stored[0] == [True] * 3 and 0 < sum(SIZE[each.kind] for each in here) <= 20_000
    assert tier.counts.keys() <= {kind.full}
    assert [each for each in tags if holds(tier, each)] == here


# -- faults ------------------------------------------------------------------------------------------------------------


@over(SHARED)
def test_what_is_removed_is_not_here_until_it_is_put_again(kind):
    """As the device finds it wrong. Others stay."""
    tier, tags = kind.tier(), prompt_tags(1, 2)
    put(tier, *tags)
    tier.remove(NAME, tags[-1:])
    assert not tier.contains(NAME, STATE, tags[-1].key) and tier.state_depth(NAME, keys(1, 2), 0, 2) == 0
    kind.settle(tier)
    assert not holds(tier, tags[-1]) and tier.counts["wrong"] == isinstance(kind, tier_kinds.Stored)
    assert tier.wants(NAME, tags[-1]) and put(tier, tags[-1], writer=1) == [True]
    assert holds(tier, tags[-1], writer=1) and tier.state_depth(NAME, keys(1, 2), 0, 2) == 2
    tier.remove(NAME, [tag(KV, 9, 9)])
    assert all(holds(tier, each) for each in tags[:-1])


@over(SHARED)
def test_a_wrong_bit_does_not_fit_the_checksum(kind):
    tier, of = kind.tier(), tag(STATE, 1, 1)
    put(tier, *prompt_tags(1, 1))
    kind.flip_a_bit(of)
    own, found = get(tier, of)
    assert own is None or (own == checksum(of) and found != data(of))


@over([*STORED, "ShortReads", "ByteReads"])
@pytest.mark.parametrize("wrong", ["shorter", "much shorter", "without a header", "empty", "longer", "other bytes"])
def test_what_is_not_valid_is_a_miss_and_is_written_again(kind, wrong):
    one, other, tags = kind.tier(), kind.tier(), prompt_tags(1, 2)
    put(one, *tags)
    content = bytes(kind.content(tags[1]))
    kept = {"shorter": -1, "much shorter": -900, "without a header": HEADER_BYTES - 1, "empty": 0, "other bytes": 0}
    more = {"longer": b"x", "other bytes": b"x" * len(content)}
    kind.give(tags[1], content[: kept.get(wrong)] + more.get(wrong, b""))
    assert [holds(one, each) for each in tags] == [True, False, True] and one.counts == {"not_valid": 1}
    kind.settle(one)
    assert not one.contains(NAME, KV, tags[1].key) and len(kind.entries()) == 2
    kind.settle(other)
    assert put(other, tags[1]) == [True] and holds(other, tags[1])
    kind.settle(one)
    assert put(one, tags[1]) == [True] and holds(one, tags[1])


@over(STORED)
def test_every_bit_of_a_header_counts(kind):
    tier, of = kind.tier(), tag(KV, 1, 1)
    put(tier, of)
    content = bytes(kind.content(of))
    for bit in range(8 * HEADER_BYTES):
        spoilt = bytearray(content)
        spoilt[bit // 8] ^= 1 << bit % 8
        kind.give(of, spoilt)
        assert get(tier, of)[0] is None and put(tier, of) == [True]
    assert tier.counts == {"not_valid": 8 * HEADER_BYTES}


@over(STORED)
def test_calls_that_fail_are_counted(kind, caplog):
    """Each reason is said once. A write leaves nothing, and what is not read may be written again."""
    tier, tags = kind.tier(), prompt_tags(1, 2)
    put(tier, tags[0])
    kind.break_calls()
    with caplog.at_level(logging.ERROR):
        assert put(tier, *tags[1:], *tags[1:]) == [False] * 4 and not holds(tier, tags[0])
    kind.mend()
    read, write = kind.reasons
    assert tier.counts == {write: 4, read: 1} and len(caplog.records) == 2
    assert len(kind.entries()) <= 1 and put(tier, *tags) == [True] * 3
    assert all(holds(tier, each) for each in tags)


@over(STORED)
def test_no_state_is_known_while_a_read_hangs(kind):
    """So other prompts do not wait for it."""
    tier, tags = kind.tier(wait_s=1e-9), prompt_tags(1, 2)
    put(tier, *tags)
    kind.close_gate()
    found: list[bool] = []
    readers = [threading.Thread(target=lambda each=each: found.append(holds(tier, each))) for each in tags[1:]]
    for reader in readers:
        reader.start()
    wait_until(lambda: len(tier._reads) == 2, "both read", pause_s=0.001)
    assert tier.state_depth(NAME, keys(1, 2), 0, 2) == 0 and tier.counts == {"stuck": 1}
    kind.gate.set()
    for reader in readers:
        reader.join(HANG_S)
    assert found == [True, True] and not tier._reads and tier.state_depth(NAME, keys(1, 2), 0, 2) == 2
