"""Keys of blocks: a chain of keyed 128-bit digests, one per full block.

``key[i] = blake2b(key[i - 1] + tokens of block i)``, keyed with a secret and seeded by a salt of (tenant's
``cache_salt``, adapter, weights epoch), so equal keys mean equal tokens from position 0 on, under the same salt and
weights. Nobody without the secret can construct a collision. Decisions never depend on the value of a key, so ranks
with different secrets would still decide alike; one secret for all makes keys comparable.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Buffer, Sequence
from hashlib import blake2b

KEY_BYTES = 16
TOKEN_BYTES = 8

type Tokens = Buffer | Sequence[int]
"""Token ids: a sequence of ints, or a buffer of int64 in native order (``bytes``, ``array('q')``, a NumPy array)."""


class KeyMaker:
    """Makes key chains.

    Args:
        block_tokens: Tokens of a block.
        secret: Key of the digests, at most 64 bytes; by default random, good for this process.

    Raises:
        ValueError: ``block_tokens`` is below 1, or ``secret`` too long.
    """

    def __init__(self, block_tokens: int, secret: bytes | None = None) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens={block_tokens}: must be 1 or more")
        self.block_tokens = block_tokens
        self._empty = blake2b(digest_size=KEY_BYTES, key=os.urandom(32) if secret is None else secret)

    def seed(self, *, salt: str | None = None, adapter: str | None = None, epoch: int = 0) -> bytes:
        """What the first block's key is chained to; lengths are part of it, so fields cannot run into each other."""
        digest = self._empty.copy()
        for field in (salt, adapter, str(epoch), str(self.block_tokens)):
            data = b"" if field is None else field.encode("utf-8", errors="surrogatepass")
            digest.update(b"-" if field is None else b"%d:" % len(data))
            digest.update(data)
        return digest.digest()

    def chain(
        self, tokens: Tokens = (), *, salt: str | None = None, adapter: str | None = None, epoch: int = 0
    ) -> KeyChain:
        """The key chain of ``tokens``."""
        chain = KeyChain([], 0, epoch=epoch, maker=self, seed=self.seed(salt=salt, adapter=adapter, epoch=epoch))
        chain.extend(tokens)
        return chain

    def extend(self, keys: list[bytes], seed: bytes, data: memoryview) -> int:
        """Appends the keys of the full blocks in ``data`` (bytes of int64); returns how many bytes they cover."""
        step = self.block_tokens * TOKEN_BYTES
        end = len(data) // step * step
        key = keys[-1] if keys else seed
        for start in range(0, end, step):
            digest = self._empty.copy()
            digest.update(key)
            digest.update(data[start : start + step])
            key = digest.digest()
            keys.append(key)
        return end


class KeyChain:
    """Keys of a growing sequence of tokens.

    Attributes:
        keys: One per full block.
        tokens: Length of the sequence.
        epoch: Weights epoch the keys are for.

    Args:
        keys: As above; keys from elsewhere (a trace) are taken as they are.
        tokens: As above.
        epoch: As above.
        maker: Computes the keys of further tokens; without one the chain cannot grow.
        seed: What the first key is chained to.
    """

    __slots__ = ("_maker", "_seed", "_tail", "epoch", "keys", "tokens")

    def __init__(
        self, keys: list[bytes], tokens: int, *, epoch: int = 0, maker: KeyMaker | None = None, seed: bytes = b""
    ) -> None:
        self.keys = keys
        self.tokens = tokens
        self.epoch = epoch
        self._maker = maker
        self._seed = seed
        self._tail = b""  # bytes of the tokens after the last full block

    def extend(self, tokens: Tokens) -> None:
        """Appends tokens, and the keys of the blocks that they fill.

        Raises:
            ValueError: The chain was made of keys alone.
        """
        if self._maker is None:
            raise ValueError("a key chain made of keys alone cannot grow: its tokens are not known")
        data = token_bytes(tokens)
        self.tokens += len(data) // TOKEN_BYTES
        if self._tail:
            data = memoryview(self._tail + data)
        used = self._maker.extend(self.keys, self._seed, data)
        self._tail = bytes(data[used:])

    def copy(self) -> KeyChain:
        """A chain of its own with the same tokens."""
        twin = KeyChain(self.keys.copy(), self.tokens, epoch=self.epoch, maker=self._maker, seed=self._seed)
        twin._tail = self._tail
        return twin


def token_bytes(tokens: Tokens) -> memoryview:
    """The tokens as bytes of int64, without a copy where they are that already.

    Raises:
        ValueError: A buffer holds something else than int64 (or plain bytes, a multiple of 8 of them).
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
