"""The demo prompt's length rule, and the arithmetic of what may hit."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.proof import prompts

NONCE = "k3v9x0a1"


def words_and_digits(text: str) -> int:
    """A stand-in tokenizer that, like real ones, gives a word one to four tokens."""
    return sum(-(-len(word) // 5) for word in re.findall(r"\w+|[^\w\s]", text))


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("chunk", [256, 512])
@pytest.mark.parametrize("target", [3000, 900, 1500, 9000])
def test_a_prompt_has_a_length_at_which_every_tier_hits_the_same(target: int, chunk: int, block: int) -> None:
    prompt = prompts.build(NONCE, words_and_digits, target=target, chunk_size=chunk, block_size=block)
    assert prompt.tokens == words_and_digits(prompt.text) <= target
    assert prompt.tokens > target - chunk - block
    hits = {source: prompts.expected_hits(prompt.tokens, chunk, block, source) for source in ("l0", "l1", "l2")}
    assert set(hits.values()) == {prompt.cached}
    assert 1 <= prompt.tokens % chunk <= block


@settings(max_examples=30, deadline=None)
@given(target=st.integers(360, 6000), block=st.sampled_from([16, 32, 128]))
def test_any_target_above_one_chunk_gives_a_prompt(target: int, block: int) -> None:
    prompt = prompts.build(NONCE, words_and_digits, target=target, block_size=block)
    assert prompt.tokens <= target
    assert 1 <= prompt.tokens % 256 <= block


def test_the_nonce_comes_first_and_the_question_last() -> None:
    prompt = prompts.build(NONCE, words_and_digits)
    assert prompt.text.startswith(NONCE)
    assert words_and_digits(NONCE) <= 16 - 2
    assert prompt.text.endswith(prompts.QUESTION)


def test_two_nonces_share_no_text_before_them_and_all_but_them_after() -> None:
    one, two = (prompts.build(nonce, words_and_digits) for nonce in ("aaaa1111", "bbbb2222"))
    assert one.text.replace("aaaa1111", "bbbb2222") == two.text


@pytest.mark.parametrize(("target", "block"), [(3000, 128), (3000, 16), (900, 128), (900, 16), (352, 128)])
def test_the_answer_stands_in_a_cached_block(target: int, block: int) -> None:
    """What is asked for must come from the cache: the tokens behind the last whole chunk are computed each time."""
    prompt = prompts.build(NONCE, words_and_digits, target=target, block_size=block)
    last = prompt.text.rindex(NONCE) + len(NONCE)
    assert words_and_digits(prompt.text[:last]) <= prompt.cached
    assert prompt.tokens - words_and_digits(prompt.text[:last]) < 500, "near enough for a small model"
    assert prompts.QUESTION.endswith("The watchword of this copy is")


def test_the_chapter_that_answers_the_question_is_kept_when_the_text_is_trimmed() -> None:
    prompt = prompts.build(NONCE, words_and_digits, target=1200)
    for name in ("Halvard Brenn", "Signe Torp", "Aurelia"):
        assert name in prompt.text


def test_a_longer_prompt_does_not_repeat_the_same_text_block_for_block() -> None:
    prompt = prompts.build(NONCE, words_and_digits, target=12000)
    assert "volume 2" in prompt.text
    assert "volume 3" in prompt.text


@pytest.mark.parametrize("nonce", ["", "short", "UPPERCASE", "has space", "x" * 13, "a/b/c/d/e"])
def test_a_nonce_that_may_not_fit_the_first_block_is_refused(nonce: str) -> None:
    with pytest.raises(ValueError, match="nonce"):
        prompts.build(nonce, words_and_digits)


def test_a_target_below_one_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match="below one chunk"):
        prompts.build(NONCE, words_and_digits, target=200)


def test_a_counter_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="no prompt"):
        prompts.build(NONCE, lambda text: 256 * len(text))


#           n,    C,   B, source, expected
HITS = [
    (3000, 256, 128, "none", 0),
    (3000, 256, 128, "l0", 2944),
    (3000, 256, 128, "l1", 2816),
    (3000, 256, 128, "l2", 2816),
    (2912, 256, 128, "l0", 2816),
    (2912, 256, 128, "l1", 2816),
    (2816 + 1, 256, 16, "l0", 2816),
    (2816 + 16, 256, 16, "l0", 2816),
    (2816 + 17, 256, 16, "l0", 2832),
    # n % C == 0: vLLM's own cache stops a block short, the connector adds that block.
    (2816, 256, 128, "l0", 2816),
    (2816, 256, 128, "l1", 2816),
    (256, 256, 128, "l2", 256),
    (255, 256, 128, "l1", 0),
    (255, 256, 128, "l0", 128),
    (1, 256, 128, "l0", 0),
]


@pytest.mark.parametrize(("tokens", "chunk", "block", "source", "expected"), HITS)
def test_expected_hits(tokens: int, chunk: int, block: int, source: str, expected: int) -> None:
    assert prompts.expected_hits(tokens, chunk, block, source) == expected


@given(
    tokens=st.integers(1, 100_000), blocks=st.integers(1, 32), block=st.sampled_from([16, 64, 128]),
    source=st.sampled_from(["none", "l0", "l1", "l2"]),
)  # fmt: skip
def test_hits_are_whole_blocks_within_the_prompt(tokens: int, blocks: int, block: int, source: str) -> None:
    hits = prompts.expected_hits(tokens, blocks * block, block, source)
    assert 0 <= hits <= tokens
    assert hits % block == 0


@pytest.mark.parametrize(
    ("tokens", "chunk", "block", "source"), [(0, 256, 128, "l0"), (9, 200, 128, "l0"), (9, 256, 128, "l3")]
)
def test_nonsense_is_refused(tokens: int, chunk: int, block: int, source: str) -> None:
    with pytest.raises(ValueError, match=r"whole blocks|one of none"):
        prompts.expected_hits(tokens, chunk, block, source)
