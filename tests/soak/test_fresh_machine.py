"""`make up` on a bare Debian 12: no engine, no images, no .venv. Takes 10 minutes; run by `make soak`, not by CI."""

from __future__ import annotations

import os
import threading
import time

import pytest

from tests.unit.test_engine_fresh import docker, machine

__all__ = ["machine"]

CLIENT = """
import json, time, urllib.request as u
bad = n = 0
opener = u.build_opener(u.ProxyHandler({}))
body = json.dumps({"model": "smollm2-135m-instruct", "prompt": "Hello", "max_tokens": 1, "temperature": 0}).encode()
end = time.time() + SECONDS
while time.time() < end:
    try:
        r = u.Request("http://127.0.0.1:8000/v1/completions", body, {"Content-Type": "application/json"})
        bad += opener.open(r, timeout=60).status != 200
    except Exception as e:
        bad += 1; print(e)
    n += 1
    time.sleep(0.2)
print("requests", n, "failures", bad)
"""


def state(machine: str) -> str:
    ids = "docker ps -q --no-trunc | sort; docker images -q --no-trunc | sort"
    return docker("exec", "-w", "/src", machine, "sh", "-c", f"{ids}; stat -c '%n %Y' .env data/secrets/*")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a privileged container")
def test_make_up_from_nothing_and_again(machine: str) -> None:
    up = ["exec", "-w", "/src", machine, "make", "up"]
    started = time.monotonic()
    print(docker(*up, timeout=2400))
    first = time.monotonic() - started

    before = state(machine)
    said: list[str] = []
    client = threading.Thread(
        target=lambda: said.append(
            docker("exec", machine, "python3", "-c", CLIENT.replace("SECONDS", "45"), timeout=300)
        )
    )
    client.start()
    started = time.monotonic()
    print(docker(*up, timeout=600))
    second = time.monotonic() - started
    client.join()
    assert state(machine) == before
    assert said[0].strip().endswith("failures 0"), said[0]
    print(f"first make up {first:.0f} s, second {second:.0f} s; {said[0].strip()}")
    print(docker("exec", machine, "sh", "-c", "docker system df; du -sh /src/data /src/.venv"))
