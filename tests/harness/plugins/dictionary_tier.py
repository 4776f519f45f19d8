"""A tier behind the host, as a user would write it in one file: a dictionary. Tests also copy it out of the repository."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_hybrid_prefix.tiers.base import Entry, Tier
from megatron_hybrid_prefix.tiers.registry import register_tier
from megatron_hybrid_prefix.tiers.units import EntryKind, Tag


class DictionaryTier(Tier):
    """Keeps entries in the memory of the process. The argument is the most entries to keep; by default there is no
    limit.
    """

    def __init__(self, argument: str = "") -> None:
        self.most = int(argument or 10**9)
        self.entries: dict[tuple[EntryKind, bytes], tuple[Tag, bytearray, int]] = {}

    def contains(self, kind: EntryKind, key: bytes) -> bool:
        return (kind, key) in self.entries

    def put(self, entries: Sequence[Entry]) -> list[bool]:
        for tag, data, checksum in entries:
            self.entries[tag.kind, tag.key] = (tag, bytearray(data), checksum)
        while len(self.entries) > self.most:
            del self.entries[next(iter(self.entries))]
        return [True] * len(entries)

    def get(self, tags: Sequence[Tag], buffers: Sequence[memoryview]) -> list[int | None]:
        sums: list[int | None] = []
        for tag, buffer in zip(tags, buffers, strict=True):
            found, data, checksum = self.entries.get((tag.kind, tag.key), (None, b"", 0))
            if found == tag:
                buffer[:] = data
            sums.append(checksum if found == tag else None)
        return sums

    def remove(self, tags: Iterable[Tag]) -> None:
        for tag in tags:
            self.entries.pop((tag.kind, tag.key), None)

    def clear(self) -> None:
        self.entries.clear()


register_tier("dictionary", DictionaryTier)
