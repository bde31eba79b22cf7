"""The prompts of the proof: a real text, a real question, and a length at which every tier can hit the same tokens.

How much can hit, for n prompt tokens, LMCache chunks of C and vLLM blocks of B tokens:
- L0 (vLLM's prefix cache): floor((n - 1) / B) * B; the last token is always computed
  (vllm 0.28.0 v1/core/kv_cache_manager.py:256-262);
- L1, L2 (LMCache): floor(n / C) * C, in whole chunks and without that rule (lmcache 0.5.3
  integration/vllm/lmcache_mp_connector.py:1075-1095).
Both are floor(n / C) * C exactly when 1 <= n mod C <= B, and a prompt is trimmed to that, so that the proof expects one
figure from every tier.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources

__all__ = ["Prompt", "Source", "build", "expected_hits", "handbook", "tokenize_payload", "unseen"]

Source = str
"""Where cached tokens come from: none | l0 | l1 | l2."""

CountTokens = Callable[[str], int]
"""Tokens of a text as the server counts a /v1/completions prompt: vLLM's own POST /tokenize, see `tokenize_payload`."""

_WATCHWORD = "The watchword of this copy is"
#: The answer is the nonce, which stands in cached blocks: read from another prompt's blocks it is another answer. To a
#: question that all copies answer alike, the demo model gave the same text whatever it was served.
QUESTION = (
    "Question: What is the watchword of this copy, and who turned the lens by hand in the winter of the great ice?\n"
    f"Answer: {_WATCHWORD}"
)
_NONCE = re.compile(r"[0-9a-z]{8,12}")


@dataclass(frozen=True)
class Prompt:
    """`tokens`: as the server counted; `cached` = floor(tokens / C) * C: what a warm request finds in every tier."""

    text: str
    tokens: int
    chunk_size: int
    block_size: int
    nonce: str

    @property
    def cached(self) -> int:
        return self.tokens // self.chunk_size * self.chunk_size


def handbook() -> str:
    """The handbook of an invented lighthouse, about 3000 tokens of English prose written for this project."""
    return resources.files("kvstrata.proof").joinpath("handbook.txt").read_text(encoding="utf-8")


def tokenize_payload(model: str, text: str) -> dict[str, object]:
    """Body of POST /tokenize that counts `text` as /v1/completions does: special tokens added, no chat template."""
    return {"model": model, "prompt": text, "add_special_tokens": True}


def expected_hits(tokens: int, chunk_size: int, block_size: int, source: Source) -> int:
    """Prompt tokens that vLLM reports as cached for a repeated prompt of `tokens` tokens whose KV is in `source`.

    For l1 and l2, vLLM's own prefix cache is taken to be empty (vLLM was restarted). With n % C == 0 LMCache still
    finds all n tokens; vLLM computes the last one again but counts all n (vllm v1/core/sched/scheduler.py:2761).
    """
    if tokens < 1 or chunk_size < 1 or block_size < 1 or chunk_size % block_size:
        raise ValueError(f"tokens={tokens}, chunk_size={chunk_size}, block_size={block_size}: chunks are whole blocks")
    local = (tokens - 1) // block_size * block_size
    stored = tokens // chunk_size * chunk_size
    if source == "none":
        return 0
    if source == "l0":
        # Where LMCache holds more than vLLM's own cache (n % C == 0), the connector adds the rest.
        return max(local, stored)
    if source in ("l1", "l2"):
        return stored
    raise ValueError(f"source {source!r}: one of none, l0, l1, l2")


def build(
    nonce: str, count: CountTokens, *, target: int = 3000, chunk_size: int = 256, block_size: int = 128
) -> Prompt:
    """A prompt of about `target` tokens (never more) with `nonce` in its first block and 1 <= n mod C <= B.

    The question asks for the nonce, so that two prompts have two answers.
    `nonce`: 8 to 12 of 0-9a-z, fresh for each prompt, else "cold" would find what an earlier run left in L2. It comes
    first, because tokens before it would be shared with other prompts. Calls `count` about 15 times.
    Raises ValueError where no such length exists below `target` (less than one chunk, or a question that is too long).
    """
    if not _NONCE.fullmatch(nonce):
        raise ValueError(f"nonce {nonce!r}: 8 to 12 characters of 0-9 and a-z, so that it fits into the first block")
    if chunk_size % block_size:
        raise ValueError(f"chunk_size {chunk_size} is not a multiple of block_size {block_size}")
    want = _aim(target, chunk_size, block_size)
    body, tail = _parts(_copies(count, want))
    if count(_assemble(nonce, [], tail)) > want:
        body, tail = [*body, tail], ""
    # The most words whose prompt has at most `want` tokens: token counts grow with the words, so halving finds it.
    low, high = 0, len(body)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count(_assemble(nonce, body[:middle], tail)) <= want else (low, middle - 1)
    for kept in range(low, max(low - 64, -1), -1):
        text = _assemble(nonce, body[:kept], tail)
        tokens = count(text)
        if chunk_size <= tokens <= target and 1 <= tokens % chunk_size <= block_size:
            return Prompt(text, tokens, chunk_size, block_size, nonce)
    raise ValueError(f"no prompt of at most {target} tokens with 1 <= n mod {chunk_size} <= {block_size}")


def unseen(nonce: str) -> str:
    """A short request that shares no token block with any other: the warm-up before a timed phase."""
    return f"{nonce} A lighthouse keeper writes in the log every hour. Tonight the entry says that"


def _aim(target: int, chunk_size: int, block_size: int) -> int:
    """The largest n <= target in the middle of the allowed remainders (room for a word of several tokens)."""
    remainder = max(1, block_size * 3 // 4)
    if target < chunk_size + remainder:
        raise ValueError(f"target {target} is below one chunk: at least {chunk_size + remainder} tokens")
    return (target - remainder) // chunk_size * chunk_size + remainder


def _copies(count: CountTokens, want: int) -> int:
    """How many copies of the handbook hold more than `want` tokens."""
    return want // max(1, count(handbook())) + 1


def _parts(copies: int) -> tuple[list[str], str]:
    """(words of the body, each with the white space before it; the last chapter, which the question is about).

    The body gives way when a prompt is trimmed; the chapter stays next to the question.
    """
    book, mark, chapter = handbook().rstrip().rpartition("\n\n12. ")
    # A prompt longer than the handbook gets further volumes of it: not the same token blocks again.
    volumes = [book] + [f"\n\nTHE SKARVEN LIGHT, volume {number}\n{book}" for number in range(2, copies + 2)]
    return re.findall(r"\s*\S+", "".join(volumes)), mark + chapter


def _assemble(nonce: str, words: list[str], tail: str) -> str:
    """The watchword stands at the top and, for models that read badly over thousands of tokens, before the last chapter
    as well: that is still in a cached block, the end of the prompt is not."""
    watchword = f"\n\n{_WATCHWORD} {nonce}."
    return f"{nonce}{watchword}\n{''.join(words)}{watchword + tail if tail else ''}\n\n{QUESTION}"
