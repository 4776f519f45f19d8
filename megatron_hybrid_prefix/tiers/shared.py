"""`SharedSettings`: the setting ``shared="file:///var/cache/prefix?gb=200"`` or ``"mooncake://10.0.0.1:50051"``, and the secret.

A shared tier outlives the process and may be used by several. Entries are named by keyed hashes, so all processes that
share them need one secret. It comes from the environment variable ``HYBRID_PREFIX_SECRET`` or from a file.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

SECRET_VARIABLE = "HYBRID_PREFIX_SECRET"
LEAST_SECRET_BYTES = 16
_MASTER_PORT = 50051
_CONNECT_S = 5.0  # a master that takes longer to answer at the start is not there


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def _gib(text: str) -> int:
    return int(_above_zero(text) * 2**30)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


def _name(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSettings(ABC):
    """A parsed ``shared`` URL.

    Attributes:
        min_tokens: A load costs as much time as computing this many tokens. A state less deep is not written, and a
            load that saves fewer tokens is not begun.
        wait_s: Longest time that a request waits for its load. A later load is a miss.
        refresh_s: What another process wrote is seen after this many seconds at most.
        threads: Threads that read.
        secret_file: File with the secret; None: the environment variable.
        weights: Name of the weights, in place of a digest of them; None: the digest.
    """

    min_tokens: int = 512
    wait_s: float = 1.0
    refresh_s: float = 1.0
    threads: int = 8
    secret_file: Path | None = None
    weights: str | None = None

    example: ClassVar[str]
    # Of the URL: for each, the field and how it is read.
    parameters: ClassVar[dict[str, tuple[str, Callable[[str], Any]]]] = {
        "min_tokens": ("min_tokens", _whole),
        "wait_s": ("wait_s", _above_zero),
        "refresh_s": ("refresh_s", _above_zero),
        "threads": ("threads", lambda text: max(1, _whole(text))),
        "secret_file": ("secret_file", lambda text: Path(_name(text))),
        "weights": ("weights", _name),
    }

    @staticmethod
    def parse(url: str) -> SharedSettings:
        """Parse a URL.

        Raises:
            ValueError: The URL is not valid; one line says why.
        """
        try:
            parts = urlsplit(url)
            kind = _KINDS[parts.scheme]
        except (ValueError, KeyError):
            examples = " or ".join(kind.example for kind in _KINDS.values())
            raise ValueError(f"shared={url!r}: must be a URL such as {examples}") from None
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        fields = kind.place(url, parts, given)
        unknown = sorted(set(given) - set(kind.parameters))
        if unknown:
            raise ValueError(
                f"shared={url!r}: unknown parameter {unknown[0]!r}; there are {', '.join(kind.parameters)}"
            )
        for name, text in given.items():
            field, read = kind.parameters[name]
            try:
                fields[field] = read(text)
            except ValueError:
                raise ValueError(f"shared={url!r}: {name}={text!r} is not valid") from None
        return kind(**fields)

    @classmethod
    @abstractmethod
    def place(cls, url: str, parts: SplitResult, given: dict[str, str]) -> dict[str, Any]:
        """The fields that are not parameters.

        Raises:
            ValueError: They are not valid, or a parameter is missing.
        """

    def secret(self) -> bytes:
        """The secret of the keys, 32 bytes, made from the configured one.

        Raises:
            ValueError: None is configured, it cannot be read, or it is too short.
        """
        if self.secret_file is not None:
            try:
                text = self.secret_file.read_bytes().strip()
            except OSError as error:
                raise ValueError(f"shared: cannot read secret_file={self.secret_file}: {error.strerror}") from None
            source = f"secret_file={self.secret_file}"
        else:
            text, source = os.environb.get(SECRET_VARIABLE.encode(), b"").strip(), SECRET_VARIABLE
            if not text:
                raise ValueError(
                    f"shared: needs a secret: set {SECRET_VARIABLE} (such as the output of 'openssl rand -hex 32'), or "
                    "add secret_file=PATH to the URL"
                )
        if len(text) < LEAST_SECRET_BYTES:
            raise ValueError(f"shared: the secret in {source} has {len(text)} bytes; needs {LEAST_SECRET_BYTES}")
        return blake2b(text, digest_size=32, person=b"prefix keys").digest()

    def check(self) -> None:
        """Check what can be checked before a model is loaded: the secret, and that the tier can be used.

        Raises:
            ValueError: One of them is missing; one line says what.
        """
        self.secret()


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSettings(SharedSettings):
    """A folder, for ``tiers/file.py``.

    Attributes:
        folder: The folder.
        budget_bytes: Most bytes in the folder, of all processes together (``gb``, GiB).
    """

    folder: Path
    budget_bytes: int
    threads: int = 16

    example = "file:///var/cache/prefix?gb=200"
    parameters: ClassVar = {"gb": ("budget_bytes", _gib), **SharedSettings.parameters}

    @classmethod
    def place(cls, url: str, parts: SplitResult, given: dict[str, str]) -> dict[str, Any]:
        """See `SharedSettings`."""
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.path == "/":
            raise ValueError(f"shared={url!r}: needs three slashes and the absolute path of a folder: {cls.example}")
        if "gb" not in given:
            raise ValueError(f"shared={url!r}: needs the size of the folder in GiB: {cls.example}")
        return {"folder": Path(unquote(parts.path))}

    def check(self) -> None:
        """See `SharedSettings`."""
        self.secret()
        existing = next(folder for folder in (self.folder, *self.folder.parents) if folder.exists())
        if not existing.is_dir():
            raise ValueError(f"shared: {existing} is not a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ValueError(f"shared: cannot write to the folder {existing}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeSettings(SharedSettings):
    """A Mooncake Store, for ``tiers/mooncake.py``.

    Attributes:
        master_host, master_port: Address of its master.
        ask_s: Longest time that the engine waits for an answer to what the store holds. A later one counts as "nothing".
        lent_bytes: Memory that each rank lends to the store (``gb``, GiB). What is kept there is lost when the rank ends.
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
        "gb": ("lent_bytes", _gib),
        "ask_s": ("ask_s", _above_zero),
        "host": ("host", _name),
        "protocol": ("protocol", _name),
        "device": ("device", _name),
        **SharedSettings.parameters,
    }

    @classmethod
    def place(cls, url: str, parts: SplitResult, given: dict[str, str]) -> dict[str, Any]:
        """See `SharedSettings`."""
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or parts.path not in ("", "/") or "@" in parts.netloc:
            raise ValueError(f"shared={url!r}: needs the address of Mooncake's master: {cls.example}")
        return {"master_host": host, "master_port": port or _MASTER_PORT}

    def check(self) -> None:
        """See `SharedSettings`."""
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


_KINDS: dict[str, type[SharedSettings]] = {"file": FolderSettings, "mooncake": MooncakeSettings}
