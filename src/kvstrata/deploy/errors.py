"""The one way a refusal reaches a person: found, needed, how to fix."""

from __future__ import annotations

__all__ = ["CommandFailed", "KvError"]


class KvError(Exception):
    """A refusal that the user can act on; the command line exits with `exit_code` (2).

    `found` is what is there now (with the file, knob and value where there is one), `needed` is what has to be
    there, `fix` is what to type or change.
    """

    exit_code = 2

    def __init__(self, found: str, needed: str, fix: str) -> None:
        super().__init__(found)
        self.found = found
        self.needed = needed
        self.fix = fix

    def __str__(self) -> str:
        fix = self.fix.replace("\n", "\n          ")
        return f"found:    {self.found}\nneeded:   {self.needed}\nto fix:   {fix}"


class CommandFailed(KvError):
    """A child process ended with an error. `argv`, `returncode` and the last lines of its output are kept."""

    exit_code = 1

    def __init__(self, argv: list[str], returncode: int, output: str) -> None:
        tail = "\n".join(output.strip().splitlines()[-15:])
        shown = " ".join(argv)
        super().__init__(
            found=f"`{shown}` ended with {returncode}" + (f":\n{tail}" if tail else ""),
            needed="the command to end with 0",
            fix="read its last lines above; run it by hand for the rest",
        )
        self.argv = argv
        self.returncode = returncode
        self.output = output
