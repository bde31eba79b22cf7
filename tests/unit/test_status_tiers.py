"""What `kvstrata status` says of the tiers."""

from kvstrata.deploy.status_tiers import l2_line, tiers_of
from kvstrata.proof.prom import Samples

STORE = {"type": "KvstrataStore", "blocks": 12, "used_bytes": 3 << 30, "capacity_bytes": 8 << 30}


def line(**more: object) -> str:
    server = {"storage_manager": {"l2_adapters": [{**STORE, **more}]}}
    return l2_line(tiers_of(server, Samples(()), Samples(()), None))


def test_the_block_store_says_how_full_it_is_which_reader_it_uses_and_what_is_wrong() -> None:
    assert line() == "3.00 GiB of 8.00 GiB, 12 blocks"
    assert line(reader="native") == "3.00 GiB of 8.00 GiB, 12 blocks, native reader"
    assert "python reader, 2 found corrupt" in line(reader="python", corrupt=2)
    assert line(store_failing="eacces").endswith(", NOTHING IS STORED: eacces")
    assert line(suspect=True).endswith("DISK DOES NOT ANSWER: computing instead")
