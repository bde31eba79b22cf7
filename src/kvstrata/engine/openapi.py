"""The description of the HTTP interface (OpenAPI 3.1), served at /openapi.json and held against the server by tests."""

from __future__ import annotations

from typing import Any

from kvstrata.engine.http_control import MAX_LEASE_S
from kvstrata.engine.http_head import MAX_KEY
from kvstrata.engine.http_json import MAX_KEYS
from kvstrata.engine.http_reply import API_VERSION

__all__ = ["description"]

Json = dict[str, Any]

_PROBLEMS = {
    400: "The request is not well formed, or makes no sense.",
    401: "No token, or one that the server does not know.",
    403: "The token may not do this, or not with this key.",
    404: "No such thing.",
    405: "Not with this method; Allow says with which.",
    408: "It took too long to arrive.",
    409: "Something else still needs it, or the data version has moved on.",
    411: "No Content-Length and no chunks.",
    412: "What is there is not what If-Match or If-None-Match ask for.",
    413: "Too large.",
    414: "The path is too long.",
    415: "Not JSON.",
    416: "The range is outside the block.",
    417: "An expectation that is not 100-continue.",
    431: "Too many or too large headers.",
    500: "A fault; the server's log says which.",
    501: "A method or a transfer coding that is not known.",
    503: "Not now; Retry-After says when.",
    505: "Not HTTP/1.x.",
    507: "No room, and none will be made.",
}
_ALWAYS = (400, 401, 403, 405, 408, 413, 414, 417, 431, 500, 501, 503, 505)
_BINARY: Json = {"application/octet-stream": {"schema": {"type": "string", "format": "binary", "minLength": 1}}}
# Where what was made here goes next; tests walk along these.
_TO_SNAPSHOT: Json = {
    name: {"operationId": name, "parameters": {"number": "$response.body#/snapshot"}}
    for name in ("fork", "dropSnapshot")
}
_TO_BRANCH: Json = {
    name: {"operationId": name, "parameters": {"number": "$response.body#/branch"}}
    for name in ("branchGet", "branchPut", "dropBranch")
}
_COUNT: Json = {"type": "integer", "minimum": 0}
_NUMBER: Json = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
_KEY: Json = {
    "name": "key", "in": "path", "required": True,
    "description": f"1 to {MAX_KEY} bytes, one path segment, percent-decoded once. A / in a key is written %2F.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY},
}  # fmt: skip
_KEYS: Json = {
    "type": "array", "maxItems": MAX_KEYS,
    "items": {"type": "string", "minLength": 1, "maxLength": MAX_KEY},
    "description": "Keys as text, not percent-encoded; in UTF-8 each has 1 to 4096 bytes.",
}  # fmt: skip
_VERSION: Json = {
    "name": "X-EG-Data-Version", "in": "header", "required": False, "schema": _NUMBER,
    "description": "Tags the entry: it is gone once the tenant's data version is higher.",
}  # fmt: skip
_STATS = (
    "unique_blocks", "total_refs", "resident_bytes", "logical_bytes", "dedup_savings_bytes", "dedup_hits", "get_hits",
    "get_misses", "put_new", "evictions", "capacity_bytes", "stale_retired", "keys_retired", "corrupt", "demotions",
    "promotions",
)  # fmt: skip
_TAGS = {"ETag": "The digest of the content.", "Accept-Ranges": "bytes"}


def description() -> Json:
    """The whole document."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvstrata KV engine", "version": API_VERSION},
        "security": [{"bearer": []}],
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Problem": _schema({"error": {"type": "string"}, "message": {"type": "string"}})},
        },
        "paths": {**_blocks(), **_figures(), **_forks(), **_pages()},
    }


def _blocks() -> Json:
    return {
        "/kv/{key}": {
            "parameters": [_KEY],
            "get": _get("Get a block"),
            "head": _operation(
                "Its length",
                {200: _answer("It is there.", _BINARY, _TAGS), 304: _answer("The client has it.", {}, _TAGS)},
                (404, 412), parameters=_conditions(),
            ),
            "put": _operation(
                "Store a block; the first value of a key stays",
                {200: _answer("The key was there; the body was not stored."), 201: _answer("Stored.")},
                (409, 411, 412, 507), parameters=[_VERSION, *_conditions()], body=_BINARY,
            ),
            "delete": _operation("Forget a key", {204: _answer("Gone.")}, (404, 412), parameters=_conditions()),
        },
        "/kv/{key}/exists": {
            "parameters": [_KEY],
            "get": _operation("Whether it is there", {200: _json(exists={"type": "boolean"}, hash={"type": "string"})}),
        },
        "/kv/batch/exists": {
            "post": _operation(
                "Which of many keys are there, in their order",
                {200: _json(exists={"type": "array", "items": {"type": "boolean"}})}, (411, 415),
                body=_json_body(
                    ["keys"], keys=_KEYS,
                    lease_s={"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": MAX_LEASE_S,
                             "description": "Those that are there are kept for so many seconds."},
                ),
            )
        },
    }  # fmt: skip


def _get(summary: str, name: str = "") -> Json:
    part = _answer("The range that was asked for.", _BINARY, {**_TAGS, "Content-Range": "Which bytes of how many."})
    return _operation(
        summary, {200: _answer("The block.", _BINARY, _TAGS), 206: part, 304: _answer("The client has it.", {}, _TAGS)},
        (404, 412, 416), name=name,
        parameters=[
            _header("Range", "One range of bytes; anything else is answered with the whole block."),
            _header("If-Range", "An ETag: else the whole block."),
            *_conditions(),
        ],
    )  # fmt: skip


def _conditions() -> list[Json]:
    return [
        _header("If-Match", "ETags, one of which must be that of what is there; *: something must be there."),
        _header("If-None-Match", "ETags, none of which may be; *: nothing may be there."),
    ]


def _figures() -> Json:
    version = _json(tracking={"type": "boolean"}, version=_COUNT)
    admins: Json = {**_COUNT, "description": "On the disk; for an admin."}
    tier = _schema({"bytes": _COUNT, "blocks": _COUNT, "capacity_bytes": _COUNT, "disk_bytes": admins})
    tier["required"].remove("disk_bytes")
    figures: Json = dict.fromkeys(_STATS, _COUNT)
    figures |= {
        "hit_rate": {"type": "number", "minimum": 0, "maximum": 1},
        "backend": {"type": "string"},
        "durable": {"type": "boolean"},
        "durability": {"enum": ["process", "fsync"]},
        "tiers": _schema(dict.fromkeys(("hot", "warm", "cold"), tier)),
    }
    schema = _schema({**figures, "catalog_bytes": admins}, list(figures))
    stats = _answer("Done.", {"application/json": {"schema": schema}})
    return {
        "/kv/stats": {"get": _operation("What is kept, and how it was used", {200: stats})},
        "/kv/version": {"get": _operation("The tenant's data version", {200: version})},
        "/kv/version/{number}": {
            "parameters": [_id()],
            "put": _operation("Raise it; older tagged entries are gone", {200: version}),
        },
        "/kv/fork/stats": {
            "get": _operation(
                "Snapshots and branches", {200: _json(snapshots=_COUNT, branches=_COUNT, resident_fork_bytes=_COUNT)}
            )
        },
    }


def _forks() -> Json:
    return {
        "/kv/snapshot": {
            "post": _operation(
                "Hold on to the keys that are there now",
                {200: {**_json(snapshot=_NUMBER, pages=_COUNT), "links": _TO_SNAPSHOT}},
                (411, 415, 507), body=_json_body(["keys"], keys=_KEYS),
            )
        },
        "/kv/snapshot/{number}": {
            "parameters": [_id()],
            "delete": _operation("Let go of them", {204: _answer("Gone.")}, (404, 409), name="dropSnapshot"),
        },
        "/kv/snapshot/{number}/fork": {
            "parameters": [_id()],
            "post": _operation(
                "A branch over it", {200: {**_json(branch=_NUMBER), "links": _TO_BRANCH}}, (404, 507), name="fork"
            ),
        },
        "/kv/branch/{number}": {
            "parameters": [_id()],
            "delete": _operation("Forget a branch", {204: _answer("Gone.")}, (404,), name="dropBranch"),
        },
        "/kv/branch/{number}/{key}": {
            "parameters": [_id(), _KEY],
            "get": _get("A block as the branch sees it", "branchGet"),
            "put": _operation(
                "Write in the branch alone", {200: _answer("Written.")}, (404, 411, 412, 507), body=_BINARY,
                parameters=_conditions(), name="branchPut",
            ),
        },
    }  # fmt: skip


def _pages() -> Json:
    status = _json(status={"type": "string"})
    text: Json = {"text/plain": {"schema": {"type": "string"}}}
    return {
        "/healthz": {"get": _operation("The process answers", {200: status}, open_to_all=True)},
        "/readyz": {"get": _operation("It serves", {200: status}, open_to_all=True)},
        "/metrics": {"get": _operation("For Prometheus", {200: _answer("Its text format.", text)})},
        "/openapi.json": {"get": _operation("This", {200: _json()})},
    }


# -- the grammar


def _operation(
    summary: str, answers: dict[int, Json], problems: tuple[int, ...] = (), *, parameters: list[Json] | None = None,
    body: Json | None = None, open_to_all: bool = False, name: str = "",
) -> Json:  # fmt: skip
    responses = {str(status): answer for status, answer in answers.items()}
    for status in sorted({*_ALWAYS, *problems}):
        schema = {"$ref": "#/components/schemas/Problem"}
        responses[str(status)] = _answer(_PROBLEMS[status], {"application/json": {"schema": schema}})
    made: Json = {"summary": summary, "responses": responses}
    if name:
        made["operationId"] = name
    if parameters:
        made["parameters"] = parameters
    if body:
        made["requestBody"] = {"required": True, "content": body}
    if open_to_all:
        made["security"] = []
    return made


def _answer(text: str, content: Json | None = None, headers: dict[str, str] | None = None) -> Json:
    made: Json = {"description": text}
    if content:
        made["content"] = content
    shown = {"KV-API-Version": "Of this interface.", **(headers or {})}
    made["headers"] = {name: {"description": why, "schema": {"type": "string"}} for name, why in shown.items()}
    return made


def _schema(fields: Json, required: list[str] | None = None) -> Json:
    return {"type": "object", "properties": fields, "required": list(fields) if required is None else required}


def _json(**fields: Json) -> Json:
    return _answer("Done.", {"application/json": {"schema": _schema(fields)}})


def _json_body(required: list[str], **fields: Json) -> Json:
    return {"application/json": {"schema": _schema(fields, required)}}


def _header(name: str, text: str) -> Json:
    return {"name": name, "in": "header", "required": False, "description": text, "schema": {"type": "string"}}


def _id() -> Json:
    return {"name": "number", "in": "path", "required": True, "schema": _NUMBER}
