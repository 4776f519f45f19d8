"""`MooncakeTier`: KV blocks and states as objects in a Mooncake Store, the memory of a cluster (``shared="mooncake://..."``).

A master knows which object is in whose memory; holders lend the memory; data goes directly from process to process. Each
entry is one object: the header of ``base.py``, then the bytes. What the store does not promise is checked here:

- A put on a key that exists succeeds and keeps the old bytes. Header and bytes are one object, so they fit each other,
  whoever wrote them. An object that does not fit is a counted miss, and is removed, else it could never be written again.
- A transfer may end late, or in the middle. So bytes go through the memory of our threads, which is registered once, and
  the device compares the checksum of all that arrives.
- A call may take half a minute: if the master hangs, or a holder. So the engine's thread makes none. What the store holds is
  asked by one thread (`Client`), in one question for all keys of a prompt; the engine waits for the answer at most ``ask_s``,
  and not at all while an earlier question is late or the master is away. Threads read, write and remove.

The package ``mooncake`` is imported when a tier is made.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_hybrid_prefix.metrics import TierStats
from megatron_hybrid_prefix.tiers.base import HEADER_BYTES, VERSION, Entry, Tier, checksum_in, copy_bytes, make_header
from megatron_hybrid_prefix.tiers.mooncake_client import NO_MASTER, Client, MooncakeSettings
from megatron_hybrid_prefix.tiers.units import EntryKind, Tag

if TYPE_CHECKING:
    import numpy as np

_NOT_FOUND, _TOO_SMALL, _TRANSFER_FAILED = -704, -600, -800
_REASONS = {-200: "no_room", -706: "leased", -707: "lease_expired", _TRANSFER_FAILED: "transfer_failed"}
_MOST_ANSWERS = 2**18  # remembered


class MooncakeTier(Tier):
    """Entries as objects in a Mooncake Store."""

    settings_class = MooncakeSettings

    def __init__(self, settings: MooncakeSettings, *, block_tokens: int, make_ranking: Callable[[], Any]) -> None:
        super().__init__(settings, block_tokens=block_tokens, make_ranking=make_ranking)
        self._settings = settings
        self._answers: dict[str, tuple[bool, float]] = {}  # by object: whether it exists, and as of when (monotonic)
        self._wrong: set[str] = set()  # objects to be removed
        self._removing = threading.Lock()
        self._mine = threading.local()  # ``memory``: registered memory of a thread
        self._client = Client(settings)
        self._about = f"shared: Mooncake at {self._client.master}"
        self._close = weakref.finalize(self, self._client.end)
        self._close.atexit = False  # the client ends with the process

    # -- queries: on the engine's thread -------------------------------------------------------------------------------

    def contains(self, namespace: bytes, kind: EntryKind, key: bytes) -> bool:
        """Asks nobody: of what it does not remember, it says no."""
        name = _object(namespace, kind, key)
        return self._recall([name]).get(name, False)

    def kv_depth(self, namespace: bytes, keys: Sequence[bytes], first: int) -> int:
        """One question for the KV and the states of all these blocks."""
        if first >= len(keys) or len(keys) < self.least_blocks:
            return first
        kv, states = (
            [_object(namespace, kind, key) for key in keys[first:]] for kind in (EntryKind.KV, EntryKind.STATE)
        )
        here = self._which_exist(kv, states)
        return first + next((at for at, name in enumerate(kv) if name not in here), len(kv))

    def state_depth(self, namespace: bytes, keys: Sequence[bytes], after: int, limit: int) -> int:
        if limit - after < max(1, self.least_blocks):
            return after
        states = [_object(namespace, EntryKind.STATE, key) for key in keys[after:limit]]
        here = self._which_exist(states)
        deepest = max((depth for depth, name in enumerate(states, after + 1) if name in here), default=after)
        return self._unless_stuck(deepest, after)

    def _which_exist(self, names: list[str], others: Sequence[str] = ()) -> set[str]:
        """Which of these objects exist. If a question is needed, it asks for the others, too."""
        known = self._recall(names)
        if len(known) < len(names):
            asked = [*names, *others]
            found = self._client.ask(asked)
            if isinstance(found, str):
                self.count(found, "what the store holds is not known")
            else:
                answers = dict(zip(asked, found, strict=True))
                self._remember(answers)
                known |= answers
        return {name for name in names if known.get(name)} - self._wrong

    def _recall(self, names: Iterable[str]) -> dict[str, bool]:
        """Whether these objects existed, as of ``refresh_s`` ago at most. Objects of which nothing is known are left out."""
        oldest = time.monotonic() - self._settings.refresh_s
        known = ((name, *self._answers.get(name, (False, -math.inf))) for name in names)
        recent = {name: here for name, here, since in known if since >= oldest}
        return recent | dict.fromkeys(self._wrong.intersection(names), False)

    def _remember(self, answers: dict[str, bool]) -> None:
        now = time.monotonic()
        if len(self._answers) > _MOST_ANSWERS:
            self._answers.clear()
        self._answers |= {name: (here, now) for name, here in answers.items()}

    # -- put, read: on other threads -----------------------------------------------------------------------------------

    def _memory(self, entry_bytes: int) -> np.ndarray[Any, Any]:
        """Registered memory of this thread for a header and an entry, (bytes,) uint8. A transfer that ends late writes there."""
        import numpy as np  # not above: a replay, which reads settings, imports no numpy

        size = HEADER_BYTES + entry_bytes
        memory: np.ndarray[Any, Any] | None = getattr(self._mine, "memory", None)
        if memory is None or len(memory) < size:
            memory = self._mine.memory = np.zeros(size, np.uint8)
            code = self._client.register(memory)
            if code:
                self.count(f"register_{_reason(code)}", f"memory is not registered, error {code}")
        return memory[:size]

    def _move(self, method: str, name: str, memory: np.ndarray[Any, Any]) -> int:
        """Put or get one object. Returns an error code, or its size or 0."""
        (code,) = self._client.call(method, [name], [[memory.ctypes.data]], [[memory.nbytes]])
        return int(code)

    def wants(self, namespace: bytes, tag: Tag) -> bool:
        """The KV of a prompt is offered with each new state, as nobody says what the master evicts."""
        name = _object(namespace, tag.kind, tag.key)
        if self._client.is_down or not self._close.alive or name in self._wrong:
            return True  # `put` knows what to do
        exists = bool(self._client.call("batch_is_exist", [name]) == [1])
        if exists:
            self._remember({name: True})
        return not exists

    def put(self, namespace: bytes, entry: Entry) -> bool:
        name = _object(namespace, entry.tag.kind, entry.tag.key)
        if not self._can_be_used():
            return False
        if not self._take_out(name):
            self.count("write_wrong")
            return False
        memory = self._memory(len(entry.data))
        view = memoryview(memory)
        view[:HEADER_BYTES] = make_header(namespace, entry.tag, len(entry.data), entry.checksum)
        copy_bytes(entry.data, view[HEADER_BYTES:])
        code = self._move("batch_put_from_multi_buffers", name, memory)
        if code:
            self._note_failure("write", code)
            return False
        self._remember({name: True})
        return True

    def get(self, namespace: bytes, tag: Tag, buffers: Sequence[memoryview]) -> int | None:
        """Through the memory of the thread: a transfer that the network delayed may write there after the call."""
        if not self._can_be_used():
            return None
        name, entry_bytes = _object(namespace, tag.kind, tag.key), sum(map(len, buffers))
        memory = self._memory(entry_bytes)
        with self._reading():
            code = self._move("batch_get_into_multi_buffers", name, memory)
        header = memory[:HEADER_BYTES].tobytes()
        checksum = checksum_in(header, namespace, tag, entry_bytes) if code == len(memory) else None
        if checksum is None:
            if code >= 0 or self._has_other_size(name, code, entry_bytes):
                self.count("not_valid")
                self._discard(name)
            else:
                self._note_failure("read", code)
            if code == _NOT_FOUND:
                self._remember({name: False})
            return None
        data, at = memoryview(memory)[HEADER_BYTES:], 0
        for buffer in buffers:
            copy_bytes(data[at : at + len(buffer)], buffer)
            at += len(buffer)
        return checksum

    def _can_be_used(self) -> bool:
        """Whether the master is there. Else it is counted."""
        if self._client.is_down:
            self.count("no_master")
            return False
        return self._close.alive

    def _has_other_size(self, name: str, code: int, entry_bytes: int) -> bool:
        """Whether a read failed because the object is larger or smaller than the entry."""
        if code != _TRANSFER_FAILED:
            return code == _TOO_SMALL
        size: int = self._client.call("get_size", name)
        return size >= 0 and size != HEADER_BYTES + entry_bytes

    def _note_failure(self, what: str, code: int) -> None:
        if code in NO_MASTER:
            self._client.note_down()
            self.count("no_master", f"a {what} failed, error {code}")
        elif code == _NOT_FOUND:
            self.count("gone")
        else:
            self.count(f"{what}_{_reason(code)}", f"error {code}")

    # -- remove --------------------------------------------------------------------------------------------------------

    def remove(self, namespace: bytes, tags: Iterable[Tag]) -> None:
        """The entries were wrong when they arrived on the device."""
        for tag in tags:
            name = _object(namespace, tag.kind, tag.key)
            if self._recall([name]).get(name, True):
                self.count("wrong")
                self._discard(name)

    def _discard(self, name: str) -> None:
        """Remove an object, soon. It does not exist for us until it is written again."""
        self._wrong.add(name)
        self._client.later(lambda: self._take_out(name))

    def _take_out(self, name: str) -> bool:
        """Remove the object if it is wrong, also if somebody reads it. Returns whether no wrong one is left."""
        if name not in self._wrong:
            return True
        with self._removing:
            if name in self._wrong:
                code = self._client.call("remove", name, True)
                if code not in (0, _NOT_FOUND):
                    return False
                self._answers.pop(name, None)
                self._wrong.discard(name)
        return True

    def describe(self, stats: TierStats) -> None:
        """Add the memory that this rank lends, and what was given up. Only the master knows what is in the store."""
        super().describe(stats)
        stats.bytes_budget = self._settings.lent_bytes

    def close(self) -> None:
        """End the thread, and the client. The objects in this rank's lent memory are lost."""
        self._close()


def _object(namespace: bytes, kind: EntryKind, key: bytes) -> str:
    """Name of an entry's object."""
    return f"mhp-v{VERSION}/{namespace.hex()}/{kind.name.lower()}/{key.hex()}"


def _reason(code: int) -> str:
    return _REASONS.get(code, f"error{code}")
