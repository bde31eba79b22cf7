"""Cache keys: what changes KV bytes changes the key, and no client can choose one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.connector.keys import cache_model_name, cache_salt, identity_digest, image_token_ids
from kvstrata.connector.pairs import SUPPORTED_PAIRS, UnsupportedPair, check_pair

KEY = b"k" * 32
LORA = {"files": "ab", "unseen": ""}
FORBIDDEN = set("@/\\\x00")


@given(st.text(min_size=1, max_size=200))
def test_every_salt_becomes_a_short_word_that_lmcache_accepts(salt: str) -> None:
    digest = cache_salt(salt, None, KEY)
    assert len(digest) == 41
    assert not FORBIDDEN & set(digest)


@pytest.mark.parametrize("salt", ["../x", "a/b", "\x00", "x" * 10_000, "соль", "\ud800"])
def test_hostile_salts_are_only_salts(salt: str) -> None:
    assert len(cache_salt(salt, None, KEY)) == 41


@given(st.text(min_size=1), st.text(min_size=1))
def test_different_salts_do_not_share(one: str, other: str) -> None:
    assert (cache_salt(one, None, KEY) == cache_salt(other, None, KEY)) == (one == other)


def test_the_literal_digest_of_a_salt_is_another_salt() -> None:
    digest = cache_salt("tenant", None, KEY)
    assert cache_salt(digest, None, KEY) != digest


def test_no_salt_and_no_lora_stays_empty() -> None:
    assert cache_salt(None, None, KEY) == cache_salt("", None, KEY) == ""


def test_lora_separates_with_and_without_a_salt() -> None:
    digests = {cache_salt(s, lora, KEY) for s in ("", "t") for lora in (None, LORA, {**LORA, "files": "cd"})}
    assert len(digests) == 6


def test_another_secret_gives_other_digests() -> None:
    assert cache_salt("t", None, KEY) != cache_salt("t", None, b"q" * 32)


@given(st.text(max_size=80))
def test_model_names_carry_no_separator(name: str) -> None:
    short, _, digest = cache_model_name(name, {"files": "1"}).rpartition("--")
    assert short and len(short) <= 48 and len(digest) == 32
    assert not (FORBIDDEN & set(short))


def test_each_fact_is_part_of_the_identity() -> None:
    facts = {"files": "1", "dtype": "float32", "tp": 1, "pp": 1, "block_size": 128, "pair": "p"}
    digests = {identity_digest({**facts, name: "changed"}) for name in facts} | {identity_digest(facts)}
    assert len(digests) == len(facts) + 1


def test_images_keep_their_whole_hash_apart() -> None:
    prompt = list(range(100))
    # Both hashes end in the same 16 bits, which is all that LMCache keeps.
    one, other = (image_token_ids(prompt, [(h, 10, 20)]) for h in ("aa" * 30 + "beef", "bb" * 30 + "beef"))
    assert one[:10] == other[:10] == prompt[:10] and one[30:] == other[30:] == prompt[30:]
    assert all(a != b for a, b in zip(one[10:30], other[10:30], strict=True))
    assert all(0 <= token < 1 << 32 for token in one)


def test_an_image_beyond_the_prompt_is_cut() -> None:
    assert len(image_token_ids([1, 2, 3], [("x", 2, 50)])) == 3


def test_only_tested_pairs_are_served() -> None:
    assert check_pair("0.28.0+cpu", "0.5.3") == "vllm 0.28.0 + lmcache 0.5.3"
    with pytest.raises(UnsupportedPair, match=r"found: vllm 0\.29\.0 \+ lmcache 0\.5\.3\. needed: one of"):
        check_pair("0.29.0", "0.5.3")
    with pytest.raises(UnsupportedPair):
        check_pair(next(iter(SUPPORTED_PAIRS)), "0.5.6")
