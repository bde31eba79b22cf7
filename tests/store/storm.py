"""A process that stores as fast as it can until it is killed: `python -m tests.store.storm ROOT CAPACITY SEED`.

It prints the number of each block whose put it saw succeed.
"""

from __future__ import annotations

import random
import sys
import threading
from pathlib import Path

from kvstrata.store.store import BlockStore, Outcome
from tests.store.stores import get, put, settings

SIZES = (4096, 300_000, 1_500_000)


def size_of(number: int) -> int:
    """Each key has its own length."""
    return SIZES[number % len(SIZES)]


def main() -> None:
    """Store, load, delete; never end."""
    root, capacity, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    store = BlockStore.open(settings(root, capacity))
    say = threading.Lock()
    with say:
        print("open", flush=True)

    def storm(number: int) -> None:
        chance = random.Random(seed * 100 + number)
        while True:
            chosen = [chance.randrange(3 * 60) for _ in range(4)]
            size = SIZES[chance.randrange(3)]
            chosen = [number for number in chosen if size_of(number) == size]
            results = put(store, chosen, size)
            with say:
                for which, result in zip(chosen, results, strict=True):
                    if result.outcome is Outcome.STORED:
                        print(which, flush=True)
            get(store, chosen[:2], size)

    threads = [threading.Thread(target=storm, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
