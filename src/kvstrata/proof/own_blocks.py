"""Runs next to LMCache (its container): finds and removes the blocks of given prompts, and of nothing else.

The proof must leave no bytes behind on somebody's disk, yet keep to the keys that real requests use (a salt of its own
would prove another path than the one that users without a salt take). LMCache's key is the hash of the tokens, so the
prompts' token ids are enough to name their blocks: LMCache 0.5.3 hashes chunk by chunk with BLAKE3
(lmcache/v1/multiprocess/token_hasher.py:29-50, 201-256). LMCache's DELETE /cache/objects does the deleting, so that
its own books stay right. Blocks are found by their file names (docs/format.md), not by listing GET /cache/objects: that
would be hundreds of pages on a full disk, and a name in the folder is what a restart will find.

Sent as source text to `python3 -c` (the container's own Python: standard library and blake3, which LMCache needs).
Arguments: action (count | drop-l1 | delete), address ("unix:PATH" or "tcp:HOST:PORT"), chunk size, then one argument a
prompt: base64 of zlib of its ids as big-endian uint32. Prints one JSON object.
"""

import base64
import http.client
import json
import socket
import struct
import sys
import time
import zlib
from pathlib import Path
from typing import Any

MODEL, RANK, GROUP, HASH, SALT = range(5)
Key = tuple[str, int, int, str, str]


def chunk_hashes(tokens: list[int], chunk: int) -> list[str]:
    """Hex keys of the whole chunks of a prompt."""
    import blake3

    hashes = []
    prefix = blake3.blake3((0).to_bytes(8, "big") + struct.pack(">1I", 0)).digest()
    for at in range(0, len(tokens) - len(tokens) % chunk, chunk):
        prefix = blake3.blake3(prefix + struct.pack(f">{chunk}I", *tokens[at : at + chunk])).digest()
        hashes.append(prefix.hex())
    return hashes


def decode(text: str) -> list[int]:
    raw = zlib.decompress(base64.b64decode(text))
    return list(struct.unpack(f">{len(raw) // 4}I", raw))


def call(address: str, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
    kind, _, place = address.partition(":")
    host, _, port = place.partition(":")
    connection = http.client.HTTPConnection(host if kind == "tcp" else "lmcache", int(port or 80), timeout=20)
    if kind == "unix":
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(20)
        connection.sock.connect(place)
    data = None if body is None else json.dumps(body)
    connection.request(method, path, body=data, headers={"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    try:
        return answer.status, json.loads(text)
    except ValueError:
        return answer.status, {"error": text[:300].decode(errors="replace")}


def store_keys(root: str, wanted: list[str]) -> list[Key]:
    """Keys of the store's blocks whose hash is wanted: <namespace>/<salt>/<2 digits>/<hash>.<rank>.<group>."""
    found = []
    for folder in sorted(Path(root).glob("*/*/")):
        shelves = {path.name for path in folder.glob("??")}
        near = [key for key in wanted if key[:2] in shelves]
        blocks = [block for key in near for block in sorted((folder / key[:2]).glob(f"{key}.*.*"))]
        if not blocks:
            continue
        # Other folders' files are nobody's business here: after a power failure one may be empty.
        model = json.loads((folder.parent / "ns.json").read_bytes())["namespace"]
        salt = json.loads((folder / "salt.json").read_bytes())["salt"]
        for block in blocks:
            key, rank, group = block.name.split(".")
            found.append((model, int(rank, 16), int(group, 16), key, salt))
    return found


def registered_keys(status: dict[str, Any], wanted: list[str]) -> list[Key]:
    """Unsalted keys of the registered engines: one a rank (lmcache/v1/distributed/api.py:171-214)."""
    engines = [*status.get("cache_context_meta", {}).values(), *status.get("non_cuda_context_meta", {}).values()]
    names = {(e["model_name"], int(e.get("world_size", 1))) for e in engines if e.get("model_name")}
    return [
        (model, size << 24 | rank << 16 | size << 8 | rank, 0, key, "")
        for model, size in names
        for rank in range(size)
        for key in wanted
    ]


def delete(address: str, tier: str, keys: list[Key], until: float) -> dict[str, Any]:
    fields = ("model_name", "kv_rank", "object_group_id", "chunk_hash_hex", "cache_salt")
    body = [dict(zip(fields, key, strict=True)) for key in keys]
    while True:
        status, answer = call(address, "DELETE", "/cache/objects", {"keys": body, "tier": tier})
        # Locked keys are being read or written: never forced, tried again.
        if status != 200 or not answer.get("skipped") or time.monotonic() > until:
            return {"status": status, **answer}
        time.sleep(0.2)


def main(argv: list[str]) -> dict[str, Any]:
    action, address, chunk, prompts = argv[0], argv[1], int(argv[2]), [decode(text) for text in argv[3:]]
    hashes = [chunk_hashes(tokens, chunk) for tokens in prompts]
    wanted = sorted({key for of_prompt in hashes for key in of_prompt})
    status = call(address, "GET", "/status")[1]
    adapters = status.get("storage_manager", {}).get("l2_adapters", [])
    folders = [a["root"] for a in adapters if a.get("type") == "KvstrataL2Adapter"]
    listable = bool(folders) and len(folders) == len(adapters)

    def on_disk() -> list[Key]:
        return [key for folder in folders for key in store_keys(folder, wanted)]

    found = on_disk()
    present = {key[HASH] for key in found}
    result: dict[str, Any] = {
        "chunks": len(wanted),
        "l2_adapters": [a.get("type", "?") for a in adapters],
        "l2_present": len(present) if listable else None,
    }
    if not listable:  # whoever can ask the place of the blocks asks by these names
        names = [
            f"{model}@{rank:08x}@{group:x}@{key}" for model, rank, group, key, _ in registered_keys(status, wanted)
        ]
        result["keys"] = names
    keys = sorted(set(found) | set(registered_keys(status, wanted)))
    until = time.monotonic() + 10
    if action in ("drop-l1", "delete") and keys:
        result["l1"] = delete(address, "l1", keys, until)
    if action == "delete" and keys and adapters:
        for kind in {a.get("type") for a in adapters}:
            result["l2"] = delete(address, "l2", found if listable else keys, until)
            result["l2_kind"] = kind
        result["l2_left"] = len(on_disk()) if listable else None
    return result


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
