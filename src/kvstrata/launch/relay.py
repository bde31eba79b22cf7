"""`kvstrata-launch relay`: a UNIX socket that passes bytes on to the collector's OTLP port.

lmcache and vllm have no network in common with the collector: LMCache's ZMQ unpickles what it gets, so nobody else may
reach it. The socket is a file in a volume that outlives containers; the collector itself does not clear one that a
killed server left behind and would not start again, so this does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from kvstrata.launch.config import ConfigError, Paths, required
from kvstrata.launch.supervise import failed_state

__all__ = ["run", "serve"]

#: vLLM's processes and lmcache hold about five; more is somebody's mistake.
_MOST = 64
_PIECE = 64 << 10
_CONNECT_S = 3.0
_LINGER_S = 5.0
_MODE = 0o600


def run(env: Mapping[str, str] = os.environ, paths: Paths | None = None) -> int:
    """Serve until SIGTERM; the failed state for an address that cannot be one."""
    paths = paths or Paths()
    try:
        host, _, port = required(env, "KV_RELAY_TO").rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(f"KV_RELAY_TO={env['KV_RELAY_TO']}, needed host:port")
    except ConfigError as error:
        return failed_state(str(error), paths.failed)
    paths.failed.unlink(missing_ok=True)
    asyncio.run(_until_told(paths.otlp_socket, host, int(port)))
    return 0


async def _until_told(path: Path, host: str, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = await serve(path, host, port)
    await stop.wait()
    server.close()


async def serve(path: Path, host: str, port: int) -> asyncio.Server:
    """Listen at `path`, in place of what a dead server left there; each connection gets one of its own to host:port."""
    path.unlink(missing_ok=True)
    slots = asyncio.Semaphore(_MOST)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if slots.locked():
            writer.close()
            return
        async with slots:
            await _relay(reader, writer, host, port)

    server = await asyncio.start_unix_server(connected, path, limit=_PIECE)
    path.chmod(_MODE)
    return server


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
    """Both directions until they end. Where nobody listens the client sees a closed connection and tries again."""
    try:
        async with asyncio.timeout(_CONNECT_S):
            there, back = await asyncio.open_connection(host, port, limit=_PIECE)
    except (OSError, TimeoutError):
        writer.close()
        return
    pumps = {asyncio.create_task(_pump(reader, back)), asyncio.create_task(_pump(there, writer))}
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(pumps, timeout=_LINGER_S)
    finally:
        for pump in pumps:
            pump.cancel()
        for end in (writer, back):
            end.close()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # either end may go at any time
        while piece := await source.read(_PIECE):
            sink.write(piece)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()
