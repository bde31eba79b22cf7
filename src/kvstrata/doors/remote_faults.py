"""Why a call had no usable answer: a word for metrics, and found / needed / fix for the one line in the log."""

from __future__ import annotations

import http.client
import socket
import ssl

from kvstrata.doors.remote_settings import RemoteError, RemoteSettings, said

__all__ = ["Down", "NoGreeting", "down", "is_engines", "no_engine", "no_token"]

#: Word -> found, needed, fix.
_SAID = {
    "deadline": ("no answer within the deadline", "one within KV_ENGINE_DEADLINE", "see what the engine's log says"),
    "refused": ("nobody listens there", "a running engine", "start it, or mend KV_ENGINE_URL in .env"),
    "name not found": ("no such host name", "one that is known in this container", "mend KV_ENGINE_URL in .env"),
    "lost": ("a connection that ends without an answer", "HTTP there",
             "https:// in KV_ENGINE_URL if that port speaks TLS; else see what the engine's log says"),
    "rubbish": ("an answer that is none of /kv", "a KV engine there", "mend KV_ENGINE_URL in .env"),
}  # fmt: skip
_NO_TLS = ("a server that speaks TLS, as https:// says",
           "http:// in KV_ENGINE_URL if that port has none; else see what the engine's log says")  # fmt: skip
#: What OpenSSL calls an answer that is no TLS.
_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")


class NoGreeting(TimeoutError):
    """The TLS handshake did not end by the deadline."""


class Down(Exception):
    """No answer, or none that is HTTP. The message is a short word, of few; `said` is the line for the log.

    timed_out: it took the whole deadline. lasting: asked again it will say the same, until somebody mends it.
    """

    def __init__(self, word: str, line: str = "", *, timed_out: bool = False, lasting: bool = False) -> None:
        super().__init__(word)
        self.said = line or said(*_SAID[word])
        self.timed_out, self.lasting = timed_out, lasting


def is_engines(response: http.client.HTTPResponse) -> bool:
    """Whether a refusal is of a server of /kv: ours marks all answers, and each says no in JSON."""
    kind = response.getheader("Content-Type", "")
    return response.getheader("KV-API-Version") is not None or kind.startswith("application/json")


def no_engine(status: int) -> Down:
    """Of an answer that is none of `is_engines`. A proxy's 502 ends when its engine is back, its 429 sooner."""
    fix = "mend KV_ENGINE_URL in .env (https:// where TLS is spoken); of a proxy, see what its own log says"
    line = said(f"status {status} in an answer that no KV engine gives", "a KV engine there", fix)
    return Down("no engine", line, lasting=status < 500 and status != 429)


def no_token(settings: RemoteSettings) -> Down:
    """Of status 401."""
    file = settings.token_file.name if settings.token_file else "token"
    fix = f"write it to data/secrets/engine-client/{file}"
    found = "a token that the engine does not know (401)"
    return Down("token refused (401)", said(found, "one that its tokens file has", fix))


def down(error: Exception, settings: RemoteSettings) -> Down:
    """`error` of sockets, TLS, http.client or settings. Nothing in it is what a server sent."""
    if isinstance(error, NoGreeting):
        return Down("deadline", said("no TLS greeting within the deadline", *_NO_TLS), timed_out=True)
    if isinstance(error, TimeoutError):
        return Down("deadline", timed_out=True)
    if isinstance(error, RemoteError):
        return Down("settings", error.said, lasting=True)
    if isinstance(error, ssl.SSLCertVerificationError):
        needed = f"one for {settings.url.hostname}, signed by {settings.trusted}"
        fix = "KV_ENGINE_CA in .env and `make up`; or mend KV_ENGINE_URL, or the engine's certificate"
        return Down("tls", said(f"a certificate that is refused: {error.verify_message}", needed, fix), lasting=True)
    if isinstance(error, ssl.SSLError):
        found = "no TLS there" if error.reason in _NOT_TLS else f"TLS that fails ({error.reason})"
        return Down("tls", said(found, *_NO_TLS))
    if isinstance(error, ConnectionRefusedError):
        return Down("refused")
    if isinstance(error, socket.gaierror):
        return Down("name not found")
    return Down("lost" if isinstance(error, (OSError, http.client.RemoteDisconnected)) else "rubbish")
