"""The engine benchmark's client: the same blocking sockets, threads and buffers for every server, HTTP or RESP.

A put sends a head and the value in one go; a get receives straight into the caller's buffer. Nothing is parsed beyond
what it takes to know the length, so that the figures are the servers'.
"""

from __future__ import annotations

import os
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b

__all__ = ["Failed", "Sample", "Target", "cell", "ready"]

_HEAD = 4096
_STAMP = 32
#: Seconds after which a server that says nothing counts as failed.
_PATIENCE_S = 60.0


class Failed(Exception):
    """The server did not do what it was asked."""


@dataclass(frozen=True)
class Target:
    """A server on this machine. `wire`: http or resp; without a token it asks for none."""

    wire: str
    port: int
    token: str = ""
    tls: bool = False


@dataclass(frozen=True)
class Sample:
    """One cell of one round: MiB/s of all connections together, and how long each request took, in ms."""

    mibps: float
    latencies_ms: tuple[float, ...]


class _Connection:
    """One connection; a server that closes after each reply is connected to again, and that time counts."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._sock: socket.socket | None = None
        auth = f"authorization: Bearer {target.token}\r\n" if target.token else ""
        self._http = f"host: bench\r\n{auth}".encode()

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._sock = None

    def put(self, key: str, value: memoryview) -> None:
        if self._target.wire == "http":
            head = b"PUT /kv/%b HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n" % (key.encode(), self._http, len(value))
            self._send([memoryview(head), value])
            answer = memoryview(bytearray(_HEAD))
            status, _, _ = self._http_head(answer)
            if status not in (200, 201):
                raise Failed(f"PUT was answered with {status}")
        else:
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key.encode(), len(value))
            self._send([memoryview(head), value, memoryview(b"\r\n")])
            self._expect(b"+OK")

    def get(self, key: str, buffer: memoryview) -> memoryview:
        """The value, inside `buffer`, which has room for it and a head."""
        if self._target.wire == "http":
            self._send([memoryview(b"GET /kv/%b HTTP/1.1\r\n%b\r\n" % (key.encode(), self._http))])
            status, size, start = self._http_head(buffer)
            if status != 200:
                raise Failed(f"GET was answered with {status}")
            return buffer[start : start + size]
        self._send([memoryview(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key.encode()))])
        got, end = self._until(buffer, b"\r\n")
        line = bytes(buffer[:end])
        if not line.startswith(b"$") or line.startswith(b"$-"):
            raise Failed(f"GET was answered with {line[:80]!r}")
        size, start = int(line[1:]), end + 2
        self._rest(buffer, got, start + size + 2)
        return buffer[start : start + size]

    def _expect(self, word: bytes) -> None:
        answer = memoryview(bytearray(_HEAD))
        got, end = self._until(answer, b"\r\n")
        if bytes(answer[:end]) != word or got != end + 2:
            raise Failed(f"found {bytes(answer[:got])[:120]!r} as an answer, not {word!r}")

    def _http_head(self, buffer: memoryview) -> tuple[int, int, int]:
        """(status, content-length, where the body begins) with all of the body in `buffer`."""
        got, end = self._until(buffer, b"\r\n\r\n")
        lines = bytes(buffer[:end]).lower().split(b"\r\n")
        fields = dict(line.split(b": ", 1) for line in lines[1:] if b": " in line)
        status, size = int(lines[0].split()[1]), int(fields.get(b"content-length", b"0"))
        self._rest(buffer, got, end + 4 + size)
        if fields.get(b"connection") == b"close":
            self.close()
        return status, size, end + 4

    def _open(self) -> socket.socket:
        if self._sock is not None:
            return self._sock
        sock = socket.create_connection(("127.0.0.1", self._target.port), _PATIENCE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._target.tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            sock = context.wrap_socket(sock)
        else:
            # The kernel's own time limit: with Python's, each receive would be two system calls.
            sock.setblocking(True)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(_PATIENCE_S), 0))
        self._sock = sock
        if self._target.wire == "resp" and self._target.token:
            self._send(
                [
                    memoryview(
                        b"*2\r\n$4\r\nAUTH\r\n$%d\r\n%b\r\n" % (len(self._target.token), self._target.token.encode())
                    )
                ]
            )
            self._expect(b"+OK")
        return sock

    def _send(self, parts: list[memoryview]) -> None:
        sock = self._open()
        if isinstance(sock, ssl.SSLSocket):
            for part in parts:
                sock.sendall(part)
            return
        sent = sock.sendmsg(parts)
        for part in parts:
            if sent < len(part):
                sock.sendall(part[sent:])
            sent = max(0, sent - len(part))

    def _until(self, buffer: memoryview, mark: bytes) -> tuple[int, int]:
        """(bytes received, where `mark` is)."""
        got = 0
        while True:
            got += self._receive(buffer[got:])
            end = bytes(buffer[: min(got, _HEAD)]).find(mark)
            if end >= 0:
                return got, end
            if got >= _HEAD:
                raise Failed(f"no end of the reply's head within {_HEAD} bytes")

    def _rest(self, buffer: memoryview, got: int, size: int) -> None:
        if size > len(buffer):
            raise Failed(f"a reply of {size} bytes, more than the value")
        while got < size:
            got += self._receive(buffer[got:size], whole=True)

    def _receive(self, view: memoryview, whole: bool = False) -> int:
        assert self._sock is not None
        if whole and not self._target.tls:
            count = self._sock.recv_into(view, len(view), socket.MSG_WAITALL)
        else:
            count = self._sock.recv_into(view)
        if not count:
            raise Failed("the server closed the connection inside a reply")
        return count


def ready(target: Target) -> bool:
    """Whether the server stores a value and gives it back."""
    connection = _Connection(target)
    try:
        connection.put("bench-ready", memoryview(b"ready"))
        return bytes(connection.get("bench-ready", memoryview(bytearray(_HEAD * 2)))) == b"ready"
    except (OSError, Failed, ValueError):
        return False
    finally:
        connection.close()


def cell(target: Target, op: str, size: int, connections: int, count: int, tag: str) -> Sample:
    """`count` puts of fresh keys, or gets of what those stored, on each connection at once. Raises Failed, OSError.

    No two values are equal, so that a server that keeps equal ones once gains nothing; each value read is looked at
    where it begins and ends. Keys are the same for the put and the get of one `tag`.
    """
    gate = threading.Barrier(connections + 1)
    latencies: list[list[float]] = [[] for _ in range(connections)]
    errors: list[BaseException] = []

    def work(at: int) -> None:
        connection = _Connection(target)
        try:
            buffer = memoryview(bytearray(os.urandom(1 << 16)) * (-(-size // (1 << 16))))[:size]
            room = memoryview(bytearray(size + _HEAD))
            names = [f"{tag}-{size}-{connections}-{at}-{number}" for number in range(count)]
            if op == "get":
                random.Random(at).shuffle(names)  # noqa: S311 - an order, no secret
            one = _putter(connection, buffer) if op == "put" else _getter(connection, room, size)
            gate.wait()
            for name in names:
                began = time.perf_counter()
                one(name)
                latencies[at].append((time.perf_counter() - began) * 1e3)
        except (Failed, OSError, ValueError, threading.BrokenBarrierError) as error:
            errors.append(error)
            gate.abort()
        finally:
            connection.close()

    threads = [threading.Thread(target=work, args=(at,), daemon=True) for at in range(connections)]
    for thread in threads:
        thread.start()
    with suppress(threading.BrokenBarrierError):
        gate.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return Sample(size * count * connections / (1 << 20) / seconds, tuple(ms for some in latencies for ms in some))


def _stamp(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=_STAMP).digest()


def _putter(connection: _Connection, buffer: memoryview) -> Callable[[str], None]:
    def put(name: str) -> None:
        buffer[:_STAMP] = buffer[-_STAMP:] = _stamp(name)
        connection.put(name, buffer)

    return put


def _getter(connection: _Connection, room: memoryview, size: int) -> Callable[[str], None]:
    def get(name: str) -> None:
        value = connection.get(name, room)
        stamp = _stamp(name)
        if len(value) != size or value[:_STAMP] != stamp or value[-_STAMP:] != stamp:
            raise Failed(f"what came back for {name} is not what was stored")

    return get
