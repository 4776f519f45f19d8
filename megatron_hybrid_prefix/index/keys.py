"""Keys of blocks: a chain of keyed 128-bit hashes, one per full block.

``key[i] = blake2b(key[i - 1] + tokens of block i)``, keyed with a secret. The chain starts from a seed made of
``cache_salt``, adapter and weights epoch. So two equal keys mean equal tokens from position 0 on, with the same salt,
adapter and weights. Without the secret nobody can construct a collision.

No decision depends on the value of a key. So ranks with different secrets still decide alike. With one secret for all
ranks their keys can be compared, too. With a configured secret, keys match those of other processes; what a salt is, all
of them know. The weights of an adapter are known to this process only.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Buffer, Sequence
from hashlib import blake2b

KEY_BYTES = 16
TOKEN_BYTES = 8
_PART_BYTES = 1024  # for 2,048 and more hashlib lets other threads run: a third of a block's time
_REMEMBERED_BYTES = 2**24  # of each generation of `_RecentBlocks`
_REMEMBERED_OVERHEAD_BYTES = 320  # of a block: the objects of Python

type Tokens = Buffer | Sequence[int]
"""Token ids: a sequence of ints, or a buffer of native int64 (``bytes``, ``array('q')``, a NumPy array)."""


class KeyMaker:
    """Makes key chains.

    Args:
        block_tokens: Tokens per block.
        secret: Secret of the hashes, at most 64 bytes. None: random, valid in this process only.

    Raises:
        ValueError: ``block_tokens`` is below 1, or ``secret`` is too long.
    """

    def __init__(self, block_tokens: int, secret: bytes | None = None) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens={block_tokens}: must be 1 or more")
        self.block_tokens = block_tokens
        self._adapter_secret = os.urandom(16)  # in the keys of requests with an adapter: no other process has the same
        self._empty = blake2b(digest_size=KEY_BYTES, key=os.urandom(32) if secret is None else secret)
        self._recent = _RecentBlocks(block_tokens * TOKEN_BYTES)

    def chain(
        self,
        tokens: Tokens = (),
        *,
        salt: str | None = None,
        adapter: str | None = None,
        epoch: int = 0,
        remember: bool = True,
    ) -> KeyChain:
        """The key chain of ``tokens``. ``remember``: whether to keep their blocks for a while, to compare others with them."""
        digest = self._empty.copy()
        for field in (salt, adapter, str(epoch), str(self.block_tokens)):  # with their lengths, so that they cannot mix
            data = b"" if field is None else field.encode("utf-8", errors="surrogatepass")
            digest.update(b"-" if field is None else b"%d:" % len(data))
            digest.update(data)
        if adapter is not None:
            digest.update(self._adapter_secret)
        seed, private = digest.digest(), adapter is not None
        chain = KeyChain([], 0, epoch=epoch, maker=self, seed=seed, private=private, remember=remember)
        view = token_bytes(tokens)
        chain.extend(view)
        if chain.keys:
            first = bytes(view[: self.block_tokens * TOKEN_BYTES])
            chain.starts = hash(first), hash((salt, adapter, first))
        return chain

    def forget(self) -> None:
        """Keep no blocks any more."""
        self._recent.clear()

    def extend(self, keys: list[bytes], seed: bytes, data: memoryview, *, remember: bool) -> int:
        """Appends the keys of the full blocks in ``data`` (bytes of int64). Returns the number of bytes used."""
        step = self.block_tokens * TOKEN_BYTES
        end = len(data) // step * step
        before = keys[-1] if keys else seed
        blocks, recent = data[:end].tobytes(), self._recent
        for start in range(0, end, step):
            block = blocks[start : start + step]
            key = recent.key_after(before, block, remember=remember)
            if key is None:
                digest = self._empty.copy()
                digest.update(before)
                for part in range(0, step, _PART_BYTES):
                    digest.update(block[part : part + _PART_BYTES])
                key = digest.digest()
                if remember:
                    recent.add(before, block, key)
            keys.append(key)
            before = key
        return end


class _RecentBlocks:
    """Keys of blocks that were hashed lately: prompts repeat what others begin with, and comparing is faster than hashing.

    For each key it knows the block that followed last, and the key of that. There are two generations. When the newer one
    is full it becomes the older one, which is forgotten.

    Args:
        block_bytes: Bytes of a block.
    """

    def __init__(self, block_bytes: int) -> None:
        self._most = max(1, _REMEMBERED_BYTES // (block_bytes + _REMEMBERED_OVERHEAD_BYTES))
        self.clear()

    def clear(self) -> None:
        """Forget all blocks."""
        self._newer: dict[bytes, tuple[bytes, bytes]] = {}
        self._older: dict[bytes, tuple[bytes, bytes]] = {}

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._newer) + len(self._older)

    def key_after(self, before: bytes, block: bytes, *, remember: bool = True) -> bytes | None:
        """The key of this block after the key ``before``; None if it is not known. ``remember``: keep it for longer now."""
        known = self._newer.get(before)
        if known is not None:
            return known[1] if known[0] == block else None
        known = self._older.get(before)
        if known is None or known[0] != block:
            return None
        if remember:
            self.add(before, *known)
        return known[1]

    def add(self, before: bytes, block: bytes, key: bytes) -> None:
        """Remember this."""
        if len(self._newer) >= self._most:
            self._older, self._newer = self._newer, {}
        self._newer[before] = block, key


class KeyChain:
    """Keys of a growing sequence of tokens.

    Attributes:
        keys: One key per full block. Keys from elsewhere (a trace) are taken as they are.
        tokens: Length of the sequence.
        epoch: Weights epoch of the keys.
        private: Whether no other process can have these keys, because they are those of an adapter.
        seed: See Args: that of salt, adapter and epoch.
        starts: Short hashes of the first block, without and with salt and adapter, for `Starts`; None: it is not full, or not known.

    Args:
        maker: Computes the keys of appended tokens. None: the chain cannot grow.
        seed: The hash that the first key is chained to.
        remember: See `KeyMaker.chain`.
    """

    __slots__ = ("_maker", "_remember", "_tail", "epoch", "keys", "private", "seed", "starts", "tokens")

    def __init__(
        self,
        keys: list[bytes],
        tokens: int,
        *,
        epoch: int = 0,
        maker: KeyMaker | None = None,
        seed: bytes = b"",
        private: bool = False,
        remember: bool = True,
    ) -> None:
        self.keys = keys
        self.tokens = tokens
        self.epoch = epoch
        self.private = private
        self.starts: tuple[int, int] | None = None
        self._maker = maker
        self.seed = seed
        self._remember = remember
        self._tail = b""  # bytes of the tokens after the last full block

    def extend(self, tokens: Tokens) -> memoryview:
        """Appends tokens, and the keys of the blocks that they fill. Returns the tokens of these blocks, int64 as bytes.

        Raises:
            ValueError: The chain has no `KeyMaker`.
        """
        if self._maker is None:
            raise ValueError("a key chain without a KeyMaker cannot grow: its tokens are not known")
        data = token_bytes(tokens)
        self.tokens += len(data) // TOKEN_BYTES
        if self._tail:
            data = memoryview(self._tail + data)
        used = self._maker.extend(self.keys, self.seed, data, remember=self._remember)
        self._tail = bytes(data[used:])
        return data[:used]

    def __copy__(self) -> KeyChain:
        """An independent copy."""
        twin = KeyChain(
            self.keys.copy(),
            self.tokens,
            epoch=self.epoch,
            maker=self._maker,
            seed=self.seed,
            private=self.private,
            remember=self._remember,
        )
        twin._tail, twin.starts = self._tail, self.starts
        return twin


def token_bytes(tokens: Tokens) -> memoryview:
    """The tokens as bytes of int64, without a copy if they are int64 already.

    Raises:
        ValueError: The buffer is not contiguous int64 (or plain bytes, a multiple of 8).
    """
    view = memoryview(tokens) if isinstance(tokens, Buffer) else memoryview(array("q", tokens))
    plain = view.format in ("B", "b", "c")
    if not (view.contiguous and (len(view) % TOKEN_BYTES == 0 if plain else view.format in ("q", "l"))):
        raise ValueError(
            f"tokens must be int64, contiguous; got a buffer of format {view.format!r}, {view.nbytes} bytes"
        )
    if view.nbytes == 0:
        return memoryview(b"")
    if not plain and view.itemsize != TOKEN_BYTES:
        raise ValueError(f"tokens must be int64; got items of {view.itemsize} bytes")
    return view.cast("B")
