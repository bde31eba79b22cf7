"""A storage backend for LMCache's in-process mode (0.5.3: `storage_plugins`) over a KV engine.

    storage_plugins: ["kvstrata"]
    extra_config:
      storage_plugin.kvstrata.module_path: kvstrata.doors.v1_backend
      storage_plugin.kvstrata.class_name: KvstrataV1Backend

with KV_REMOTE_* in the environment, as for path A, whose client does the work here too. For people who run that mode
anyway: `make up` never does, because LMCacheConnectorV1 lives in vLLM's process and none of the guards of
kvstrata.connector is in its way (identity of the model, salts, failed loads).

A block is two values: what it looks like (shape, type, format), and its bytes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import select
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import quote

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from kvstrata.doors.l2_remote import KvstrataRemote

__all__ = ["KvstrataV1Backend", "key_text"]

logger = logging.getLogger("lmcache.kvstrata.v1")

_LOOKS = 512  # bytes of the first value, padded: its size must be known before it is read
_POLL_MS = 200


def key_text(key: CacheEngineKey) -> str:
    """One text for each key: model, ranks, hash, type, layer and tags, each quoted, so that no part can imitate two."""
    parts: list[object] = [key.model_name, key.world_size, key.worker_id, key.chunk_hash_hex, key._dtype_str]
    parts += [getattr(key, "layer_id", "")]
    parts += [part for tag in key.tags or () for part in tag]
    return "v1@" + "@".join(quote(str(part), safe="") for part in parts)


class KvstrataV1Backend(StoragePluginInterface):  # type: ignore[misc]
    """See the module. Each fault of the engine is a miss within KV_REMOTE_DEADLINE. RemoteError for settings."""

    def __init__(self, config: Any = None, metadata: Any = None, local_cpu_backend: Any = None, loop: Any = None,
                 dst_device: str = "cpu") -> None:  # fmt: skip
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        self._client = KvstrataRemote()
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[list[bool]]] = {}
        self._puts: dict[str, int] = {}
        self._open = True
        self._thread = threading.Thread(target=self._demux, name="kvstrata-v1", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return "KvstrataV1Backend"

    # -- lookups ----------------------------------------------------------------------------------------------------

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """`pin` holds nothing: our engine keeps what it said yes to for a while, others may not."""
        return self.batched_contains([key]) == 1

    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """How many of `keys`, from the first on, are there; in one call."""
        names = [name for key in keys for name in _names(key)]
        found = self._ask(lambda: self._client.submit_batch_exists(names)).result()
        both = (looks and data for looks, data in zip(found[::2], found[1::2], strict=True))
        return sum(1 for _ in itertools.takewhile(bool, both))

    async def batched_async_contains(self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False) -> int:
        return await asyncio.to_thread(self.batched_contains, keys, pin)

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        return key_text(key) in self._puts

    # -- stores -----------------------------------------------------------------------------------------------------

    def batched_submit_put_task(
        self, keys: Sequence[CacheEngineKey], objs: list[MemoryObj], transfer_spec: Any = None,
        on_complete_callback: Callable[[CacheEngineKey], None] | None = None,
    ) -> list[Future[Any]]:  # fmt: skip
        """The objects are held until their bytes have left. A store that fails is a block less, and no error."""
        return [self._put(key, item, on_complete_callback) for key, item in zip(keys, objs, strict=True)]

    def _put(self, key: CacheEngineKey, item: MemoryObj, told: Callable[[CacheEngineKey], None] | None) -> Future[Any]:
        text = key_text(key)
        with self._lock:
            self._puts[text] = self._puts.get(text, 0) + 1
        item.ref_count_up()
        buffers = [memoryview(_looks_of(item)), memoryview(item.byte_array).cast("B")]
        future = self._ask(lambda: self._client.submit_batch_set(_names(key), buffers))

        def ended(done: Future[list[bool]]) -> None:
            item.ref_count_down()
            with self._lock:
                self._puts[text] -= 1
                if not self._puts[text]:
                    del self._puts[text]
            if told is not None and all(done.result()):
                try:
                    told(key)
                except Exception:
                    logger.exception("kvstrata: a callback failed")

        future.add_done_callback(ended)
        return future

    # -- loads ------------------------------------------------------------------------------------------------------

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """All at once; None for each that does not come whole, or that there is no memory for."""
        if self.local_cpu_backend is None:
            return [None] * len(keys)
        names = [_names(key) for key in keys]
        looks = [bytearray(_LOOKS) for _ in keys]
        there = self._read([name for name, _ in names], looks)
        items = [self._room(text) if good else None for text, good in zip(looks, there, strict=True)]
        wanted = [(name, item) for (_, name), item in zip(names, items, strict=True) if item is not None]
        loaded = iter(self._read([name for name, _ in wanted], [item.byte_array for _, item in wanted]))
        result: list[MemoryObj | None] = []
        for item in items:
            if item is not None and not next(loaded):
                item.ref_count_down()
                item = None
            result.append(item)
        return result

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[CacheEngineKey], transfer_spec: Any = None
    ) -> list[MemoryObj]:
        """Those from the first on that came: LMCache takes what it gets for a prefix."""
        items = await asyncio.to_thread(self.batched_get_blocking, keys)
        good = list(itertools.takewhile(lambda item: item is not None, items))
        for late in items[len(good) :]:
            if late is not None:
                late.ref_count_down()
        return [item for item in good if item is not None]

    def _read(self, names: list[str], buffers: Sequence[Any]) -> list[bool]:
        if not names:
            return []
        views = [memoryview(buffer) for buffer in buffers]
        return self._ask(lambda: self._client.submit_batch_get(names, views)).result()

    def _room(self, looks: bytearray) -> MemoryObj | None:
        """Memory of LMCache's own for a block that looks so."""
        try:
            found = json.loads(bytes(looks).rstrip())
            shapes = [torch.Size(shape) for shape in found["shapes"]]
            dtypes = [getattr(torch, name) for name in found["dtypes"]]
            return self.local_cpu_backend.allocate(shapes, dtypes, MemoryFormat[found["fmt"]], busy_loop=False)
        except (ValueError, KeyError, TypeError, AttributeError):
            logger.warning("kvstrata: what a block looks like cannot be read; it counts as a miss")
            return None

    # -- the rest ---------------------------------------------------------------------------------------------------

    def pin(self, key: CacheEngineKey) -> bool:
        return False

    def unpin(self, key: CacheEngineKey) -> bool:
        return False

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        return all(self._ask(lambda: self._client.submit_batch_delete(_names(key))).result())

    def get_allocator_backend(self) -> Any:
        return self.local_cpu_backend

    def touch_cache(self) -> None:
        """Nothing: the engine counts uses itself."""

    def close(self) -> None:
        self._open = False
        self._thread.join()
        self._client.close()
        with self._lock:
            left, self._waiting = self._waiting, {}
        for future in left.values():
            future.cancel()

    def _ask(self, submit: Callable[[], int]) -> Future[list[bool]]:
        future: Future[list[bool]] = Future()
        with self._lock:  # so that the answer is not looked for before its number is known
            self._waiting[submit()] = future
        return future

    def _demux(self) -> None:
        poller = select.poll()
        poller.register(self._client.event_fd(), select.POLLIN)
        while self._open:
            if not poller.poll(_POLL_MS):
                continue
            for number, _, _, flags in self._client.drain_completions():
                with self._lock:
                    future = self._waiting.pop(number)
                future.set_result(flags)


def _names(key: CacheEngineKey) -> list[str]:
    text = key_text(key)
    return [text + "@looks", text]


def _looks_of(item: MemoryObj) -> bytes:
    found = {
        "shapes": [list(shape) for shape in item.get_shapes()],
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in item.get_dtypes()],
        "fmt": item.get_memory_format().name,
    }
    return json.dumps(found).encode().ljust(_LOOKS)
