"""HTTP clients of the two servers: vLLM's OpenAI API, and LMCache's read-only status behind the proxy.

Prompts are token ids: `/v1/completions` takes them as they are, so a prompt's length, and with it every tier's hit, is
exact whatever the tokenizer does at the seams of a text.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import httpx_sse

from kvstrata.deploy.errors import KvError
from kvstrata.proof.prom import Samples, parse

__all__ = ["Completion", "EngineFacts", "LmcacheClient", "RequestFailed", "VllmClient"]


class RequestFailed(Exception):
    """The server answered a proof request with an error, or not at all within the timeout."""


@dataclass(frozen=True)
class Completion:
    """One greedy answer. Times are seconds on this host's clock, from sending the request."""

    text: str
    token_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    ttft_s: float
    """Until the first token arrived; of a request that was not streamed, until the whole answer did."""
    total_s: float
    streamed: bool
    cached_tokens: int | None
    """usage.prompt_tokens_details.cached_tokens, where the server runs with --enable-prompt-tokens-details."""
    stats: dict[str, int] | None = None
    """LMCache's own counts of this request (`cached_token_stats`), of a request that was not streamed."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def text_sha256(self) -> str:
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class EngineFacts:
    """What the running engine says of itself on /metrics and /version."""

    version: str
    model: str
    max_model_len: int
    block_size: int
    prefix_caching: bool


class VllmClient:
    """Talks to one vLLM server. Never through a proxy of the environment: the address is this machine's own."""

    def __init__(self, base_url: str, timeout_s: float = 300.0) -> None:
        self.base_url = base_url
        self._http = httpx.Client(base_url=base_url, timeout=httpx.Timeout(timeout_s, connect=5.0), trust_env=False)
        self._model: str | None = None

    def close(self) -> None:
        self._http.close()

    def healthy(self) -> bool:
        """True when /health answers 200: the engine's core loop is alive."""
        try:
            return self._http.get("/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def samples(self) -> Samples:
        return parse(self._get("/metrics").text)

    def facts(self) -> EngineFacts:
        """Ask the server what it runs. Raises KvError when it does not answer."""
        model = self._get("/v1/models").json()["data"][0]
        cache = self.samples().labels("vllm:cache_config_info")
        self._model = str(model["id"])
        return EngineFacts(
            version=str(self._get("/version").json()["version"]),
            model=self._model,
            max_model_len=int(model.get("max_model_len") or 0),
            block_size=int(cache.get("block_size", "0") or 0),
            prefix_caching=cache.get("enable_prefix_caching") == "True",
        )

    def in_flight(self) -> int:
        """Requests that vLLM runs or queues now, whoever sent them."""
        now = self.samples()
        return int(now.sum("vllm:num_requests_running") + now.sum("vllm:num_requests_waiting"))

    def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`; `special` adds what the tokenizer puts in front of a prompt (BOS)."""
        body = {"model": self._name(), "prompt": text, "add_special_tokens": special}
        return [int(token) for token in self._post("/tokenize", body)["tokens"]]

    def complete(
        self, prompt: Sequence[int], max_tokens: int, *, salt: str | None = None, keep: bool = True
    ) -> Completion:
        """Stream one greedy answer of exactly `max_tokens` tokens; TTFT is taken at the first token.

        Args:
            salt: `cache_salt` of the request.
            keep: False asks the connector not to store this prompt's blocks (`lmcache.skip_save`).
        Raises:
            RequestFailed: an HTTP error, an error inside the stream, or no answer.
        """
        body = self._body(prompt, max_tokens, salt)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if not keep:
            body["kv_transfer_params"] = {"lmcache.skip_save": True}
        began = time.perf_counter()
        ttft: float | None = None
        text: list[str] = []
        tokens: list[int] = []
        prompt_ids, cached = tuple(prompt), None
        for event in self._stream(body):
            for choice in event.get("choices") or ():
                if ttft is None:
                    ttft = time.perf_counter() - began
                    prompt_ids = tuple(choice.get("prompt_token_ids") or prompt)
                text.append(str(choice.get("text") or ""))
                tokens.extend(choice.get("token_ids") or ())
            if usage := event.get("usage"):
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if ttft is None:
            raise RequestFailed("found: a stream that ended without a token; needed: an answer")
        total = time.perf_counter() - began
        return Completion("".join(text), tuple(tokens), prompt_ids, ttft, total, True, cached)

    def complete_counted(
        self, prompt: Sequence[int], max_tokens: int, *, salt: str | None = None, keep: bool = True
    ) -> Completion:
        """Like `complete`, not streamed, with the connector's own hit counts of this very request.

        The counts are exact while others use the server, which counters are not; vLLM 0.28.0 returns
        `kv_transfer_params` of completions only without streaming (entrypoints/openai/completion/serving.py:632-642).
        """
        body = self._body(prompt, max_tokens, salt)
        body["kv_transfer_params"] = {"cached_token_stats": 1} | ({} if keep else {"lmcache.skip_save": True})
        began = time.perf_counter()
        answer = self._post("/v1/completions", body)
        total = time.perf_counter() - began
        choice, usage = answer["choices"][0], answer.get("usage") or {}
        return Completion(
            text=str(choice["text"]),
            token_ids=tuple(choice.get("token_ids") or ()),
            prompt_ids=tuple(choice.get("prompt_token_ids") or prompt),
            ttft_s=total,
            total_s=total,
            streamed=False,
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            stats=(answer.get("kv_transfer_params") or {}).get("cached_token_stats"),
        )

    def _body(self, prompt: Sequence[int], max_tokens: int, salt: str | None) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._name(),
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            # Greedy and of a fixed length: two runs are comparable byte for byte, and cost the same.
            "temperature": 0,
            "seed": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return body | ({"cache_salt": salt} if salt else {})

    def _name(self) -> str:
        return self._model or self.facts().model

    def _stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        # httpx_sse and not httpx's iter_lines: that one also ends a line at U+2028, which an answer may hold.
        try:
            with httpx_sse.connect_sse(self._http, "POST", "/v1/completions", json=body) as source:
                if source.response.status_code != 200:
                    said = source.response.read()[:300]
                    raise RequestFailed(f"found: HTTP {source.response.status_code} {said!r}; needed: 200")
                for sent in source.iter_sse():
                    if sent.data == "[DONE]":
                        return
                    event = json.loads(sent.data)
                    if "error" in event:
                        raise RequestFailed(f"found: error in the stream: {event['error']}; needed: an answer")
                    yield event
        except (httpx.HTTPError, ValueError) as error:
            raise RequestFailed(f"found: {type(error).__name__}: {error}; needed: an answer") from error
        raise RequestFailed("found: a stream that was cut short; needed: an answer")

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = self._http.post(path, json=body)
        except httpx.HTTPError as error:
            raise RequestFailed(f"found: {path}: {type(error).__name__}: {error}; needed: an answer") from error
        if answer.status_code != 200:
            raise RequestFailed(f"found: {path}: HTTP {answer.status_code} {answer.text[:300]}; needed: 200")
        result: dict[str, Any] = answer.json()
        return result

    def _get(self, path: str) -> httpx.Response:
        return _get(self._http, path, "vLLM", "make logs; the port is KV_PORT in .env")


class LmcacheClient:
    """Reads LMCache's /status and /metrics through the proxy (GET only; nothing else passes it)."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self._http = httpx.Client(base_url=base_url, timeout=10.0, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def samples(self) -> Samples:
        return parse(self._get("/metrics").text)

    def status(self) -> dict[str, Any]:
        result: dict[str, Any] = self._get("/status").json()
        return result

    def healthy(self) -> bool:
        try:
            return self._http.get("/status", timeout=5.0).json().get("is_healthy") is True
        except (httpx.HTTPError, ValueError):
            return False

    def _get(self, path: str) -> httpx.Response:
        return _get(self._http, path, "LMCache", "make logs; the port is KV_METRICS_PORT in .env")


def _get(http: httpx.Client, path: str, who: str, fix: str) -> httpx.Response:
    try:
        answer = http.get(path, timeout=10.0)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        raise KvError(
            found=f"{who} at {http.base_url} does not answer {path}: {type(error).__name__}: {error}",
            needed=f"a running stack ({who} healthy)",
            fix=fix,
        ) from error
    return answer
