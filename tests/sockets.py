"""The other end of a socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

__all__ = ["received"]


def received(send: Callable[[socket.socket], None]) -> bytes:
    """What `send` sends; what it raises is raised here."""
    ours, theirs = socket.socketpair()
    got = bytearray()

    def take() -> None:
        while piece := theirs.recv(1 << 20):
            got.extend(piece)

    taker = threading.Thread(target=take)
    taker.start()
    with theirs:
        try:
            with ours:
                send(ours)
        finally:
            taker.join()
    return bytes(got)
