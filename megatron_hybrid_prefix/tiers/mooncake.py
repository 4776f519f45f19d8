"""`MooncakeTier`: KV blocks and states as objects in a Mooncake Store, the memory of a cluster (``shared="mooncake://..."``).

A master knows which object is in whose memory; holders lend the memory; data goes directly from process to process. Each
entry is one object: the header of ``header.py``, then the bytes. What the store does not promise is checked here:

- A put on a key that exists succeeds and keeps the old bytes. Header and bytes are one object, so they fit each other,
  whoever wrote them. What does not fit is a counted miss, and is removed, else it could never be written again.
- A transfer may end late, or in the middle. So bytes go through the memory of our threads, which is registered once, and
  the device compares the checksum of all that arrives.
- A call may take half a minute: if the master hangs, or a holder. So the engine's thread makes none. What the store holds is
  asked by one thread (`_Asker`), in one question for all keys of a prompt; the engine waits for the answer at most ``ask_s``,
  and not at all while an earlier question is late or the master is away. Threads read, write and remove.

The package ``mooncake`` is imported when a tier is made.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.metrics import TierStats
from megatron_hybrid_prefix.tiers.base import Entry, SharedTier
from megatron_hybrid_prefix.tiers.header import HEADER_BYTES, VERSION, checksum_in, make_header
from megatron_hybrid_prefix.tiers.shared import MooncakeSettings
from megatron_hybrid_prefix.tiers.units import EntryKind, Tag

logger = logging.getLogger(__name__)

_NOT_FOUND, _TOO_SMALL, _TRANSFER_FAILED, _NO_MASTER = -704, -600, -800, (-900, -901)
_REASONS = {-200: "no_room", -706: "leased", -707: "lease_expired", _TRANSFER_FAILED: "transfer_failed"}
_MOST_ANSWERS = 2**18  # remembered


class Store(Protocol):
    """What is used of ``mooncake.store.MooncakeDistributedStore``. Calls return 0 or a size, or a negative error code."""

    def setup(self, *arguments: Any) -> int: ...

    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...

    def batch_is_exist(self, keys: list[str]) -> list[int]: ...

    def batch_put_from_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]: ...

    def batch_get_into_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]: ...

    def get_size(self, key: str) -> int: ...

    def remove(self, key: str, force: bool = False) -> int: ...

    def close(self) -> int: ...


def new_store() -> Store:
    """A client of Mooncake that is not set up.

    Raises:
        ImportError: The package, or a library that it needs, is missing.
    """
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # else some lines for each client and each miss
    from mooncake.store import MooncakeDistributedStore

    store: Store = MooncakeDistributedStore()
    return store


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

    whole_entries = True

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
        self._client = _Client(settings)
        self._asker = _Asker(self._client, settings.ask_s, settings.refresh_s)
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
            known = {name: self._answers.get(name, (False, 0.0)) for name in names}
            recent = {name: here for name, (here, since) in known.items() if since >= oldest}
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

    def read(self, tag: Tag, entry_bytes: int, start: int, buffer: memoryview, *, wait: bool) -> int | None:
        """See `SharedTier`."""
        assert wait and not start and len(buffer) == entry_bytes, "whole entries only"
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
        if code == HEADER_BYTES + entry_bytes:
            checksum = checksum_in(self._mine.header.tobytes(), namespace, tag, entry_bytes)
        if checksum is None:
            if code >= 0 or self._has_other_size(name, code, entry_bytes):
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
        if code in _NO_MASTER:
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


class _Client:
    """A client that is closed when nobody uses it any more: a call on a closed one would end the process.

    Args:
        settings: See `MooncakeTier`.

    Raises:
        ValueError: See `MooncakeTier`.
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        self.master = f"{settings.master_host}:{settings.master_port}"
        host = settings.own_address()  # `setup` would try for 90 s
        try:
            self._store = new_store()
        except ImportError as error:
            raise ValueError(
                f"shared: mooncake:// needs the package mooncake-transfer-engine and its libraries: {error}"
            ) from None
        code = self._store.setup(
            host, "P2PHANDSHAKE", settings.lent_bytes, 0, settings.protocol, settings.device, self.master
        )
        if code:
            raise ValueError(f"shared: Mooncake at {self.master} refuses this client: error {code}; its log says why")
        self._lock = threading.Lock()
        self._calls = 0
        self._closed = False
        self._registered: list[np.ndarray[Any, Any]] = []  # transfers that end late may still write there

    def register(self, memory: np.ndarray[Any, Any]) -> int:
        """Register memory for transfers. Returns an error code, or 0."""
        self._registered.append(memory)
        code: int = self.call("register_buffer", memory.ctypes.data, memory.nbytes)
        return code

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the store.

        Raises:
            RuntimeError: The client is closed.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the client of Mooncake is closed")
            self._calls += 1
        try:
            return getattr(self._store, method)(*arguments)
        finally:
            self._leave()

    def close(self) -> None:
        """Close it, now or after the last call."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._calls += 1
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._calls -= 1
            is_last = self._closed and not self._calls
        if is_last:
            self._store.close()


class _Question:
    """Objects whose existence is asked, and the answer: a reason if there is none."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.over = names, threading.Event()
        self.answer: list[bool] | str = "ask_failed"


class _Asker:
    """A thread that asks for objects and removes them. It asks again while the master is away.

    Args:
        client: The client; closed by `end`.
        wait_s: `ask` waits at most this long.
        retry_s: Pause between two tries to reach the master.

    Attributes:
        is_down: The last call did not reach the master.
    """

    def __init__(self, client: _Client, wait_s: float, retry_s: float) -> None:
        self._client, self._wait_s, self._retry_s = client, wait_s, retry_s
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._last: _Question | None = None
        self.is_down = False
        threading.Thread(target=self._serve, name="mooncake", daemon=True).start()

    def ask(self, names: list[str]) -> list[bool] | str:
        """Which of these objects exist; or why that is not known. Waits at most ``wait_s``."""
        if self.is_down:
            return "no_master"
        if self._last is not None and not self._last.over.is_set():
            return "late_answer"
        question = self._last = _Question(names)
        self._work.put(lambda: self._answer(question))
        return question.answer if question.over.wait(self._wait_s) else "late_answer"

    def later(self, job: Callable[[], object]) -> None:
        """The thread runs this."""
        self._work.put(job)

    def note_down(self) -> None:
        """A call did not reach the master."""
        self.is_down = True
        self._work.put(lambda: None)  # the thread begins to try

    def end(self) -> None:
        """End the thread, and the client. Does not wait, as the garbage collector may call it, anywhere."""
        self._work.put(self._client.close)
        self._work.put(None)

    def _serve(self) -> None:
        while True:
            try:
                job = self._work.get(timeout=self._retry_s if self.is_down else None)
            except Empty:
                job = self._try
            if job is None:
                return
            try:
                job()
            except Exception as error:
                logger.error("shared: Mooncake at %s: %r", self._client.master, error)
            del job  # it may be the last that has the tier

    def _answer(self, question: _Question) -> None:
        try:
            codes = self._client.call("batch_is_exist", question.names)
            self.is_down = any(code in _NO_MASTER for code in codes)
            question.answer = "no_master" if self.is_down else [code == 1 for code in codes]
        finally:
            question.over.set()

    def _try(self) -> None:
        self._answer(_Question(["whether the master is there"]))


def _object(namespace: bytes, kind: EntryKind, key: bytes) -> str:
    """Name of an entry's object."""
    return f"mhp-v{VERSION}/{namespace.hex()}/{kind.name.lower()}/{key.hex()}"


def _reason(code: int) -> str:
    return _REASONS.get(code, f"error{code}")
