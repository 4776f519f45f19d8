"""Settings and client of a Mooncake Store. A thread asks it what exists, so that the engine's thread never waits for long."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import SplitResult

from megatron_hybrid_prefix.tiers.base import finish_at_exit
from megatron_hybrid_prefix.tiers.settings import TierSettings, above_zero, gib, name

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

_END_S = 1.0
NO_MASTER = (-900, -901)  # error codes of a call that did not reach the master
_MASTER_PORT = 50051
_CONNECT_S = 5.0  # a master that takes longer to answer at the start is not there


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeSettings(TierSettings):
    """A Mooncake Store.

    Attributes:
        master_host, master_port: Address of its master.
        ask_s: Longest time that the engine waits for an answer to what the store holds. A later one counts as "nothing".
        lent_bytes: Memory that each rank lends to the store (``gb``, GiB). Objects there are lost when the rank ends.
        host: Address of this host, for the others; None: the one that it reaches the master from.
        protocol: Of transfers: ``tcp`` or ``rdma``.
        device: Names of RDMA devices; empty: chosen by Mooncake.
    """

    master_host: str
    master_port: int = _MASTER_PORT
    ask_s: float = 0.1
    lent_bytes: int = 0
    host: str | None = None
    protocol: str = "tcp"
    device: str = ""

    example = "mooncake://127.0.0.1:50051?gb=50"
    parameters: ClassVar = {
        "gb": ("lent_bytes", gib),
        "ask_s": ("ask_s", above_zero),
        "host": ("host", name),
        "protocol": ("protocol", name),
        "device": ("device", name),
        **TierSettings.parameters,
    }

    @classmethod
    def place(cls, url: str, parts: SplitResult, given: dict[str, str]) -> dict[str, Any]:
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or parts.path not in ("", "/") or "@" in parts.netloc:
            raise ValueError(f"shared={url!r}: needs the address of Mooncake's master: {cls.example}")
        return {"master_host": host, "master_port": port or _MASTER_PORT}

    def check(self) -> None:
        self.secret()
        if importlib.util.find_spec("mooncake") is None:
            raise ValueError(
                "shared: mooncake:// needs the package mooncake-transfer-engine: "
                "pip install 'megatron-hybrid-prefix[mooncake]'"
            )
        self.own_address()

    def own_address(self) -> str:
        """Address that the master sees this host at, or ``host``.

        Raises:
            ValueError: The master cannot be reached.
        """
        try:
            with socket.create_connection((self.master_host, self.master_port), timeout=_CONNECT_S) as connection:
                return self.host or str(connection.getsockname()[0])
        except OSError as error:
            raise ValueError(
                f"shared: cannot reach Mooncake's master at {self.master_host}:{self.master_port}: {error}; start "
                "mooncake_master, or change the URL"
            ) from None


def new_store() -> Any:
    """A ``MooncakeDistributedStore`` that is not set up. Its calls return 0 or a size, or an error code below 0.

    Raises:
        ImportError: The package, or a library that it needs, is missing.
    """
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # else some lines for each client and each miss
    from mooncake.store import MooncakeDistributedStore

    return MooncakeDistributedStore()


class _Opened:
    """A store that is closed when nobody refers to this any more. With the process, it ends unclosed."""

    def __init__(self, store: Any) -> None:
        self.store = store
        weakref.finalize(self, store.close).atexit = False


class Client:
    """A client of the store, and a thread that asks it for objects and removes them. It asks again while the master is away.

    The client is closed after its last call: a call on a closed one would end the process.

    Attributes:
        is_down: The last call did not reach the master.

    Raises:
        ValueError: The package is missing, or the master does not answer; one line says what.
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        self._settings, self.master = settings, f"{settings.master_host}:{settings.master_port}"
        host = settings.own_address()  # `setup` would try for 90 s
        try:
            store = new_store()
        except ImportError as error:
            raise ValueError(
                f"shared: mooncake:// needs the package mooncake-transfer-engine and its libraries: {error}"
            ) from None
        code = store.setup(
            host, "P2PHANDSHAKE", settings.lent_bytes, 0, settings.protocol, settings.device, self.master
        )
        if code:
            raise ValueError(f"shared: Mooncake at {self.master} refuses this client: error {code}; its log says why")
        self._opened: _Opened | None = _Opened(store)
        self._registered: list[np.ndarray[Any, Any]] = []  # transfers that end late may still write there
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._last: Future[list[bool] | str] | None = None  # the answer to the last question
        self.is_down = False
        self._thread = threading.Thread(target=self._serve, name="mooncake", daemon=True)
        self._thread.start()
        finish_at_exit(self)

    def register(self, memory: np.ndarray[Any, Any]) -> int:
        """Register memory for transfers. Returns an error code, or 0."""
        self._registered.append(memory)
        code: int = self.call("register_buffer", memory.ctypes.data, memory.nbytes)
        return code

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the store. Raises RuntimeError if the client is closed."""
        opened = self._opened  # nobody closes it meanwhile
        if opened is None:
            raise RuntimeError("the client of Mooncake is closed")
        return getattr(opened.store, method)(*arguments)

    def ask(self, names: list[str]) -> list[bool] | str:
        """Which of these objects exist; or why that is not known. Waits at most ``ask_s``."""
        if self.is_down:
            return "no_master"
        if self._last is not None and not self._last.done():
            return "late_answer"
        answer = self._last = Future()
        self._work.put(lambda: self._answer(names, answer))
        try:
            return answer.result(self._settings.ask_s)
        except TimeoutError:
            return "late_answer"

    def later(self, job: Callable[[], object]) -> None:
        """The thread runs this."""
        self._work.put(job)

    def note_down(self) -> None:
        """A call did not reach the master."""
        self.is_down = True
        self._work.put(lambda: None)  # the thread begins to try

    def end(self) -> None:
        """End the thread, and close the client after the last call. Does not wait: the garbage collector may call it, anywhere."""
        self._work.put(self._close)
        self._work.put(None)

    def finish(self) -> None:
        """The process ends. A thread that is in a call when the interpreter is gone would abort it."""
        self._work.put(None)
        self._thread.join(_END_S)

    def _serve(self) -> None:
        while True:
            try:
                job = self._work.get(timeout=self._settings.refresh_s if self.is_down else None)
            except Empty:
                job = self._try
            if job is None:
                return
            try:
                job()
            except Exception as error:
                logger.error("shared: Mooncake at %s: %r", self.master, error)
            del job  # it may be the last that has the tier

    def _close(self) -> None:
        self._opened = None

    def _answer(self, names: list[str], answer: Future[list[bool] | str]) -> None:
        found: list[bool] | str = "ask_failed"
        try:
            codes = self.call("batch_is_exist", names)
            self.is_down = any(code in NO_MASTER for code in codes)
            found = "no_master" if self.is_down else [code == 1 for code in codes]
        finally:
            answer.set_result(found)

    def _try(self) -> None:
        try:
            self._settings.own_address()  # unlike a call, this does not hold up the end of the process
        except ValueError:
            return
        self._answer(["whether the master is there"], Future())
