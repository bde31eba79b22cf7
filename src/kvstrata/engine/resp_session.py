"""One RESP connection: who it is, what it still has to be told, and what all connections share."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from kvstrata.engine import resp_lmcache
from kvstrata.engine.auth import Grant, Tokens
from kvstrata.engine.buffers import Budget, Busy, TooBig
from kvstrata.engine.connection import Connection
from kvstrata.engine.content import Engine
from kvstrata.engine.errors import Corrupt, EngineError, Full, TooLarge
from kvstrata.engine.places import Places, Strangers
from kvstrata.engine.resp_cursors import Cursors
from kvstrata.engine.resp_lmcache import Unfit
from kvstrata.engine.resp_parse import Command, Limits, Wire
from kvstrata.engine.resp_reply import Error, Reply, bulk_head, encode
from kvstrata.engine.resp_value import Incoming
from kvstrata.engine.settings import EngineSettings

__all__ = ["CROWDED", "Session", "Shared", "failure"]

#: Replies are collected up to here; a peer that sends on without reading stops us at the socket, not in memory.
_OUT = 64 << 10
#: The slowest peer that is waited for: bytes a second, on top of the time that every value has.
_SLOWEST = 1 << 20
CROWDED = "ERR too many commands of this tenant at once; try again"


def failure(error: EngineError) -> Error:
    """What the peer is told."""
    return Error(f"{'OOM' if isinstance(error, Full | TooLarge) else 'ERR'} {error}")


@dataclass
class Shared:
    """What the connections have in common."""

    engine: Engine
    tokens: Tokens
    budget: Budget
    settings: EngineSettings
    cursors: Cursors = field(init=False)
    places: Places = field(init=False)
    strangers: Strangers = field(default_factory=Strangers)
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.cursors = Cursors(lambda: self.tokens.tenants)
        self.places = Places(self.settings.threads, lambda: self.tokens.tenants)


class Session:
    """State of a connection between two calls of `serve`."""

    def __init__(self, shared: Shared, conn: Connection) -> None:
        self.shared, self.conn = shared, conn
        self.id = secrets.randbits(48)
        self.name, self.protocol, self.closing, self.literal = b"", 2, False, False
        self.wire = Wire(self)
        self._token = b""
        self._generation = shared.tokens.refresh()
        self._grant = shared.tokens.check(b"")
        self._out = bytearray()
        self._held = ExitStack()
        self._refusal: Error | None = None
        self._begun = False
        self._place: str | None = None

    # -- who it is

    def sign_in(self, token: bytes, user: bytes = b"") -> None:
        """From now on with the rights of this token. Raises Error and keeps the old ones.

        Any user name will do; `resp_lmcache.USER` asks for the replies that LMCache's client can take.
        """
        grant = self.shared.tokens.check(token)
        if grant is None:
            raise Error("WRONGPASS invalid token; any user name will do, the password is a token of the tokens file")
        self._token, self._grant, self.literal = token, grant, user == resp_lmcache.USER
        if self.literal:
            self.conn.idle_s = None  # it never connects again
        self.leave()
        if not self.enter():
            self.closing = True
            raise Error(CROWDED)

    def enter(self) -> bool:
        """It may hold a thread until `leave`. False: those of its tenant hold as many as they may.

        A stranger needs no leave: nothing that he has to send or to read is waited for.
        """
        grant = self.grant
        if grant is not None:
            if not self.shared.places.take(grant.tenant):
                return False
            self._place = grant.tenant
        return True

    def leave(self) -> None:
        """Idempotent."""
        if self._place is not None:
            self.shared.places.leave(self._place)
            self._place = None

    @property
    def grant(self) -> Grant | None:
        """None: nobody we know, or no longer: a token that was taken out of the file ends on open connections too."""
        generation = self.shared.tokens.refresh()
        if generation != self._generation:
            self._generation = generation
            self._grant = self.shared.tokens.check(self._token)
        return self._grant

    def reader(self, *keys: bytes) -> Grant:
        """The grant, if it may read those keys. Raises Error."""
        grant = self.grant
        if grant is None:
            raise Error("NOAUTH Authentication required.")
        if not grant.read:
            raise Error("NOPERM this token is for /metrics alone")
        if not all(key.startswith(grant.prefix) for key in keys):
            raise Error(f"NOPERM this token's keys begin with {grant.prefix.decode()}")
        return grant

    def writer(self, *keys: bytes) -> Grant:
        """The grant, if it may change those keys. Raises Error."""
        grant = self.reader(*keys)
        if not grant.write:
            raise Error("NOPERM this token may only read")
        return grant

    # -- bytes in (resp_parse.Source)

    @property
    def buffered(self) -> bytearray:
        return self.conn.buffered

    def more(self, wait: bool) -> bool:
        self.flush()
        if not wait:
            self.conn.midway = self.wire.inside
            grew = self.conn.fill() > 0
            self._begin()
            return grew
        self.conn.wait()  # `fill` waits for a moment at most, this until the deadline
        return True

    def read_into(self, view: memoryview) -> None:
        self.flush()
        self.conn.read_into(view)

    def skip(self, size: int) -> None:
        self.flush()
        self.conn.skip(size)

    def command(self) -> Command | None:
        """The next command; what it holds is held until `release`. Raises as Wire.command."""
        if self.conn.buffered:
            self._begin()
        limits = Limits(bulk=self.shared.settings.resp_max_value) if self.grant else Limits.of_a_stranger()
        return self.wire.command(limits, self._value)

    def _begin(self) -> None:
        """The time for a command runs from its first byte; more bytes buy no more of it."""
        if not self._begun:
            self._begun = True
            self.conn.until(self.shared.settings.header_s)

    def _value(self, before: Sequence[bytes], size: int) -> Incoming | None:
        """Where SET's value goes, if this SET may be."""
        self.allow(size)
        if len(before) != 2 or before[0].upper() != b"SET":
            self._refusal = Error(f"ERR an argument of {size} bytes; only the value of SET may be that large")
            return None
        shared = self.shared
        try:
            tenant = self.writer(before[1]).tenant
            found = Incoming(
                shared.engine, shared.budget, tenant, before[1], size, shared.settings.body_s / 2, self._held
            )  # fmt: skip
            self.allow(size)
            return found
        except Error as error:
            self._refusal = error
        except Busy:
            self._refusal = Error("OOM the memory for values in flight is spent (KV_ENGINE_MEMORY_BYTES); try again")
        except TooBig:
            self._refusal = Error(f"OOM a value of {size} bytes needs more than KV_ENGINE_MEMORY_BYTES")
        except EngineError as error:
            self._refusal = failure(error)
        return None

    def allow(self, size: int) -> None:
        """Start the time that a value of `size` bytes may take, in either direction."""
        self.conn.until(self.shared.settings.body_s + size / _SLOWEST)

    def refusal(self) -> Error:
        """Why an argument of the command was skipped."""
        return self._refusal or Error("ERR the arguments of this command are too large together")

    def release(self) -> None:
        """Give back what the command held."""
        self._refusal = None
        self._held.close()

    def done(self) -> None:
        """The command is answered; another may begin."""
        self.release()
        self._begun = False

    # -- bytes out

    def say(self, reply: Reply) -> None:
        """Tell the peer, soon."""
        self._out += encode(reply, self.protocol)
        if len(self._out) >= _OUT:
            self.flush()

    def say_bytes(self, reply: bytes) -> None:
        """The same for a reply that is encoded already."""
        self._out += reply

    def say_array(self, count: int) -> None:
        """So many replies that follow are one."""
        self._out += b"*%d\r\n" % count

    def say_block(self, tenant: str, key: bytes) -> None:
        """The value of a key that may be read, or nil. Raises Corrupt where the peer already has a part of it, Unfit
        where a nil would be misread."""
        block = self.shared.engine.open_block(tenant, key)
        if block is None:
            if self.literal:
                raise Unfit("a key that is not there")
            self.say(None)
            return
        with block:
            head = bytes(self._out) + bulk_head(block.size)
            self.allow(block.size)
            try:
                block.send_to(self.conn.sock, 0, block.size, head=head, tail=b"\r\n")
            except Corrupt as error:
                if error.sent:
                    raise
                if self.literal:
                    self.say_bytes(resp_lmcache.failed_get(block.size))
                else:
                    self.say(None)
                return
        self._out.clear()

    def flush(self) -> None:
        """Send what is waiting."""
        if self._out:
            if self._place is None:
                self.conn.send_at_once(bytes(self._out))
            else:
                self.conn.sock.sendall(self._out)
            self._out.clear()
