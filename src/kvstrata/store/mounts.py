"""Which file system a folder lies on, and whether a store may live there."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["file_system", "objection"]

_NETWORK = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "9p", "virtiofs", "glusterfs", "lustre", "gpfs", "beegfs",
     "orangefs", "ocfs2", "gfs2", "vboxsf", "prl_fs", "vmhgfs")
)  # fmt: skip
_STACKED = frozenset(["overlay", "aufs", "unionfs", "ecryptfs"])
_VOLATILE = frozenset(["tmpfs", "ramfs", "devtmpfs", "hugetlbfs"])
_FOREIGN = frozenset(
    ("vfat", "msdos", "exfat", "ntfs", "ntfs3", "hfs", "hfsplus", "iso9660", "udf", "squashfs", "proc", "sysfs")
)
_OCTAL = re.compile(r"\\([0-7]{3})")


def _unescape(field: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)


def file_system(path: Path, mountinfo: str | None = None) -> str:
    """The type of the file system that holds an existing, resolved path ("ext4", "fuse.sshfs", ...; "" if unknown).

    By mount point and not by device number: btrfs subvolumes have device numbers that no mount shows.
    """
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return ""
    best, kind = -1, ""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(" "), after.split(" ")
        if len(fields) < 5 or not tail[0]:
            continue
        point = Path(_unescape(fields[4]))
        # Of two mounts on one point the later hides the earlier.
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), tail[0]
    return kind


def objection(kind: str) -> str:
    """Why no store should live on this file system; "" if it may. Unknown ones are left to the probe."""
    if kind in _NETWORK:
        return "a network file system: locks, unnamed files and timeouts of its server are not to be relied on"
    if kind in _STACKED:
        return "a stacked file system: its bytes belong to the container's layers and go with them"
    if kind in _VOLATILE:
        return "memory: the cache would not survive a restart and takes RAM from the model"
    if kind.partition(".")[0] in ("fuse", "fuseblk"):
        return "a user-space file system: it can hang with its daemon, and is often a network in disguise"
    if kind in _FOREIGN:
        return "a file system without the modes, links and locks that the store needs"
    return ""
