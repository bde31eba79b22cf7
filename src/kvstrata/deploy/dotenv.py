"""The dotenv dialect of docker compose: reading it with line numbers, and writing values that read back the same.

Compose 2.24.7 and 5.6.1 alike read a value so: 'single quotes' are literal; "double quotes" know backslash escapes and
$; without quotes it ends at " #" and knows $. tests/compose runs this module and both versions over one table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstrata.deploy.errors import KvError

__all__ = ["BEGIN", "END", "Entry", "parse", "parse_text", "quote", "read"]

BEGIN = "# >>> kvstrata: written by the CLI, changes below are lost >>>"
END = "# <<< kvstrata <<<"

_ASSIGN = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=(.*)")
_PLAIN = re.compile(r"[A-Za-z0-9_./:@,+=-]*")
_VARIABLE = re.compile(r"\$(?:\$|\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*)|)")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "$": "$"}


@dataclass(frozen=True)
class Entry:
    """One assignment: 1-based line, value as compose would see it, and whether it stands in the managed block."""

    key: str
    value: str
    line: int
    managed: bool


def parse(path: Path, environ: Mapping[str, str]) -> list[Entry]:
    """Entries of the file, in order. `environ` feeds $NAME. KvError with file:line for a line compose would refuse."""
    return parse_text(read(path), str(path), environ)


def read(path: Path) -> str:
    """The text of a dotenv file, without a byte order mark. KvError when it cannot be read or is not UTF-8."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise KvError(f"{path} cannot be read ({error.strerror})", "a file that you can read",
                      f"ls -l {path}; run it as its owner") from None  # fmt: skip
    if b"\0" in raw:
        raise KvError(f"{path} is no UTF-8 (NUL bytes, as in UTF-16)", "UTF-8", _recode(path, "UTF-16"))
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        found = f"{path}:{line}: byte {raw[error.start]:#04x}, which is no UTF-8"
        raise KvError(found, "UTF-8", _recode(path, "LATIN1")) from None
    return text.replace("\r\n", "\n")


def _recode(path: Path, from_: str) -> str:
    return f"save it as UTF-8 in the editor, or: iconv -f {from_} -t UTF-8 {path} -o {path}.new && mv {path}.new {path}"


def parse_text(text: str, name: str, environ: Mapping[str, str]) -> list[Entry]:
    entries: list[Entry] = []
    seen: dict[str, str] = {}
    managed = False
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: \f and U+2028 end no line
        if line.strip() in (BEGIN, END):
            managed = line.strip() == BEGIN
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _ASSIGN.fullmatch(line)
        if not match:
            raise KvError(f"{name}:{number}: {line.strip()[:80]}", "NAME=value, or a comment that starts with #",
                          "mend or delete that line")  # fmt: skip
        key = match[1]
        value = _value(match[2].strip(), f"{name}:{number}: {key}", {**seen, **environ})
        seen[key] = value
        entries.append(Entry(key, value, number, managed))
    return entries


def quote(value: str) -> str:
    """`value` written so that compose and `parse` read it back unchanged. Raises ValueError for NUL."""
    if "\0" in value:
        raise ValueError("a NUL cannot stand in an environment value")
    if _PLAIN.fullmatch(value):
        return value
    if not set(value) & {"'", "\n", "\r", "\\"}:
        return f"'{value}'"
    for char, escape in (("\\", "\\\\"), ('"', '\\"'), ("$", "\\$"), ("\n", "\\n"), ("\r", "\\r")):
        value = value.replace(char, escape)
    return f'"{value}"'


def _value(raw: str, at: str, names: Mapping[str, str]) -> str:
    if raw[:1] in ("'", '"'):
        end = _closing(raw)
        rest = raw[end + 1 :].strip() if end > 0 else ""
        if end < 0 or (rest and not rest.startswith("#")):
            raise KvError(f"{at}: quotes that do not match", "one quoted value on one line", "mend the quotes")
        body = raw[1:end]
        return body if raw[0] == "'" else _double(body, at, names)
    if raw.startswith("#"):  # compose takes the comment for the value: a blank knob would silently be "# …"
        raise KvError(
            f"{at}: a comment right after =", "the comment on a line of its own", "move or delete the comment"
        )
    plain = re.split(r"\s#", raw, maxsplit=1)[0].rstrip()
    return _expand(plain, at, names)


def _closing(raw: str) -> int:
    position = 1
    while position < len(raw):
        if raw[position] == "\\" and raw[0] == '"':
            position += 1
        elif raw[position] == raw[0]:
            return position
        position += 1
    return -1


def _double(body: str, at: str, names: Mapping[str, str]) -> str:
    parts = re.split(r"(\\.)", body)
    out = []
    for part in parts:
        if len(part) == 2 and part[0] == "\\":
            out.append(_ESCAPES.get(part[1], part))
        else:
            out.append(_expand(part, at, names))
    return "".join(out)


def _expand(text: str, at: str, names: Mapping[str, str]) -> str:
    def one(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        name = match[1] or match[2]
        if not name:
            raise KvError(f"{at}: a $ that starts no $NAME or ${{NAME}}", "a literal $ in 'single quotes'",
                          "put the whole value in single quotes")  # fmt: skip
        return names.get(name, "")

    return _VARIABLE.sub(one, text)
