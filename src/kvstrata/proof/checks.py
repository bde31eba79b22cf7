"""What must be true of the running stack before a hit means anything: the guard is loaded, the chunk size is the one.

Read from the running processes, never from configuration: the guard's own report inside vLLM's container, and the names
under which LMCache knows the engines that registered with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstrata.proof.control import Control

__all__ = ["GUARD_CLASS", "GuardFacts", "guard_problems", "read_guard", "registered_models"]

GUARD_CLASS = "kvstrata.connector.KvstrataConnector"
_NAMED = re.compile(r"^.+--[0-9a-f]{32}$")
_READ = """
import glob, json, os
out = {}
for path in sorted(glob.glob(os.environ.get("KVSTRATA_RUN_DIR", "/run/kvstrata") + "/guard-*.json")):
    try:
        with open(path) as stream:
            report = json.load(stream)
    except (OSError, ValueError) as error:
        report = {"error": str(error)}
    report["alive"] = os.path.isdir("/proc/%s" % report.get("pid"))
    out[os.path.basename(path)[len("guard-"):-len(".json")]] = report
print(json.dumps(out))
"""


@dataclass(frozen=True)
class GuardFacts:
    """The guard's reports by role ("scheduler", "worker", "worker-1"...); empty when nothing reports."""

    roles: Mapping[str, Mapping[str, Any]]

    def value(self, key: str) -> Any:
        return next((role[key] for role in self.roles.values() if key in role), None)

    @property
    def pair(self) -> str:
        return str(self.value("pair") or "")

    @property
    def dtype(self) -> str:
        """vLLM's dtype ("torch.float32"), or "" when no guard says."""
        return str((self.value("facts") or {}).get("dtype", ""))

    @property
    def exact_text(self) -> bool:
        """Is the text of a cold run the yardstick for a cached one?

        In float32 it is. In 16-bit types a prefill in other pieces rounds differently (the cached part is not computed
        again), so that greedy texts of a cold and of a cached run may part though every KV byte is right; there the
        yardstick is plain vLLM's own prefix-cache run of the same prompt, which cuts at the same place.
        """
        return self.dtype in ("", "torch.float32")


def read_guard(control: Control) -> GuardFacts:
    """Ask inside vLLM's container. No answer is an empty GuardFacts: the guard is not there."""
    status, output = control.exec("vllm", ["python3", "-c", _READ])
    if status != 0:
        return GuardFacts({})
    try:
        return GuardFacts(json.loads(output.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        return GuardFacts({})


def registered_models(status: Mapping[str, Any]) -> list[str]:
    """Model names of the engines that LMCache's /status lists, GPU (cache_context) and others."""
    engines = [*status.get("cache_context_meta", {}).values(), *status.get("non_cuda_context_meta", {}).values()]
    return sorted({str(engine.get("model_name", "")) for engine in engines})


def guard_problems(guard: GuardFacts, status: Mapping[str, Any], chunk_size: int, files_digest: str = "") -> list[str]:
    """Each way in which the guard is not the class that serves, as "guard: found …; needed …"."""
    problems = []
    for role in ("scheduler", "worker"):
        report = guard.roles.get(role)
        if report is None:
            problems.append(f"guard: found: no report of the {role}; needed: {GUARD_CLASS} loaded (connector removed?)")
            continue
        if report.get("class") != GUARD_CLASS:
            problems.append(f"guard: found: {report.get('class')} in the {role}; needed: {GUARD_CLASS}")
        if not report.get("alive"):
            problems.append(f"guard: found: the {role}'s report is of a dead process; needed: a live one")
        if report.get("chunk_size") != chunk_size:
            found = report.get("chunk_size")
            problems.append(f"chunk size: found: {found} in the {role}; needed: {chunk_size} (settings)")
    registered = registered_models(status)
    names = {str(report.get("identity")) for report in guard.roles.values()}
    if not registered:
        problems.append("guard: found: no engine registered with LMCache; needed: one, named <model>--<identity>")
    if wrong := sorted(name for name in {*names, *registered} if not _NAMED.match(name)):
        problems.append(f"guard: found: engine named {wrong[0]}; needed: <model>--<32 hex digits of identity>")
    elif len(names) > 1:
        problems.append(f"guard: found: different identities {', '.join(sorted(names))}; needed: one")
    elif registered and not names <= set(registered):
        # More names are no fault: LMCache keeps an engine that was replaced until it is reaped (120 s).
        problems.append(f"guard: found: LMCache knows {', '.join(registered)}; needed: {', '.join(names)}")
    found_files = (guard.value("facts") or {}).get("files", "")
    if files_digest and found_files and found_files != files_digest:
        problems.append(f"identity: found: files {found_files[:16]}… in vLLM; needed: {files_digest[:16]}… (.env)")
    if status.get("chunk_size") != chunk_size:
        problems.append(f"chunk size: found: {status.get('chunk_size')} in LMCache; needed: {chunk_size} (settings)")
    return problems
