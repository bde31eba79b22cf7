"""The RESP door: the subset of Redis that LMCache, redis-py's key/value calls, redis-cli and redis-benchmark speak.

Anything else is answered with an error and the connection stays in step; bytes that are no RESP end it. A reply that
has begun and cannot be finished ends it as well: a short value must never look like a whole one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from kvstrata.engine import resp_commands as data
from kvstrata.engine import resp_lmcache
from kvstrata.engine import resp_manners as manners
from kvstrata.engine.auth import Tokens
from kvstrata.engine.buffers import Budget
from kvstrata.engine.connection import Connection, NotYet
from kvstrata.engine.content import Engine
from kvstrata.engine.errors import Corrupt, EngineError
from kvstrata.engine.resp_lmcache import Unfit
from kvstrata.engine.resp_parse import Broken, Command
from kvstrata.engine.resp_reply import Error, Reply, Simple
from kvstrata.engine.resp_session import CROWDED, Session, Shared, failure
from kvstrata.engine.settings import EngineSettings

__all__ = ["COMMANDS", "make_serve"]

log = logging.getLogger(__name__)

#: So much of what a peer still sends is read after an error that ends its connection, so that the error arrives.
_GOODBYE_S, _GOODBYE_BYTES = 1.0, 1 << 20

Handler: TypeAlias = "Callable[[Session, Command], Reply | data.NoReply]"


@dataclass(frozen=True, slots=True)
class _Spec:
    """`arity`: arguments with the name, negative: at least. `keys`: place of the first key, of the last (from the end
    where negative), and the step; as COMMAND tells them."""

    run: Handler
    arity: int
    flags: tuple[str, ...] = ("readonly", "fast")
    keys: tuple[int, int, int] = (0, 0, 0)
    open: bool = False

    def takes(self, count: int) -> bool:
        return count == self.arity if self.arity > 0 else count >= -self.arity


def _command(session: Session, command: Command) -> Reply:
    sub, *words = command.words() or [b""]
    match sub.upper():
        case b"":
            return [_described(name) for name in COMMANDS]
        case b"COUNT":
            return len(COMMANDS)
        case b"LIST":
            return [name.lower() for name in COMMANDS]
        case b"INFO":
            return [_described(word.upper()) if word.upper() in COMMANDS else None for word in words]
        case b"DOCS":
            return {}
    raise Error("ERR unknown subcommand of 'command'")


def _described(name: bytes) -> Reply:
    spec = COMMANDS[name]
    return [name.lower(), spec.arity, [Simple(flag) for flag in spec.flags], *spec.keys]


_WRITE = ("write",)
_ALL = ("loading", "stale", "fast")

COMMANDS: dict[bytes, _Spec] = {
    b"AUTH": _Spec(manners.auth, -2, ("no_auth", *_ALL), open=True),
    b"CLIENT": _Spec(manners.client, -2, _ALL),
    b"COMMAND": _Spec(_command, -1, _ALL),
    b"CONFIG": _Spec(manners.config, -2, ("admin", *_ALL)),
    b"DBSIZE": _Spec(data.dbsize, 1),
    b"DEL": _Spec(data.delete, -2, _WRITE, (1, -1, 1)),
    b"ECHO": _Spec(manners.echo, 2, _ALL),
    b"EXISTS": _Spec(data.exists, -2, keys=(1, -1, 1)),
    b"GET": _Spec(data.get, 2, keys=(1, 1, 1)),
    b"HELLO": _Spec(manners.hello, -1, ("no_auth", *_ALL), open=True),
    b"INFO": _Spec(manners.info, -1, _ALL),
    b"MGET": _Spec(data.mget, -2, keys=(1, -1, 1)),
    b"PING": _Spec(manners.ping, -1, _ALL),
    b"PTTL": _Spec(data.pttl, 2, keys=(1, 1, 1)),
    b"QUIT": _Spec(manners.quit_, -1, ("no_auth", *_ALL), open=True),
    b"SCAN": _Spec(data.scan, -2),
    b"SELECT": _Spec(manners.select, 2, _ALL),
    b"SET": _Spec(data.set_, -3, (*_WRITE, "denyoom"), (1, 1, 1)),
    b"STRLEN": _Spec(data.strlen, 2, keys=(1, 1, 1)),
    b"TTL": _Spec(data.ttl, 2, keys=(1, 1, 1)),
    b"TYPE": _Spec(data.type_, 2, keys=(1, 1, 1)),
    b"UNLINK": _Spec(data.delete, -2, _WRITE, (1, -1, 1)),
}


def make_serve(
    engine: Engine, tokens: Tokens, budget: Budget, settings: EngineSettings
) -> Callable[[Connection], bool]:
    """What the listener calls when bytes have come on a connection."""
    return _Server(Shared(engine, tokens, budget, settings)).serve


class _Server:
    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def serve(self, conn: Connection) -> bool:
        """Answer what is there; True: nothing is, call again when there is. False: the connection is to be closed."""
        if conn.state is None:
            conn.state = Session(self._shared, conn)
        session: Session = conn.state
        if not session.enter():
            if not session.literal:  # whose client would take it for a part of a value
                session.say(Error(CROWDED))
                session.flush()
            return False
        try:
            while not session.closing:
                command = session.command()
                if command is None:
                    return False
                self._answer(session, command)
                session.done()
            session.flush()
        except NotYet:
            return True
        except Broken as broken:
            session.say(Error(f"ERR Protocol error: {broken}"))
            session.flush()
            with self._shared.strangers.waiting(session.grant is not None) as free:
                if free:
                    conn.finish(_GOODBYE_S, _GOODBYE_BYTES)
        except Corrupt as corrupt:
            log.warning("RESP: a reply was cut short: %s", corrupt)
        except Unfit as unfit:
            log.warning("RESP: the connection of LMCache's client ends, for it would misread the answer: %s", unfit)
        finally:
            session.release()
            session.leave()
        return False

    def _answer(self, session: Session, command: Command) -> None:
        try:
            reply = self._run(session, command)
        except Error as error:
            reply = error
        except Corrupt:
            raise  # a part of the reply has left
        except EngineError as error:
            reply = failure(error)
        if isinstance(reply, data.NoReply):
            return
        if session.literal and (instead := resp_lmcache.fitting(command.name, reply)) is not None:
            log.warning("RESP: %s of LMCache's client failed: %s", command.name.decode(), reply or "not stored")
            session.say_bytes(instead)
        else:
            session.say(reply)

    def _run(self, session: Session, command: Command) -> Reply | data.NoReply:
        spec = COMMANDS.get(command.name)
        if not (spec and spec.open):
            session.reader()
        if spec is None:
            raise Error(f"ERR unknown command '{manners.shown(command.name)}'")
        if not spec.takes(1 + len(command.args)):
            raise Error(f"ERR wrong number of arguments for '{command.name.decode().lower()}' command")
        if command.skipped:
            raise session.refusal()
        return spec.run(session, command)
