"""vLLM and LMCache as plain processes: the proof's `Control` without docker, for developing and testing the proof.

KVSTRATA_TEST_VENV names a virtual environment with the CPU pair, KVSTRATA_TEST_MODEL a small model folder. Kills are
SIGKILL to the process group of the server, which is what a container's death is to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvstrata.proof.client import VllmClient
from kvstrata.proof.control import wait_until

SRC = Path(__file__).parents[2] / "src"


class ProcessStack:
    """`kvstrata.proof.control.Control` over two process groups. Logs and L2 lie under `folder`."""

    def __init__(
        self, folder: Path, *, venv: Path, model: Path, port: int = 26001, guard: bool = True, chunk: int = 256,
        connector: bool = True, dtype: str = "float32", claimed_chunk: int = 256, l1_gb: float = 1,
    ) -> None:  # fmt: skip
        self.folder, self.venv, self.model = folder, venv, model
        self.port, self.mq, self.http = port, port + 1, port + 2
        self.lmcache_http = f"tcp:127.0.0.1:{self.http}"
        self.vllm_url, self.lmcache_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{self.http}"
        self.l2 = folder / "l2"
        self._guard, self._connector, self._chunk, self._claimed_chunk = guard, connector, chunk, claimed_chunk
        self._dtype, self._l1_gb = dtype, l1_gb
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("l2", "log", "run"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "salt_key").write_text("5" * 64)

    def env(self) -> dict[str, str]:
        return {
            **{k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")},
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCHDYNAMO_DISABLE": "1", "TORCH_COMPILE_DISABLE": "1", "PYTHONPATH": str(SRC),
            "KVSTRATA_RUN_DIR": str(self.folder / "run"), "KV_STORE_ROOT": str(self.l2),
            "KV_STORE_CAPACITY_BYTES": str(4 << 30), "KV_CACHE_ALLOW_FS": "tmpfs overlay",
        }  # fmt: skip

    def argv(self, service: str) -> list[str]:
        if service == "lmcache":
            adapter = json.dumps(
                {"type": "plugin", "module_path": "kvstrata.doors.l2_plugin", "class_name": "KvstrataL2Adapter",
                 "adapter_params": {}}
            )  # fmt: skip
            return [
                str(self.venv / "bin/lmcache"), "server", "--host", "127.0.0.1", "--port", str(self.mq),
                "--http-host", "127.0.0.1", "--http-port", str(self.http), "--l1-size-gb", str(self._l1_gb),
                "--no-l1-use-lazy",
                "--l2-prefetch-policy", "retain", "--eviction-policy", "LRU", "--chunk-size", str(self._chunk),
                "--shm-name", f"proof{self.port}",
                "--l2-adapter", adapter,
            ]  # fmt: skip
        argv = [
            str(self.venv / "bin/vllm"), "serve", str(self.model), "--served-model-name", "tiny", "--host", "127.0.0.1",
            "--port", str(self.port), "--dtype", self._dtype, "--max-model-len", "8192",
            "--max-num-batched-tokens", "2048", "--max-num-seqs", "4", "--enforce-eager",
        ]  # fmt: skip
        return argv + (["--kv-transfer-config", json.dumps(self._transfer())] if self._connector else [])

    def _transfer(self) -> dict[str, object]:
        extra: dict[str, object] = {
            "lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.mq,
            "lmcache.mp.mq_timeout": 5, "lmcache.mp.heartbeat_interval": 5,
        }  # fmt: skip
        config: dict[str, object] = {
            "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }  # fmt: skip
        if self._guard:
            config |= {"kv_connector": "KvstrataConnector", "kv_connector_module_path": "kvstrata.connector"}
            extra |= {
                "kvstrata.identity": "ab" * 32, "kvstrata.model_name": "tiny",
                "kvstrata.chunk_size": self._claimed_chunk,
                "kvstrata.salt_key_file": str(self.folder / "salt_key"),
            }  # fmt: skip
        return config

    # -- Control ------------------------------------------------------------------------------------------------

    def kill(self, services: Sequence[str]) -> None:
        left = [path for service in services for path in self._shared_memory(service)]
        for service in services:
            self._signal(service, signal.SIGKILL)
        for service in services:
            if process := self._processes.pop(service, None):
                process.wait(30)
        for path in left:  # a killed vLLM cannot unlink its own (0.4 GB a kill); the server's pool it reclaims itself
            path.unlink(missing_ok=True)
        if "vllm" in services:
            time.sleep(0.5)  # its workers are in the same group, their port is free a moment later

    def start(self, services: Sequence[str]) -> None:
        for service in services:
            if service in self._processes and self._processes[service].poll() is None:
                continue
            with (self.folder / "log" / service).open("ab") as log:
                self._processes[service] = subprocess.Popen(
                    self.argv(service), env=self.env(), stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                    start_new_session=True, umask=0o077,
                )  # fmt: skip

    def exec(self, service: str, argv: Sequence[str]) -> tuple[int, str]:
        command = [str(self.venv / "bin/python"), *argv[1:]] if argv[0] == "python3" else list(argv)
        done = subprocess.run(command, env=self.env(), capture_output=True, text=True, check=False)
        return done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """vLLM without the connector, as bench wants it."""
        client = VllmClient(self.vllm_url)
        self.kill(["vllm"])
        self._connector = False
        self.start(["vllm"])
        wait_until(client.healthy, "vllm", 300)
        yield
        self.kill(["vllm"])
        self._connector = True
        self.start(["vllm"])
        wait_until(client.healthy, "vllm", 300)

    # -- the test's own -----------------------------------------------------------------------------------------

    def pid(self, service: str) -> int:
        return self._processes[service].pid

    def stop(self) -> None:
        for service in list(self._processes):
            self._signal(service, signal.SIGTERM)
        deadline = time.monotonic() + 15
        for service, process in self._processes.items():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._signal(service, signal.SIGKILL)
        self._processes.clear()

    def _shared_memory(self, service: str) -> set[Path]:
        """Python's shared-memory files that the processes of the service's group map."""
        found: set[Path] = set()
        process = self._processes.get(service)
        for maps in Path("/proc").glob("[0-9]*/maps") if process else ():
            with contextlib.suppress(OSError, ProcessLookupError):
                if process and os.getpgid(int(maps.parent.name)) == process.pid:
                    found |= {
                        Path(line.split()[5]) for line in maps.read_text().splitlines() if "/dev/shm/psm_" in line
                    }
        return found

    def _signal(self, service: str, number: int) -> None:
        if process := self._processes.get(service):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
