"""The RESP commands on keys and values."""

from __future__ import annotations

from kvstrata.engine.errors import Absent
from kvstrata.engine.resp_parse import SMALL, Command
from kvstrata.engine.resp_reply import OK, Error, Reply, Simple
from kvstrata.engine.resp_session import Session
from kvstrata.engine.resp_value import Incoming
from kvstrata.engine.writing import LONGEST_KEY

__all__ = ["NoReply", "integer", "wrong_syntax"]

#: Keys a SCAN looks at in one go, at most.
_SCAN_MAX = 10_000


class NoReply:
    """The command has sent its reply itself."""


def wrong_syntax() -> Error:
    return Error("ERR syntax error")


def integer(word: bytes, least: int, most: int) -> int:
    """A number in the range, or Error."""
    digits = word[1:] if word.startswith(b"-") else word
    if not digits.isdigit() or len(digits) > 18 or not least <= int(word) <= most:
        raise Error("ERR value is not an integer or out of range")
    return int(word)


def _keys(command: Command) -> list[bytes]:
    keys = command.words()
    for key in keys:
        _fits(key)
    return keys


def _fits(key: bytes) -> bytes:
    if not 0 < len(key) <= LONGEST_KEY:
        raise Error(f"ERR a key of {len(key)} bytes; keys have 1 to {LONGEST_KEY}")
    return key


def get(session: Session, command: Command) -> Reply | NoReply:
    (key,) = _keys(command)
    session.say_block(session.reader(key).tenant, key)
    return NoReply()


def mget(session: Session, command: Command) -> Reply | NoReply:
    keys = _keys(command)
    # Once, before the head of the array: an error after it (the tokens change) would be taken for an element, and the
    # replies of later commands for the rest.
    tenant = session.reader(*keys).tenant
    session.say_array(len(keys))
    for key in keys:
        session.say_block(tenant, key)
    return NoReply()


def set_(session: Session, command: Command) -> Reply:
    first, value, *options = command.args
    key = _fits(first if isinstance(first, bytes) else b"")
    ttl_s, only = _set_options([bytes(word).upper() for word in options if isinstance(word, bytes)])
    tenant = session.writer(key).tenant
    engine = session.shared.engine
    replace, over = only != b"NX", only == b"XX"
    try:
        if isinstance(value, Incoming):
            put = value.store(replace=replace, over=over, ttl_s=ttl_s)
        else:
            assert isinstance(value, bytes)
            put = engine.put(tenant, key, memoryview(value), replace=replace, over=over, ttl_s=ttl_s)
    except Absent:
        return None
    return None if only == b"NX" and not put.new else OK


def _set_options(words: list[bytes]) -> tuple[float | None, bytes]:
    """(seconds to live, NX or XX or nothing). Raises Error."""
    ttl_s, only = None, b""
    rest = iter(words)
    for word in rest:
        if word in (b"NX", b"XX") and not only:
            only = word
        elif word in (b"EX", b"PX") and ttl_s is None:
            amount = next(rest, None)
            if amount is None:
                raise wrong_syntax()
            if amount.startswith(b"-") or amount == b"0":
                raise Error("ERR invalid expire time in 'set' command")
            ttl_s = integer(amount, 1, 1 << 40) / (1 if word == b"EX" else 1000)
        else:
            raise wrong_syntax()
    return ttl_s, only


def exists(session: Session, command: Command) -> Reply:
    """Each block it counts stays for a while: whoever asks first and gets then must find it (LMCache's client never
    comes back from a nil)."""
    keys = _keys(command)
    grant = session.reader(*keys)
    return sum(session.shared.engine.exists(grant.tenant, keys, session.shared.settings.lease_s))


def delete(session: Session, command: Command) -> Reply:
    keys = _keys(command)
    return session.shared.engine.delete(session.writer(*keys).tenant, keys)


def strlen(session: Session, command: Command) -> Reply:
    (key,) = _keys(command)
    return session.shared.engine.size(session.reader(key).tenant, key) or 0


def type_(session: Session, command: Command) -> Reply:
    (key,) = _keys(command)
    there = session.shared.engine.size(session.reader(key).tenant, key) is not None
    return Simple("string" if there else "none")


def _left(session: Session, command: Command, unit: int) -> int:
    (key,) = _keys(command)
    left = session.shared.engine.ttl(session.reader(key).tenant, key)
    if left is None:
        return -2
    return -1 if left < 0 else round(left * unit)


def ttl(session: Session, command: Command) -> Reply:
    return _left(session, command, 1)


def pttl(session: Session, command: Command) -> Reply:
    return _left(session, command, 1000)


def scan(session: Session, command: Command) -> Reply:
    cursor, *words = command.words()
    match, count, kind = b"*", 10, b"string"
    if len(words) % 2:
        raise wrong_syntax()
    for option, value in zip(words[::2], words[1::2], strict=True):
        if option.upper() == b"MATCH" and len(value) <= SMALL:
            match = value
        elif option.upper() == b"COUNT":
            count = min(integer(value, 1, 1 << 40), _SCAN_MAX)
        elif option.upper() == b"TYPE":
            kind = value.lower()
        else:
            raise wrong_syntax()
    tenant, prefix = session.reader().tenant, session.reader().prefix
    after = session.shared.cursors.after(tenant, integer(cursor, 0, 1 << 62))
    after, keys = session.shared.engine.scan(tenant, after, match, count)
    found = [key for key in keys if key.startswith(prefix)] if kind == b"string" else []
    return [str(session.shared.cursors.number(tenant, after)), found]


def dbsize(session: Session, command: Command) -> Reply:
    return session.shared.engine.count(session.reader().tenant)
