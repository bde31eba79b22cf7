"""One changing verb at a time in a checkout: two `up` at once would remove each other's containers.

A lock of the kernel (flock) on a file of the checkout: it goes with its process, however that ends, and no child
inherits it. The file says who holds it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from kvstrata.deploy.errors import KvError

__all__ = ["LOCK", "holder", "refuse_while_taken", "take"]

LOCK = ".kvstrata.lock"


@contextmanager
def take(root: Path, verb: str) -> Iterator[None]:
    """Hold the checkout at `root` for `verb`. Raises KvError at once when another command holds it: nothing waits."""
    path = root / LOCK
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise KvError(f"{path} cannot be written ({error.strerror})", "a checkout that you can write",
                      f"run it as the owner of {root}") from None  # fmt: skip
    with os.fdopen(handle, "r+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _refusal(root, file.read()) from None
        try:
            since = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S")
            _write(file.fileno(), json.dumps({"pid": os.getpid(), "verb": verb, "since": since}) + "\n")
            yield
        finally:
            _write(file.fileno(), "")


def holder(root: Path) -> str:
    """Who holds the checkout now, in words, or ""."""
    said = _taken(root)
    return "" if said is None else _words(said)


def refuse_while_taken(root: Path) -> None:
    """Raise KvError while another command changes the stack: what one sees of it then says nothing."""
    said = _taken(root)
    if said is not None:
        raise _refusal(root, said)


def _taken(root: Path) -> str | None:
    """Text of the file while somebody holds it, else None."""
    try:
        with (root / LOCK).open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read()
    except OSError:
        pass
    return None


def _refusal(root: Path, said: str) -> KvError:
    pid = _facts(said).get("pid")
    stop = f"kill {pid}, which ends it as Ctrl-C does" if pid else f"fuser {root / LOCK} names it"
    return KvError(
        f"{_words(said)} is at work in {root}",
        "one changing command at a time",
        f"wait for its end (make status shows the stack meanwhile); or stop it: {stop}",
    )


def _words(said: str) -> str:
    facts = _facts(said)
    return f"`{facts['verb']}` (pid {facts['pid']}, since {facts['since']})" if facts else "another command"


def _facts(said: str) -> dict[str, str]:
    """What the holder wrote; {} in the moment before it has."""
    try:
        facts = json.loads(said)
        return {key: str(facts[key]) for key in ("verb", "pid", "since")}
    except (ValueError, KeyError, TypeError):
        return {}


def _write(handle: int, text: str) -> None:
    os.ftruncate(handle, 0)
    os.pwrite(handle, text.encode(), 0)
