"""A stack that behaves like vLLM and LMCache towards the proof: real HTTP, token-exact tiers, no model.

The proof is what is tested; this is its environment. Blocks are identified by the tokens before them, as in the real
servers; L0 dies with vLLM, L1 with lmcache, L2 stays. `corrupt` makes L2 serve KV that gives another answer; blocks in
`damaged` are refused, counted and gone, as the block store has it; `rotten` damages whatever is stored from then on.

L1 holds `l1_chunks` chunks. As LMCache has it, a store that finds no room is dropped whole, and at 0.8 of the pool a
fifth of the chunks goes, those that were used longest ago first, and of one prompt the last ones first.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvstrata.proof import own_blocks
from kvstrata.proof.checks import GUARD_CLASS

CHUNK, BLOCK = 32, 16
CHUNK_BYTES = 3 << 20
NAME = "tiny--" + "ab" * 16


class SimStack:
    """Also the `Control` of the stack."""

    lmcache_http = "unix:/run/lmcache-http/http.sock"

    def __init__(self) -> None:
        self.l0: set[tuple[Any, ...]] = set()
        self.l1: dict[tuple[Any, ...], None] = {}
        """The least recently used first."""
        self.l1_chunks: int | None = 1000
        """None: its status tells no sizes."""
        self.l2: set[tuple[Any, ...]] = set()
        self.damaged: set[tuple[Any, ...]] = set()
        self.rotten = False
        self.corrupt = self.guard = self.store_lost = self.noise = False
        self.connector, self.chunk, self.dtype, self.model_name = True, CHUNK, "torch.float32", NAME
        self.guard = True
        self.running = 0
        self.log: list[tuple[str, ...]] = []
        self.counters: dict[str, float] = {}
        self.lm: dict[str, float] = {}
        self.lock = threading.Lock()
        self._servers = [self._serve(_vllm_handler(self)), self._serve(_lmcache_handler(self))]
        self.vllm_url, self.lmcache_url = (f"http://127.0.0.1:{s.server_address[1]}" for s in self._servers)

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    # -- Control ------------------------------------------------------------------------------------------------

    def kill(self, services: Sequence[str]) -> None:
        self.log.append(("kill", *services))
        if "vllm" in services:
            self.l0.clear()
            self.counters.clear()
        if "lmcache" in services:
            self.l1.clear()
            self.lm.clear()

    def start(self, services: Sequence[str]) -> None:
        self.log.append(("start", *services))

    def exec(self, service: str, argv: Sequence[str]) -> tuple[int, str]:
        if service == "vllm":
            roles = ("scheduler", "worker") if self.guard else ()
            one = {"class": GUARD_CLASS, "identity": self.model_name, "chunk_size": self.chunk, "alive": True,
                   "pair": "vllm 0 + lmcache 0", "facts": {"dtype": self.dtype, "block_size": BLOCK}}  # fmt: skip
            return 0, json.dumps(dict.fromkeys(roles, one))
        action, prompts = argv[3], [own_blocks.decode(text) for text in argv[6:]]
        keys = {("", *prompt[:end]) for prompt in prompts for end in _ends(prompt, self.chunk)}
        result: dict[str, Any] = {"l2_present": len(keys & self.l2)}
        if action in ("drop-l1", "delete"):
            result["l1"] = {"deleted": len(keys & self.l1.keys()), "skipped": 0}
            self.l1 = {key: None for key in self.l1 if key not in keys}
        if action == "delete":
            self.l2 -= keys
            result["l2_left"] = 0
        return 0, json.dumps(result)

    # -- the servers --------------------------------------------------------------------------------------------

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, salt = body["prompt"], body.get("cache_salt", "")
        keep = not (body.get("kv_transfer_params") or {}).get("lmcache.skip_save")
        with self.lock:
            self.evict()
            local = _longest(self.l0, salt, prompt[:-1], BLOCK)
            wrong, known = False, 0
            if self.connector:
                known, wrong = self._lookup(salt, prompt, keep)
            external = max(0, known - local)
            extra = {"local_cache_hit": local, "external_kv_transfer": external}
            for source, count in {**extra, "local_compute": len(prompt) - local - external}.items():
                self.counters[source] = self.counters.get(source, 0) + count + (7 if self.noise else 0)
            self.l0 |= {(salt, *prompt[:end]) for end in _ends(prompt, BLOCK)}
        seed = repr((prompt, wrong and external > 0)).encode()
        return {
            "text": hashlib.sha256(seed).hexdigest()[: body["max_tokens"]],
            "stats": {"num_vllm_cached_tokens": local, "num_lmcache_extra_cached_tokens": external},
        }

    def _lookup(self, salt: str, prompt: list[int], keep: bool) -> tuple[int, bool]:
        keys = [(salt, *prompt[:end]) for end in _ends(prompt, self.chunk)]
        refused = self.damaged & set(keys) - self.l1.keys()
        self.l2 -= refused
        self.damaged -= refused
        self.lm["refused"] = self.lm.get("refused", 0) + len(refused)
        known = _longest(self.l1.keys() | self.l2, salt, prompt, self.chunk)
        loaded = [key for key in keys if len(key) - 1 <= known and key not in self.l1]
        self.lm["lookup_requested_tokens"] = self.lm.get("lookup_requested_tokens", 0) + len(keys) * self.chunk
        self.lm["l2_loaded"] = self.lm.get("l2_loaded", 0) + len(loaded)
        self._use([key for key in keys if key in self.l1])
        room = (self.l1_chunks or 1000) - len(self.l1)
        if keep and len(set(keys) - self.l1.keys()) <= room:
            self._use(keys)
            self.damaged |= set(keys) - self.l2 if self.rotten else set()
            self.l2 |= set() if self.store_lost else set(keys)
        return known, self.corrupt and bool(loaded)

    def _use(self, keys: list[tuple[Any, ...]]) -> None:
        for key in reversed(keys):
            self.l1.pop(key, None)
            self.l1[key] = None

    def evict(self) -> None:
        """What LMCache does once a second: here between two requests."""
        if len(self.l1) >= 0.8 * (self.l1_chunks or 1000):
            for key in list(self.l1)[: max(1, len(self.l1) // 5)]:
                del self.l1[key]

    @property
    def l1_status(self) -> dict[str, int]:
        with self.lock:
            if self.l1_chunks is None:
                return {}
            used = {"memory_used_bytes": len(self.l1) * CHUNK_BYTES, "total_object_count": len(self.l1)}
            return used | {"memory_total_bytes": self.l1_chunks * CHUNK_BYTES}

    @staticmethod
    def _serve(handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server


def _ends(prompt: Sequence[int], step: int) -> range:
    return range(step, len(prompt) + 1, step)


def _longest(tier: set[tuple[Any, ...]], salt: str, prompt: Sequence[int], step: int) -> int:
    best = 0
    for end in _ends(prompt, step):
        if (salt, *prompt[:end]) not in tier:
            break
        best = end
    return best


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def reply(self, body: str, kind: str = "application/json") -> None:
        data = body.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _vllm_handler(stack: SimStack) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        def do_GET(self) -> None:
            lines = [f'vllm:prompt_tokens_by_source_total{{source="{k}"}} {v}' for k, v in stack.counters.items()]
            lines += [f"vllm:num_requests_running {stack.running}", "process_start_time_seconds 1"]
            lines += [f'vllm:cache_config_info{{block_size="{BLOCK}",enable_prefix_caching="True"}} 1']
            answers = {
                "/v1/models": json.dumps({"data": [{"id": "tiny", "max_model_len": 4096}]}),
                "/version": json.dumps({"version": "0"}),
                "/metrics": "\n".join(lines),
                "/health": "",
            }
            self.reply(answers[self.path])

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                words = (hashlib.sha256(word.encode()).hexdigest() for word in body["prompt"].split())
                self.reply(json.dumps({"tokens": [int(word[:6], 16) for word in words]}))
                return
            answer = stack.complete(body)
            choice = {"text": answer["text"], "token_ids": [1]}
            if not body.get("stream"):
                params = {"cached_token_stats": answer["stats"]} if stack.connector else None
                self.reply(json.dumps({"choices": [choice], "kv_transfer_params": params}))
                return
            self.reply(f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n", "text/event-stream")

    return Handler


def _lmcache_handler(stack: SimStack) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                names = {"lookup_requested_tokens": "lmcache_mp_lookup_requested_tokens_total",
                         "l2_loaded": "lmcache_mp_l2_prefetch_load_completed_chunks_total",
                         "refused": "kvstrata_store_corrupt_total"}  # fmt: skip
                self.reply("\n".join(f"{name} {stack.lm.get(key, 0)}" for key, name in names.items()))
                return
            engines = {"1": {"model_name": stack.model_name, "world_size": 1}} if stack.connector else {}
            self.reply(json.dumps({
                "is_healthy": True, "chunk_size": stack.chunk, "non_cuda_context_meta": engines,
                "storage_manager": {"num_l2_adapters": 1, "store_controller": {}, "l1_manager": stack.l1_status},
            }))  # fmt: skip

    return Handler
