"""Version pairs that the guard was written and tested for (versions.lock repeats them; a test compares)."""

from collections.abc import Mapping

__all__ = ["SUPPORTED_PAIRS", "UnsupportedPair", "check_pair"]

# vLLM version -> LMCache versions whose private names the guard uses.
SUPPORTED_PAIRS: Mapping[str, tuple[str, ...]] = {
    "0.28.0": ("0.5.3",),
    "0.25.1": ("0.5.3",),
}


class UnsupportedPair(RuntimeError):
    """The guard relies on private names of one version pair; with another it could guard nothing."""


def check_pair(vllm_version: str, lmcache_version: str) -> str:
    """Return a printable pair, or raise `UnsupportedPair`. Local parts such as `+cpu` are ignored."""
    vllm, lmcache = vllm_version.split("+")[0], lmcache_version.split("+")[0]
    if lmcache in SUPPORTED_PAIRS.get(vllm, ()):
        return f"vllm {vllm} + lmcache {lmcache}"
    known = ", ".join(f"vllm {v} + lmcache {w}" for v, ws in SUPPORTED_PAIRS.items() for w in ws)
    raise UnsupportedPair(
        f"kvstrata: unsupported version pair. found: vllm {vllm} + lmcache {lmcache}. needed: one of {known}. "
        "fix: use the image that versions.lock names (make build), or run without the cache (make rollback)."
    )
