"""The header of a stored entry. It names the content, so that an entry that is torn, or another one, is known.

The checksum of the entry's bytes was made on the device, and is compared there. The header has a digest of itself.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

from megatron_hybrid_prefix.tiers.units import Tag

VERSION = 1  # of the header, and of the names of entries
_MAGIC = b"mhp-kv-s"
_FIELDS = struct.Struct("<8sII16s16s16sQQq")  # magic, version, kind, namespace, key, parent, depth, bytes, checksum
_DIGEST_BYTES = 16
HEADER_BYTES = _FIELDS.size + _DIGEST_BYTES


def make_header(namespace: bytes, tag: Tag, data_bytes: int, checksum: int) -> bytes:
    """The header of an entry, `HEADER_BYTES` long.

    Args:
        namespace: 16 bytes; see ``mcore/state/fingerprint.py``.
        tag: Name of the entry. Its epoch is not stored: the key depends on it.
        data_bytes: Bytes of the entry without the header.
        checksum: See `Entry`.
    """
    fields = _FIELDS.pack(
        _MAGIC, VERSION, tag.kind, namespace, tag.key, tag.parent, tag.depth_tokens, data_bytes, checksum
    )
    return fields + blake2b(fields, digest_size=_DIGEST_BYTES).digest()


def checksum_in(header: bytes, namespace: bytes, tag: Tag, data_bytes: int) -> int | None:
    """The checksum in a header; None if the header is not that of this entry."""
    checksum: int = _FIELDS.unpack(header[: _FIELDS.size])[-1]
    return checksum if header == make_header(namespace, tag, data_bytes, checksum) else None
