"""What every container must be, read from `docker inspect` and from /proc of its processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["RULES", "findings"]

Container = dict[str, Any]


def _status(container: Container) -> dict[str, str]:
    """/proc/<pid>/status of the container's first process, by key."""
    text = Path(f"/proc/{container['State']['Pid']}/status").read_text()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def _non_root(c: Container) -> bool:
    return "0" not in _status(c)["Uid"].split() and c["Config"]["User"].split(":")[0] not in ("", "0", "root")


def _loopback(c: Container) -> bool:
    bindings = (c["NetworkSettings"]["Ports"] or {}).values()
    return all(b["HostIp"] == "127.0.0.1" for entry in bindings for b in entry or [])


def _home(c: Container) -> bool:
    env = dict(item.split("=", 1) for item in c["Config"]["Env"])
    return (
        bool(env.get("HOME") and env.get("USER")) or c["Path"].endswith("nginx") or "nginx" in c["Config"]["Entrypoint"]
    )


def _noexec_tmpfs(c: Container) -> bool:
    mounts = Path(f"/proc/{c['State']['Pid']}/mounts").read_text().splitlines()
    rows = [line.split() for line in mounts]
    return all("noexec" in options for _, target, _, options, *_ in rows if target in ("/tmp", "/run/kvstrata"))


def _writable_root(c: Container) -> bool:
    mounts = Path(f"/proc/{c['State']['Pid']}/mounts").read_text().splitlines()
    return "ro" in next(line.split()[3] for line in mounts if line.split()[1] == "/").split(",")


RULES: dict[str, Callable[[Container], bool]] = {
    "non_root": _non_root,
    "passwd_or_home": _home,
    "read_only_root": lambda c: bool(c["HostConfig"]["ReadonlyRootfs"]) and _writable_root(c),
    "no_capabilities": lambda c: (
        c["HostConfig"]["CapDrop"] == ["ALL"] and int(_status(c)["CapEff"], 16) == int(_status(c)["CapBnd"], 16) == 0
    ),
    "no_new_privileges": lambda c: _status(c)["NoNewPrivs"] == "1",
    "not_privileged": lambda c: not c["HostConfig"]["Privileged"] and not c["HostConfig"]["CapAdd"],
    "seccomp": lambda c: _status(c)["Seccomp"] == "2",
    "memory_limit": lambda c: c["HostConfig"]["Memory"] > 0,
    "pids_limit": lambda c: (c["HostConfig"]["PidsLimit"] or 0) > 0,
    "log_cap": lambda c: {"max-size", "max-file"} <= set(c["HostConfig"]["LogConfig"]["Config"] or {}),
    "healthcheck": lambda c: bool((c["Config"].get("Healthcheck") or {}).get("Test")),
    "init": lambda c: bool(c["HostConfig"].get("Init")),
    "restart": lambda c: c["HostConfig"]["RestartPolicy"]["Name"] == "unless-stopped",
    "loopback_ports": _loopback,
    "noexec_tmpfs": _noexec_tmpfs,
    "no_docker_socket": lambda c: not any("docker.sock" in m["Source"] for m in c["Mounts"]),
    "no_host_namespaces": lambda c: (
        "host" not in (c["HostConfig"]["NetworkMode"], c["HostConfig"]["IpcMode"], c["HostConfig"]["PidMode"])
    ),
    "no_secret_in_env": lambda c: (
        not any(
            word in item.split("=", 1)[0].upper() and not item.split("=", 1)[0].endswith("_FILE")  # a path
            for item in c["Config"]["Env"]
            for word in ("TOKEN", "PASSWORD", "SECRET")
        )
    ),
}


def findings(container: Container) -> list[str]:
    """Names of the rules that a running container breaks."""
    return [name for name, rule in RULES.items() if not rule(container)]
