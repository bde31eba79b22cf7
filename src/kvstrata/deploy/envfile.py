"""Writing .env and the data folders: create once, fill blanks in place, rewrite the managed block only on a change."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from kvstrata.deploy import dotenv, folders, kv_engine
from kvstrata.deploy.errors import KvError
from kvstrata.deploy.knobs import MANAGED_KEYS, USER_KEYS
from kvstrata.deploy.settings import Settings

__all__ = [
    "check_data",
    "ensure",
    "ensure_data",
    "ensure_secrets",
    "lost_salt_key",
    "set_blank",
    "set_value",
    "write_managed",
]

#: Owner of the data when root runs the CLI: containers never run as root (facts: 0600 files need the same id).
SERVICE_ID = 10001


def ensure(root: Path, *, rootless: bool = False) -> bool:
    """Copy .env.example to .env if there is none, and fill KV_UID/KV_GID once. True if .env was created.

    `rootless`: the engine maps container uid 0 to the caller, so 0 is the id that owns the caller's files.
    """
    path = root / ".env"
    created = not path.exists()
    if created:
        example = root / ".env.example"
        if not example.is_file():
            raise KvError(f"no {example}", "a complete checkout", "git checkout -- .env.example")
        _replace(path, example.read_text(encoding="utf-8"), mode=0o600)  # a user may put a secret into it
    root_caller = os.geteuid() == 0
    uid, gid = (0, 0) if rootless else (SERVICE_ID, SERVICE_ID) if root_caller else (os.geteuid(), os.getegid())
    set_blank(root, {"KV_UID": str(uid), "KV_GID": str(gid)})
    return created


def set_blank(root: Path, values: Mapping[str, str]) -> list[str]:
    """Write `values` into user knobs that are blank or absent; a knob with a value is left alone. Names that changed.

    The rest of the file, comments included, stays byte for byte. Raises KvError for a name that is no knob.
    """
    return [key for key, value in values.items() if value and _set(root, key, value, keep=True)]


def set_value(root: Path, key: str, value: str) -> bool:
    """Write one user knob in place, whatever it says now: the verb that was called decides. True if it changed."""
    return _set(root, key, value, keep=False)


def _set(root: Path, key: str, value: str, keep: bool) -> bool:
    if key not in USER_KEYS:
        raise KvError(f"a write of {key} to .env", "a knob of .env.example", "this is a bug in kvstrata: report it")
    path = root / ".env"
    text = dotenv.read(path)
    lines = text.split("\n")
    entries = [e for e in dotenv.parse_text(text, str(path), os.environ) if e.key == key and not e.managed]
    line = f"{key}={dotenv.quote(value)}"
    if not entries:
        lines.insert(_end_of_user_part(lines), line)
    elif entries[-1].value == value or (keep and entries[-1].value):
        return False
    else:
        index = entries[-1].line - 1
        comment = re.search(r"\s+#[^'\"]*$", lines[index])
        lines[index] = line + (comment[0] if comment else "")
    _replace(path, "\n".join(lines))
    return True


def write_managed(root: Path, values: Mapping[str, str]) -> bool:
    """Put exactly MANAGED_KEYS between the marker lines at the end of .env; True if the file changed.

    Equal content is not written, so a second `up` leaves the file's mtime alone. Raises KvError for a missing or
    unknown key.
    """
    missing, extra = set(MANAGED_KEYS) - set(values), set(values) - set(MANAGED_KEYS)
    if missing or extra:
        raise KvError(f"managed settings: missing {sorted(missing)}, unknown {sorted(extra)}", "exactly MANAGED_KEYS",
                      "this is a bug in kvstrata: report it")  # fmt: skip
    path = root / ".env"
    text = dotenv.read(path)
    block = "".join(f"{key}={dotenv.quote(values[key])}\n" for key in MANAGED_KEYS)
    old = rf"\n*^{re.escape(dotenv.BEGIN)}$.*?(?:^{re.escape(dotenv.END)}$\n?|\Z)"
    begin, end = (re.search(rf"^{re.escape(mark)}$", text, re.M) for mark in (dotenv.BEGIN, dotenv.END))
    if begin and not end:
        # The end marker is lost: what is the user's below the begin marker stays.
        keys = "|".join(map(re.escape, MANAGED_KEYS))
        text = text[: begin.start()] + re.sub(rf"^(?:{keys})=.*\n?", "", text[begin.end() + 1 :], flags=re.M)
    user = re.sub(old, "\n", text, flags=re.M | re.S)
    new = f"{user.rstrip()}\n\n{dotenv.BEGIN}\n{block}{dotenv.END}\n"
    if new == text:
        return False
    _replace(path, new)
    return True


def check_data(settings: Settings) -> None:
    """Can the data folders be what they have to be? Changes nothing.

    Raises KvError for what is no folder, a system folder, or a cache or secrets folder that is not ours: closing it
    could take a disk away from its users (R16 wants it closed; a folder below it can be).
    """
    private = _private(settings)
    folders.check("KV_DATA_DIR", settings.data_dir, settings, private=False)
    for folder, knob in {**private, **dict.fromkeys(_open(settings), "KV_DATA_DIR")}.items():
        folders.check(knob, folder, settings, private=folder in private)
    for folder, knob in private.items():
        mode = folder.stat().st_mode & 0o777 if folder.exists() else 0o700
        if mode != 0o700 and not _ours(folder):
            fix = f"{knob}={folder / 'kvstrata'} in .env"
            if not folders.is_shared(folder):
                fix += f"; or, if nobody else needs it: chmod 700 {folder}"
            raise KvError(
                f"{folder} exists, holds other files and is open to others (mode {mode:o})",
                "a folder that only the services enter (0700)",
                fix,
            )


def ensure_data(settings: Settings) -> None:
    """Make the data folders, 0700 for cache and secrets, owned by KV_UID:KV_GID. KvError as `check_data` says."""
    check_data(settings)
    private = _private(settings)
    for folder in (settings.data_dir, *private, *_open(settings)):
        created = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if created and folder != settings.data_dir:
                _own(folder, settings)
            if folder in private and folder.stat().st_mode & 0o777 != 0o700:
                folder.chmod(0o700)
        except OSError as error:
            knob = private.get(folder, "KV_DATA_DIR")
            raise KvError(
                f"{knob}: {folder} cannot be made, or closed to others ({error.strerror})",
                "a place where you can make folders",
                f"set {knob} in .env to another folder",
            ) from None


def _private(settings: Settings) -> dict[Path, str]:
    """Folders that only the services enter, with the knob that leads to them. Plain vLLM has no cache folder."""
    cache = {settings.l2_dir: settings.l2_knob} if settings.persist else {}
    return {**cache, settings.secrets_dir: "KV_DATA_DIR"}


def _open(settings: Settings) -> tuple[Path, ...]:
    return settings.models_dir, settings.state_dir, settings.reports_dir


def _ours(folder: Path) -> bool:
    """Empty, or holding nothing but what this deployment puts there."""
    ours = {"store", "fs", "engine", "salt_key", kv_engine.SERVER, kv_engine.CLIENT, "prometheus", "grafana"}
    return {path.name for path in folder.iterdir()} <= ours


def ensure_secrets(settings: Settings) -> list[Path]:
    """Create the secrets that are missing or empty, 0600, never overwriting one. Files that were created or changed.

    salt_key: 32 random bytes in hex, the key of the digest of tenants' cache salts; without it salted blocks are lost.
    The KV engine's token and what goes with it: kv_engine.secret_files, and kv_engine.copies, which follow .env.
    """
    ensure_data(settings)
    created = [path for path, make in kv_engine.secret_files(settings).items() if _ensure_secret(path, make, settings)]
    for path, text in kv_engine.copies(settings).items():
        if not path.exists() or path.read_text(encoding="utf-8", errors="replace") != text:
            _write_secret(path, text, settings)
            created.append(path)
    path = settings.secrets_dir / "salt_key"
    if path.exists():
        if not path.read_text(encoding="ascii", errors="replace").strip():
            raise KvError(f"{path} is empty", "32 random bytes in hex", f"rm {path}; `make up` makes a new one")
        return created
    _replace(path, secrets.token_hex(32) + "\n", mode=0o600)
    _own(path, settings)
    return [*created, path]


def _ensure_secret(path: Path, make: Callable[[], str], settings: Settings) -> bool:
    if path.exists() and path.stat().st_size:
        return False
    text = make()
    if path.exists() and not text:  # the user's to write
        return False
    _write_secret(path, text, settings)
    return True


def _write_secret(path: Path, text: str, settings: Settings) -> None:
    if not path.parent.exists():
        path.parent.mkdir(mode=0o700)
        _own(path.parent, settings)
    _replace(path, text, mode=0o600)
    _own(path, settings)


def lost_salt_key(settings: Settings) -> str:
    """What to say when the key is gone although the cache holds blocks, else "". Ask before `ensure_secrets`."""
    key = settings.secrets_dir / "salt_key"
    if key.exists() or not any(path.is_file() for path in settings.cache_dir.rglob("*")):
        return ""
    return (
        f"{key} is gone, and {settings.cache_dir} holds blocks: a new key is made. Blocks of requests with a "
        "cache_salt or a LoRA adapter will never be found again. If you have a copy of the old key, put it back, then "
        "`make up`"
    )


def _end_of_user_part(lines: list[str]) -> int:
    """Index after the last line with text that stands before the managed block."""
    end = next((i for i, line in enumerate(lines) if line.strip() == dotenv.BEGIN), len(lines))
    while end and not lines[end - 1].strip():
        end -= 1
    return end


def _own(path: Path, settings: Settings) -> None:
    if os.geteuid() == 0 and settings.uid is not None and settings.gid is not None:
        os.chown(path, settings.uid, settings.gid)


def _replace(path: Path, text: str, mode: int | None = None) -> None:
    """Atomic write: a crash leaves the old file. An existing file keeps its owner and mode; a link keeps being one."""
    path = path.resolve()
    old = path.stat() if path.exists() else None
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), old.st_mode & 0o7777 if old else mode or 0o644)
            if old and os.geteuid() == 0:
                os.fchown(file.fileno(), old.st_uid, old.st_gid)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink()
        raise
