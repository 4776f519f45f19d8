"""`TierSettings`: the setting ``shared="file:///var/cache/prefix?gb=200"`` or ``"mooncake://10.0.0.1:50051"``, and the secret.

The tier below the host may outlive the process and be used by several. Entries are named by keyed hashes, so all processes that
share them need one secret. It comes from the environment variable ``HYBRID_PREFIX_SECRET`` or from a file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import SplitResult, parse_qsl, unquote

from megatron_hybrid_prefix.support.private_folder import warn_if_others_read

SECRET_VARIABLE = "HYBRID_PREFIX_SECRET"
LEAST_SECRET_BYTES = 16


def above_zero(text: str) -> float:
    """A number above 0. Raises ValueError."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def gib(text: str) -> int:
    """GiB, in bytes. Raises ValueError."""
    return int(above_zero(text) * 2**30)


def whole(text: str) -> int:
    """A whole number. Raises ValueError."""
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


def name(text: str) -> str:
    """Text that is not empty. Raises ValueError."""
    if not text:
        raise ValueError(text)
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """A parsed ``shared`` URL. A kind of tier that needs more has a subclass.

    Attributes:
        path: Path of the URL.
        min_tokens: A load costs as much time as computing this many tokens. A state less deep is not written, and a
            load that saves fewer tokens is not begun.
        wait_s: Longest time that a request waits for its load. A later load is a miss.
        refresh_s: Entries of another process are seen after this many seconds at most.
        threads: Threads that read.
        secret_file: File with the secret; None: the environment variable.
        weights: Name of the weights, in place of a digest of them; None: the digest.
    """

    path: str = ""
    min_tokens: int = 512
    wait_s: float = 1.0
    refresh_s: float = 1.0
    threads: int = 8
    secret_file: Path | None = None
    weights: str | None = None

    example: ClassVar[str] = ""
    # Of the URL: for each, the field and how it is read.
    parameters: ClassVar[dict[str, tuple[str, Callable[[str], Any]]]] = {
        "min_tokens": ("min_tokens", whole),
        "wait_s": ("wait_s", above_zero),
        "refresh_s": ("refresh_s", above_zero),
        "threads": ("threads", lambda text: max(1, whole(text))),
        "secret_file": ("secret_file", lambda text: Path(name(text))),
        "weights": ("weights", name),
    }

    @classmethod
    def of(cls, url: str, parts: SplitResult) -> Self:
        """The settings in a URL of this kind of tier.

        Raises:
            ValueError: The URL is not valid; one line says why.
        """
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        fields = cls.place(url, parts, given)
        unknown = sorted(set(given) - set(cls.parameters))
        if unknown:
            raise ValueError(f"shared={url!r}: unknown parameter {unknown[0]!r}; there are {', '.join(cls.parameters)}")
        for parameter, text in given.items():
            field, read = cls.parameters[parameter]
            try:
                fields[field] = read(text)
            except ValueError:
                raise ValueError(f"shared={url!r}: {parameter}={text!r} is not valid") from None
        return cls(**fields)

    @classmethod
    def place(cls, url: str, parts: SplitResult, given: dict[str, str]) -> dict[str, Any]:
        """The fields that are not parameters: what the host and the path of the URL say.

        Raises:
            ValueError: They are not valid, or a parameter is missing.
        """
        return {"path": unquote(parts.path)}

    def secret(self) -> bytes:
        """The secret of the keys, 32 bytes, made from the configured one.

        Raises:
            ValueError: None is configured, it cannot be read, or it is too short.
        """
        if self.secret_file is not None:
            try:
                warn_if_others_read(self.secret_file)
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
