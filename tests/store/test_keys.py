"""Keys: whatever they hold, the path stays below the root, fits a file system, and belongs to one key only."""

import os
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstrata.store.keys import BlockKey, parse_name

TEXT = st.text(st.characters(exclude_categories=()))
KEYS = st.builds(
    BlockKey,
    TEXT,
    TEXT,
    st.binary(max_size=200),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
)
NASTY = (
    "",
    ".",
    "..",
    "/",
    "../..",
    "a/b",
    "\0",
    "-",
    "\udc80",
    "\ud800\udc00",
    "\U00010000",
    "x" * 100_000,
    "é",
    "e\u0301",
)


@given(KEYS)
@example(BlockKey("../../etc", "..", b"../../etc/passwd"))
@example(BlockKey("x" * 10_000, "y" * 10_000, b"z" * 10_000, 2**64 - 1, 2**32 - 1))
def test_a_path_stays_below_the_root_and_fits_a_file_system(key: BlockKey) -> None:
    parts = key.path.split("/")
    assert len(parts) == 4
    assert os.path.normpath(key.path) == key.path
    assert all(part not in ("", ".", "..") and len(os.fsencode(part)) <= 255 for part in parts)
    assert key.path.isascii() and len(key.path) < 300
    assert tuple(parts[:2]) == key.folder and parts[3] == key.name
    assert len(parts[2]) == 2 and parts[3].lstrip("~").startswith(parts[2])


@given(KEYS, KEYS)
def test_different_keys_have_different_encodings_digests_and_paths(one: BlockKey, other: BlockKey) -> None:
    for left, right in ((one.encode(), other.encode()), (one.digest, other.digest), (one.path, other.path)):
        assert (left == right) == (one == other)


def test_texts_that_look_alike_are_different_keys() -> None:
    keys = [BlockKey(name, salt, b"x") for name in NASTY for salt in NASTY]
    keys += [BlockKey("ab", "c", b"d"), BlockKey("a", "bc", b"d"), BlockKey("a", "b", b"cd"), BlockKey("abcd", "", b"")]
    assert len({key.encode() for key in keys}) == len({key.path for key in keys}) == len(keys)


@given(KEYS)
@example(BlockKey("\ud800\udc00", "\udfff", b""))
def test_an_encoding_gives_the_key_back(key: BlockKey) -> None:
    assert BlockKey.decode(key.encode()) == key


@given(KEYS, st.data())
def test_a_cut_or_grown_encoding_is_refused(key: BlockKey, data: st.DataObject) -> None:
    encoded = key.encode()
    cut = data.draw(st.integers(0, len(encoded) - 1))
    for wrong in (encoded[:cut], encoded + b"\0"):
        with pytest.raises(ValueError):
            BlockKey.decode(wrong)


@given(st.binary(max_size=80))
def test_bytes_that_are_no_encoding_are_refused_or_are_the_encoding_of_what_they_give(data: bytes) -> None:
    try:
        key = BlockKey.decode(data)
    except ValueError:
        return
    assert key.encode() == data


@given(KEYS)
def test_a_name_gives_back_what_it_holds(key: BlockKey) -> None:
    chunk = key.chunk if 1 <= len(key.chunk) <= 64 else None
    assert parse_name(key.name) == (chunk, key.rank, key.group)


@given(
    st.text("0123456789abcdefABg.~-/ \n", max_size=200)
    | st.from_regex(r"~?[0-9a-f]*\.[0-9a-f]*\.[0-9a-f]*", fullmatch=True)
)
@example("ab.0.0\n")
@example("ab.00.0")
@example("abc.0.0")
@example(".0.0")
@example("ab.٣.0")
@example("ab." + "1" * 17 + ".0")
@example("ab.0." + "1" * 9)
@example("ab" * 65 + ".0.0")
def test_only_names_that_a_key_gives_are_names_of_blocks(name: str) -> None:
    parsed = parse_name(name)
    if parsed is not None and parsed[0] is not None:
        assert BlockKey("", "", *parsed).name == name
    elif parsed is not None:
        assert name.startswith("~") and len(name.split(".")[0]) == 65


@pytest.mark.parametrize("wrong", [{"rank": -1}, {"rank": 2**64}, {"group": -1}, {"group": 2**32}])
def test_numbers_that_do_not_fit_a_name_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="needed"):
        replace(BlockKey("m", "", b"c"), **wrong)
