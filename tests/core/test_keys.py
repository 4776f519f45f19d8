"""Keys of blocks."""

from __future__ import annotations

from array import array
from copy import copy
from hashlib import blake2b
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.index import keys
from megatron_hybrid_prefix.index.keys import KeyChain, KeyMaker
from megatron_hybrid_prefix.index.settings import CacheSettings

SECRET = b"of the tests"
tokens_st = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40)


@given(tokens_st, st.integers(1, 7), st.data())
def test_growing_gives_the_same_keys(tokens, block_tokens, data):
    maker, whole = KeyMaker(block_tokens, SECRET), KeyMaker(block_tokens, SECRET).chain(tokens)
    assert len(whole.keys) == len(tokens) // block_tokens and whole.tokens == len(tokens)
    chain, start = maker.chain(), 0
    while start < len(tokens):
        end = data.draw(st.integers(start + 1, len(tokens)))
        chain.extend(tokens[start:end])
        start = end
    assert chain.keys == whole.keys and chain.tokens == whole.tokens


@given(st.integers(1, 3), st.integers(1, 6), st.data())
def test_what_was_hashed_before_changes_no_key(block_tokens, remembered, data):
    """Prompts that share beginnings, some of which were forgotten; of two salts; grown in parts."""
    with patch.object(keys, "_REMEMBERED_BYTES", remembered * (8 * block_tokens + keys._REMEMBERED_OVERHEAD_BYTES)):
        maker = KeyMaker(block_tokens, SECRET)
    for _ in range(data.draw(st.integers(1, 12))):
        tokens = data.draw(st.lists(st.integers(0, 1), max_size=8 * block_tokens))
        salt, parts = data.draw(st.sampled_from([None, "a"])), data.draw(st.integers(0, len(tokens)))
        chain = maker.chain(tokens[:parts], salt=salt)
        chain.extend(tokens[parts:])
        before, expected = maker.chain(salt=salt).seed, []
        for start in range(0, len(tokens) // block_tokens * block_tokens, block_tokens):
            block = array("q", tokens[start : start + block_tokens]).tobytes()
            before = blake2b(before + block, key=SECRET, digest_size=16).digest()
            expected.append(before)
        assert chain.keys == expected
        assert len(maker._recent) <= 2 * remembered


def test_what_was_hashed_lately_is_not_hashed_again():
    """What each prompt begins with is not forgotten, however many others come."""
    with patch.object(keys, "_REMEMBERED_BYTES", 4 * (8 + keys._REMEMBERED_OVERHEAD_BYTES)):
        maker = KeyMaker(1, SECRET)
    maker._empty = hashed = Hashed(maker._empty)
    for number in range(20):
        maker.chain([1, 2, 100 + number, 200 + number])
    assert hashed.times == 20 + 2 + 20 * 2, "seeds, what they share, and their own"


def test_what_must_not_be_kept_is_not_remembered():
    """Nor what a copy of its chain adds."""
    maker = KeyMaker(2, SECRET)
    chain = maker.chain([1, 2, 5], remember=False)
    chain.extend([6])
    twin = copy(chain)
    twin.extend([7, 8])
    assert not len(maker._recent) and maker.chain([1, 2, 5, 6, 7, 8]).keys == twin.keys
    assert len(maker._recent) == 3
    maker.forget()
    assert not len(maker._recent)


def test_new_weights_and_a_reset_forget_them():
    cache = HybridPrefixCache(CacheSettings(block_tokens=2, kv_blocks=9, state_slots=1))
    for forget in (cache.invalidate, cache.reset):
        cache.chain([1, 2, 3, 4])
        assert len(cache._keys._recent) == 2
        forget()
        assert not len(cache._keys._recent)


class Hashed:
    """A hash that counts its copies."""

    def __init__(self, digest):
        self.digest, self.times = digest, 0

    def copy(self):
        self.times += 1
        return self.digest.copy()


@given(tokens_st, tokens_st, st.integers(1, 5))
def test_equal_keys_mean_equal_prefixes(one, other, block_tokens):
    maker = KeyMaker(block_tokens, SECRET)
    for depth, (left, right) in enumerate(zip(maker.chain(one).keys, maker.chain(other).keys, strict=False), 1):
        assert (left == right) == (one[: depth * block_tokens] == other[: depth * block_tokens])


def test_every_part_of_the_salt_counts():
    maker = KeyMaker(2, SECRET)
    salts = [
        {}, {"salt": ""}, {"salt": "a"}, {"adapter": "a"}, {"adapter": ""}, {"salt": "a", "adapter": "b"},
        {"salt": "ab"}, {"salt": "ab", "adapter": ""}, {"epoch": 1}, {"epoch": 11}, {"salt": "1"}, {"salt": "1:-"},
        {"salt": "\ud800"},
    ]  # fmt: skip
    firsts = {maker.chain([1, 2], **salt).keys[0] for salt in salts}
    firsts |= {KeyMaker(2, b"another").chain([1, 2]).keys[0], KeyMaker(2).chain([1, 2]).keys[0]}
    firsts.add(KeyMaker(2).chain([1, 2]).keys[0])  # another random secret
    assert len(firsts) == len(salts) + 3


def test_every_form_of_tokens_gives_the_same_keys():
    numpy = pytest.importorskip("numpy")
    maker = KeyMaker(3, SECRET)
    tokens = [5, 0, -1, 2**40, 7, 8, 9]
    packed = array("q", tokens)
    forms = [tokens, tuple(tokens), packed, packed.tobytes(), bytearray(packed.tobytes()), memoryview(packed)]
    forms += [numpy.array(tokens, dtype=numpy.int64), memoryview(packed.tobytes())]
    assert {tuple(maker.chain(form).keys) for form in forms} == {tuple(maker.chain(tokens).keys)}
    with pytest.raises(ValueError, match="int64"):
        maker.chain(numpy.arange(4, dtype=numpy.int32))


@pytest.mark.parametrize(
    "tokens", [array("i", [1, 2]), b"1234", memoryview(array("q", range(4)))[::2], array("d", [1.0])]
)
def test_other_buffers_are_refused(tokens):
    with pytest.raises(ValueError, match="int64"):
        KeyMaker(2).chain(tokens)


def test_bad_arguments():
    with pytest.raises(ValueError, match="cannot grow"):
        KeyChain([b"k" * 16], 3).extend([1])
    with pytest.raises(ValueError, match="block_tokens=0"):
        KeyMaker(0)
    with pytest.raises(ValueError):
        KeyMaker(2, b"x" * 65)
