"""One keep-alive connection to a server of /kv, with one deadline over everything that a call does.

http.client speaks the protocol over the timed sockets of remote_connection. Bodies go from the caller's buffer to the
socket and back, without a copy between.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from kvstrata.doors import remote_frame
from kvstrata.doors.remote_connection import Connection
from kvstrata.doors.remote_faults import Down, down, is_engines, no_engine, no_token
from kvstrata.doors.remote_settings import RemoteSettings
from kvstrata.store.checksum import crc32

__all__ = ["PREFIX", "Corrupt", "Down", "Refused", "Wire", "key_path"]

_PIECE = 1 << 20  # a piece is checked while it is still in the processor's cache
_SMALL = 64 << 10
PREFIX = "framed@"
_NO_BATCH = (400, 404, 405, 501)


class Refused(Exception):
    """An HTTP answer that says no to this call (its status); the server as such works."""


class Corrupt(Exception):
    """What came is not the block that was stored under this key: the reason. The buffer's content is undefined."""


def key_path(key: str) -> str:
    """Path segment of `key`: one for each key, and the same whether the server decodes percent signs or not.

    The prefix keeps framed values out of the names that LMCache's own RESP client uses for bare ones: it loses step
    with its connection at a value of another size.
    """
    return quote(PREFIX + key, safe="@")


class Wire:
    """Used by one thread at a time; `abort` may come from any."""

    def __init__(self, settings: RemoteSettings) -> None:
        self._settings = settings
        self._base = settings.url.path.rstrip("/") + "/kv/"
        self._http: Connection | None = None
        self._socket: Any = None  # http.client lets go of its own when the server says `Connection: close`
        self._lock = threading.Lock()
        self._aborted = False
        self._has_batch = True

    # -- calls; each raises Down or Refused, and leaves no connection behind that is out of step ---------------------

    def get_into(self, key: str, block: memoryview, deadline: float) -> bool:
        """Fill `block`; False for a key that is not there. Raises Corrupt as well."""
        response = self._look("GET", key, deadline)
        if response.status == 404:
            self._finish(response)
            return False
        try:
            if response.length != remote_frame.SIZE + block.nbytes:
                raise Corrupt("length")
            frame = bytearray(remote_frame.SIZE)
            self._fill(response, memoryview(frame))
            wanted, crc = remote_frame.check(bytes(frame), key, block.nbytes), 0
            for at in range(0, block.nbytes, _PIECE):
                piece = block[at : at + _PIECE]
                self._fill(response, piece)
                crc = crc32(piece, crc)
            if crc != wanted:
                raise Corrupt("crc")
        except remote_frame.BadFrame as error:
            self.close()
            raise Corrupt(str(error)) from None
        except Corrupt:
            self.close()
            raise
        self._finish(response)
        return True

    def put(self, key: str, block: memoryview, deadline: float) -> bool:
        """Store `block`; False when the key was there already (the server keeps what it has)."""
        frame = remote_frame.make(key, block)
        response = self._call("PUT", key_path(key), deadline, frame, block)
        self._expect(response, (200, 201, 204))
        self._finish(response)
        return response.status == 201

    def exists(self, key: str, deadline: float) -> bool:
        response = self._look("HEAD", key, deadline)
        self._finish(response)
        return response.status == 200

    def exists_many(self, keys: Sequence[str], deadline: float, lease_s: float) -> list[bool] | None:
        """One call for all, which also asks the engine to keep what it has for a while. None: it has no such call."""
        if not self._has_batch:
            return None
        body = json.dumps({"keys": [PREFIX + key for key in keys], "lease_s": lease_s}).encode()
        response = self._call("POST", "batch/exists", deadline, body)
        if response.status in _NO_BATCH:
            self._finish(response)
            self._has_batch = False
            return None
        self._expect(response, (200,), lookup=True)
        with self._faults():
            text = response.read(_SMALL + 16 * len(keys))
        self._finish(response)
        try:
            found = json.loads(text)["exists"]
            if isinstance(found, bool):  # epistemic-graph takes it for a question about the key "batch"
                self._has_batch = False
                return None
            if len(found) != len(keys) or not all(isinstance(there, bool) for there in found):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            self.close()
            raise Down("rubbish") from None
        return list(found)

    def delete(self, key: str, deadline: float) -> bool:
        """True when it is gone; False where the server has no DELETE."""
        response = self._call("DELETE", key_path(key), deadline)
        self._expect(response, (200, 204, 404, 405))
        self._finish(response)
        return response.status != 405

    def _look(self, method: str, key: str, deadline: float) -> http.client.HTTPResponse:
        response = self._call(method, key_path(key), deadline)
        self._expect(response, (200, 404), lookup=True)
        return response

    # -- the connection ---------------------------------------------------------------------------------------------

    @property
    def reused(self) -> bool:
        """The next call goes over a connection that has served before; the server may have closed it meanwhile."""
        return self._http is not None and self._http.sock is not None

    def close(self) -> None:
        with self._lock:
            http_, self._http, self._socket = self._http, None, None
        if http_ is not None:
            with contextlib.suppress(OSError):
                http_.close()

    def abort(self) -> None:
        """End the call that runs, and all later ones, at once: its thread comes back with Down."""
        with self._lock:
            self._aborted = True
            if self._socket is not None:
                # Not SSLSocket's own: it drops its TLS first, and what another thread sends then goes in the clear.
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _call(
        self, method: str, path: str, deadline: float, head: bytes = b"", body: memoryview | None = None
    ) -> http.client.HTTPResponse:
        with self._faults():
            connection = self._connected(deadline)
            connection.putrequest(method, self._base + path, skip_accept_encoding=True)
            if connection.bearer:
                connection.putheader("Authorization", f"Bearer {connection.bearer}")
            if method in ("PUT", "POST"):
                connection.putheader("Content-Length", str(len(head) + (body.nbytes if body is not None else 0)))
            if method == "POST":
                connection.putheader("Content-Type", "application/json")
            # A server that refuses may close before it has read all; its answer says why.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.endheaders(head or None)
                if body is not None:
                    connection.send(body)
            return connection.getresponse()

    def _connected(self, deadline: float) -> Connection:
        if not self.reused:
            self.close()
            fresh = Connection(self._settings, deadline, self._opened)
            fresh.connect()
            self._http = fresh
        assert self._http is not None
        self._opened(self._http.sock)
        self._http.sock.deadline = deadline
        return self._http

    def _opened(self, sock: socket.socket) -> None:
        with self._lock:
            self._socket = sock
            if self._aborted:
                raise ConnectionAbortedError("closed")

    def _expect(self, response: http.client.HTTPResponse, good: Sequence[int], *, lookup: bool = False) -> None:
        """lookup: a no must be an engine's. What a put is told may be a proxy's, with a limit for bodies alone."""
        foreign = lookup and response.status not in (200, 401) and not is_engines(response)
        if response.status in good and not foreign:
            return
        self.close()  # its body may be anything
        if response.status == 401:
            raise no_token(self._settings)
        if foreign:
            raise no_engine(response.status)
        raise Refused(str(response.status))

    def _fill(self, response: http.client.HTTPResponse, view: memoryview) -> None:
        with self._faults():
            at = 0
            while at < len(view):
                count = response.readinto(view[at:])
                if not count:
                    raise ConnectionResetError("cut short")
                at += count

    def _finish(self, response: http.client.HTTPResponse) -> None:
        """Read what is left, so that the connection can be used again; drop it where that is much."""
        with self._faults():
            if not response.isclosed() and (response.length is None or response.length > _SMALL):
                self.close()
                return
            response.read()
            if response.will_close:
                self.close()

    @contextlib.contextmanager
    def _faults(self) -> Any:
        """Everything that sockets, TLS and http.client raise, as Down; the connection is gone then."""
        try:
            yield
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise down(error, self._settings) from None
