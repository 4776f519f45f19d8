"""`MooncakeTier`: KV blocks and states as objects in a Mooncake Store, the memory of a cluster (``shared="mooncake://..."``).

A master knows which object is in whose memory; holders lend the memory; data goes directly from process to process. Each
entry is one object: the header of ``header.py``, then the bytes. What the store does not promise is checked here:

- A put on a key that exists succeeds and keeps the old bytes. Header and bytes are one object, so they fit each other,
  whoever wrote them. What does not fit is a counted miss, and is removed, else it could never be written again.
- A transfer may end late, or in the middle. So bytes go through the memory of our threads, which is registered once, and
  the device compares the checksum of all that arrives.
- A call may take half a minute: if the master hangs, or a holder. So the engine's thread makes none. What the store holds is
  asked by one thread (`Asker`), in one question for all keys of a prompt; the engine waits for the answer at most ``ask_s``,
  and not at all while an earlier question is late or the master is away. Threads read, write and remove.

The package ``mooncake`` is imported when a tier is made.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.metrics import TierStats
from megatron_hybrid_prefix.tiers.base import Entry, SharedTier
from megatron_hybrid_prefix.tiers.header import HEADER_BYTES, VERSION, checksum_in, make_header
from megatron_hybrid_prefix.tiers.mooncake_client import NO_MASTER, Asker, Client
from megatron_hybrid_prefix.tiers.shared import MooncakeSettings
from megatron_hybrid_prefix.tiers.units import EntryKind, Tag

logger = logging.getLogger(__name__)

_NOT_FOUND, _TOO_SMALL, _TRANSFER_FAILED = -704, -600, -800
_REASONS = {-200: "no_room", -706: "leased", -707: "lease_expired", _TRANSFER_FAILED: "transfer_failed"}
_MOST_ANSWERS = 2**18  # remembered


class MooncakeTier(SharedTier):
    """See the top of this file.

    Args:
        settings: Master, limits and lent memory.
        block_tokens: Tokens per block.

    Attributes:
        counts: What was given up, by reason.

    Raises:
        ValueError: The package is missing, or the master does not answer; one line says what.
    """

    def __init__(self, settings: MooncakeSettings, *, block_tokens: int) -> None:
        self._settings = settings
        self.wait_s = settings.wait_s
        self.least_blocks = ceil_div(settings.min_tokens, block_tokens)
        self.threads = settings.threads
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._epoch = 0
        self._make_name: Callable[[], bytes] | None = None
        self._name = b""  # of the namespace, 16 bytes; empty if there is none yet
        self._answers: dict[str, tuple[bool, float]] = {}  # by object: whether it exists, and as of when (monotonic)
        self._wrong: set[str] = set()  # objects to be removed
        self._removing = threading.Lock()
        self._reads: dict[int, float] = {}  # reads that run: when they began (monotonic), by thread
        self._mine = threading.local()  # ``header``: registered memory of a thread
        self._client = Client(settings)
        self._asker = Asker(self._client, settings.ask_s, settings.refresh_s)
        self._close = weakref.finalize(self, self._asker.end)
        self._close.atexit = False  # the client ends with the process

    # -- namespace -----------------------------------------------------------------------------------------------------

    def name_entries(self, make_name: Callable[[], bytes]) -> None:
        """Use a namespace. Until then the tier has nothing and takes nothing.

        Args:
            make_name: Returns 16 bytes made of all that entries depend on: weights, layout, rank, versions. Called now, and
                again after the weights have changed.
        """
        self._make_name = make_name
        self._namespace()

    def invalidate(self, epoch: int) -> None:
        """The weights changed: other entries are used from now on. Nothing is removed."""
        with self._lock:
            self._epoch, self._name = epoch, b""
            self._answers.clear()

    def _namespace(self) -> bytes:
        """Name of the namespace, for the engine's thread. Made again if the weights have changed."""
        if not self._name and self._make_name is not None:
            name = self._make_name()
            with self._lock:
                self._name = name
        return self._name

    def _object(self, tag: Tag) -> tuple[str, bytes]:
        """The entry's object, and its namespace; empty if the entry is of other weights."""
        with self._lock:
            namespace = self._name if tag.epoch == self._epoch else b""
        return (_object(namespace, tag.kind, tag.key) if namespace else ""), namespace

    # -- queries: on the engine's thread -------------------------------------------------------------------------------

    def contains(self, kind: EntryKind, key: bytes) -> bool:
        """See Tier. Asks nobody: of what it does not remember, it says no."""
        namespace = self._namespace()
        name = _object(namespace, kind, key)
        return bool(namespace) and self._recall([name]).get(name, False)

    def kv_depth(self, keys: Sequence[bytes], first: int) -> int:
        """See `DepthTier`. One question for the KV and the states of all these blocks."""
        namespace = self._namespace()
        if not namespace or first >= len(keys) or len(keys) < self.least_blocks:
            return first
        kv, states = ([_object(namespace, kind, key) for key in keys[first:]] for kind in EntryKind)
        here = self._which_exist(kv, states)
        return first + next((at for at, name in enumerate(kv) if name not in here), len(kv))

    def state_depth(self, keys: Sequence[bytes], after: int, limit: int) -> int:
        """See `DepthTier`. No state is here while a read does not come back: its holder hangs."""
        namespace = self._namespace()
        if not namespace or limit - after < max(1, self.least_blocks):
            return after
        states = [_object(namespace, EntryKind.STATE, key) for key in keys[after:limit]]
        here = self._which_exist(states)
        depth = max((depth for depth, name in enumerate(states, after + 1) if name in here), default=after)
        if depth > after and self._is_stuck():
            self.count("stuck")
            return after
        return depth

    def _which_exist(self, names: list[str], others: Sequence[str] = ()) -> set[str]:
        """Which of these objects exist. If a question is needed, it asks for the others, too."""
        known = self._recall(names)
        if len(known) < len(names):
            asked = [*names, *others]
            found = self._asker.ask(asked)
            if isinstance(found, str):
                self.count(found, "what the store holds is not known")
            else:
                self._remember(zip(asked, found, strict=True))
                known |= {name: here and name not in self._wrong for name, here in zip(asked, found, strict=True)}
        return {name for name in names if known.get(name)}

    def _recall(self, names: Iterable[str]) -> dict[str, bool]:
        """Whether these objects existed, as of ``refresh_s`` ago at most. What is not known is left out."""
        oldest = time.monotonic() - self._settings.refresh_s
        with self._lock:
            known = ((name, *self._answers[name]) for name in names if name in self._answers)
            recent = {name: here for name, here, since in known if since >= oldest}
            return recent | dict.fromkeys(self._wrong.intersection(names), False)

    def _remember(self, answers: Iterable[tuple[str, bool]]) -> None:
        now = time.monotonic()
        with self._lock:
            if len(self._answers) > _MOST_ANSWERS:
                self._answers.clear()
            self._answers.update((name, (answer, now)) for name, answer in answers)

    def _is_stuck(self) -> bool:
        """Whether a read has taken longer than a request waits."""
        oldest = min(list(self._reads.values()), default=None)
        return oldest is not None and time.monotonic() - oldest > self.wait_s

    # -- put, read: on other threads -----------------------------------------------------------------------------------

    def use_memory(self, memory: memoryview) -> None:
        """See `SharedTier`. Registers the memory, and as much for a header."""
        self._mine.header = np.zeros(HEADER_BYTES, np.uint8)
        for each in (np.frombuffer(memory, np.uint8), self._mine.header):
            code = self._client.register(each)
            if code:
                self.count(f"register_{_reason(code)}", f"memory is not registered, error {code}")

    def wants(self, tag: Tag) -> bool:
        """See `SharedTier`. The KV of a prompt is offered with each new state, as nobody says what the master evicts."""
        name, _ = self._object(tag)
        if not name or self._asker.is_down or not self._close.alive or name in self._wrong:
            return True  # `put` knows what to do
        exists = bool(self._client.call("batch_is_exist", [name]) == [1])
        if exists:
            self._remember([(name, True)])
        return not exists

    def put(self, entries: Sequence[Entry]) -> list[bool]:
        """See Tier."""
        return [self._put(entry) for entry in entries]

    def _put(self, entry: Entry) -> bool:
        name, namespace = self._object(entry.tag)
        if not self._can_be_used("old_weights" if not name else ""):
            return False
        if not self._take_out(name):
            self.count("write_wrong")
            return False
        header = make_header(namespace, entry.tag, len(entry.data), entry.checksum)
        self._mine.header[:] = np.frombuffer(header, np.uint8)
        (code,) = self._client.call("batch_put_from_multi_buffers", *self._buffers(name, entry.data))
        if code:
            self._note_failure("write", code)
            return False
        self._remember([(name, True)])
        return True

    def get(self, tags: Sequence[Tag], buffers: Sequence[memoryview]) -> list[int | None]:
        """See Tier."""
        return [self._get(tag, buffer) for tag, buffer in zip(tags, buffers, strict=True)]

    def _get(self, tag: Tag, buffer: memoryview) -> int | None:
        name, namespace = self._object(tag)
        if not self._can_be_used("gone" if not name else ""):
            return None
        thread = threading.get_ident()
        self._reads[thread] = time.monotonic()
        try:
            (code,) = self._client.call("batch_get_into_multi_buffers", *self._buffers(name, buffer))
        finally:
            del self._reads[thread]
        checksum = None
        if code == HEADER_BYTES + len(buffer):
            checksum = checksum_in(self._mine.header.tobytes(), namespace, tag, len(buffer))
        if checksum is None:
            if code >= 0 or self._has_other_size(name, code, len(buffer)):
                self.count("not_valid")
                self._discard(name)
            else:
                self._note_failure("read", code)
            if code == _NOT_FOUND:
                self._remember([(name, False)])
        return checksum

    def _can_be_used(self, trouble: str) -> bool:
        """Whether there is no such trouble, and the master is there. Else it is counted."""
        trouble = trouble or ("no_master" if self._asker.is_down else "")
        if trouble:
            self.count(trouble)
        return not trouble and self._close.alive

    def _buffers(self, name: str, data: memoryview) -> tuple[list[str], list[list[int]], list[list[int]]]:
        """The arguments of a put or get: the thread's header, then the data."""
        header: np.ndarray[Any, Any] = self._mine.header
        addresses = [header.ctypes.data, np.frombuffer(data, np.uint8).ctypes.data]
        return [name], [addresses], [[HEADER_BYTES, len(data)]]

    def _has_other_size(self, name: str, code: int, entry_bytes: int) -> bool:
        """Whether a read failed because the object is larger or smaller than the entry."""
        if code != _TRANSFER_FAILED:
            return code == _TOO_SMALL
        size: int = self._client.call("get_size", name)
        return size >= 0 and size != HEADER_BYTES + entry_bytes

    def _note_failure(self, what: str, code: int) -> None:
        if code in NO_MASTER:
            self._asker.note_down()
            self.count("no_master", f"a {what} failed, error {code}")
        elif code == _NOT_FOUND:
            self.count("gone")
        else:
            self.count(f"{what}_{_reason(code)}", f"error {code}")

    # -- remove --------------------------------------------------------------------------------------------------------

    def remove(self, tags: Iterable[Tag]) -> None:
        """See Tier: the entries were wrong when they arrived on the device."""
        for tag in tags:
            name, _ = self._object(tag)
            if name and self._recall([name]).get(name, True):
                self.count("wrong")
                self._discard(name)

    def _discard(self, name: str) -> None:
        """Remove an object, soon. It does not exist for us until it is written again."""
        with self._lock:
            self._wrong.add(name)
        self._asker.later(lambda: self._take_out(name))

    def _take_out(self, name: str) -> bool:
        """Remove the object if it is wrong, also if somebody reads it. Returns whether no wrong one is left."""
        if name not in self._wrong:
            return True
        with self._removing:
            if name in self._wrong:
                code = self._client.call("remove", name, True)
                if code not in (0, _NOT_FOUND):
                    return False
            with self._lock:
                self._wrong.discard(name)
                self._answers.pop(name, None)
            return True

    def describe(self, stats: TierStats) -> None:
        """Add the memory that this rank lends, and what was given up. What is in the store, its master knows."""
        stats.bytes_budget = self._settings.lent_bytes
        with self._lock:
            stats.faults = dict(self.counts)

    def clear(self) -> None:
        """See Tier. The entries stay: they are still right, and others use them."""

    def close(self) -> None:
        """End the thread, and the client. What is in this rank's lent memory is lost."""
        self._close()

    def count(self, reason: str, trouble: str = "") -> None:
        """Count what was given up; logs the first of each reason with some trouble."""
        with self._lock:
            self.counts[reason] += 1
            first = self.counts[reason] == 1
        if first and trouble:
            logger.error("shared: Mooncake at %s: %s: %s", self._client.master, reason, trouble)


def _object(namespace: bytes, kind: EntryKind, key: bytes) -> str:
    """Name of an entry's object."""
    return f"mhp-v{VERSION}/{namespace.hex()}/{kind.name.lower()}/{key.hex()}"


def _reason(code: int) -> str:
    return _REASONS.get(code, f"error{code}")
