"""What a chunk takes of L1, read from an LMCache that stores and evicts at its own pace."""

from __future__ import annotations

import json
import socketserver
import threading
from http.server import BaseHTTPRequestHandler

import pytest

from kvstrata.proof import room
from kvstrata.proof.client import LmcacheClient, RequestFailed


def _tells(total: int, used: list[int]) -> type[BaseHTTPRequestHandler]:
    """GET /status of an L1 that has so many bytes in use, one reading after the other; the last one stays."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            now = used.pop(0) if len(used) > 1 else used[0]
            l1 = {"memory_used_bytes": now, "memory_total_bytes": total} if total else {}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"storage_manager": {"l1_manager": l1}}).encode())

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    return Handler


@pytest.mark.parametrize(
    ("total", "used", "chunk"),
    [
        (100, [0, 0, 4], 4),  # an empty pool; the store ends after the answer
        (100, [70, 72, 74], 4),  # rank after rank
        (100, [78, 82, 66], 4),  # an eviction just after it
        (100, [82, 66], None),  # an eviction that hides it
        (100, [5], None),  # nothing stored
        (0, [0], None),  # no sizes
    ],
)
@pytest.mark.parametrize("refused", [False, True])
def test_a_chunk_is_what_l1_grows_by(
    monkeypatch: pytest.MonkeyPatch, total: int, used: list[int], chunk: int | None, refused: bool
) -> None:
    monkeypatch.setattr(room, "_LOOK_S", 0.0)
    stored: list[str] = []

    def store() -> None:
        stored.append("one")
        if refused:
            raise RequestFailed("no")

    with socketserver.TCPServer(("127.0.0.1", 0), _tells(total, list(used))) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        client = LmcacheClient(f"http://127.0.0.1:{server.server_address[1]}")
        found = room.measure(client, store)
        client.close()
        server.shutdown()
    assert found == (room.Room(total, chunk) if chunk and not refused else None)
    assert len(stored) == (total > 0)


@pytest.mark.parametrize(("chunks", "a_prompt", "kept"), [(2, 1, 1), (4, 1, 2), (22, 4, 13), (100, 20, 60)])
def test_two_prompts_are_kept_from_four_chunks_on(chunks: int, a_prompt: int, kept: int) -> None:
    found = room.Room(chunks * 10 + 9, 10)
    assert (found.a_prompt, found.kept) == (a_prompt, kept)
    assert (2 * a_prompt <= kept) == (chunks >= 4)
