"""CRC-32 as zlib computes it, by zlib-ng: 56 GB/s a core and without the GIL, where zlib's own makes 4."""

from __future__ import annotations

try:
    from zlib_ng import zlib_ng
except ImportError as error:  # pragma: no cover - the locked environments have it
    raise ImportError(
        f"found: {error}; needed: the package zlib-ng, for the checksums of blocks; to fix: pip install zlib-ng"
    ) from error

__all__ = ["LIBRARY", "crc32"]

crc32 = zlib_ng.crc32
LIBRARY = zlib_ng.__file__
"""Where it is, for those who call it from C: `uint32_t zng_crc32_z(uint32_t crc, const uint8_t *data, size_t size)`."""
