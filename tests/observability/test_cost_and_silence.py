"""What is made of the measurements and of the looks; both commands run on a live stack (docs/observability.md)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from kvstrata.deploy.errors import KvError
from kvstrata.observe.cost import FIGURES, Row, order, rows
from kvstrata.observe.silence import Silence, firing

TTFT, _, RATE = FIGURES


def test_rounds_change_their_order_and_each_kind_has_as_many() -> None:
    assert order(3) == [True, False, False, True, True, False]


def test_figures_go_to_the_side_they_were_measured_on() -> None:
    measured = [(True, dict.fromkeys(FIGURES, 1.0)), (False, dict.fromkeys(FIGURES, 2.0))] * 2
    assert [(row.off, row.on) for row in rows(measured)] == [((2.0, 2.0), (1.0, 1.0))] * len(FIGURES)


@pytest.mark.parametrize(
    ("name", "off", "on", "cost", "within"),
    [
        (TTFT, (1.0, 1.1, 1.2), (1.1, 1.15, 1.3), 0.045, True),
        (TTFT, (1.0, 1.01, 1.02), (1.2, 1.21, 1.22), 0.198, False),
        (TTFT, (1.0, 1.01, 1.02), (0.8, 0.81, 0.82), -0.198, True),
        (RATE, (100.0, 101.0, 102.0), (80.0, 81.0, 82.0), 0.198, False),
        (RATE, (100.0, 101.0, 102.0), (120.0, 121.0, 122.0), -0.198, True),
    ],
)
def test_a_cost_is_what_is_worse_by_more_than_rounds_differ(
    name: str, off: tuple[float, ...], on: tuple[float, ...], cost: float, within: bool
) -> None:
    row = Row(name, off, on)
    assert row.difference == pytest.approx(cost, abs=0.001) and row.within_noise is within


@contextmanager
def serving(pages: dict[str, Any]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(pages[self.path]).encode() if self.path in pages else b""
            self.send_response(200 if body else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def alert(name: str, state: str = "") -> dict[str, Any]:
    return {"labels": {"alertname": name}, "state": state}


def test_the_worse_state_of_an_alert_counts_and_alertmanagers_word_is_firing() -> None:
    states = [alert("A", "pending"), alert("A", "firing"), alert("A", "pending"), alert("B", "pending")]
    pages = {"/api/v1/alerts": {"data": {"alerts": states}}, "/api/v2/alerts": [alert("C")]}
    with serving(pages) as url, httpx.Client(trust_env=False) as http:
        assert firing(http, url, url) == {"A": "firing", "B": "pending", "C": "firing"}
        with pytest.raises(KvError, match="no alerts to be had"):
            firing(http, url, url + "/elsewhere")


def test_an_alert_keeps_the_second_at_which_it_was_first_seen() -> None:
    seen = Silence(1)
    for second, state in ((5.0, "pending"), (10.0, "firing"), (15.0, "firing")):
        seen.look({"A": state}, second)
    assert seen.fired == {"A": 10.0} and seen.pending == {"A": 5.0}
