"""The KV engine of a deployment: who speaks to it, at what address, with which token. (engine.py is Docker's.)"""

from __future__ import annotations

import hashlib
import secrets
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from kvstrata.deploy.errors import KvError
from kvstrata.deploy.settings import Settings

__all__ = [
    "CLIENT",
    "SERVER",
    "STORAGE",
    "check",
    "check_ca",
    "client_dir",
    "copies",
    "managed",
    "secret_files",
    "server_dir",
    "storage",
    "token",
]

#: Storage layer -> what `status` and `up` call the place of the blocks.
STORAGE = {
    "nvme": "the local disk",
    "path-a": "the KV engine by HTTP (path A)",
    "path-b": "RESP (path B)",
}
SERVER, CLIENT = "engine", "engine-client"
_TOKEN, _URL_TOKEN = "token", "url_token"
_HTTP = "http://engine:9130"
_RESP = ("engine", "6379")


def storage(layers: tuple[str, ...]) -> str:
    """The layer that says where blocks lie, or "" for none. They exclude each other (`# not with:`)."""
    return next((name for name in STORAGE if name in layers), "")


def check(settings: Settings) -> None:
    """Raise KvError for a path that leads nowhere, to two places, or to an engine elsewhere without a token for it."""
    if not settings.persist:
        return
    for layer, knob, url, example in (
        ("path-a", "KV_ENGINE_URL", settings.engine_url, "https://kv.example.com:9130"),
        ("path-b", "KV_RESP_URL", settings.resp_url, "redis://redis.example.com:6379"),
    ):
        if layer not in settings.layers:
            continue
        if settings.has_engine and url:
            raise KvError(f"layers engine and {layer}, and {knob}={url}", "one of the two",
                          f"take engine out of KV_LAYERS in .env, or leave {knob} blank")  # fmt: skip
        if not settings.has_engine and not url:
            raise KvError(f"layer {layer}, and no engine to reach", f"an engine here, or {knob}",
                          f"KV_LAYERS=engine,{layer} in .env; or {knob}={example}")  # fmt: skip
    if "path-a" in settings.layers and settings.engine_url:
        _check_url_token(settings)


def _check_url_token(settings: Settings) -> None:
    file = client_dir(settings) / _URL_TOKEN
    try:
        words = len(file.read_text(encoding="ascii").split())
        why = "" if words == 1 else "more than one word" if words else "no token"
    except FileNotFoundError:
        why = "no token"
    except (OSError, UnicodeDecodeError) as error:
        why = str(error)
    if why:
        raise KvError(f"KV_ENGINE_URL={settings.engine_url}, and in {file}: {why}",
                      "the token that this engine knows; that of this stack's own engine is not sent to another",
                      f"write it to {file}, a word of your choice if that engine asks for none")  # fmt: skip


def check_ca(settings: Settings) -> None:
    """Raise KvError for a KV_ENGINE_CA that the cache server could not check an https engine with."""
    file = settings.engine_ca
    if file is None or "path-a" not in settings.layers or not settings.persist:
        return
    try:
        ssl.create_default_context(cafile=file)
        file.read_bytes()
    except OSError as error:  # ssl.SSLError is one
        why = "no certificate in it" if isinstance(error, ssl.SSLError) else error.strerror
        raise KvError(f"KV_ENGINE_CA={file}: {why}", "a file with the CA's certificate as PEM, which you can read",
                      "mend KV_ENGINE_CA in .env, or leave it blank for the CAs of the system") from None  # fmt: skip


def managed(settings: Settings) -> Mapping[str, str]:
    """The keys of .env's managed block that say where the engine is."""
    resp = urlsplit(settings.resp_url) if settings.resp_url else None
    return {
        "KV_ENGINE_ADDRESS": settings.engine_url or _HTTP,
        "KV_ENGINE_PATH": str(settings.engine_dir),
        "KV_ENGINE_SECRET": _URL_TOKEN if settings.engine_url else _TOKEN,
        "KV_RESP_HOST": str(resp.hostname) if resp else _RESP[0],
        "KV_RESP_PORT": str(resp.port) if resp else _RESP[1],
        # The engine answers the user `lmcache` in the forms that LMCache's client can read (engine/resp_lmcache.py).
        "KV_RESP_USER": (resp.username or "") if resp else "lmcache",
        "KV_RESP_SECRET": "resp_password" if resp else _TOKEN,
        # A network without a way out, unless the engine is elsewhere.
        "KV_STORE_NET_INTERNAL": "true" if settings.has_engine or not (settings.engine_url or resp) else "false",
    }


def server_dir(settings: Settings) -> Path:
    """What the engine's container sees of the secrets: `tokens`."""
    return settings.secrets_dir / SERVER


def client_dir(settings: Settings) -> Path:
    """What lmcache's container sees of the secrets.

    `token` is of this stack's own engine and made here. `url_token` is of KV_ENGINE_URL and `resp_password` of
    KV_RESP_URL: the user's to write. `ca.pem` follows KV_ENGINE_CA (empty: the system's CAs).

    Folders and not files are mounted, so that a file that is replaced is seen in the container.
    """
    return settings.secrets_dir / CLIENT


def secret_files(settings: Settings) -> Mapping[Path, Callable[[], str]]:
    """Each secret file that these layers need, and how to make it where it is not there."""
    client, server = client_dir(settings), server_dir(settings)
    found: dict[Path, Callable[[], str]] = {}
    if settings.has_engine:
        found[client / _TOKEN] = lambda: secrets.token_urlsafe(32) + "\n"
        found[server / "tokens"] = lambda: _tokens((client / _TOKEN).read_text(encoding="ascii").strip())
    if settings.engine_url and "path-a" in settings.layers:
        found[client / _URL_TOKEN] = lambda: ""
    if settings.resp_url and "path-b" in settings.layers:
        found[client / "resp_password"] = lambda: ""
    return found if settings.persist else {}


def copies(settings: Settings) -> Mapping[Path, str]:
    """What lies beside the secrets and follows a setting: the CA, nothing in it where the system's are meant."""
    if "path-a" not in settings.layers or not settings.persist:
        return {}
    file = settings.engine_ca
    text = file.read_text(encoding="utf-8", errors="replace") if file else ""
    return {client_dir(settings) / "ca.pem": text}


def _tokens(token: str) -> str:
    digest = hashlib.sha256(token.encode()).hexdigest()
    return (
        "# One line a token: name scope tenant [prefix] token. Read again when it changes; docs/engine.md.\n"
        f"stack rw+metrics default sha256:{digest}\n"
    )


def token(settings: Settings) -> str:
    """The token of the stack's own engine, or "" where it cannot be read."""
    try:
        return (client_dir(settings) / _TOKEN).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
