"""The user's own vLLM arguments, as far as the plan has to know them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvstrata.deploy.errors import KvError
from kvstrata.launch.owned_args import owned

__all__ = ["ExtraArgs"]

#: vLLM takes these short forms too.
_SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size"}


@dataclass(frozen=True)
class ExtraArgs:
    """Last value of each flag in KV_VLLM_EXTRA_ARGS; a flag without a value is "" here."""

    values: Mapping[str, str]

    @staticmethod
    def parse(args: tuple[str, ...]) -> ExtraArgs:
        """Raises KvError for a flag that another knob owns."""
        if found := owned(args):
            raise KvError(f"KV_VLLM_EXTRA_ARGS has {found[0]}", "no such argument there", found[1])
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
