"""The engine as a process of its own, as it runs in production: started with settings, killed, stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_LISTENING = re.compile(r"engine: (\w+) on (\S+):(\d+)")
TOKENS = "writer rw default 0123456789abcdef-writer\nreader ro default 0123456789abcdef-reader\n"
WRITER = "0123456789abcdef-writer"
READER = "0123456789abcdef-reader"


class EngineProcess:
    """A running engine. `http`, `resp`: (host, port), chosen by the system."""

    def __init__(self, root: Path, **knobs: object) -> None:
        self.root = root
        chosen = {"ROOT": root, "CAPACITY_BYTES": 256 << 20, "FREE_FLOOR_BYTES": 1, "HTTP": "127.0.0.1:0", **knobs}
        self._env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("KV_")},
            **{f"KV_ENGINE_{name}": str(value) for name, value in chosen.items()},
            "KV_CACHE_ALLOW_FS": "tmpfs overlay fuse",
            "PYTHONPATH": str(ROOT / "src"),
        }
        self._wanted = {"http"} | ({"resp"} if knobs.get("RESP") else set())
        self.start()

    def start(self) -> None:
        """Start it (again), on new ports."""
        self._log: list[str] = []
        self._ports: dict[str, tuple[str, int]] = {}
        self._up = threading.Event()
        command = [sys.executable, "-m", "kvstrata.engine"]
        self.process = subprocess.Popen(command, env=self._env, stderr=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._up.wait(60) or self._wanted - set(self._ports):
            self.process.kill()
            raise AssertionError(f"the engine did not start:\n{self.log}")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._log.append(line)
            found = _LISTENING.search(line)
            if found:
                self._ports[found[1]] = (found[2], int(found[3]))
                if not self._wanted - set(self._ports):
                    self._up.set()
        self._up.set()

    @property
    def log(self) -> str:
        """What it has said."""
        return "".join(self._log)

    @property
    def http(self) -> tuple[str, int]:
        """Where it speaks HTTP."""
        return self._ports["http"]

    @property
    def resp(self) -> tuple[str, int]:
        """Where it speaks RESP."""
        return self._ports["resp"]

    @property
    def url(self) -> str:
        """Of HTTP."""
        return "http://{}:{}".format(*self.http)

    def rss(self) -> int:
        """Bytes of memory now."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    def threads(self) -> int:
        """How many it has."""
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))

    def peak_rss(self) -> int:
        """Bytes of memory at most, since the start."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", text)[1]) << 10  # type: ignore[index]

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait(30)
        self._reader.join(10)

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM. Returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        return code


def until(true: object, timeout_s: float = 20.0) -> None:
    """Wait until `true()` is; fails the test if it does not become so."""
    end = time.monotonic() + timeout_s
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end, "did not come about in time"
        time.sleep(0.02)
