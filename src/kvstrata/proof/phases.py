"""The steps that verify is made of: a timed and judged request, a kill and its recovery, waiting, cleaning up."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence

from kvstrata.deploy.errors import KvError
from kvstrata.proof import prompts, room
from kvstrata.proof.checks import GuardFacts, registered_models
from kvstrata.proof.client import Completion, EngineFacts, LmcacheClient, RequestFailed, VllmClient
from kvstrata.proof.control import OwnBlocks, Target, wait_until
from kvstrata.proof.report import Phase
from kvstrata.proof.sources import Hits, Meter, Source, StoresStuck, wait_for_stores

__all__ = ["Disturbed", "Prover", "difference"]

Tokens = Sequence[int]
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"


class Disturbed(Exception):
    """Requests of others moved the counters of a phase; a live run starts again with per-request counts."""


class Prover:
    """One run of the proof: what was sent, what was seen, what went wrong. Used once."""

    def __init__(
        self, target: Target, vllm: VllmClient, lmcache: LmcacheClient, facts: EngineFacts, guard: GuardFacts, *,
        answer_tokens: int, counted: bool, retry_counted: bool, before: Callable[[str], None] | None,
    ) -> None:  # fmt: skip
        self.chunk = target.chunk_size
        self.block = facts.block_size or int((guard.value("facts") or {}).get("block_size", 0)) or target.chunk_size
        self.phases: list[Phase] = []
        self.failures: list[str] = []
        """Of the run as a whole; a phase keeps its own."""
        self.notes: list[str] = []
        self.skipped: set[str] = set()
        self.at = "cold"
        self.sent_tokens = 0
        """Tokens of the first prompt that a phase sent (P1)."""
        self.room: room.Room | None = None
        """Of L1, where it was measured."""
        self._answer_tokens = answer_tokens
        self._target, self._vllm, self._lmcache, self._facts = target, vllm, lmcache, facts
        self._counted, self._retry_counted, self._before = counted, retry_counted, before
        self._meter = Meter(vllm, lmcache)
        self._blocks = OwnBlocks(target.control, target.chunk_size, target.engine)
        self._sent: list[tuple[int, ...]] = []
        self._down: set[str] = set()

    # -- prompts ------------------------------------------------------------------------------------------------

    def length(self, wanted: int) -> int:
        """Prompt length that every tier hits alike: the most that is <= wanted and fits the model's context."""
        answer = self._answer_tokens
        most = min(wanted, (self._facts.max_model_len or wanted + answer + 64) - answer - 16)
        if most < 2 * self.chunk:
            most = max(most, min(2 * self.chunk, self._facts.max_model_len - answer - 16))
        remainder = max(1, self.block * 3 // 4)
        if most < self.chunk + remainder:
            raise KvError(
                found=f"max_model_len {self._facts.max_model_len} with chunks of {self.chunk} tokens",
                needed=f"room for one chunk: {self.chunk + remainder} prompt tokens and {answer} more",
                fix="raise --max-model-len (KV_VLLM_EXTRA_ARGS) or lower KV_CHUNK_SIZE in .env",
            )
        return (most - remainder) // self.chunk * self.chunk + remainder

    def measure_l1(self) -> room.Room | None:
        """Stores one chunk to see what it takes of L1. None: not to be told, as while others store theirs."""
        if not self._counted:
            self.room = room.measure(self._lmcache, lambda: self._vllm.complete(self._unrelated(self.chunk + 1), 1))
        return self.room

    def fitted(self, length: int) -> int:
        """`length`, or less and a note, so that L1 keeps two such prompts until they are read."""
        found = self.measure_l1()
        if found is None or length // self.chunk <= found.a_prompt:
            return length
        fits = found.a_prompt * self.chunk + length % self.chunk
        self.notes.append(f"prompts of {fits} instead of {length} tokens: {found}; a larger KV_L1_GB allows more")
        return fits

    def _l1_is_small(self, chunks: int) -> str:
        size = self.room or f"L1 of {room.l1_bytes(self._lmcache)[1] / (1 << 30):.3g} GiB"
        return f": {size}, and did not keep all {chunks} of these; raise KV_L1_GB in .env, then `make up`"

    def prompt(self, length: int) -> tuple[int, ...]:
        """A fresh prompt of `length` tokens or, as it keeps whole words, a few less; its hits are those of `length`."""
        fresh = "".join(secrets.choice(_ALPHABET) for _ in range(10))
        text = prompts.build(
            fresh, lambda t: len(self._vllm.tokenize(t)), target=length, chunk_size=self.chunk, block_size=self.block
        ).text
        return tuple(self._vllm.tokenize(text))

    # -- requests -----------------------------------------------------------------------------------------------

    def warm_up(self) -> bool:
        """An unrelated request of a little over one chunk. True if vLLM asked LMCache for it."""
        fresh = self._unrelated(self.chunk + 1)
        try:
            _, hits = self._meter.measure(lambda: self._vllm.complete(fresh, 2, keep=False))
        except RequestFailed:
            return False
        return hits.looked_up_tokens > 0

    def _unrelated(self, length: int) -> list[int]:
        fresh = [byte % 250 + 3 for byte in secrets.token_bytes(length)]
        self._sent.append(tuple(fresh))
        return fresh

    def ask(self, prompt: Tokens) -> Completion:
        """An untimed request (a yardstick)."""
        self._sent.append(tuple(prompt))
        return self._vllm.complete(prompt, self._answer_tokens)

    def phase(
        self, name: str, prompt: Tokens, source: Source, yardstick: Completion | None, *,
        salt: str | None = None, keep: bool = True, hook: bool = True,
    ) -> Completion | None:  # fmt: skip
        """Warm up, run one timed request, judge it against what `source` must give and against `yardstick`'s text."""
        self.at = name
        if self._before and hook:
            self._before(name)
        # Shorter than a chunk: it wakes the engine and asks LMCache for nothing.
        with contextlib.suppress(RequestFailed):
            self._vllm.complete(self._unrelated(32), 2, keep=False)
        self._sent.append(tuple(prompt))
        self.sent_tokens = self.sent_tokens or len(prompt)
        send = self._vllm.complete_counted if self._counted else self._vllm.complete
        expected = prompts.expected_hits(len(prompt), self.chunk, self.block, source)
        served = self._served()
        try:
            answer, hits = self._meter.measure(lambda: send(prompt, self._answer_tokens, salt=salt, keep=keep))
        except RequestFailed as failed:
            self.phases.append(Phase(name, None, 0, expected, "none", source, "", False, (str(failed),)))
            return None
        if self._counted:
            hits = _counted_hits(answer, hits, source)
        elif not hits.exact and self._retry_counted:
            raise Disturbed
        problems = _judge(hits, expected, source, self._counted)
        if source == "l1" and problems and hits.exact and hits.external_tokens:
            problems[0] += self._l1_is_small(len(prompt) // self.chunk)
        if source == "l2" and served is not None and not problems:
            problems += _engine_problems((self._served() or 0) - served, hits.l2_chunks)
        unlike = difference(answer, yardstick) if yardstick is not None else None
        if unlike is None and not answer.text:
            unlike = "found: an empty answer; needed: text"
        problems += [unlike] if unlike else []
        self.phases.append(
            Phase(
                name, answer.ttft_s, hits.tokens, expected, hits.source, source, answer.text_sha256, unlike is None,
                tuple(problems),
            )
        )  # fmt: skip
        return answer

    def _served(self) -> int | None:
        """Blocks that the KV engine has given so far; None where the blocks are elsewhere."""
        return self._target.engine.hits() if self._target.engine else None

    def from_disk(self, name: str, prompt: Tokens, yardstick: Completion | None) -> Completion | None:
        """A phase from L2 that forgives damaged blocks once: they are to be computed again, and right.

        A disk that damages what lies on it is no fault of the cache, as long as the text stays equal and the store
        counts what it refused. What was then stored again has to be hit in full, so that a store which refuses
        everything does not pass. LMCache is not restarted in between: its counters tell what happened.
        """
        before = self._refused()
        answer = self.phase(name, prompt, "l2", yardstick)
        seen, refused = self.phases[-1], self._refused() - before
        if not (seen.problems and seen.equal and refused > 0):
            return answer
        self.phases.pop()
        self.notes.append(
            f"{name}: {refused} damaged blocks on disk were refused and computed again: equal text, "
            f"{seen.hit_tokens} of {seen.expected_hit_tokens} tokens from the cache. The figures are those of a second "
            "try, after they were stored again. Look at the disk (dmesg, smartctl)"
        )
        self.wait_stored(name, prompt)
        self.restart("vllm")
        self.drop_l1(prompt)
        return self.phase(name, prompt, "l2", yardstick, hook=False)

    def _refused(self) -> int:
        return int(self._lmcache.samples().sum("kvstrata_store_corrupt_total"))

    # -- the stack ----------------------------------------------------------------------------------------------

    @property
    def has_l2(self) -> bool:
        return bool(self._lmcache.status().get("storage_manager", {}).get("num_l2_adapters"))

    def skip(self, name: str, why: str) -> None:
        self.skipped.add(name)
        self.notes.append(why)

    def wait_stored(self, name: str, *stored: Tokens) -> None:
        """Until the blocks of `stored` lie in their last tier. Raises StoresStuck; `name` needs it."""
        self.at = name
        chunks = sum(len(prompt) // self.chunk for prompt in stored)
        try:
            wait_for_stores(self._lmcache, chunks, lambda: self._blocks.count(stored))
        except StoresStuck as stuck:
            if self.room is None or chunks <= self.room.kept:
                raise
            raise StoresStuck(f"{stuck}{self._l1_is_small(chunks)}") from stuck

    def drop_l1(self, prompt: Tokens) -> None:
        """Remove the proof's own blocks from L1, so that only L2 can serve them."""
        removed, needed = self._blocks.drop_l1([prompt]), len(prompt) // self.chunk
        if removed < needed:
            self.notes.append(f"{removed} of {needed} own blocks were in L1 when they were to be removed from it")

    def restart(self, *services: str) -> None:
        """SIGKILL at once, start again, and return when requests are served and LMCache is asked again."""
        control = self._target.control
        self.at = "restart_both" if len(services) > 1 else f"restart_{services[0]}"
        self._down |= set(services)
        control.kill(services)
        control.start(services)
        self.wait_back()

    def wait_back(self) -> None:
        """Until requests are served and LMCache is asked again, after whatever restarted one of them."""
        limit = self._target.wait_timeout_s
        wait_until(self._lmcache.healthy, "lmcache healthy", limit)
        wait_until(self._vllm.healthy, "vllm healthy", limit)
        self._down.clear()
        wait_until(lambda: bool(registered_models(self._lmcache.status())), "vLLM registered with lmcache", limit)
        wait_until(self.warm_up, "vLLM asks LMCache for its prompts", limit, every_s=1.0)

    def restore(self) -> None:
        """Start what a failed run left down."""
        if self._down:
            self._target.control.start(sorted(self._down))
            self._down.clear()

    def clean_up(self) -> None:
        """Remove every block of this run; what cannot be removed is a note, never a reason to fail."""
        try:
            wait_until(self._lmcache.healthy, "lmcache healthy", 30)
            left = self._blocks.delete(self._sent)
        except (KvError, OSError) as error:
            left = f"blocks of the proof were not removed: {error}"
        if left:
            self.notes.append(left)


def difference(answer: Completion, yardstick: Completion) -> str | None:
    """None when both answers are the same bytes, else a sentence that says where they part."""
    if answer.text == yardstick.text and answer.token_ids == yardstick.token_ids:
        return None
    found, needed = answer.text.encode(), yardstick.text.encode()
    at = next((i for i, (a, b) in enumerate(zip(found, needed, strict=False)) if a != b), min(len(found), len(needed)))
    return (
        f"answer differs from byte {at} on: found: {found[at : at + 24]!r} (sha256 {answer.text_sha256[:12]}); "
        f"needed: {needed[at : at + 24]!r} (sha256 {yardstick.text_sha256[:12]})"
    )


def _judge(hits: Hits, expected: int, source: Source, counted: bool) -> list[str]:
    problems = []
    if not hits.exact:
        problems.append("found: counters moved by other requests; needed: this request alone (run it again)")
    if hits.tokens != expected:
        found = f"{hits.tokens} (from {hits.source})"
        problems.append(f"cached tokens: found: {found}; needed: {expected} (from {source})")
    elif hits.source != source:
        problems.append(f"source: found: {hits.source}; needed: {source}")
    if not counted and not hits.looked_up_tokens:
        problems.append("found: vLLM did not ask LMCache; needed: a lookup of the prompt (is the connector there?)")
    return problems


def _engine_problems(given: int, chunks: int) -> list[str]:
    """LMCache says that so many chunks came from L2: the engine must have given their blocks, one a rank and group."""
    if given and chunks and given % chunks == 0:
        return []
    return [f"engine: found: {given} blocks given (get_hits); needed: those of {chunks} chunks"]


def _counted_hits(answer: Completion, around: Hits, source: Source) -> Hits:
    """Hits from the connector's own counts; L1 or L2 as the steps before left possible: others blur the counters."""
    if answer.stats is None:
        return Hits(0, 0, 0, 0, exact=True)
    extra = int(answer.stats.get("num_lmcache_extra_cached_tokens", 0))
    return Hits(
        l0_tokens=int(answer.stats.get("num_vllm_cached_tokens", 0)),
        external_tokens=extra,
        l2_chunks=around.l2_chunks if source == "l2" else 0,
        looked_up_tokens=around.looked_up_tokens,
    )
