"""The RESP commands that clients say about themselves and ask about the server."""

from __future__ import annotations

import os
import time
from fnmatch import fnmatchcase
from pathlib import Path

from kvstrata import __version__
from kvstrata.engine.resp_commands import integer, wrong_syntax
from kvstrata.engine.resp_parse import Command
from kvstrata.engine.resp_reply import OK, Error, Reply, Simple
from kvstrata.engine.resp_session import Session

__all__ = ["auth", "client", "config", "echo", "hello", "info", "ping", "quit_", "select", "shown"]

#: Clients choose what they send by it. What we understand is a part of that version.
_REDIS_VERSION = "7.0.0"


def ping(session: Session, command: Command) -> Reply:
    return command.words()[0] if command.args else Simple("PONG")


def echo(session: Session, command: Command) -> Reply:
    return command.words()[0]


def quit_(session: Session, command: Command) -> Reply:
    session.closing = True
    return OK


def select(session: Session, command: Command) -> Reply:
    if integer(command.words()[0], -(1 << 31), 1 << 31) != 0:
        raise Error("ERR DB index is out of range: there is one database, 0; a token is a keyspace of its own")
    return OK


def auth(session: Session, command: Command) -> Reply:
    """The last word is the token."""
    *user, token = command.words()
    if len(user) > 1:
        raise wrong_syntax()
    session.sign_in(token, *user)
    return OK


def hello(session: Session, command: Command) -> Reply:
    words = command.words()
    protocol = session.protocol
    if words:
        if words[0] not in (b"2", b"3"):
            raise Error("NOPROTO unsupported protocol version")
        protocol = int(words.pop(0))
    who, name = None, None
    while words:
        option = words.pop(0).upper()
        if option == b"AUTH" and len(words) >= 2:
            who, words = (words[1], words[0]), words[2:]
        elif option == b"SETNAME" and words:
            name = _client_name(words.pop(0))
        else:
            raise wrong_syntax()
    if who is not None:
        session.sign_in(*who)
    session.reader()
    session.protocol = protocol
    session.name = session.name if name is None else name
    return {
        "server": "redis", "version": _REDIS_VERSION, "proto": protocol, "id": session.id, "mode": "standalone",
        "role": "master", "modules": [],
    }  # fmt: skip


def client(session: Session, command: Command) -> Reply:
    sub, *words = command.words()
    match sub.upper(), words:
        case b"SETNAME", [name]:
            session.name = _client_name(name)
        case b"GETNAME", []:
            return session.name or None
        case b"ID", []:
            return session.id
        case b"SETINFO", [_, _]:
            pass
        case ((b"INFO" | b"LIST"), _):
            peer = session.conn.peer
            return (
                f"id={session.id} addr={peer} name={session.name.decode('utf-8', 'replace')} resp={session.protocol}\n"
            )
        case b"REPLY", [mode] if mode.upper() == b"ON":
            pass
        case ((b"NO-EVICT" | b"NO-TOUCH"), [_]):
            pass
        case _:
            raise Error(f"ERR unknown subcommand or wrong number of arguments for 'client|{shown(sub.lower())}'")
    return OK


def config(session: Session, command: Command) -> Reply:
    sub, *patterns = command.words()
    session.reader()
    if sub.upper() != b"GET" or not patterns:
        raise Error("ERR only CONFIG GET is there: the settings are the engine's environment (docs/engine.md)")
    shared = session.shared
    values = {
        "appendonly": "yes",
        "databases": "1",
        "maxclients": str(shared.settings.max_connections),
        "maxmemory": str(shared.settings.capacity),
        "maxmemory-policy": "allkeys-lru",
        "proto-max-bulk-len": str(shared.settings.resp_max_value),
        "save": "",
    }
    wanted = [pattern.decode("utf-8", "replace").lower() for pattern in patterns]
    return {name: value for name, value in values.items() if any(fnmatchcase(name, one) for one in wanted)}


def info(session: Session, command: Command) -> Reply:
    shared = session.shared
    tenant = session.reader().tenant
    stats = shared.engine.stats(tenant)
    sections: dict[str, dict[str, object]] = {
        "server": {
            "redis_version": _REDIS_VERSION,
            "redis_mode": "standalone",
            "kvstrata_version": __version__,
            "process_id": os.getpid(),
            "uptime_in_seconds": int(time.monotonic() - shared.started),
        },
        "clients": {"maxclients": shared.settings.max_connections},
        "memory": {
            "used_memory": stats["resident_bytes"],
            "used_memory_rss": _rss(),
            "maxmemory": stats["capacity_bytes"],
            "maxmemory_policy": "allkeys-lru",
        },
        "persistence": {"loading": 0, "aof_enabled": 1},
        "stats": {
            "keyspace_hits": stats["get_hits"],
            "keyspace_misses": stats["get_misses"],
            "evicted_keys": stats["evictions"],
        },
        "replication": {"role": "master", "connected_slaves": 0},
        "keyspace": {"db0": f"keys={shared.engine.count(tenant)},expires={shared.engine.expiring(tenant)}"},
    }
    wanted = {shown(word.lower()) for word in command.words()}
    chosen = (
        sections if wanted <= {"default", "all", "everything"} else {s: v for s, v in sections.items() if s in wanted}
    )
    return "\r\n".join(
        f"# {title.capitalize()}\r\n" + "".join(f"{name}:{value}\r\n" for name, value in rows.items())
        for title, rows in chosen.items()
    )


def _client_name(name: bytes) -> bytes:
    if any(not 33 <= char <= 126 for char in name):
        raise Error("ERR Client names cannot contain spaces, newlines or special characters.")
    return name


def shown(word: bytes) -> str:
    """A word of the peer's for an error text."""
    return word[:64].decode("ascii", "backslashreplace")


def _rss() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
