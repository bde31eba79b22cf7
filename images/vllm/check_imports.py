"""Fail the build if a module that the services need does not import (vllm#30805, LMCache#909: images without it).

It also leaves the bytecode of what is imported: the containers' root is read-only, so each start would compile these
files anew. Compiling all of site-packages instead takes several times as long and adds files that nothing loads.
"""

import importlib
import importlib.metadata

MODULES = (
    "vllm",
    "lmcache",
    "lmcache.native_storage_ops",
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "lmcache.integration.vllm.lmcache_mp_connector",
    "lmcache.v1.multiprocess.server",
    # the block store's
    "zlib_ng.zlib_ng",
    "blosc",
)
# vllm._C is imported by name: vLLM itself only warns when it does not load.
DEVICE_MODULES = {"cpu": ("vllm._C", "vllm.v1.worker.cpu_worker"), "gpu": ("vllm.v1.worker.gpu_worker",)}

for name in MODULES:
    importlib.import_module(name)
version = importlib.metadata.version("vllm")
for name in DEVICE_MODULES["cpu" if "cpu" in version else "gpu"]:
    importlib.import_module(name)
print("imports:", "vllm", version, "lmcache", importlib.metadata.version("lmcache"))
