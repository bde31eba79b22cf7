"""A real epistemic-graph-server 2.27.7 (PyPI), started with the settings that it insists on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

TOKEN = "0123456789abcdef-epistemic"


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


class EpistemicServer:
    """Its KV-cache over HTTP. `backend`: durable or memory."""

    def __init__(self, folder: Path, backend: str) -> None:
        self.address = ("127.0.0.1", free_port())
        folder.mkdir(parents=True, exist_ok=True)
        env = {
            "GRAPH_SERVICE_SOCKET": str(folder / "s"), "GRAPH_SERVICE_PERSIST_DIR": str(folder / "data"),
            "GRAPH_SERVICE_AUTH_SECRET": "x", "EPISTEMIC_GRAPH_AUDIENCE": "lab", "EPISTEMIC_GRAPH_TENANT": "lab",
            "EPISTEMIC_GRAPH_POLICY_VERSION": "1", "EPISTEMIC_GRAPH_SIGNER_KEYS_JSON": '{"boot":"y"}',
            "EPISTEMIC_GRAPH_REQUIRE_OIDC": "false", "EPISTEMIC_GRAPH_KVCACHE_TOKEN": TOKEN,
            "EPISTEMIC_GRAPH_KVCACHE_ADDR": f"127.0.0.1:{self.address[1]}", "NO_COLOR": "1",
        }  # fmt: skip
        if backend == "durable":
            env["EPISTEMIC_GRAPH_KVCACHE_BACKEND"] = "durable"
        (folder / "data").mkdir(exist_ok=True)
        binary = Path(sys.executable).parent / "epistemic-graph-server"
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen([binary], env={**os.environ, **env}, stdout=log, stderr=log)
        end = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(self.address, timeout=5).close()
                return
            except OSError:
                if time.monotonic() > end or self.process.poll() is not None:
                    self.stop()
                    raise AssertionError((folder / "log").read_text()) from None
                time.sleep(0.05)

    @property
    def url(self) -> str:
        """Of its HTTP."""
        return "http://{}:{}".format(*self.address)

    def stop(self) -> None:
        """At once."""
        self.process.kill()
        self.process.wait(30)
