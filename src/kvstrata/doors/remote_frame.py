"""What the remote door puts before each value, so that a reader can refuse what is not the block it asked for.

A server of /kv keeps bytes and no checksum of ours. So each value is 64 bytes of frame and then the block. The frame,
little-endian: magic, version, CRC-32 and length of the block, BLAKE2b of its key, CRC-32 of the frame itself.
"""

from __future__ import annotations

import hashlib
import struct

from kvstrata.store.checksum import crc32

__all__ = ["SIZE", "BadFrame", "check", "make"]

_MAGIC, _VERSION = b"kvstrata", 1
_BODY = struct.Struct("<8sHHIQ32s4x")
_CRC = struct.Struct("<I")
SIZE = _BODY.size + _CRC.size


class BadFrame(ValueError):
    """The value is not the block that was asked for; the message is one word: magic, frame, version, key, length."""


def make(key: str, block: memoryview) -> bytes:
    """The frame of `block` under `key`; reads the whole block once."""
    body = _BODY.pack(_MAGIC, _VERSION, 0, crc32(block), block.nbytes, _digest(key))
    return body + _CRC.pack(crc32(body))


def check(frame: bytes, key: str, size: int) -> int:
    """CRC-32 that the `size` bytes after `frame` must have. Raises BadFrame."""
    if len(frame) != SIZE or frame[:8] != _MAGIC:
        raise BadFrame("magic")
    if _CRC.unpack_from(frame, _BODY.size)[0] != crc32(frame[: _BODY.size]):
        raise BadFrame("frame")
    _, version, _, crc, length, digest = _BODY.unpack_from(frame)
    if version != _VERSION:
        raise BadFrame("version")
    if digest != _digest(key):
        raise BadFrame("key")
    if length != size:
        raise BadFrame("length")
    return int(crc)


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=32).digest()
