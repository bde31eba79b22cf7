"""What goes into a cache key: the model's name, the tenant salt, and the ids that stand for images.

Everything here is pure. The rules: whatever changes the KV bytes of a token must change its key, and no
client can choose a key. In doubt two requests do not share.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["cache_model_name", "cache_salt", "identity_digest", "image_token_ids"]

_NAME_LIMIT = 48  # characters of the readable part; the digest is what counts
_U32 = 0xFFFF_FFFF


def identity_digest(facts: Mapping[str, Any]) -> str:
    """32 hex digits over facts that decide the KV bytes (canonical JSON, sorted keys)."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def cache_model_name(short_name: str, facts: Mapping[str, Any]) -> str:
    """`<short name>--<32 hex>`: the model name that LMCache keys carry, in L1 and in every L2.

    No `/` or `@` (LMCache's adapters use them as separators, lmcache 0.5.3 l2_adapters/fs_l2_adapter.py).
    """
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", short_name).strip("-.")[:_NAME_LIMIT] or "model"
    return f"{readable}--{identity_digest(facts)}"


def cache_salt(salt: str | None, lora: Mapping[str, Any] | None, key: bytes) -> str:
    """Fixed-length form of a tenant's salt, with the LoRA adapter folded in; `""` for neither.

    Every non-empty salt is digested, not only those that LMCache rejects: otherwise a client could send the
    literal digest of another tenant's salt and read its blocks. `key` (a local secret) keeps a reader of the
    disk from guessing salts. Length prefixes keep (salt, lora) pairs apart.
    """
    if not salt and not lora:
        return ""
    parts = [(salt or "").encode("utf-8", "surrogatepass")]
    if lora:
        parts.append(json.dumps(lora, sort_keys=True, default=str).encode())
    message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return "s" + hmac.new(key, message, hashlib.sha256).hexdigest()[:40]


def image_token_ids(token_ids: Sequence[int], images: Iterable[tuple[str, int, int]]) -> list[int]:
    """Replace placeholder tokens by ids that depend on the whole image hash and on the position in the image.

    LMCache keeps 16 bits of an image's hash for all of its tokens (lmcache 0.5.3 integration/vllm/utils.py:161),
    so two images collide once in 65536. Here each placeholder gets 32 bits of its own of SHA-256(hash, index).

    Args:
        token_ids: prompt token ids; not modified.
        images: (identifier, offset, length) per image, in tokens.
    """
    ids = list(token_ids)
    for identifier, offset, length in images:
        seed = str(identifier).encode("utf-8", "surrogatepass")
        for index in range(length):
            position = offset + index
            if position >= len(ids):
                break
            word = hashlib.sha256(seed + b"\0" + index.to_bytes(4, "big")).digest()[:4]
            ids[position] = int.from_bytes(word, "big") & _U32
    return ids
