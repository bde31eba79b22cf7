"""Start an installed engine: by systemd where it runs, else the daemon itself in its own session."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from kvstrata.deploy.errors import KvError
from kvstrata.deploy.shell import run
from kvstrata.deploy.steps import Step

__all__ = ["LOG", "PID", "start"]

LOG = Path("/var/log/kvstrata-dockerd.log")
PID = Path("/run/kvstrata-dockerd.pid")
_WAIT_S = 60.0


def start(dockerd: str, step: Step) -> None:
    """Start `dockerd` (a path) and wait until it answers. Root only; the caller has seen that none answers.

    Raises KvError with the log's last lines when it ends, or does not answer within a minute.
    """
    if Path("/run/systemd/system").is_dir():
        step.say("starting the Docker Engine: systemctl start docker")
        run(["systemctl", "start", "docker"], timeout=120)
        return
    step.say(f"no systemd here: starting {dockerd} itself; its log is {LOG}, its pid in {PID}")
    LOG.parent.mkdir(parents=True, exist_ok=True)
    # dockerd looks for iptables and containerd on PATH; a caller's PATH may lack the sbin folders
    env = {**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"}
    with LOG.open("ab") as log:
        child = subprocess.Popen(
            [dockerd], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True, cwd="/"
        )
    PID.write_text(f"{child.pid}\n")
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        if run(["docker", "info", "--format", "{{.ServerVersion}}"], check=False, timeout=20).returncode == 0:
            return
        if child.poll() is not None:
            break
        step.note("waiting for the engine to answer")
        time.sleep(0.3)
    tail = "\n".join(LOG.read_text(errors="replace").splitlines()[-8:])
    raise KvError(
        found=f"{dockerd} does not answer:\n{tail}",
        needed="a Docker Engine that runs",
        fix=f"read {LOG}; in a container it needs --privileged and a volume at /var/lib/docker",
    )
