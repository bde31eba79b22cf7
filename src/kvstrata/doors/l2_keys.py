"""LMCache's ObjectKey and the store's BlockKey: the same five fields, one to one.

The namespace is the model name that the connector sends (`<short name>--<identity digest>`), so that identity is part
of every path on disk; the salt is the tenant's digest, never its plain text.
"""

from __future__ import annotations

from collections.abc import Iterable

from lmcache.v1.distributed.api import ObjectKey

from kvstrata.store.keys import BlockKey

__all__ = ["block_key", "block_keys", "object_key"]


def block_key(key: ObjectKey) -> BlockKey:
    """The store's name of LMCache's `key`."""
    return BlockKey(
        namespace=key.model_name,
        salt=key.cache_salt,
        chunk=key.chunk_hash,
        rank=key.kv_rank,
        group=key.object_group_id,
    )


def block_keys(keys: Iterable[ObjectKey]) -> list[BlockKey]:
    return [block_key(key) for key in keys]


def object_key(key: BlockKey) -> ObjectKey | None:
    """LMCache's name of a block; None for one that another door wrote under a name that LMCache refuses.

    ObjectKey refuses `@` in model names and path characters in salts (lmcache 0.5.3 v1/distributed/api.py:122).
    """
    try:
        return ObjectKey(
            chunk_hash=key.chunk,
            model_name=key.namespace,
            kv_rank=key.rank,
            object_group_id=key.group,
            cache_salt=key.salt,
        )
    except ValueError:
        return None
