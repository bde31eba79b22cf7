"""Two tenants never share, whatever they call themselves; a strange salt harms nobody."""

from __future__ import annotations

import pytest

from kvstrata.connector.keys import cache_salt
from tests.stack.harness import Stack, chunks, prompt

pytestmark = pytest.mark.stack


@pytest.mark.parametrize(
    "salt", ["../x", "a/b", "a\\b", "a@b", "nul\x00byte", "x" * 10_000, "соль-鹽", " "], ids=lambda s: repr(s)[:20]
)
def test_hostile_salts_are_served_and_isolated(stack: Stack, salt: str) -> None:
    name = f"hostile-{salt[:8]}"
    bare = stack.store(prompt(name))
    stack.drop_l0()
    first = stack.store(prompt(name), cache_salt=salt)
    assert first.status == 200 and first.text == bare.text
    assert first.lmcache == 0, "read blocks that were stored without a salt"
    stack.drop_l0()
    again = stack.ask(prompt(name), cache_salt=salt)
    assert again.text == bare.text and again.lmcache == chunks(again.prompt_tokens)
    assert stack.healthy()


def test_the_literal_digest_of_a_salt_opens_nothing(stack: Stack) -> None:
    """The name under which a tenant's blocks lie on disk is no key to them."""
    stack.store(prompt("victim"), cache_salt="tenant-a")
    key = bytes.fromhex((stack.root / "data" / "secrets" / "salt_key").read_text().strip())
    raw_key = (stack.root / "data" / "secrets" / "salt_key").read_bytes().strip()
    names = " ".join(p.read_text() for p in stack.l2_files() if p.name == "salt.json")
    digest = cache_salt("tenant-a", None, raw_key)
    assert digest in names, "the test does not know the name on disk any more"
    stack.drop_l0()
    for guess in (digest, "h-" + digest, digest[1:], cache_salt("tenant-a", None, key)):
        assert stack.ask(prompt("victim"), cache_salt=guess).lmcache == 0
        stack.drop_l0()


def test_raw_salts_are_in_no_metric_and_no_file_name(stack: Stack) -> None:
    secret = "tenant-with-a-telling-name"
    stack.store(prompt("telling"), cache_salt=secret)
    assert secret not in stack.client.get(stack.metrics_url + "/metrics").text
    assert secret not in " ".join(str(p) for p in stack.l2_files())


def test_prompt_logprobs_are_not_served_from_the_cache(stack: Stack) -> None:
    cold = stack.store(prompt("logprobs"))
    stack.drop_l0()
    answer = stack.ask(prompt("logprobs"), prompt_logprobs=1)
    assert answer.status == 200 and answer.text == cold.text and answer.lmcache == 0


def test_skip_save_stores_nothing(stack: Stack) -> None:
    before = set(stack.l2_files())
    hint = {"cached_token_stats": 1, "lmcache.skip_save": True}
    answer = stack.ask(prompt("skip-save"), kv_transfer_params=hint)
    stack.wait_stored()
    stack.drop_l0()
    assert stack.ask(prompt("skip-save"), kv_transfer_params=hint).lmcache == 0
    assert set(stack.l2_files()) == before
    stack.drop_l0()
    assert stack.store(prompt("skip-save")).text == answer.text
    assert set(stack.l2_files()) > before  # without the hint the same prompt is stored


@pytest.mark.parametrize("extra", [0, 1, 127, 128, 129])
def test_a_prompt_that_ends_near_a_chunk_boundary(stack: Stack, extra: int) -> None:
    """n % 256 == 0 and its neighbours: vLLM recomputes at least one token, the text stays the same."""
    ids = stack.client.post(
        stack.url + "/tokenize", json={"model": stack.model(), "prompt": prompt(f"edge-{extra}", 700)}
    ).json()
    tokens = ids["tokens"][: 512 + extra]
    cold = stack.store(tokens)  # type: ignore[arg-type]
    stack.drop_l0()
    warm = stack.ask(tokens)  # type: ignore[arg-type]
    assert cold.prompt_tokens == 512 + extra
    assert warm.text == cold.text and warm.lmcache == 512
