"""A tier behind the host, as a user would write it in one file: a dictionary. Tests also copy it out of the repository."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from megatron_hybrid_prefix.tiers.base import Entry, Tier
from megatron_hybrid_prefix.tiers.registry import register_tier
from megatron_hybrid_prefix.tiers.settings import TierSettings
from megatron_hybrid_prefix.tiers.units import EntryKind, Tag


class DictionaryTier(Tier):
    """Keeps entries in the memory of the process. The path of the URL is the most entries to keep; by default there is
    no limit.
    """

    def __init__(self, settings: TierSettings, *, block_tokens: int = 1, make_ranking: Any = None) -> None:
        super().__init__(settings, block_tokens=block_tokens, make_ranking=make_ranking)
        self.most = int(settings.path.strip("/") or 10**9)
        self.entries: dict[tuple[bytes, EntryKind, bytes], tuple[Tag, bytearray, int]] = {}

    def contains(self, namespace: bytes, kind: EntryKind, key: bytes) -> bool:
        return (namespace, kind, key) in self.entries

    def put(self, namespace: bytes, entry: Entry) -> bool:
        tag = entry.tag
        self.entries[namespace, tag.kind, tag.key] = tag, bytearray(entry.data), entry.checksum
        while len(self.entries) > self.most:
            self.entries.pop(next(iter(self.entries)), None)
        return True

    def get(self, namespace: bytes, tag: Tag, buffers: Sequence[memoryview]) -> int | None:
        found, data, checksum = self.entries.get((namespace, tag.kind, tag.key), (None, b"", 0))
        if found != tag:
            return None
        at = 0
        for buffer in buffers:
            buffer[:] = data[at : at + len(buffer)]
            at += len(buffer)
        return checksum

    def remove(self, namespace: bytes, tags: Iterable[Tag]) -> None:
        for tag in tags:
            self.entries.pop((namespace, tag.kind, tag.key), None)


register_tier("dictionary", DictionaryTier)
