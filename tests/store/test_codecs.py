"""Codecs: lossless for every length and item size, and refused with a reason where they cannot be had."""

import subprocess
import sys
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.store.codecs import CodecError, codec
from kvstrata.store.format import BadBlock
from tests.store.blocks import smooth

ENCODING = ("lz4", "zstd")


@pytest.mark.parametrize("name", ENCODING)
@given(
    data=st.binary(max_size=3000) | st.binary(max_size=40).map(lambda part: part * 300), itemsize=st.integers(1, 255)
)
def test_what_is_encoded_comes_back(name: str, data: bytes, itemsize: int) -> None:
    encoded = codec(name).encode(memoryview(data), itemsize)
    if encoded is None:
        return
    assert len(encoded) < len(data)
    target = bytearray(len(data))
    codec(name).decode_into(memoryview(bytearray(encoded)), memoryview(target))
    assert target == data


@pytest.mark.parametrize(("name", "itemsize"), list(product(ENCODING, (1, 2, 3, 4, 8, 255))))
def test_a_whole_sub_block_comes_back_and_shrinks(name: str, itemsize: int) -> None:
    data = bytes(1 << 20) if itemsize not in (2, 4) else smooth(1 << 20)
    encoded = codec(name).encode(memoryview(data), itemsize)
    assert encoded is not None
    target = bytearray(len(data))
    codec(name).decode_into(memoryview(encoded), memoryview(target))
    assert target == data


def test_the_shuffle_by_item_size_is_what_makes_kv_shrink() -> None:
    data = memoryview(smooth(1 << 20))
    shuffled, plain = (codec("zstd").encode(data, itemsize) for itemsize in (2, 1))
    assert shuffled is not None and len(shuffled) < 0.6 * len(data)
    assert plain is None or len(plain) > 1.1 * len(shuffled)


@pytest.mark.parametrize("name", ENCODING)
def test_a_chunk_that_names_another_length_writes_nothing(name: str) -> None:
    encoded = codec(name).encode(memoryview(bytes(8192)), 2)
    assert encoded is not None
    for size in (0, 1, 8191, 8193):
        around = bytearray(b"\xa5" * (size + 64))
        with pytest.raises(BadBlock, match="decode"):
            codec(name).decode_into(memoryview(encoded), memoryview(around)[:size])
        assert around == b"\xa5" * (size + 64)


#: One for all examples: hypothesis wants to be able to repeat them.
SMOOTH = smooth(5000)


@pytest.mark.parametrize("name", ENCODING)
@given(data=st.data())
def test_a_damaged_chunk_never_writes_past_the_target(name: str, data: st.DataObject) -> None:
    encoded = bytearray(codec(name).encode(memoryview(SMOOTH), 2) or b"")
    for _ in range(data.draw(st.integers(1, 8))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    stored = encoded[: data.draw(st.integers(0, len(encoded)))] if data.draw(st.booleans()) else encoded
    around = bytearray(b"\xa5" * 5064)
    try:
        codec(name).decode_into(memoryview(stored), memoryview(around)[:5000])
    except BadBlock as error:
        assert error.reason == "decode"
    assert around[5000:] == b"\xa5" * 64


@pytest.mark.parametrize(
    "name", ["cachegen", "kivi", "fp8", "int8", "q4", "q4_0", "e4m3", "turboquant", "nf4", "CacheGen"]
)
def test_a_lossy_codec_is_refused_as_lossy(name: str) -> None:
    with pytest.raises(CodecError, match=r"found: .*lossy; needed: .*; to fix: "):
        codec(name)


@pytest.mark.parametrize("name", ["", "RAW", "gzip", "blosc"])
def test_an_unknown_codec_is_refused_with_the_names_that_are_known(name: str) -> None:
    with pytest.raises(CodecError, match=r"found: .*; needed: .*; to fix: KV_STORE_CODEC=raw\|lz4\|zstd") as caught:
        codec(name)
    assert "lossy" not in str(caught.value)


def _without(package: str, code: str) -> subprocess.CompletedProcess[str]:
    hidden = f"import sys; sys.modules[{package!r}] = None\n{code}"
    return subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)


def test_raw_blocks_need_no_codec_library() -> None:
    done = _without("blosc", "from kvstrata.store.blockfile import BlockIO; BlockIO('/nowhere', codec='raw')")
    assert done.returncode == 0, done.stderr


def test_a_codec_without_its_library_says_what_to_install() -> None:
    done = _without("blosc", "from kvstrata.store.blockfile import BlockIO; BlockIO('/nowhere', codec='zstd')")
    assert "CodecError: found: " in done.stderr and "pip install blosc" in done.stderr


def test_a_store_without_its_checksum_says_what_to_install() -> None:
    done = _without("zlib_ng", "import kvstrata.store.blockfile")
    assert "ImportError: found: " in done.stderr and "pip install zlib-ng" in done.stderr
