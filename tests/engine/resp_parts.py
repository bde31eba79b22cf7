"""A RESP server in this process, on a store of its own, and a client that speaks bytes."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstrata.engine.auth import Tokens
from kvstrata.engine.buffers import Budget
from kvstrata.engine.content import Engine
from kvstrata.engine.listener import Listener
from kvstrata.engine.resp import make_serve
from kvstrata.engine.settings import EngineSettings

MIB = 1 << 20
TOKEN, READER, PREFIXED, OTHER = (name * 8 for name in ("rw-a", "ro-a", "px-a", "rw-b"))
TOKENS = f"one rw a {TOKEN}\ntwo ro a {READER}\nthree rw a models/ {PREFIXED}\nfour rw b {OTHER}\n"


class Nil:
    def __repr__(self) -> str:
        return "NIL"


NIL = Nil()


@dataclass
class Server:
    engine: Engine
    budget: Budget
    listener: Listener
    root: Path
    tokens: Path

    @property
    def port(self) -> int:
        return self.listener.address[1]


@contextmanager
def server(folder: Path, *, tokens: bool = False, **changes: Any) -> Iterator[Server]:
    """It runs until the block ends."""
    folder.mkdir(exist_ok=True)
    file = folder / "tokens"
    file.write_text(TOKENS)
    wanted: dict[str, Any] = {
        "root": folder / "root", "capacity": 256 * MIB, "free_floor": 0, "allow_fs": ("tmpfs", "overlay"),
        "memory": 64 * MIB, "max_value": 16 * MIB, "resp_max_value": 32 * MIB, "resp": "127.0.0.1:0",
        "tokens_file": file if tokens else None, **changes,
    }  # fmt: skip
    settings = EngineSettings(**wanted)
    engine, budget = Engine.open(settings), Budget(settings.memory)
    serve = make_serve(engine, Tokens(settings.tokens_file), budget, settings)
    listener = Listener("127.0.0.1", 0, serve, idle_s=settings.idle_s).start()
    try:
        yield Server(engine, budget, listener, settings.root, file)
    finally:
        listener.stop(5.0)
        engine.close()


class Client:
    """Sends commands as arrays of bulk strings; replies come back as Python values, errors as their text."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), 30)
        self._file = self.sock.makefile("rb")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.sock.close()

    def __call__(self, *words: bytes | str | int) -> Any:
        self.send(words)
        return self.reply()

    def send(self, *commands: Sequence[bytes | str | int]) -> None:
        self.sock.sendall(b"".join(map(encoded, commands)))

    def raw(self, data: bytes) -> None:
        self.sock.sendall(data)

    def reply(self) -> Any:
        """The next reply. Raises EOFError where the connection ends before or inside it."""
        line = self._file.readline()
        if not line.endswith(b"\r\n"):
            raise EOFError(line)
        kind, rest = line[:1], line[1:-2]
        if kind == b"+":
            return rest.decode()
        if kind == b"-":
            return Failure(rest.decode())
        if kind == b":":
            return int(rest)
        if kind == b"_" or line == b"$-1\r\n":
            return NIL
        if kind == b"$":
            value = self._file.read(int(rest) + 2)
            if len(value) != int(rest) + 2:
                raise EOFError(value[:100])
            assert value.endswith(b"\r\n")
            return value[:-2]
        if kind == b"*":
            return [self.reply() for _ in range(int(rest))]
        assert kind == b"%", line
        return {self.reply(): self.reply() for _ in range(int(rest))}

    def closed(self) -> bool:
        """The server ended the connection."""
        try:
            return self._file.read(1) == b""
        except ConnectionResetError:
            return True


class Failure(str):
    """An error reply."""

    __slots__ = ()


def encoded(words: Sequence[bytes | str | int]) -> bytes:
    parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
