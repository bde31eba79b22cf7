"""LMCache's memory objects as the store sees them: bytes, and the size of an element."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.memory_management import MemoryObj

__all__ = ["buffers_of", "itemsize_of"]


def buffers_of(keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> list[memoryview]:
    """L1's own memory, byte by byte, without its padding. The views stay valid as long as the task is not reported."""
    if len(keys) != len(objects):
        raise ValueError(f"{len(keys)} keys and {len(objects)} objects")
    return [memoryview(item.byte_array).cast("B") for item in objects]


def itemsize_of(objects: Sequence[MemoryObj]) -> int:
    """Bytes of one KV element: what the byte shuffle of a codec goes by. All objects of a batch are of one layout."""
    dtype = objects[0].get_dtype() if objects else None
    return int(dtype.itemsize) if dtype is not None else 1
