"""The user's own vLLM arguments, as far as the plan has to know them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvstrata.deploy.errors import KvError

__all__ = ["ExtraArgs"]

_REFUSED = {
    "--kv-transfer-config": "the launcher writes it; KV_PERSIST=0 is the switch for no connector",
    "--served-model-name": "the served name is the model's short name: KV_MODEL, or the folder's name",
    "--host": "vLLM listens inside its container; only 127.0.0.1 of this machine reaches it",
    "--port": "set KV_PORT",
    "--model": "set MODEL_DIR or KV_MODEL",
    "--config": "write the arguments themselves: what stands in a file cannot be checked",
    "--api-key": "the API listens on 127.0.0.1 only and the proof has no key; put a gateway with keys before it",
}
#: vLLM takes these short forms too.
_SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size"}


@dataclass(frozen=True)
class ExtraArgs:
    """Last value of each flag in KV_VLLM_EXTRA_ARGS; a flag without a value is "" here."""

    values: Mapping[str, str]

    @staticmethod
    def parse(args: tuple[str, ...]) -> ExtraArgs:
        """Raises KvError for a flag that another knob owns."""
        values: dict[str, str] = {}
        name = ""
        for arg in args:
            if arg.startswith("-") and not _is_number(arg):
                name, _, value = arg.partition("=")
                # vLLM takes --max_model_len as well as --max-model-len.
                name = _SHORT.get(name, name.replace("_", "-"))
                values[name] = value
            elif name:
                values[name] = f"{values[name]} {arg}".strip()
        for name in values:
            if name in _REFUSED:
                raise KvError(f"KV_VLLM_EXTRA_ARGS has {name}", "no such flag there", _REFUSED[name])
        return ExtraArgs(values)

    def value(self, name: str) -> str | None:
        return self.values.get(name)

    def whole(self, name: str) -> int | None:
        """A positive whole number (vLLM's 8k = 8000, 8K = 8192), or None when the flag is absent."""
        text = self.values.get(name)
        if text is None:
            return None
        scale = {"k": 1000, "K": 1024, "m": 10**6, "M": 1 << 20}.get(text[-1:], 1)
        digits = text[:-1] if scale != 1 else text
        if not digits.isdecimal() or int(digits) < 1:
            raise KvError(f"KV_VLLM_EXTRA_ARGS has {name} {text}", "a whole number > 0", f"mend {name} in .env")
        return int(digits) * scale


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
