"""`SharedSettings`: the setting ``shared="file:///var/cache/prefix?gb=200"``, and the secret of the keys.

A shared tier outlives the process and may be used by several. Entries are named by keyed hashes, so all processes that
share them need one secret. It comes from the environment variable ``HYBRID_PREFIX_SECRET`` or from a file.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

SECRET_VARIABLE = "HYBRID_PREFIX_SECRET"
LEAST_SECRET_BYTES = 16
_EXAMPLE = "file:///var/cache/prefix?gb=200"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSettings:
    """A parsed ``shared`` URL.

    Attributes:
        folder: The folder.
        budget_bytes: Most bytes in the folder, of all processes together (``gb``, GiB).
        min_tokens: A load costs as much time as computing this many tokens. A state less deep is not written, and a
            load that saves fewer tokens is not begun.
        wait_s: Longest time that a request waits for its load. A later load is a miss.
        refresh_s: Seconds between two looks at what other processes wrote.
        threads: Threads that read.
        secret_file: File with the secret; None: the environment variable.
        weights: Name of the weights, in place of a digest of them; None: the digest.
    """

    folder: Path
    budget_bytes: int
    min_tokens: int = 512
    wait_s: float = 1.0
    refresh_s: float = 1.0
    threads: int = 8
    secret_file: Path | None = None
    weights: str | None = None

    @classmethod
    def parse(cls, url: str) -> SharedSettings:
        """Parse a URL.

        Raises:
            ValueError: The URL is not valid; one line says why.
        """
        parts = urlsplit(url)
        if parts.scheme != "file":
            raise ValueError(f"shared={url!r}: must be a URL such as {_EXAMPLE}")
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.path == "/":
            raise ValueError(f"shared={url!r}: needs three slashes and the absolute path of a folder: {_EXAMPLE}")
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        unknown = sorted(set(given) - set(_PARAMETERS))
        if unknown:
            raise ValueError(f"shared={url!r}: unknown parameter {unknown[0]!r}; there are {', '.join(_PARAMETERS)}")
        if "gb" not in given:
            raise ValueError(f"shared={url!r}: needs the size of the folder in GiB: {_EXAMPLE}")
        fields: dict[str, Any] = {"folder": Path(unquote(parts.path))}
        for name, text in given.items():
            try:
                fields["budget_bytes" if name == "gb" else name] = _PARAMETERS[name](text)
            except ValueError:
                raise ValueError(f"shared={url!r}: {name}={text!r} is not valid") from None
        return cls(**fields)

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
        """Check what can be checked before a model is loaded: the secret, and that the folder can be written to.

        Raises:
            ValueError: One of them is missing; one line says what.
        """
        self.secret()
        existing = next(folder for folder in (self.folder, *self.folder.parents) if folder.exists())
        if not existing.is_dir():
            raise ValueError(f"shared: {existing} is not a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ValueError(f"shared: cannot write to the folder {existing}")


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


def _name(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


# Parameters of the URL, and how each is read.
_PARAMETERS: dict[str, Callable[[str], Any]] = {
    "gb": lambda text: int(_above_zero(text) * 2**30),
    "min_tokens": _whole,
    "wait_s": _above_zero,
    "refresh_s": _above_zero,
    "threads": lambda text: max(1, _whole(text)),
    "secret_file": lambda text: Path(_name(text)),
    "weights": _name,
}
assert {"folder", "budget_bytes", *_PARAMETERS} - {"gb"} == {item.name for item in dataclasses.fields(SharedSettings)}
