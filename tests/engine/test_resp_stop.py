"""A client that sends ahead of its answers, while the engine is stopped."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.engine.process import EngineProcess
from tests.engine.resp_parts import encoded

VALUE = b"v" * 1000


@pytest.mark.parametrize("pause_s", [0.0, 0.001])
def test_what_was_stored_by_then_was_answered_and_no_answer_is_cut(
    engine_process: Callable[..., EngineProcess], pause_s: float
) -> None:
    engine = engine_process(RESP="127.0.0.1:0")
    answers, over = bytearray(), threading.Event()

    def send() -> None:
        number = 0
        with suppress(OSError):
            while not over.is_set():
                client.sendall(encoded(["SET", f"k{number}", VALUE]))
                number += 1
                time.sleep(pause_s)

    def receive() -> None:
        with suppress(ConnectionResetError):
            while data := client.recv(65536):
                answers.extend(data)

    with socket.create_connection(engine.resp, timeout=20) as client:
        threads = [threading.Thread(target=work) for work in (send, receive)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        assert engine.stop() == 0
        over.set()
        for thread in threads:
            thread.join(20)
    engine.start()
    with socket.create_connection(engine.resp, timeout=20) as client:
        client.sendall(encoded(["DBSIZE"]))
        stored = int(client.recv(100)[1:-2])
    assert stored > 10
    assert bytes(answers) == b"+OK\r\n" * stored
