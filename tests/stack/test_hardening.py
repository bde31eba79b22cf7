"""Least privilege, as the engine and the kernel see it, and a planted violation that must be caught."""

from __future__ import annotations

import json
import socket
import stat
import tomllib
from pathlib import Path

import pytest

from tests.stack.hardening import RULES, findings
from tests.stack.harness import REPOSITORY, Stack, prompt

pytestmark = pytest.mark.stack


def exceptions() -> set[tuple[str, str]]:
    rows = tomllib.loads((REPOSITORY / "compose" / "exceptions.toml").read_text())["exception"]
    assert all(row["reason"].strip() for row in rows)
    return {(row["service"], row["rule"]) for row in rows}


def test_every_container_keeps_every_rule(stack: Stack) -> None:
    containers = stack.containers()
    assert set(containers) == {"vllm", "lmcache", "proxy"}
    broken = {(service, rule) for service, c in containers.items() for rule in findings(c)}
    assert broken == {(service, rule) for service, rule in exceptions() if service in containers}


def test_a_planted_violation_is_caught(stack: Stack) -> None:
    """The same image run carelessly breaks the rules that the stack keeps."""
    image = stack.containers()["proxy"]["Image"]
    made = stack.docker(
        "run", "-d", "--rm", "--user", "0", "--network", "host", "--entrypoint", "sleep", image, "60"
    ).strip()  # fmt: skip
    try:
        broken = set(findings(json.loads(stack.docker("inspect", made))[0]))
    finally:
        stack.docker("rm", "-f", made)
    expected = {
        "non_root",
        "read_only_root",
        "no_capabilities",
        "no_new_privileges",
        "memory_limit",
        "restart",
        "log_cap",
    }
    assert expected <= broken, f"not caught: {expected - broken}"
    assert set(RULES) > broken  # and a rule that always fails would be no rule


def test_only_loopback_ports_listen_on_the_host(stack: Stack) -> None:
    for url in (stack.url, stack.metrics_url):
        port = int(url.rsplit(":", 1)[1])
        socket.create_connection(("127.0.0.1", port), timeout=3).close()
        rows = Path("/proc/net/tcp").read_text().splitlines()[1:]
        listening = {r.split()[1] for r in rows if r.split()[3] == "0A" and r.split()[1].endswith(f":{port:04X}")}
        assert listening == {f"0100007F:{port:04X}"}


def test_lmcache_has_no_http_port_and_no_way_out(stack: Stack) -> None:
    """/run_script is remote code execution: only ZMQ may listen on TCP, on a network without a gateway."""
    code = (
        "import pathlib,socket\n"
        "rows=[r.split() for f in ('tcp','tcp6') for r in pathlib.Path('/proc/net/'+f).read_text().splitlines()[1:]]\n"
        "print(sorted({int(r[1].rsplit(':',1)[1],16) for r in rows if r[3]=='0A' and r[1][:8]!='0B00007F'}))\n"
        "s=socket.socket(); s.settimeout(2)\n"
        "try: s.connect(('192.0.2.1', 80)); print('out')\n"
        "except OSError as e: print('closed')\n"
    )
    ports, out = stack.compose("exec", "-T", "lmcache", "python3", "-c", code).split("\n")[:2]
    assert ports == "[5555]"
    assert out == "closed"


def test_data_on_disk_is_private(stack: Stack) -> None:
    cache = stack.root / "data" / "cache"
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    stack.store(prompt("private"))
    files = stack.l2_files()
    assert files, "nothing stored"
    for path in (*files, stack.root / "data" / "secrets" / "salt_key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    uid = stack.containers()["vllm"]["Config"]["User"].split(":")[0]
    assert {str(p.stat().st_uid) for p in files} == {uid}


def test_no_secret_in_logs_or_arguments(stack: Stack) -> None:
    secret = (stack.root / "data" / "secrets" / "salt_key").read_text().strip()
    seen = stack.compose("logs", "--no-color")
    for container in stack.containers().values():
        seen += " ".join([*container["Config"]["Env"], *(container["Args"] or [])])
        seen += Path(f"/proc/{container['State']['Pid']}/cmdline").read_text()
    assert secret and secret not in seen


def test_nothing_phones_home(stack: Stack) -> None:
    for service in ("vllm", "lmcache"):
        env = stack.containers()[service]["Config"]["Env"]
        assert {"LMCACHE_TRACK_USAGE=false", "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1", "HF_HUB_OFFLINE=1"} <= set(env)
