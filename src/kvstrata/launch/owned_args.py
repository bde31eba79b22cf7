"""Arguments of vLLM that are not the user's to give. One test for the preflight (deploy) and the launcher (here)."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["OWNED", "owned"]

_CONNECTOR = "the launcher writes it; KV_PERSIST=0 is the switch for no connector"
_OFFLOAD = "it sets up vLLM's own offloading connector in place of ours: size the RAM tier with KV_L1_GB"

#: Flag -> why, or which knob it is. A flag's parts (--flag.part) and abbreviations go with it.
OWNED = {
    "--kv-transfer-config": _CONNECTOR,
    "--kv-offloading-size": _OFFLOAD,
    "--kv-offloading-backend": _OFFLOAD,
    "--served-model-name": "the served name is the model's short name: KV_MODEL, or the folder's name",
    "--host": "vLLM listens inside its container; only 127.0.0.1 of this machine reaches it",
    "--port": "set KV_PORT",
    "--model": "set MODEL_DIR or KV_MODEL",
    "--config": "write the arguments themselves: what stands in a file cannot be checked",
    "--api-key": "the API listens on 127.0.0.1 only and the proof has no key; put a gateway with keys before it",
}
_V1 = "LMCacheConnectorV1"
_SHORTEST = len("--xyz")


def owned(args: Iterable[str], flags: Iterable[str] = tuple(OWNED)) -> tuple[str, str] | None:
    """(argument, reason) of the first of `args` that is one of `flags`, in any spelling that vLLM takes, or None.

    vLLM takes --a_b as --a-b, --flag.part as a part of a JSON flag, and, being argparse, the beginning of a flag's name
    where no other flag begins so.
    """
    listed = tuple(flags)
    for arg in args:
        if _V1 in arg:
            return _V1, "it keeps no cache over a restart; KV_PERSIST=0 is the switch for no connector"
        if not arg.startswith("--"):
            continue
        given = arg.split("=", 1)[0]
        name = given.replace("_", "-").split(".", 1)[0].rstrip("+")
        for flag in listed:
            if name == flag or (len(name) >= _SHORTEST and flag.startswith(name)):
                return given if given == flag else f"{given} ({flag})", OWNED[flag]
    return None
