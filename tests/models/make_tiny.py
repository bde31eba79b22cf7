"""Make a small model for tests: a Qwen3 of 44 M parameters with seeded weights and a byte-level BPE of its own.

Usage, inside the vLLM image or any environment with torch and transformers:

    python make_tiny.py OUT [--seed N] [--variant-seed N] [--layers N] [--hidden N]

No hub is asked. The same arguments give the same bytes (with the same torch): the weights come from numpy's PCG64, and
the tokenizer learns from a text that this file makes up. `--variant-seed` changes the weights and nothing else: the
same architecture, tokenizer and file sizes, for tests of the identity.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB = 4096
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONSONANTS = [*"bcdfghklmnprstvw", "st", "tr", "ch", "sh"]
VOWELS = [*"aeiou", "ea", "ou", "ai"]


def corpus(seed: int, sentences: int = 20000) -> list[str]:
    """Sentences of made-up words whose frequencies fall as in a language, so that merges have something to learn."""
    rng = random.Random(seed)
    syllables = ["".join(pair) for pair in itertools.product(CONSONANTS, VOWELS)]
    words = ["".join(rng.choices(syllables, k=rng.choice((1, 1, 2, 2, 2, 3)))) for _ in range(6000)]
    words[:12] = ["the", "of", "and", "to", "in", "is", "that", "it", "for", "was", "on", "with"]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    lines = []
    for _ in range(sentences):
        chosen = rng.choices(words, weights, k=rng.randint(4, 16))
        lines.append(" ".join(chosen).capitalize() + rng.choice([".", ".", "?", ", " + str(rng.randint(0, 9999))]))
    return lines


def make_tokenizer(out: Path, seed: int) -> int:
    """Write tokenizer.json and tokenizer_config.json; returns the size of the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed), trainer)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[3],
        "model_max_length": 32768,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return tokenizer.get_vocab_size()


def make_weights(out: Path, config: Qwen3Config, seed: int) -> int:
    """Write model.safetensors in bfloat16; returns the number of parameters."""
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in Qwen3ForCausalLM(config).state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    tensors = {}
    for name, shape in sorted(shapes.items()):
        # One generator a tensor: another number of layers leaves the others as they were.
        rng = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
        if "norm" in name:
            values = torch.ones(shape)
        else:
            values = torch.from_numpy(
                rng.standard_normal(shape, dtype=np.float32) * np.float32(config.initializer_range)
            )
        tensors[name] = values.to(torch.bfloat16).contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    # safetensors writes 0600, and the server that reads it runs under another user id.
    (out / "model.safetensors").chmod(0o644)
    return sum(tensor.numel() for tensor in tensors.values())


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a small seeded model for tests")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=20260101, help="tokenizer and weights")
    parser.add_argument("--variant-seed", type=int, default=0, help="other weights, everything else the same")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=768)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    vocab = make_tokenizer(args.out, args.seed)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 3,
        num_hidden_layers=args.layers,
        num_attention_heads=max(4, args.hidden // 64),
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        # Wide enough that the answers of two prompts differ, narrow enough that float32 keeps them stable.
        initializer_range=0.05,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=3,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(args.out)
    ends = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 3}
    (args.out / "generation_config.json").write_text(json.dumps(ends) + "\n", encoding="utf-8")
    count = make_weights(args.out, config, args.seed + 1000003 * args.variant_seed)
    print(f"{args.out}: {count / 1e6:.1f} M parameters, vocabulary {vocab}")


if __name__ == "__main__":
    main()
