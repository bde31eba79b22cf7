"""What `kvstrata store` does to a root: check, make room, pin. Changes are made by the owner of the root alone.

The store keeps its books in memory, so a file that somebody else takes away from under it would make them wrong. Every
change here therefore holds the owner's flock, and is refused while a store holds it.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .blockfile import BlockIO
from .codecs import CodecError
from .errors import StoreError
from .format import BadBlock
from .keys import BlockKey, parse_name
from .settings import CLASSES
from .survey import Block, Folder, Odd, Survey, Totals, check_root

__all__ = [
    "Bad", "Evicted", "Verified", "evict", "holder", "key_of", "owning", "ranking", "set_class", "set_pinned", "verify",
]  # fmt: skip

_ALL_READERS = 4


@contextmanager
def owning(root: Path) -> Iterator[None]:
    """Hold the owner's lock of `root`. StoreError where a store holds it, or where the caller may not write there."""
    check_root(root)
    path = root / ".lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise StoreError(
            f"no {path}", "the lock that a store makes when it starts there", "start it once (make up)"
        ) from error
    except OSError as error:
        raise StoreError(
            f"{path}: {error.strerror} for uid {os.geteuid()}", "the owner's rights",
            "run this as root (sudo) or as the owner; KV_UID in .env names it",
        ) from error  # fmt: skip
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(
                f"{root} is in use by {holder(root) or 'another process'}",
                "a store that is stopped: a running one counts its blocks in memory",
                "docker compose stop lmcache, then this command again, then make up "
                "(ls, stat, namespaces, report and verify without --repair work beside a running one)",
                owned=True,
            ) from error
        yield
    finally:
        os.close(fd)


def holder(root: Path, proc: Path = Path("/proc")) -> str:
    """Who holds the lock, by looking only: "" for nobody, or for somebody whom this process cannot see."""
    try:
        info = (root / ".lock").stat()
        lines = (proc / "locks").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    wanted = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    for line in lines:
        parts = line.split()
        if "FLOCK" not in parts or "->" in parts or wanted not in parts:
            continue
        pid = parts[parts.index(wanted) - 1]
        with suppress(OSError):
            words = (proc / pid / "cmdline").read_bytes().decode(errors="replace").split("\0")
            return f"process {pid} ({' '.join(words).strip()[:100]})"
        return f"process {pid}" if pid.isdecimal() and pid != "0" else "a process of another container"
    return ""


# -- verify ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bad:
    """A file that is not the block its name says. `reason` as in docs/format.md; "io" where the system would not read
    it, "library" where the codec's Python package is missing.
    """

    path: str
    reason: str
    detail: str
    removed: bool


@dataclass
class Verified:
    """`gone`: evicted while the check ran. `whole`: good blocks; `disk`: their bytes on disk."""

    whole: int = 0
    disk: int = 0
    gone: int = 0
    bad: list[Bad] = field(default_factory=list)
    odd: list[Odd] = field(default_factory=list)

    @property
    def left(self) -> list[Bad]:
        """Bad blocks that are still there."""
        return [bad for bad in self.bad if not bad.removed]


def verify(
    survey: Survey, blocks: Iterable[tuple[Folder, Block]], *, repair: bool = False, workers: int = 0,
    done: Callable[[int], None] = lambda nbytes: None,
) -> Verified:  # fmt: skip
    """Read and check `blocks` in full. With `repair` (the caller owns the root) bad ones are removed.

    A file that cannot be judged (EIO, EACCES, no library for its codec) is told as bad and never removed.
    """
    result = Verified(odd=survey.odd)
    io = BlockIO(survey.root, codec="raw")
    with ThreadPoolExecutor(workers or min(_ALL_READERS, os.cpu_count() or 1)) as pool:
        pending: deque[tuple[Block, Future[Bad | None]]] = deque()
        for folder, block in blocks:
            pending.append((block, pool.submit(_check, io, folder, block)))
            if len(pending) > 64:
                _take(*pending.popleft(), survey.root, repair, result, done)
        while pending:
            _take(*pending.popleft(), survey.root, repair, result, done)
    return result


def _check(io: BlockIO, folder: Folder, block: Block) -> Bad | None:
    """None for a whole block; FileNotFoundError for one that went away."""
    try:
        io.check(Path(block.path), key_of(folder, block))
    except BadBlock as bad:
        return Bad(block.path, bad.reason, bad.detail, removed=False)
    except CodecError as error:
        return Bad(block.path, "library", str(error), removed=False)
    except FileNotFoundError:
        raise
    except OSError as error:
        return Bad(block.path, "io", error.strerror or str(error), removed=False)
    return None


def key_of(folder: Folder, block: Block) -> BlockKey | None:
    """The key that the block's place spells; None where a name is not known or only hashed."""
    parts = parse_name(block.path.rsplit("/", 1)[1])
    if parts is None or parts[0] is None or folder.namespace is None or folder.salt is None:
        return None
    with suppress(ValueError):  # numbers that no key has
        return BlockKey(folder.namespace, folder.salt, parts[0], parts[1], parts[2])
    return None


def _take(
    block: Block, checked: Future[Bad | None], root: Path, repair: bool, into: Verified, done: Callable[[int], None]
) -> None:
    try:
        bad = checked.result()
    except FileNotFoundError:
        into.gone += 1
    else:
        if bad is None:
            into.whole += 1
            into.disk += block.disk
        else:
            removed = repair and bad.reason not in ("io", "library") and _unlink(root / block.path)
            into.bad.append(Bad(bad.path, bad.reason, bad.detail, removed))
    done(block.length)


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


# -- make room, pin --------------------------------------------------------------------------------------------------


@dataclass
class Evicted:
    """What `evict` removed. `short`: bytes that it did not find, because the rest is pinned or cannot be removed."""

    blocks: int = 0
    disk: int = 0
    failed: int = 0
    short: int = 0


def evict(survey: Survey, nbytes: int, done: Callable[[int], None] = lambda nbytes: None) -> Evicted:
    """Remove blocks, lowest class and least recently used first, until `nbytes` are free. The caller owns the root."""
    ranked = [
        (CLASSES.index(cls), block.last_use_ns, block.path, block.disk)
        for folder, block in survey.all()
        if (cls := folder.cls_of(block)) != "pin"
    ]
    heapq.heapify(ranked)
    result = Evicted()
    while ranked and result.disk < nbytes:
        _, _, path, disk = heapq.heappop(ranked)
        if _unlink(survey.root / path):
            result.blocks += 1
            result.disk += disk
            done(disk)
        else:
            result.failed += 1
    result.short = max(0, nbytes - result.disk)
    return result


def set_pinned(root: Path, blocks: Iterable[Block], pinned: bool) -> int:
    """Set or clear the pin of blocks (mode 0400 or 0600); how many changed. The last use stays. The caller owns it."""
    changed = 0
    for block in blocks:
        if block.pinned != pinned:
            with suppress(FileNotFoundError):
                (root / block.path).chmod(0o400 if pinned else 0o600)
                changed += 1
    return changed


def set_class(root: Path, folder: Folder, cls: str | None, *, whole_namespace: bool) -> None:
    """Write the retention class of a namespace or of one salt. None takes a salt's own away. The caller owns the root.

    The file is replaced in one step, keeps what else it says, and belongs to its folder's owner, whoever runs this.
    """
    place = root / (folder.ns if whole_namespace else folder.path)
    path = place / ("ns.json" if whole_namespace else "salt.json")
    known: dict[str, Any] = {}
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_bytes())
        known = found if isinstance(found, dict) else {}
    name = folder.namespace if whole_namespace else folder.salt
    if name is None:
        raise StoreError(
            f"{path} does not say whose folder that is",
            "a readable JSON file",
            "start the store: it writes the file anew",
        )
    known |= {"namespace" if whole_namespace else "salt": name, "class": cls}
    owner = place.stat()
    temporary = place / f".{path.name}.new"
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
        if (owner.st_uid, owner.st_gid) != (os.geteuid(), os.getegid()):
            os.fchown(fd, owner.st_uid, owner.st_gid)
        os.write(fd, json.dumps(known).encode())
    finally:
        os.close(fd)
    temporary.replace(path)


def ranking(sums: dict[Folder, Totals]) -> list[tuple[Folder, Totals]]:
    """Folders with blocks, what is kept longest first: by class, then by last use."""
    full = [(folder, of) for folder, of in sums.items() if of.blocks]
    return sorted(full, key=lambda row: (CLASSES.index(row[0].cls), row[1].newest_ns or 0), reverse=True)
