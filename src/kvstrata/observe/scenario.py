"""Traffic that moves every panel: what `observe check` wants to have happened, on the running stack.

Each step is a few requests or one restart; a step that could not be reached (a cache too large to be filled within
the step's limit, say) is told and left to the check, which then names the panels that stand still.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstrata.deploy import kv_engine
from kvstrata.deploy.settings import Settings
from kvstrata.deploy.steps import Steps
from kvstrata.observe.engine_traffic import EngineTraffic
from kvstrata.proof.checks import registered_models
from kvstrata.proof.client import LmcacheClient, VllmClient
from kvstrata.proof.control import OwnBlocks, Target, wait_until
from kvstrata.proof.docker_control import running_stack
from kvstrata.proof.prompts import handbook

__all__ = ["Script", "run"]

_PUSHED_AND_SCRAPED_S = 25.0
"""LMCache pushes every 10 s and Prometheus scrapes every 10 s: a figure is seen within this time."""
_MOST_FILLERS = 160
_ANSWER = 4
_EVICTED = 12
_L0_EVICTED = "lmcache_mp_l0_block_lifetime_seconds_count"


@dataclass
class Script:
    """One run. `blocks`: the folder on this host in which L2's blocks lie, None where it is another machine's."""

    target: Target
    vllm: VllmClient
    lmcache: LmcacheClient
    blocks: Path | None
    note: Callable[[str], None]

    def __post_init__(self) -> None:
        self._words = self.vllm.tokenize(handbook(), special=False)
        self._own = OwnBlocks(self.target.control, self.target.chunk_size, self.target.engine)
        self._sent: list[list[int]] = []

    def prompt(self, chunks: int) -> list[int]:
        """A prompt that nobody has sent: a nonce, then words from the handbook, `chunks` chunks and one token long."""
        length = chunks * self.target.chunk_size + 1
        nonce = self.vllm.tokenize(secrets.token_hex(8), special=True)
        words = self._words * (length // max(len(self._words), 1) + 1)
        made = (nonce + words)[:length]
        self._sent.append(made)
        return made

    def ask(self, prompts: Sequence[Sequence[int]], salt: str | None = None) -> None:
        for prompt in prompts:
            self.vllm.complete(prompt, _ANSWER, salt=salt)

    def seen(self) -> None:
        """Wait until Prometheus has what happened so far."""
        time.sleep(_PUSHED_AND_SCRAPED_S)

    def restart(self, service: str, answers: Callable[[], bool]) -> None:
        self.target.control.kill([service])
        self.target.control.start([service])
        wait_until(answers, f"{service} answers", self.target.wait_timeout_s)
        known = lambda: bool(registered_models(self.lmcache.status()))  # noqa: E731
        wait_until(known, "vLLM registered with lmcache", self.target.wait_timeout_s)

    # -- steps --------------------------------------------------------------------------------------------------

    def cold_and_warm(self) -> None:
        prompts = [self.prompt(3) for _ in range(4)]
        self.ask(prompts)
        self.seen()
        self.ask(prompts)

    def tenants(self) -> None:
        shared = self.prompt(2)
        for salt in ("scenario-one", "scenario-two"):
            self.ask([shared, shared], salt=salt)

    def from_l1(self) -> None:
        prompts = [self.prompt(3) for _ in range(3)]
        self.ask(prompts)
        self.seen()
        self.restart("vllm", self.vllm.healthy)
        self.ask(prompts)

    def from_l2(self) -> None:
        prompts = [self.prompt(4) for _ in range(3)]
        self.ask(prompts)
        self.seen()
        for _ in range(2):
            self._own.drop_l1(prompts)
            self.ask(prompts)
            self.seen()

    def corrupt(self) -> None:
        """Flip a byte of the payload of the blocks that are written now, then read them."""
        if self.blocks is None:
            self.note("no L2 on this machine: no block to damage")
            return
        before, prompt = time.time() - 1, self.prompt(3)
        self.ask([prompt])
        self.seen()
        newest = sorted(
            (path for path in self.blocks.rglob("*") if path.is_file() and path.stat().st_mtime >= before),
            key=lambda path: path.stat().st_size,
        )[-1:]
        for path in newest:
            with path.open("r+b") as file:
                file.seek(4096 + 100)  # behind the header page (docs/format.md)
                byte = file.read(1)
                file.seek(4096 + 100)
                file.write(bytes([byte[0] ^ 0xFF]))
        self._own.drop_l1([prompt])
        self.ask([prompt])

    def evict(self) -> None:
        """Fill until every tier has evicted, and what L1 threw out came back."""
        first = [self.prompt(4) for _ in range(3)]
        self.ask(first)
        before = self._evicted()
        for count in range(_MOST_FILLERS):
            self.ask([self.prompt(4)])
            if count % 8 == 7 and not (still := [k for k, n in self._evicted().items() if n < before[k] + _EVICTED]):
                break
        else:
            self.note(f"{_MOST_FILLERS} prompts, and no eviction from {', '.join(still)}: smaller KV_L1_GB, KV_L2_GB")
        self.ask(first)

    def _evicted(self) -> dict[str, float]:
        """Tier to what it has thrown out so far."""
        now = self.lmcache.samples()
        found = {"L0": now.sum(_L0_EVICTED), "L1": now.sum("lmcache_mp_l1_evicted_chunks_total")}
        if self.target.engine:
            found["L2"] = float(self.target.engine.stats()["evictions"])
        elif self.blocks:
            found["L2"] = now.sum("kvstrata_store_evictions_total")
        return found

    def restart_lmcache(self) -> None:
        self.restart("lmcache", self.lmcache.healthy)
        self.ask([self.prompt(2)])

    def tidy(self) -> None:
        """Remove what it stored; blocks of tenants age out."""
        left = self._own.delete(self._sent)
        if left:
            self.note(left)


def run(settings: Settings, root: Path, steps: Steps) -> None:
    """All steps, in an order in which each finds what it needs. The proof at the end moves its own panels."""
    from kvstrata.proof import verify

    target = running_stack(settings, root)
    vllm, lmcache = VllmClient(target.vllm_url), LmcacheClient(target.lmcache_url)
    try:
        script = Script(target, vllm, lmcache, _blocks(settings), lambda text: None)
        for title, part in (
            *_engine_steps(settings),
            ("Cold, then from vLLM's own cache", script.cold_and_warm),
            ("Two tenants", script.tenants),
            ("From L2", script.from_l2),
            ("From L1, after a restart of vLLM", script.from_l1),
            ("A corrupt block", script.corrupt),
            ("Eviction from every tier", script.evict),
            ("A restart of lmcache", script.restart_lmcache),
            ("Taking it away again", script.tidy),
        ):
            with steps.step(title) as step:
                script.note = step.note
                part()
                script.seen()
                step.done("")
        with steps.step("Proof, live") as step:
            report = verify.run(settings, root, live=True)
            step.done("passed" if report.passed else "FAILED")
            script.seen()
    finally:
        vllm.close()
        lmcache.close()


def _blocks(settings: Settings) -> Path | None:
    """Where L2's blocks lie on this host."""
    if settings.has_engine:
        return settings.engine_dir / "engine" / "blocks"
    return settings.store_root if "nvme" in settings.layers else None


def _engine_steps(settings: Settings) -> tuple[tuple[str, Callable[[], None]], ...]:
    if not settings.has_engine:
        return ()
    traffic = EngineTraffic(f"http://127.0.0.1:{settings.engine_port}", kv_engine.token(settings))
    return (("The KV engine, asked directly", traffic.run),)
