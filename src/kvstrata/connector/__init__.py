"""vLLM-side guard around LMCache's multi-process connector.

`KvstrataConnector` is looked up by vLLM through `kv_connector_module_path`. It is imported on first use,
so that the pure helpers in this package can be tested on a machine without vLLM.
"""

from typing import Any

__all__ = ["KvstrataConnector"]


def __getattr__(name: str) -> Any:
    if name == "KvstrataConnector":
        from kvstrata.connector.guard import KvstrataConnector

        return KvstrataConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
