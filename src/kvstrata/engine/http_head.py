"""The head of an HTTP request: strict, bounded, and unambiguous about where the body ends.

llhttp (httptools) does the parsing in its strict mode, and refuses what smuggling is made of: two lengths, a length
beside a transfer coding, bare line feeds, folded headers, blanks before a colon. What it lets through and we do not
want is refused here.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

import httptools

from kvstrata.engine.http_reply import Problem

__all__ = ["MAX_HEAD", "MAX_KEY", "Head", "key_of_segment", "parse"]

MAX_HEAD = 32 << 10
"""Bytes of request line and headers together."""
MAX_TARGET = 3 * 4096 + 512
MAX_HEADERS = 100
MAX_KEY = 4096
"""Bytes of a key, decoded."""

# A second one of these would leave it to chance which of the two counts.
_SINGLE = frozenset((
    b"authorization", b"connection", b"content-length", b"content-type", b"expect", b"host", b"if-match",
    b"if-none-match", b"if-range", b"range", b"transfer-encoding", b"x-eg-data-version",
))  # fmt: skip
_VERSION = re.compile(rb"HTTP/(\d)\.\d")
_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
# RFC 9110: visible ASCII without these; a target with others is no URI, and proxies disagree about what it means.
_NO_URI = re.compile(rb"[^!$%&'()*+,\-./0-9:;=@A-Z_a-z~?]")


class Head:
    """What a request says before its body.

    Attributes:
        method, target: as sent. `minor` is 0 or 1 (HTTP/1.x).
        headers: lower-case name to value; of those that may be repeated, the last one.
        length: Content-Length, or None. `chunked`: the body comes in chunks, of unknown length.
        keep: the client wants the connection to stay. `expect`: it waits for "100 Continue"; False once that was sent.
        unread: the body, or a part of it, is still to be read from the connection.
    """

    __slots__ = (
        "chunked",
        "count",
        "expect",
        "headers",
        "keep",
        "length",
        "method",
        "minor",
        "target",
        "twice",
        "unread",
    )

    def __init__(self) -> None:
        self.method = b""
        self.target = b""
        self.minor = 1
        self.headers: dict[bytes, bytes] = {}
        self.length: int | None = None
        self.chunked = self.keep = self.expect = self.unread = False
        self.count = 0
        self.twice: bytes | None = None

    # -- called by httptools

    def on_url(self, part: bytes) -> None:
        """A piece of the target."""
        self.target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line."""
        name = name.lower()
        self.count += 1
        if name in self.headers and name in _SINGLE:
            self.twice = name
        self.headers[name] = value


def parse(raw: bytes) -> Head:
    """Read a head, from its first byte to the empty line that ends it. Raises Problem."""
    raw = _of_1_1(raw)
    head = Head()
    parser = httptools.HttpRequestParser(head)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserInvalidMethodError:
        raise Problem(501, "UnknownMethod", "that method is none that HTTP knows") from None
    except httptools.HttpParserUpgrade:
        pass  # nothing to upgrade to here: it is answered as if it had not been asked
    except httptools.HttpParserError as error:
        raise Problem(400, "BadRequest", f"not a request of HTTP/1.1: {error}") from None
    method = head.method = parser.get_method()
    if len(head.target) > MAX_TARGET:
        raise Problem(414, "TargetTooLong", f"a target of {len(head.target)} bytes; {MAX_TARGET} at most")
    if not raw.startswith(b"%b %b HTTP/1." % (method, head.target)):
        raise Problem(400, "BadRequest", "one blank between method, target and version")
    if _NO_URI.search(head.target):
        raise Problem(400, "BadTarget", "percent-encode what is not allowed in a path")
    headers = head.headers
    if head.twice is not None:
        raise Problem(400, "DuplicateHeader", f"{head.twice.decode('latin-1')} is there twice")
    if head.count > MAX_HEADERS:
        raise Problem(431, "TooManyHeaders", f"{head.count} headers; {MAX_HEADERS} at most")
    if parser.get_http_version() == "1.1":
        if not headers.get(b"host"):
            raise Problem(400, "NoHost", "HTTP/1.1 needs one Host header")
        head.keep = b"close" not in headers.get(b"connection", b"").lower()
    else:
        head.minor = 0
        head.keep = b"keep-alive" in headers.get(b"connection", b"").lower()
    _frame(head)
    return head


def _of_1_1(raw: bytes) -> bytes:
    """With the version that we speak: a later minor one is served as ours (RFC 9110, 2.5). Problem 505."""
    end = raw.find(b"\r\n")
    version = _VERSION.fullmatch(raw, end - 8, end)
    if version is None or version[0] in (b"HTTP/1.1", b"HTTP/1.0"):
        return raw  # what is no version, the parser refuses
    if version[1] != b"1":
        raise Problem(505, "BadVersion", "this server speaks HTTP/1.1 and HTTP/1.0")
    return raw[: end - 1] + b"1" + raw[end:]


def _frame(head: Head) -> None:
    """Where the body ends."""
    headers = head.headers
    coding = headers.get(b"transfer-encoding")
    if coding is not None:
        if coding.strip().lower() != b"chunked" or not head.minor:
            raise Problem(501, "TransferCoding", "the only transfer coding here is chunked, in HTTP/1.1")
        head.chunked = head.unread = True
    length = headers.get(b"content-length")
    if length is not None:
        head.length = int(length)
        head.unread = head.length > 0
    expect = headers.get(b"expect")
    if expect is not None and head.minor:
        if expect.strip().lower() != b"100-continue":
            raise Problem(417, "Expectation", "the only expectation that is met here is 100-continue")
        head.expect = head.unread


def key_of_segment(segment: bytes) -> bytes:
    """The key that a path segment spells: percent-decoded, once. Raises Problem 400."""
    if b"?" in segment:
        raise Problem(400, "BadKey", "a ? in a key is written %3F; there is no query here")
    if b"%" in segment:
        if _BAD_ESCAPE.search(segment):
            raise Problem(400, "BadKey", "a % that no two hex digits follow; a % in a key is written %25")
        segment = unquote_to_bytes(segment)
    if not 0 < len(segment) <= MAX_KEY:
        raise Problem(400, "BadKey", f"a key of {len(segment)} bytes; 1 to {MAX_KEY} are allowed")
    return segment
