"""The block store under the running stack: damage, the cap, recency, a full disk and one that does not answer."""

from __future__ import annotations

import json
import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvstrata.deploy import settings
from kvstrata.deploy.knobs import USER_KEYS
from kvstrata.proof import own_blocks
from kvstrata.proof.control import OwnBlocks, pack
from kvstrata.proof.docker_control import DockerControl
from tests.stack.harness import CHUNK, Answer, Stack, chunks, prompt, wait_until

pytestmark = pytest.mark.stack

#: Bytes of traffic that the cap test sends, as a multiple of its cap of 300 MB; the issue's own figure is 10.
TIMES = float(os.environ.get("KVSTRATA_CAP_TIMES", "3"))
CAP = 300_000_000
DEADLINE_S = 3


def tokens(stack: Stack, text: str) -> list[int]:
    body = {"model": stack.model(), "prompt": text}
    return list(stack.client.post(stack.url + "/tokenize", json=body).json()["tokens"])


def block_files(stack: Stack, text: str) -> list[Path]:
    """The files of the prompt's whole chunks in their order, whether they are there or not."""
    source = Path(own_blocks.__file__).read_text().partition("\nif __name__")[0]
    code = source + f"\nprint(json.dumps(chunk_hashes(decode(sys.argv[1]), {CHUNK})))"
    out = stack.compose("exec", "-T", "lmcache", "python3", "-c", code, pack(tokens(stack, text)))
    wanted: list[str] = json.loads(out)
    here = {path.name.split(".")[0]: path for path in stack.blocks()}
    return [here.get(name, Path("/absent") / name) for name in wanted]


def drop_l1(stack: Stack, text: str) -> None:
    """Only L2 has the prompt now: neither vLLM nor LMCache's RAM."""
    current = settings.load(stack.root, environ={})
    OwnBlocks(DockerControl(current, stack.root), CHUNK).drop_l1([tokens(stack, text)])
    stack.drop_l0()


def store_status(stack: Stack) -> dict[str, Any]:
    return dict(stack.client.get(stack.metrics_url + "/status").json()["storage_manager"]["l2_adapters"][0])


def restart_lmcache(stack: Stack) -> None:
    stack.kill("lmcache")
    stack.start("lmcache")
    stack.wait_used()


def flip(path: Path) -> None:
    """One bit of the payload, keeping owner and mode."""
    with path.open("r+b") as file:
        file.seek(4096 + 12_345)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


# -- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_a_damaged_block_is_a_hit_up_to_it_the_right_text_and_written_again(stack: Stack, where: str) -> None:
    text = prompt(f"damaged-{where}", 1100)
    cold = stack.store(text)
    files = block_files(stack, text)
    assert len(files) * CHUNK == chunks(cold.prompt_tokens) and all(path.exists() for path in files)
    at = {"first": 0, "middle": len(files) // 2, "last": len(files) - 1}[where]
    before = stack.metric("kvstrata_store_corrupt_total")
    drop_l1(stack, text)
    flip(files[at])
    warm = stack.ask(text)
    assert warm.text == cold.text
    assert warm.lmcache == at * CHUNK, "exactly the chunks before it"
    assert stack.metric("kvstrata_store_corrupt_total") == before + 1
    assert store_status(stack)["corrupt"] >= 1
    wait_until(files[at].exists, 30, "written again")
    stack.wait_stored()
    drop_l1(stack, text)
    again = stack.ask(text)
    assert again.text == cold.text and again.lmcache == len(files) * CHUNK
    assert stack.metric("kvstrata_store_corrupt_total") == before + 1


def test_status_and_metrics_tell_of_the_store(stack: Stack) -> None:
    stack.store(prompt("told"))
    status = store_status(stack)
    assert status["is_healthy"] and status["blocks"] == len(stack.blocks())
    assert status["used_bytes"] == stack.metric("kvstrata_store_used_bytes") > 0
    assert status["capacity_bytes"] == stack.metric("kvstrata_store_capacity_bytes")
    assert status["reader"] == "native"
    assert stack.metric("lmcache_mp_l2_usage_bytes") > 0, "LMCache's own gauge, in the same scrape"
    line = next(line for line in stack.ok("status").splitlines() if line.startswith("L2 "))
    assert f"{status['blocks']} blocks" in line


def test_a_store_that_cannot_be_opened_is_said_at_once_and_vllm_goes_on(stack: Stack) -> None:
    cold = stack.store(prompt("no-store"))
    root = settings.load(stack.root, environ={}).store_root
    away = root.with_name("away")
    stack.kill("lmcache")
    root.rename(away)
    root.symlink_to("/cache/away")
    try:
        stack.start("lmcache")

        def health() -> str:
            return json.dumps(stack.containers()["lmcache"]["State"].get("Health", {}).get("Log") or "")

        wait_until(lambda: "kvstrata failed: block store: found" in health(), 60, "the failed state")
        assert "is a symlink" in health() and "to fix it: set KV_STORE_ROOT" in health()
        assert stack.containers()["lmcache"]["RestartCount"] == 0
        stack.drop_l0()
        assert stack.ask(prompt("no-store")).text == cold.text
        done = stack.cli("up", "--no-proof")
        assert done.returncode == 1 and "is a symlink" in done.stderr
    finally:
        root.unlink()
        away.rename(root)
        stack.ok("up", "--no-proof")
        stack.wait_ready()
    stack.drop_l0()
    warm = stack.ask(prompt("no-store"))
    assert warm.text == cold.text and warm.lmcache == chunks(cold.prompt_tokens)


# -- the cap ---------------------------------------------------------------------------------------------------------


def disk_use(folder: Path) -> int:
    """As `du` counts: files and folders, each inode once."""
    seen: dict[int, int] = {}
    pending = [folder]
    while pending:
        with suppress(FileNotFoundError):
            here = pending.pop()
            stat = here.stat()
            seen[stat.st_ino] = stat.st_blocks * 512
            for entry in os.scandir(here):
                if entry.is_dir(follow_symlinks=False):
                    pending.append(Path(entry.path))
                else:
                    with suppress(FileNotFoundError):
                        stat = entry.stat(follow_symlinks=False)
                        seen[stat.st_ino] = stat.st_blocks * 512
    return sum(seen.values())


class Sampler:
    """`du` of the store every 100 ms."""

    def __init__(self, folder: Path) -> None:
        self.most = self.samples = 0
        self._folder, self._stop = folder, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            self.most = max(self.most, disk_use(self._folder))
            self.samples += 1


@contextmanager
def knobs(stack: Stack, **values: str) -> Iterator[None]:
    """Other settings in .env, and back."""
    stack.set(**values)
    try:
        yield
    finally:
        stack.set(**{key: USER_KEYS[key] for key in values})


@pytest.fixture
def capped(stack: Stack) -> Iterator[None]:
    with knobs(stack, KV_L2_GB=f"{CAP / 2**30:.4f}"):
        yield


def test_traffic_of_several_caps_over_kills_never_passes_the_cap_and_every_hit_is_right(
    stack: Stack, capped: None
) -> None:
    """Kills come while stores are under way; each prompt is asked for again, after a kill out of what is left of it."""
    root = stack.root / "data" / "cache" / "store"
    with Sampler(root) as sampler:
        cap = int(store_status(stack)["capacity_bytes"])
        assert cap <= CAP + 2**20
        asked: list[tuple[str, Answer]] = []
        sent, number, hits = 0.0, 0, 0
        kills = [TIMES * CAP * n / 4 for n in (1, 2, 3)]
        block = 0
        while sent < TIMES * CAP:
            text = prompt(f"cap-{number}", 1800)
            asked.append((text, stack.ask(text, 4)))
            block = block or max((p.stat().st_size for p in stack.blocks()), default=0)
            sent, number = sent + chunks(asked[-1][1].prompt_tokens) / CHUNK * (block or 1 << 20), number + 1
            if kills and sent > kills[0]:
                kills.pop(0)
                time.sleep(random.random())
                restart_lmcache(stack)
                stack.drop_l0()
                for old, cold in asked[-3:]:
                    warm = stack.ask(old, 4)
                    assert warm.text == cold.text
                    hits += warm.lmcache
        stack.wait_stored()
        assert not kills and hits > 0
        assert 0 < sampler.most <= cap, f"{sampler.most} bytes on disk, {sampler.samples} samples"
        assert sampler.samples > 20
        assert stack.metric("kvstrata_store_evictions_total") > 0
        restart_lmcache(stack)
        stack.drop_l0()
        text, cold = asked[-1]
        warm = stack.ask(text, 4)
        assert warm.text == cold.text and warm.lmcache == chunks(cold.prompt_tokens)
        print(f"cap {cap}, most {sampler.most}, {sampler.samples} samples, {sent:.0f} bytes sent in {number} prompts")


def test_a_hot_prefix_outlives_the_churn_of_the_disk_and_then_a_restart(stack: Stack, capped: None) -> None:
    """It is only ever answered by L0 and L1; without telling the disk it would be the oldest there."""
    hot = prompt("hot", 900)
    cold = stack.store(hot)
    block = stack.blocks()[-1].stat().st_size
    sent, number = 0, 0
    evictions = stack.metric("kvstrata_store_evictions_total")
    while sent < 2 * CAP:
        other = stack.ask(prompt(f"churn-{number}", 1800), 2)
        assert stack.ask(hot).text == cold.text
        sent, number = sent + chunks(other.prompt_tokens) // CHUNK * block, number + 1
    stack.wait_stored()
    assert stack.metric("kvstrata_store_evictions_total") > evictions
    restart_lmcache(stack)
    stack.drop_l0()
    warm = stack.ask(hot)
    assert warm.text == cold.text and warm.lmcache == chunks(cold.prompt_tokens)


# -- a disk of its own: full, and hung -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Disk:
    """A loop-mounted ext4 that holds the cache of the running stack."""

    stack: Stack
    folder: Path
    device: str  # "major:minor"

    @contextmanager
    def full(self) -> Iterator[None]:
        """Not a byte left. fallocate takes the space without writing it."""
        file = self.folder / "filler"
        stat = os.statvfs(self.folder)
        with file.open("wb") as handle:
            size = stat.f_bavail * stat.f_frsize
            while size >= 4096:
                try:
                    os.posix_fallocate(handle.fileno(), handle.seek(0, os.SEEK_END), size)
                except OSError:
                    size //= 2
        try:
            yield
        finally:
            file.unlink()

    @contextmanager
    def hung(self) -> Iterator[None]:
        """One byte a second for the cache server's reads (blkio of its container), and none of it in the page cache."""
        container = self.stack.containers()["lmcache"]
        control = Path("/sys/fs/cgroup/blkio/docker", container["Id"], "blkio.throttle.read_bps_device")
        if not control.exists():
            pytest.skip("no blkio controller of cgroup v1 for containers here")
        os.sync()
        for path in self.stack.blocks():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        control.write_text(f"{self.device} 1")
        try:
            yield
        finally:
            control.write_text(f"{self.device} 0")


@pytest.fixture(scope="module")
def disk(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a disk")
    folder = tmp_path_factory.mktemp("disk")
    image, mounted = folder / "image", folder / "mounted"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(6 << 30)  # sparse
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    done = subprocess.run(["mount", "-o", "loop", str(image), str(mounted)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this machine does not mount it: {done.stderr.strip()}")
    number = mounted.stat().st_dev
    try:
        values = {"KV_CACHE_DIR": str(mounted / "cache"), "KV_STORE_FREE_FLOOR_GB": "0"}
        with knobs(stack, **values, KV_STORE_LOAD_DEADLINE=str(DEADLINE_S)):
            yield Disk(stack, mounted, f"{os.major(number)}:{os.minor(number)}")
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)


def test_a_full_disk_serves_what_it_has_and_needs_no_restart(stack: Stack, disk: Disk) -> None:
    kept = prompt("kept", 900)
    cold = stack.store(kept)
    failures = stack.metric("kvstrata_store_store_failures_total")
    with disk.full():
        new = prompt("new", 900)
        first = stack.ask(new)
        assert first.status == 200
        wait_until(lambda: stack.metric("kvstrata_store_store_failures_total") > failures, 60, "counted")
        said = stack.cli("status")
        assert said.returncode == 1 and "NOTHING IS STORED: " in said.stdout, said.stdout
        drop_l1(stack, kept)
        warm = stack.ask(kept)
        assert warm.text == cold.text and warm.lmcache == chunks(cold.prompt_tokens)
        restart_lmcache(stack)
        stack.drop_l0()
        warm = stack.ask(kept)
        assert warm.text == cold.text and warm.lmcache == chunks(cold.prompt_tokens), "after a start on a full disk"
    later = prompt("later", 900)
    stored = stack.store(later)
    assert "NOTHING IS STORED" not in stack.cli("status").stdout
    drop_l1(stack, later)
    warm = stack.ask(later)
    assert warm.text == stored.text and warm.lmcache == chunks(stored.prompt_tokens)


def test_a_disk_that_does_not_answer_costs_one_deadline_and_no_answer(stack: Stack, disk: Disk) -> None:
    texts = [prompt(f"hung-{n}", 900) for n in range(3)]
    cold = [stack.store(text) for text in texts]
    for text in texts:
        drop_l1(stack, text)
    with disk.hung():
        for n, text in enumerate(texts):
            answer = stack.ask(text)
            assert answer.text == cold[n].text and answer.lmcache == 0
            assert answer.seconds < cold[n].seconds * 3 + DEADLINE_S + 5, "cold speed, and the deadline"
            print(f"hung disk: answered in {answer.seconds:.1f} s, cold was {cold[n].seconds:.1f} s")
            assert store_status(stack)["suspect"]
        assert stack.healthy() and stack.cache_healthy()
        assert "DOES NOT ANSWER" in stack.cli("status").stdout
    wait_until(lambda: not store_status(stack)["suspect"], 60, "the disk is trusted again")
    for text, first in zip(texts, cold, strict=True):
        drop_l1(stack, text)
        warm = stack.ask(text)
        assert warm.text == first.text and warm.lmcache == chunks(first.prompt_tokens)
