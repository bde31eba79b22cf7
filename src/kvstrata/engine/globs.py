"""Patterns as Redis has them: * ? [a-c] [^a] and \\ before a character that means itself."""

from __future__ import annotations

import re

__all__ = ["glob"]

_CLASS = re.compile(rb"\[(\^?)((?:\\.|[^\]\\])*)\]?", re.DOTALL)
_MEMBER = re.compile(rb"(\\.|.)(?:-(\\.|.))?", re.DOTALL)


def glob(pattern: bytes) -> re.Pattern[bytes]:
    """What `fullmatch`es the keys that the pattern means, in time of their lengths' product.

    What stands between two stars has one length, so its first place is as good as any: it is never looked for again.
    """
    parts, at = [b""], 0
    while at < len(pattern):
        byte = pattern[at : at + 1]
        if byte == b"*":
            at += 1
            if len(parts) == 1 or parts[-1]:
                parts.append(b"")
            continue
        if byte == b"[" and (match := _CLASS.match(pattern, at)):
            parts[-1] += _class(match[1], match[2])
            at = match.end()
            continue
        if byte == b"\\" and at + 1 < len(pattern):
            at += 1
            byte = pattern[at : at + 1]
            parts[-1] += re.escape(byte)
        else:
            parts[-1] += b"." if byte == b"?" else re.escape(byte)
        at += 1
    first, *rest = parts
    found = b"".join(b"(?>.*?%b)" % part for part in rest[:-1]) + b".*" + rest[-1] if rest else b""
    return re.compile(first + found, re.DOTALL)


def _class(negated: bytes, members: bytes) -> bytes:
    body = b""
    for match in _MEMBER.finditer(members):
        low, high = match[1][-1:], (match[2] or match[1])[-1:]
        low, high = min(low, high), max(low, high)
        body += b"\\x%02x-\\x%02x" % (low[0], high[0])
    if not body:
        return b"." if negated else b"(?!)"
    return b"[" + (b"^" if negated else b"") + body + b"]"
