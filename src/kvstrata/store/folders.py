"""The folders of a key, and the small files in them that spell out what their names only hash."""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from pathlib import Path

from kvstrata.store.keys import BlockKey

__all__ = ["NAMESPACE_FILE", "SALT_FILE", "SALT_MEMBER", "json_stamps", "link_unnamed", "make_folders", "spell_out"]

NAMESPACE_FILE = "ns.json"
SALT_FILE = "salt.json"
SALT_MEMBER = "salt"


def make_folders(root: str, key: BlockKey) -> None:
    """Make what is missing of a key's folders, and write their JSON files where they are missing or damaged.

    The innermost folder comes last: where it is, the JSON files were there before it. Never makes the root. OSError.
    """
    path = root
    for folder, file, member, text, cls in zip(
        key.folder,
        (NAMESPACE_FILE, SALT_FILE),
        ("namespace", SALT_MEMBER),
        (key.namespace, key.salt),
        ("normal", None),
        strict=True,
    ):
        path = f"{path}/{folder}"
        _make_folder(path)
        spell_out(path, file, {member: text, "class": cls}, member)
    _make_folder(os.path.dirname(f"{root}/{key.path}"))  # noqa: PTH120


def json_stamps(salt_folder: str) -> list[object]:
    """Of the files in and above a salt's folder: while they are the same, so are the files. OSError."""
    stamps: list[object] = []
    for path in (f"{salt_folder}/{SALT_FILE}", f"{salt_folder[: salt_folder.rindex('/')]}/{NAMESPACE_FILE}"):
        seen = os.lstat(path)
        stamps += [seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns]
    return stamps


def _make_folder(path: str) -> None:
    try:
        os.mkdir(path, 0o700)  # noqa: PTH102
        os.chmod(path, 0o700)  # noqa: PTH101
    except FileExistsError:
        if os.path.islink(path):  # noqa: PTH114
            raise OSError(errno.ELOOP, "a symlink where a folder of the store belongs", path) from None


def spell_out(folder: str, file: str, content: dict[str, str | None], member: str) -> None:
    """Write a JSON file unless it says this already. OSError."""
    path = Path(folder, file)
    with suppress(FileNotFoundError, ValueError, AttributeError):
        if json.loads(path.read_bytes()).get(member) == content[member]:
            return
    data = json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")
    fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
        os.write(fd, data)
        path.unlink(missing_ok=True)
        # Another writer of the same folder says the same.
        link_unnamed(fd, str(path))
    finally:
        os.close(fd)


def link_unnamed(fd: int, path: str, folder: int | None = None) -> bool:
    """Give an O_TMPFILE file its name, in `folder` where that is open; False if the name is taken. OSError."""
    try:
        # src_dir_fd makes Python call linkat(2) with AT_SYMLINK_FOLLOW; an absolute path is not looked up from it.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, dst_dir_fd=folder, follow_symlinks=True)
    except FileExistsError:
        return False
    return True
