"""Which handler a method and a path mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvstrata.engine.http_blocks import Blocks
from kvstrata.engine.http_control import Control
from kvstrata.engine.http_reply import Problem

__all__ = ["RESERVED", "Found", "Routes"]

Handler = Callable[..., None]

RESERVED = frozenset((b"stats", b"version", b"batch", b"snapshot", b"branch", b"fork"))
"""First segments that are no keys; a key of that name is written with an escape, such as %73tats."""


class Found(NamedTuple):
    """`op` names the route in the metrics; `handler(request, *segments)` answers."""

    op: str
    handler: Handler
    segments: tuple[bytes, ...]


class Routes:
    """All routes. `paths` has each path with its methods, as OpenAPI writes them."""

    def __init__(self, blocks: Blocks, control: Control, pages: Mapping[str, Handler]) -> None:
        self.paths: dict[str, dict[bytes, tuple[str, Handler]]] = {
            "/kv/{key}": {
                b"GET": ("get", blocks.get),
                b"HEAD": ("head", blocks.head),
                b"PUT": ("put", blocks.put),
                b"DELETE": ("delete", blocks.delete),
            },
            "/kv/{key}/exists": {b"GET": ("exists", blocks.exists)},
            "/kv/stats": {b"GET": ("stats", control.stats)},
            "/kv/version": {b"GET": ("version", control.version)},
            "/kv/version/{number}": {b"PUT": ("bump_version", control.bump)},
            "/kv/batch/exists": {b"POST": ("batch_exists", control.batch_exists)},
            "/kv/snapshot": {b"POST": ("snapshot", control.snapshot)},
            "/kv/snapshot/{number}": {b"DELETE": ("drop_snapshot", control.drop_snapshot)},
            "/kv/snapshot/{number}/fork": {b"POST": ("fork", control.fork)},
            "/kv/branch/{number}": {b"DELETE": ("drop_branch", control.drop_branch)},
            "/kv/branch/{number}/{key}": {
                b"GET": ("branch_get", control.branch_get),
                b"PUT": ("branch_put", control.branch_put),
            },
            "/kv/fork/stats": {b"GET": ("fork_stats", control.fork_stats)},
            **{path: {b"GET": (path[1:], handler)} for path, handler in pages.items()},
        }
        self._block = self.paths["/kv/{key}"]
        self._shapes = [(path.encode().split(b"/")[1:], methods) for path, methods in self.paths.items()]

    def find(self, method: bytes, target: bytes) -> Found:
        """The handler. Raises Problem 404 for an unknown path, 405 (with Allow) for another method."""
        segments = target.split(b"/")[1:]
        if len(segments) == 2 and segments[0] == b"kv" and segments[1] not in RESERVED:
            return self._of(self._block, method, (segments[1],))
        for shape, methods in self._shapes:
            if len(shape) == len(segments):
                found = _fit(shape, segments)
                if found is not None:
                    return self._of(methods, method, found, _as_a_key(segments))
        text = _as_a_key(segments) or "; a / in a key is written %2F (docs/engine.md)"
        raise Problem(404, "NoSuchRoute", f"no such route{text}")

    @staticmethod
    def _of(
        methods: dict[bytes, tuple[str, Handler]], method: bytes, segments: tuple[bytes, ...], hint: str = ""
    ) -> Found:
        known = methods.get(method)
        if known is None and method == b"HEAD":
            known = methods.get(b"GET")
        if known is None:
            allow = sorted({*methods, *([b"HEAD"] if b"GET" in methods else [])})
            raise Problem(
                405, "MethodNotAllowed", f"allowed here: {b', '.join(allow).decode()}{hint}",
                headers=b"Allow: %b\r\n" % b", ".join(allow),
            )  # fmt: skip
        return Found(known[0], known[1], segments)


def _as_a_key(segments: list[bytes]) -> str:
    """How to say that the word of a route is a key."""
    if len(segments) != 2 or segments[0] != b"kv" or segments[1] not in RESERVED:
        return ""
    word = segments[1].decode()
    return f"; {word} is the word of a route: as a key, write /kv/%{ord(word[0]):02x}{word[1:]}"


def _fit(shape: list[bytes], segments: list[bytes]) -> tuple[bytes, ...] | None:
    """What stands where the shape has a {name}; None if it does not fit."""
    found = []
    for place, (part, segment) in enumerate(zip(shape, segments, strict=True)):
        if part.startswith(b"{"):
            if place == 1 and segment in RESERVED:
                return None
            found.append(segment)
        elif part != segment:
            return None
    return tuple(found)
