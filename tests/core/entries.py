"""Entries for tiers behind the host: prompts of numbers, whose bytes follow from their names."""

from __future__ import annotations

import random
import threading

from megatron_hybrid_prefix.tiers.base import Entry, Tier
from megatron_hybrid_prefix.tiers.units import EntryKind, Tag

KV, STATE = EntryKind.KV, EntryKind.STATE
BLOCK, SIZE = 4, {KV: 1000, STATE: 3000}
NAME = b"n" * 16  # of a namespace


def key(prompt: int, depth: int) -> bytes:
    return bytes([prompt, depth]) * 8


def keys(prompt: int, depth: int) -> list[bytes]:
    return [key(prompt, at) for at in range(1, depth + 1)]


def tag(kind: EntryKind, prompt: int, depth: int, epoch: int = 0) -> Tag:
    parent = key(prompt, depth - 1) if depth > 1 else b""
    return Tag(kind=kind, key=key(prompt, depth), depth_tokens=depth * BLOCK, epoch=epoch, parent=parent)


def prompt_tags(prompt: int, depth: int) -> list[Tag]:
    """The entries of a prompt of so many blocks: KV, and the state at their end."""
    return [*(tag(KV, prompt, at) for at in range(1, depth + 1)), tag(STATE, prompt, depth)]


def data(of: Tag, writer: int = 0) -> bytes:
    return random.Random(f"{of.kind} {of.key.hex()} {writer}").randbytes(SIZE[of.kind])


def checksum(of: Tag, writer: int = 0) -> int:
    return hash(data(of, writer)) % 2**60


def entry(of: Tag, writer: int = 0) -> Entry:
    return Entry(of, memoryview(data(of, writer)), checksum(of, writer))


def put(tier: Tier, *tags: Tag, writer: int = 0, name: bytes = NAME) -> list[bool]:
    return [tier.put(name, entry(each, writer)) for each in tags]


def get(tier: Tier, of: Tag, name: bytes = NAME) -> tuple[int | None, bytes]:
    memory = bytearray(SIZE[of.kind])
    views = [memoryview(memory)[start:end] for start, end in ((0, 700), (700, 700), (700, len(memory)))]
    return tier.get(name, of, views), bytes(memory)


def holds(tier: Tier, of: Tag, writer: int = 0, name: bytes = NAME) -> bool:
    """Whether the entry is here. If it is, it is as this writer wrote it."""
    own, found = get(tier, of, name)
    assert threading.get_ident() not in tier._reads, "the read is over"
    assert own is None or (own, found) == (checksum(of, writer), data(of, writer))
    return own is not None


def raises(error: Exception) -> None:
    raise error
