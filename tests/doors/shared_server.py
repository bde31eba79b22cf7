"""A cache server of its own process, as far as it stores and loads: a StorageManager whose L2 is a KV engine.

Two of these share one engine in inside_shared.py, and one can be killed or stopped as a machine would be.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ANSWER_S = 120.0


class CacheServer:
    """The parent's end. `begin` and `end` are the two halves of `do`, so that two servers can be at work at once."""

    def __init__(self, env: dict[str, str], ranks: int, groups: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._ours, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, env, ranks, groups), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, what: str, *args: Any) -> None:
        self._ours.send((what, *args))

    def end(self) -> Any:
        """The answer. AssertionError with the other side's traceback where it failed, EOFError where it died."""
        assert self._ours.poll(ANSWER_S), "the server does not answer"
        good, result = self._ours.recv()
        assert good, result
        return result

    def do(self, what: str, *args: Any) -> Any:
        self.begin(what, *args)
        return self.end()

    def stop(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._ours.close()


def _serve(asked: Connection, env: dict[str, str], ranks: int, groups: int) -> None:
    os.environ.update(env)
    import inside_manager
    from inside_remote import SPEC, Remote
    from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class

    from kvstrata.doors.remote_settings import RemoteSettings
    from kvstrata.doors.remote_wire import Wire

    inside_manager.adapter_config = lambda **_: get_l2_adapter_config_class("native_plugin").from_dict(SPEC)
    server = Remote(Path("/none"), ranks, groups)
    server.asked = Wire(RemoteSettings.from_env(os.environ))
    calls = {"paths": _paths, "write": _write, "read": _read, "ready": lambda _server: None}
    while True:
        what, *args = asked.recv()
        try:
            asked.send((True, calls[what](server, *args)))
        except Exception:
            asked.send((False, traceback.format_exc()))


def _paths(server: Any, prompt: str, salt: str = "") -> list[str]:
    """What the prompt's blocks are called in the engine."""
    return [server.path(key) for key in server.keys(prompt, salt=salt)]


def _write(server: Any, prompts: list[str], salt: str = "") -> None:
    """Compute and store, prompt by prompt, and forget: only the engine has it then."""
    for prompt in prompts:
        keys = server.keys(prompt, salt=salt)
        names = [server.name(key) for key in keys]
        server.write(keys, gone=True)
        server.wait(lambda names=names: all(server.asked.exists(n, time.monotonic() + 20) for n in names), prompt)
        server.drop_l1(keys)


def _read(server: Any, prompts: list[str], salt: str = "") -> list[int]:
    """Chunks found of each prompt, each byte compared; forgotten again."""
    found = []
    for prompt in prompts:
        keys = server.keys(prompt, salt=salt)
        found.append(server.read(keys))
        server.drop_l1(keys)
    return found
