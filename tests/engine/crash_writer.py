"""A process that stores, replaces, deletes and reads until it is killed, and says on its output what was acknowledged.

python -m tests.engine.crash_writer ROOT SEED DURABILITY
"""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path

from kvstrata.engine.content import Engine
from kvstrata.engine.errors import Full
from tests.engine.engines import MIB, data, get, settings

WRITERS = 4


def main() -> None:
    """Lines: B = begun, A = acknowledged, D = deleted (begun: E), each with worker, key and value number."""
    root, seed, durability = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    engine = Engine.open(
        settings(root / "engine", 48 * MIB, cold_root=root / "cold", cold_capacity=512 * MIB, durability=durability)
    )

    def say(word: str, worker: int, key: int, number: int) -> None:
        # One write: whole lines, in the order of what happened to this worker's keys.
        os.write(1, f"{word} {worker} {key} {number}\n".encode())

    def work(worker: int) -> None:
        rng = random.Random(seed * 100 + worker)
        number = 0
        while True:
            key = rng.randrange(40)
            name = b"%d.%d" % (worker, key)
            number += 1
            value = seed * 1_000_000 + worker * 100_000 + number
            act = rng.random()
            if act < 0.15:
                say("E", worker, key, 0)
                engine.delete("a", [name])
                say("D", worker, key, 0)
            elif act < 0.25:
                get(engine, name)
            else:
                say("B", worker, key, value)
                try:
                    engine.put("a", name, memoryview(data(value, 1 + rng.randrange(300_000))), replace=True)
                except Full:
                    continue
                say("A", worker, key, value)

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
