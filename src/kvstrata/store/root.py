"""Owning a root folder: checks before anything is written, the lock, and healing when the folder is pulled away."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import stat
import threading
from pathlib import Path

from kvstrata.store.errors import StoreError
from kvstrata.store.folders import link_unnamed
from kvstrata.store.format import FORMAT
from kvstrata.store.mounts import file_system, objection
from kvstrata.store.settings import StoreSettings

__all__ = ["FORMAT_FILE", "LOCK_FILE", "NAMESPACE_FOLDER", "Root", "open_root"]

LOCK_FILE = ".lock"
FORMAT_FILE = "FORMAT.json"
_PROBE_FILE = ".probe"
NAMESPACE_FOLDER = re.compile("[0-9a-f]{32}")
_OTHERS = 0o077
# A full or worn disk still serves reads: the probe passes, stores will say what is wrong.
_NOT_THE_PATHS_FAULT = (errno.ENOSPC, errno.EDQUOT, errno.EIO)

log = logging.getLogger(__name__)


class Root:
    """An owned root. `direct`: O_DIRECT was asked for and works here."""

    def __init__(self, path: Path, lock_fd: int, *, direct: bool) -> None:
        self.path = path
        self.direct = direct
        self._lock_fd = lock_fd
        self._device = path.stat().st_dev
        self._healing = threading.Lock()

    def heal(self) -> bool:
        """Make the root anew if it was removed or emptied, and own that one; True if so: the books are wrong then.

        Never on another device: an unmounted disk must not fill what lies under its mount point. OSError otherwise.
        """
        with self._healing:
            try:
                ours, there = os.fstat(self._lock_fd), (self.path / LOCK_FILE).stat()
                if (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino):
                    return False
            except FileNotFoundError:
                pass
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.path.stat().st_dev != self._device:
                with contextlib.suppress(OSError):
                    self.path.rmdir()
                raise OSError(errno.ENODEV, "the root is on another device than at the start", str(self.path))
            lock_fd = _lock(self.path)
            with contextlib.suppress(OSError):
                os.close(self._lock_fd)
            self._lock_fd = lock_fd
            _write_format(self.path)
            log.warning("block store: %s had been taken away and was made anew", self.path)
            return True

    def close(self) -> None:
        """Give the root up; idempotent."""
        with contextlib.suppress(OSError):
            os.close(self._lock_fd)
        self._lock_fd = -1


def open_root(settings: StoreSettings) -> Root:
    """Check, create, lock and probe the root. StoreError says what is wrong (`owned`: another process has it)."""
    path = _checked_folder(settings.root)
    _check_file_system(path, settings.allow_fs)
    try:
        lock_fd = _lock(path)
    except BlockingIOError:
        raise StoreError(
            f"{path} owned by another process ({_owner(path)})",
            "one owner a root",
            "stop that process, or give this one a root of its own (KV_STORE_ROOT)",
            owned=True,
        ) from None
    except OSError as error:
        raise _not_writable(path, error) from error
    try:
        _check_format(path)
        _probe_links(path)
        return Root(path, lock_fd, direct=settings.io == "direct" and _probe_direct(path))
    except BaseException:
        os.close(lock_fd)
        raise


def _not_writable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path}: {error.strerror} (errno {error.errno}, user {os.geteuid()})",
        "a folder that this user may write, on a file system with flock, O_TMPFILE and links",
        f"chown or remount it (for example `chown -R {os.geteuid()} {path}`), or set KV_STORE_ROOT to another folder",
    )


def _checked_folder(path: Path) -> Path:
    """An existing folder, nobody else's, mode 0700, that is a store's or empty."""
    if path.is_symlink():
        raise StoreError(
            f"{path} is a symlink to {path.readlink()}",
            "a real folder (what a link points to can change under a running store)",
            f"set KV_STORE_ROOT to {path.resolve()}",
        )
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path} is no folder", "a folder", "move the file away or set KV_STORE_ROOT to another path")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = path.resolve()
        names = {entry.name for entry in os.scandir(path)}
    except OSError as error:
        raise _not_writable(path, error) from error
    strangers = sorted(name for name in names - {LOCK_FILE, "lost+found"} if not NAMESPACE_FOLDER.fullmatch(name))
    if FORMAT_FILE not in names and strangers:
        raise StoreError(
            f"{path} holds {', '.join(strangers[:3])} and no {FORMAT_FILE}",
            "an empty folder or a block store",
            "set KV_STORE_ROOT to a folder of its own",
        )
    mode = path.stat().st_mode
    if mode & _OTHERS or mode & stat.S_IRWXU != stat.S_IRWXU:
        try:
            path.chmod(0o700)
        except OSError as error:
            raise _not_writable(path, error) from error
        log.warning("block store: %s had mode %o, now 700: a cache holds what users wrote", path, stat.S_IMODE(mode))
    return path


def _check_file_system(path: Path, allowed: tuple[str, ...]) -> None:
    kind = file_system(path)
    why = objection(kind)
    if not why:
        return
    if kind in allowed or kind.partition(".")[0] in allowed:
        log.warning("block store: %s is on %s, %s. KV_CACHE_ALLOW_FS allows it.", path, kind, why)
        return
    raise StoreError(
        f"{path} on {kind}, {why}",
        "a local disk with ext4, xfs, btrfs or the like",
        f"set KV_STORE_ROOT to a folder on such a disk, or KV_CACHE_ALLOW_FS={kind} to use it all the same",
    )


def _lock(path: Path) -> int:
    """A descriptor that holds the lock; BlockingIOError if another one does."""
    # Read-only, so that it keeps nobody from remounting the disk read-only.
    lock_fd = os.open(path / LOCK_FILE, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(lock_fd, 0o600)
        # For the message of the second one only; a full disk may refuse it.
        with contextlib.suppress(OSError):
            (path / LOCK_FILE).write_text(f"{os.getpid()}\n")
    except BaseException:
        os.close(lock_fd)
        raise
    return lock_fd


def _owner(path: Path) -> str:
    try:
        return f"pid {int((path / LOCK_FILE).read_text())}"
    except (OSError, ValueError):
        return "pid unknown"


def _check_format(path: Path) -> None:
    file = path / FORMAT_FILE
    try:
        found = json.loads(file.read_bytes()).get("format")
    except FileNotFoundError:
        _write_format(path)
        return
    except (OSError, ValueError, AttributeError) as error:
        raise StoreError(
            f"{file}: {error}",
            f'{{"format": {FORMAT}}}',
            "restore the file, or remove it if the blocks are of this format",
        ) from error
    if found != FORMAT:
        raise StoreError(
            f"{file}: format {found}",
            f"format {FORMAT}",
            "use the kvstrata that wrote it, or set KV_STORE_ROOT to a new folder",
        )
    with contextlib.suppress(OSError):
        file.chmod(0o600)


def _write_format(path: Path) -> None:
    """Whole or not at all, like a block; a full disk leaves it for the next start."""
    text = json.dumps({"format": FORMAT, "about": "kvstrata block store, see docs/format.md"}) + "\n"
    try:
        fd = os.open(path, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in _NOT_THE_PATHS_FAULT:
            return
        raise _not_writable(path, error) from error
    try:
        if os.write(fd, text.encode()) == len(text):
            # The one file that is: without its bytes after a power failure, no start would succeed.
            os.fsync(fd)
            link_unnamed(fd, str(path / FORMAT_FILE))
    except OSError as error:
        if error.errno not in _NOT_THE_PATHS_FAULT:
            raise _not_writable(path, error) from error
    finally:
        os.close(fd)


def _probe_links(path: Path) -> None:
    """The way a block is published, tried for real."""
    # One name for all: what a killed start leaves, the next one removes.
    name = path / _PROBE_FILE
    try:
        fd = os.open(path, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            name.unlink(missing_ok=True)
            link_unnamed(fd, str(name))
            name.unlink()
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in _NOT_THE_PATHS_FAULT:
            raise _not_writable(path, error) from error
        log.warning("block store: %s: %s. Loads work; stores will fail until that is mended.", path, error.strerror)


def _probe_direct(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        log.warning(
            "block store: KV_STORE_IO=direct, but %s (%s) refuses O_DIRECT: %s (errno %s). Buffered I/O is used.",
            path,
            file_system(path),
            error.strerror,
            error.errno,
        )
        return False
    return True
