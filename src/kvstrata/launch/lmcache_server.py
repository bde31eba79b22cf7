"""python -m kvstrata.launch.lmcache_server SOCKET <lmcache arguments>: the stock server, its HTTP on a UNIX socket.

LMCache's HTTP has no setting for one, and POST /run_script runs code for whoever reaches the port (0.5.3).
http_server.py:249 makes a `uvicorn.Config` with host and port: that one call is redirected. Besides it the server's
guards of kvstrata.connector are installed, and where it pushes telemetry lmcache_telemetry; nothing else is touched.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

__all__ = ["bind_http_to", "main", "reserve_socket"]


def main(argv: list[str] | None = None) -> int:
    """Run `lmcache <argv[1:]>` in this process."""
    args = sys.argv[1:] if argv is None else argv
    bind_http_to(Path(args[0]))
    from kvstrata.connector import l1_guard, liveness, lock_ledger

    l1_guard.install()
    liveness.install()
    lock_ledger.install()
    if "--otlp-endpoint" in args:
        from kvstrata.launch import lmcache_telemetry

        lmcache_telemetry.keep_page()
        lmcache_telemetry.reconnect_soon()
        lmcache_telemetry.join_traces()
    from lmcache.cli.main import main as lmcache_main

    sys.argv = ["lmcache", *args[1:]]
    return int(lmcache_main() or 0)


def bind_http_to(path: Path) -> None:
    """Make every uvicorn server of this process listen on the UNIX socket `path` and nowhere else."""
    import uvicorn

    real = uvicorn.Config

    class SocketConfig(real):  # type: ignore[misc, valid-type]
        """uvicorn.Config that knows one address only. No access log: health checks would fill it."""

        def __init__(self, app: object, *_args: object, log_level: str = "info", **_rest: object) -> None:
            reserve_socket(path)
            super().__init__(app, uds=str(path), log_level=log_level, access_log=False)

    uvicorn.Config = SocketConfig


def reserve_socket(path: Path, mode: int = 0o660) -> None:
    """Leave a dead socket with `mode` at `path`: uvicorn replaces a socket and keeps its mode, else it gives 0666."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as placeholder:
        placeholder.bind(str(path))
    path.chmod(mode)


if __name__ == "__main__":
    raise SystemExit(main())
