"""A TCP listener: parked connections cost no thread, ready ones get a worker thread with a blocking socket.

One poller thread owns an epoll: it accepts, hands a connection that has something to read to a worker (one shot, so
that nobody else gets it), takes it back when the worker is done, and enforces every deadline by shutting the socket
down, which wakes the worker that is blocked in it. Workers therefore need no timeouts of their own, and a receive or
a sendfile is one system call.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from kvstrata.engine.connection import Connection, Crowd, Cut, NotYet

__all__ = ["Connection", "Cut", "Listener", "NotYet"]

log = logging.getLogger(__name__)

_READ = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT
_TICK_S = 0.25
# What is left for a short answer once a deadline has passed, before the connection is cut.
_LAST_WORDS_S = 2.0
_BACKLOG = 4096
# To send the first byte. Only who has sent something may be idle for longer.
_FIRST_S = 60.0
# A machine that vanished is asked after so many idle seconds, or its connections would stay where idle_s is None.
_DEAD_AFTER_S = 120


class Listener:
    """Serves one protocol on one address.

    Args:
        host, port: where; port 0 takes a free one (`address` says which). "::1" and the like are IPv6.
        serve: called with a Connection when bytes may be there; True parks it until there are more, False closes it.
        idle_s: how long a parked connection with nothing half-received may stay.
        max_connections: one more is sent `refusal` and closed.
        workers: threads that serve when all goes well; up to `max_workers` while every one is stuck in a slow peer.
        tls: the context of the certificate, or None.
    """

    def __init__(
        self,
        host: str,
        port: int,
        serve: Callable[[Connection], bool],
        *,
        name: str = "listener",
        idle_s: float = 300.0,
        handshake_s: float = 10.0,
        max_connections: int = 12_000,
        workers: int = 16,
        max_workers: int = 256,
        tls: ssl.SSLContext | None = None,
        refusal: bytes = b"",
    ) -> None:
        self._serve = serve
        self._name = name
        self._idle_s = idle_s
        self._handshake_s = handshake_s
        self._max_connections = max_connections
        self._workers = workers
        self._max_workers = max(workers, max_workers)
        self._tls = tls
        self._refusal = refusal
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ready: SimpleQueue[Connection | None] = SimpleQueue()
        self._connections: dict[int, Connection] = {}
        self._crowd = Crowd()
        self._threads = self._free = self._taken = 0
        self._accept_again = 0.0
        self._done = False
        self.refused = self.timeouts = self.accepted = 0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._listening.setblocking(False)
        self.address: tuple[str, int] = self._listening.getsockname()[:2]
        self._epoll = select.epoll()
        self._epoll.register(self._listening.fileno(), select.EPOLLIN)
        self._poller = threading.Thread(target=self._poll, name=f"{name}-poll", daemon=True)

    @property
    def open_connections(self) -> int:
        """Connections now."""
        return len(self._connections)

    @property
    def busy_connections(self) -> int:
        """Those that a worker has, or that wait for one."""
        return max(0, self._threads - self._free) + self._crowd.waiting

    def start(self) -> Listener:
        """Begin to accept."""
        self._poller.start()
        return self

    def stop(self, grace_s: float) -> int:
        """Accept no more, end idle connections, let requests end for `grace_s`, then cut. Returns how many were cut."""
        with self._changed:
            self._crowd.stopping = True
        deadline = time.monotonic() + grace_s
        with self._changed:
            while self._connections and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            rest = len(self._connections)
            self._done = True
            for connection in self._connections.values():
                self._shut(connection, socket.SHUT_RDWR)
            for _ in range(self._threads):
                self._ready.put(None)
        if self._poller.ident is None:
            self._listening.close()
        else:
            self._poller.join(5.0)
        return rest

    # -- the poller's thread

    def _poll(self) -> None:
        listening = self._listening.fileno()
        tick = 0.0
        taken = -1
        while not self._done:
            for fd, _ in self._epoll.poll(_TICK_S, 1024):
                if fd == listening:
                    self._accept()
                else:
                    self._wake(fd)
            if self._crowd.stopping and listening >= 0:
                self._accept()  # what the kernel has accepted for us is answered as well
                self._listening.close()
                listening = -1
            now = time.monotonic()
            if now >= tick:
                tick = now + _TICK_S
                self._enforce(now)
                taken = self._relieve(taken)
        self._epoll.close()
        if listening >= 0:
            self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    log.warning("%s: no more connections: %s; raise the limit of open files", self._name, error)
                    self._accept_again = time.monotonic() + 1.0
                    self._epoll.modify(self._listening.fileno(), 0)
                    return
                continue  # that peer is gone already
            self.accepted += 1
            if len(self._connections) >= self._max_connections:
                self._refuse(sock)
                continue
            try:
                self._welcome(sock, f"{address[0]}:{address[1]}")
            except OSError:
                sock.close()

    def _refuse(self, sock: socket.socket) -> None:
        self.refused += 1
        with suppress(OSError):
            if self._refusal and self._tls is None:
                sock.send(self._refusal, socket.MSG_DONTWAIT)
                sock.shutdown(socket.SHUT_WR)
        sock.close()

    def _welcome(self, sock: socket.socket, peer: str) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_AFTER_S)
        if self._tls is not None:
            sock.setblocking(False)
            sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        connection = Connection(sock, peer, self._idle_s, self._crowd)
        connection.until(min(self._handshake_s if self._tls is not None else _FIRST_S, self._idle_s))
        with self._lock:
            connection.parked = True
            self._connections[connection.fd] = connection
            self._epoll.register(connection.fd, _READ)

    def _wake(self, fd: int) -> None:
        with self._lock:
            connection = self._connections.get(fd)
            if connection is None or not connection.parked:
                return
            connection.parked = False
            self._hand_over(connection)

    def _hand_over(self, connection: Connection) -> None:
        """To a worker, with the lock held."""
        if self._free:
            self._free -= 1
        elif self._threads >= self._workers or not self._hire():
            self._crowd.waiting += 1
        self._ready.put(connection)

    def _hire(self) -> bool:
        """One more worker. False: the system gives no thread now; `_relieve` asks again."""
        try:
            threading.Thread(target=self._work, name=f"{self._name}-{self._threads + 1}", daemon=True).start()
        except RuntimeError as error:
            log.warning("%s: no more than %d threads: %s", self._name, self._threads, error)
            return False
        self._threads += 1
        return True

    def _enforce(self, now: float) -> None:
        """Shut down whatever is past its deadline; end what is idle while stopping."""
        if self._accept_again and now >= self._accept_again and not self._crowd.stopping:
            self._accept_again = 0.0
            self._epoll.modify(self._listening.fileno(), select.EPOLLIN)
        with self._lock:
            for connection in list(self._connections.values()):
                late = connection.deadline is not None and now >= connection.deadline
                if connection.parked:
                    if not (late or (self._crowd.stopping and not connection.handshaking)):
                        continue
                    connection.parked = False
                    connection.expired = connection.expired or late
                    if late and not connection.buffered:
                        self._end(connection)
                    else:
                        connection.deadline = now + _LAST_WORDS_S
                        self._hand_over(connection)
                elif late:
                    self.timeouts += 1
                    how = socket.SHUT_RDWR if connection.expired else socket.SHUT_RD
                    connection.expired = True  # first: whoever finds the end of the stream asks why
                    self._shut(connection, how)
                    connection.deadline = now + _LAST_WORDS_S

    def _relieve(self, taken: int) -> int:
        """One more worker where some wait and none was taken since the last look."""
        with self._lock:
            if self._crowd.waiting and self._taken == taken and self._threads < self._max_workers:
                # as many as there is room for: each of them would wait for a tick otherwise
                for _ in range(min(self._crowd.waiting, self._max_workers - self._threads)):
                    if not self._hire():
                        break
                    self._crowd.waiting -= 1
            return self._taken

    @staticmethod
    def _shut(connection: Connection, how: int) -> None:
        with suppress(OSError):
            socket.socket.shutdown(connection.sock, how)  # an SSLSocket's own would forget its session meanwhile

    def _end(self, connection: Connection) -> None:
        """Close it, with the lock held: a number that is free again must not be met by a shutdown that is under way."""
        self._connections.pop(connection.fd, None)
        with suppress(OSError):
            connection.sock.close()
        if self._crowd.stopping and not self._connections:
            self._changed.notify_all()

    # -- the workers' threads

    def _work(self) -> None:
        while True:
            connection = self._ready.get()
            if connection is None:
                return
            self._taken += 1
            keep = False
            try:
                keep = self._serve_some(connection)
            except (Cut, OSError):
                pass  # the peer's affair
            except Exception:
                log.exception("%s: connection of %s ended by a fault", self._name, connection.peer)
            with self._lock:
                self._take_back(connection, keep)
                if self._crowd.waiting:
                    self._crowd.waiting -= 1
                elif self._threads > self._workers:
                    self._threads -= 1
                    return
                else:
                    self._free += 1

    def _serve_some(self, connection: Connection) -> bool:
        if connection.handshaking:
            if not self._shake_hands(connection):
                return True
            connection.until(self._idle_s)
        while True:
            # As it was before: who was not told of the stop may leave unread what has come; `_enforce` hands it over.
            stopping = connection.stopping
            if not self._serve(connection):
                return False
            if not connection.has_more():
                return not (stopping or connection.expired)

    @staticmethod
    def _shake_hands(connection: Connection) -> bool:
        assert isinstance(connection.sock, ssl.SSLSocket)
        if connection.expired:
            raise Cut
        try:
            connection.sock.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        connection.sock.settimeout(None)
        connection.handshaking = False
        return True

    def _take_back(self, connection: Connection, keep: bool) -> None:
        """Park or close, with the lock held."""
        if keep and not self._done:
            if not (connection.buffered or connection.midway or connection.handshaking):
                connection.until(connection.idle_s)
            connection.parked = True
            try:
                self._epoll.modify(connection.fd, _READ)
                return
            except (OSError, ValueError):
                connection.parked = False
        self._end(connection)
