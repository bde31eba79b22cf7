"""Patterns as Redis has them: * ? [a-c] [^a] and \\ before a character that means itself."""

from __future__ import annotations

import re

__all__ = ["glob"]

_CLASS = re.compile(rb"\[(\^?)((?:\\.|[^\]\\])*)\]?", re.DOTALL)
_MEMBER = re.compile(rb"(\\.|.)(?:-(\\.|.))?", re.DOTALL)


def glob(pattern: bytes) -> re.Pattern[bytes]:
    """What `fullmatch`es the keys that the pattern means. Stars in a row are one, so that no pattern takes for ever."""
    out, at = b"", 0
    while at < len(pattern):
        byte = pattern[at : at + 1]
        if byte == b"*":
            while pattern[at : at + 1] == b"*":
                at += 1
            out += b".*+" if at == len(pattern) else b".*"
            continue
        if byte == b"[" and (match := _CLASS.match(pattern, at)):
            out += _class(match[1], match[2])
            at = match.end()
            continue
        if byte == b"\\" and at + 1 < len(pattern):
            at += 1
            byte = pattern[at : at + 1]
            out += re.escape(byte)
        else:
            out += b"." if byte == b"?" else re.escape(byte)
        at += 1
    return re.compile(out, re.DOTALL)


def _class(negated: bytes, members: bytes) -> bytes:
    body = b""
    for match in _MEMBER.finditer(members):
        low, high = match[1][-1:], (match[2] or match[1])[-1:]
        low, high = min(low, high), max(low, high)
        body += b"\\x%02x-\\x%02x" % (low[0], high[0])
    if not body:
        return b"." if negated else b"(?!)"
    return b"[" + (b"^" if negated else b"") + body + b"]"
