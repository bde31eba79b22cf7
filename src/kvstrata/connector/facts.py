"""Facts of a running vLLM that decide the KV bytes, read from its config."""

import hashlib
import json
from pathlib import Path
from typing import Any

from kvstrata.connector.keys import identity_digest

__all__ = ["engine_facts", "lora_facts"]


def engine_facts(vllm_config: Any, files_digest: str, pair: str) -> dict[str, Any]:
    """Return what, besides the tokens and the salt, decides the bytes of a KV block.

    Args:
        vllm_config: vllm.config.VllmConfig.
        files_digest: SHA-256 over the model folder (kvstrata.deploy.identity).
        pair: printable version pair.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    # The config after overrides (rope scaling, sliding window, ...) as vLLM will use it, without the folder's path.
    hf_config = {k: v for k, v in model.hf_config.to_dict().items() if k not in ("_name_or_path", "name_or_path")}
    return {
        "files": files_digest,
        "pair": pair,
        "dtype": str(model.dtype),
        "kv_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "load_format": str(vllm_config.load_config.load_format),
        "hf_config": identity_digest(json.loads(json.dumps(hf_config, default=str))),
        "block_size": int(cache.block_size),
        "tp": int(parallel.tensor_parallel_size),
        "pp": int(parallel.pipeline_parallel_size),
        "dcp": int(getattr(parallel, "decode_context_parallel_size", 1)),
        "device": str(vllm_config.device_config.device_type),
        # Layers of a draft model lie in the same blocks.
        "speculative": _speculative(vllm_config.speculative_config),
        "kv_skip_layers": [str(x) for x in getattr(cache, "kv_cache_dtype_skip_layers", None) or []],
        # LongRoPE and dynamic scaling choose their factors by the length that is served.
        "rope_length": int(model.max_model_len) if _length_matters(hf_config) else 0,
        "seed": int(model.seed or 0) if str(vllm_config.load_config.load_format) == "dummy" else 0,
    }


def _speculative(config: Any) -> str:
    if config is None:
        return ""
    names = ("method", "model", "num_speculative_tokens", "draft_tensor_parallel_size", "quantization")
    return json.dumps({name: str(getattr(config, name, "")) for name in names}, sort_keys=True)


def _length_matters(hf_config: dict[str, Any]) -> bool:
    text = json.dumps({k: v for k, v in hf_config.items() if "rope" in k}, default=str).lower()
    return any(kind in text for kind in ("longrope", '"su"', "dynamic"))


def lora_facts(lora_request: Any, _cache: dict[str, tuple[Any, str]]) -> dict[str, str] | None:
    """Identity of a request's LoRA adapter: the content of its files, not its name.

    `_cache` keeps the digest by adapter id: vLLM keeps an adapter that it has loaded, so the first digest stays right
    for as long as the files are the same. Raises RuntimeError when they have changed since (what vLLM holds is not
    known then) and OSError when they cannot be read; the caller serves such a request without the cache.
    """
    if lora_request is None:
        return None
    path, key = Path(lora_request.lora_path), f"{lora_request.lora_int_id}:{lora_request.lora_path}"
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else []
    stamps = tuple((str(f), s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for f in files for s in [f.stat()])
    known = _cache.get(key)
    if known is not None and known[0] != stamps:
        raise RuntimeError(f"files of LoRA adapter {lora_request.lora_name} changed while vLLM runs: restart vLLM")
    if known is None:
        digest = hashlib.sha256()
        for file in files:
            digest.update(file.relative_to(path.parent if path.is_file() else path).as_posix().encode() + b"\0")
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        known = (stamps, digest.hexdigest())
        _cache[key] = known
    # Files that cannot be seen here (a hub name): the name and path have to stand for them.
    unseen = "" if files else f"{lora_request.lora_name}@{lora_request.lora_path}#{lora_request.lora_int_id}"
    return {"files": known[1], "unseen": unseen}
