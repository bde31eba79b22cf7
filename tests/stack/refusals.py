"""How a refusal of `up` has to look, beside a running stack and without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.stack.harness import Stack


@dataclass(frozen=True)
class Case:
    name: str
    break_it: Callable[[Stack], object]
    says: tuple[str, ...]


def refused(fresh: Stack, case: Case) -> None:
    """`up` in a fresh checkout says why it cannot work, ends with 2, starts nothing and deletes nothing."""
    case.break_it(fresh)
    before = snapshot(fresh)
    done = fresh.cli("up")
    assert done.returncode == 2, done.stdout + done.stderr
    for word in ("found:", "needed:", "to fix:", *case.says):
        assert word in done.stderr, f"{word!r} is not in\n{done.stderr}"
    assert "Traceback" not in done.stderr
    assert fresh.containers() == {}
    assert before.items() <= snapshot(fresh).items(), "something was changed or deleted"


def snapshot(stack: Stack) -> dict[str, bytes]:
    """Every file of the checkout but .env, whose blanks may be filled, by name."""
    files = (p for p in stack.root.rglob("*") if p.is_file() and p.name != ".env" and p.stat().st_size < 1 << 20)
    return {str(p): p.read_bytes() for p in files}
