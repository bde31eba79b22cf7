"""Many threads, all tiers, disks that are too small: no wrong byte, no promise broken, books that fit the disks."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

from kvstrata.engine.content import Engine
from kvstrata.engine.errors import Full
from tests.engine.engines import MIB, block_files, data, get, settings, until

_KEYS = 120
_SECONDS = 6.0


def test_a_storm_over_all_tiers_leaves_true_books(tmp_path: Path) -> None:
    engine = Engine.open(
        settings(tmp_path / "engine", 16 * MIB, hot=2 * MIB, cold_root=tmp_path / "cold", cold_capacity=24 * MIB)
    )
    wrong: list[object] = []
    done = [0, 0]
    end = time.monotonic() + _SECONDS

    def value(key: int) -> bytes:
        # Two keys share each value.
        return data(key // 2, 300_000 + key // 2)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            while time.monotonic() < end:
                key = int(rng.triangular(0, _KEYS - 1, 0))
                name, act = b"%d" % key, rng.random()
                if act < 0.4:
                    engine.put("a", name, memoryview(value(key)), replace=act < 0.1)
                    done[0] += 1
                elif act < 0.5:
                    engine.delete("a", [name])
                else:
                    found = get(engine, name)
                    done[1] += found is not None
                    if found not in (None, value(key)):
                        wrong.append((key, len(found or b"")))
        except Full:
            pass
        except Exception as error:
            wrong.append(error)

    def promised() -> None:
        """Keys that nobody else deletes: what EXISTS says yes to must be there."""
        rng = random.Random(99)
        try:
            for step in range(10_000):
                if time.monotonic() > end:
                    return
                number = 1000 + step % 20
                name = b"%d" % number
                engine.put("a", name, memoryview(data(number, 200_000)))
                time.sleep(rng.random() * 0.01)
                if engine.exists("a", [name], lease_s=2.0)[0] and get(engine, name) != data(number, 200_000):
                    wrong.append(("promised", number))
        except Full:
            pass
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    threads += [threading.Thread(target=promised) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert min(done) > 50
    before: object = None
    while (now := engine.stats("a")) != before:
        before = now
        time.sleep(0.7)
    names = engine.scan("a", b"", None, 10_000)[1]
    stats = engine.stats("a")
    assert stats["total_refs"] == len(names)
    until(lambda: len(block_files(tmp_path)) == int(str(engine.stats("a")["unique_blocks"])))
    engine.close()
    # What the books said is what lies there.
    engine = Engine.open(settings(tmp_path / "engine", 16 * MIB, cold_root=tmp_path / "cold", cold_capacity=24 * MIB))
    again = engine.stats("a")
    assert {name: again[name] for name in ("total_refs", "unique_blocks", "logical_bytes", "resident_bytes")} == {
        name: stats[name] for name in ("total_refs", "unique_blocks", "logical_bytes", "resident_bytes")
    }
    engine.close()
