"""What the documents say exists: programs, verbs and their options, settings, messages, links. No engine is asked.

The checks are functions from a text to a list of complaints, so that planted mistakes can show that each of them bites.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.stack import test_docs as on_stack

from kvstrata import cli
from kvstrata.deploy import checks_disk, dotenv
from kvstrata.deploy.host import GIB
from kvstrata.deploy.knobs import MANAGED_KEYS, USER_KEYS
from kvstrata.proof import sizing

ROOT = Path(__file__).parents[2]
README_LINES = 100
PROGRAMS = {"make", "docker", "curl", "ls", "grep", "df", "du", "cp", "rm", "install"}
#: Names that only exist inside the containers (compose/*.yaml sets them).
CONTAINER_NAMES = {"KV_L2"}
#: The engine's own settings, as its reader spells them.
ENGINE_NAMES = {
    f"KV_ENGINE_{name}"
    for name in re.findall(r'read\.\w+\("([A-Z_]+)"', (ROOT / "src/kvstrata/engine/settings.py").read_text())
}

Check = Callable[[str, Path], list[str]]


def documents() -> list[Path]:
    return [*on_stack.documents(), ROOT / "configs" / "models" / "README.md"]


def code_of(text: str) -> list[str]:
    """Commands of the sh blocks, and every inline code span. Other blocks are pictures and settings."""
    commands = [step.text for step in on_stack.steps_of(text, "") if step.kind == "sh"]
    outside = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return commands + re.findall(r"`([^`\n]+)`", outside)


# -- the checks ------------------------------------------------------------------------------------------------------


def unknown_programs(text: str, _path: Path) -> list[str]:
    commands = [step.text for step in on_stack.steps_of(text, "") if step.kind == "sh"]
    return [command for command in commands if shlex.split(command)[0] not in PROGRAMS]


def commands_nobody_runs(text: str, path: Path) -> list[str]:
    """A command is run by tests/stack/test_docs.py from the files it reads, or stands in its table."""
    ran = {*on_stack.here(), *on_stack.RUN_ELSEWHERE}
    ran |= {step.text for step in on_stack.steps() if step.section in on_stack.FOLLOWED}
    commands = [step.text for step in on_stack.steps_of(text, path.name) if step.kind == "sh"]
    return [command for command in commands if command not in ran]


def curls_that_show_nothing(text: str, _path: Path) -> list[str]:
    commands = [step.text for step in on_stack.steps_of(text, "") if step.kind == "sh"]
    return [command for command in commands if command.startswith("curl") and not on_stack.shown_by(command)]


def unknown_targets(text: str, _path: Path) -> list[str]:
    named = {name for code in code_of(text) for name in re.findall(r"\bmake ([a-z][a-z-]*)", code)}
    return sorted(named - targets())


def unknown_verbs(text: str, _path: Path) -> list[str]:
    found = []
    for code in code_of(text):
        for words in re.findall(r"(?<![\w/.-])kvstrata ((?:[a-z][a-z-]* ?)+)\b(?!:)", code):
            commands: dict[str, Any] = command_line()
            for word in words.split():
                if commands and word not in commands:
                    found.append(f"kvstrata {words}")
                    break
                commands = subcommands(commands[word]) if commands else {}
    return found


def unknown_settings(text: str, _path: Path) -> list[str]:
    known = {*USER_KEYS, *MANAGED_KEYS, *CONTAINER_NAMES, *ENGINE_NAMES}
    found = sorted(set(re.findall(r"\bKV_[A-Z0-9_]+\b", text)) - known)
    for step in on_stack.steps_of(text, ""):
        if step.kind == "ini":
            found += [e.key for e in dotenv.parse_text(step.text, "", {}) if e.key not in USER_KEYS]
    return found


def broken_links(text: str, path: Path) -> list[str]:
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists() or (anchor and anchor not in anchors(text if not name else file.read_text())):
            found.append(target)
    return found


def machine_paths(text: str, _path: Path) -> list[str]:
    return re.findall(r"(?<![\w.~-])/(?:work|root|home|tmp|mnt|Users)/\S*", text)


def messages_that_nothing_says(text: str, _path: Path) -> list[str]:
    """Symptoms are quoted in the first column of tables headed "it says" or "the log says"."""
    found, quoting = [], False
    for line in text.splitlines():
        if not line.startswith("|"):
            quoting = False
            continue
        first = line.split("|")[1].strip()
        if first in ("it says", "the log says"):
            quoting = True
        elif quoting:
            found += [quote for quote in re.findall(r"`([^`]+)`", first) if quote not in said_by_the_code()]
    return found


CHECKS: tuple[Check, ...] = (
    unknown_programs, commands_nobody_runs, curls_that_show_nothing, unknown_targets, unknown_verbs, unknown_settings,
    broken_links, machine_paths, messages_that_nothing_says,
)  # fmt: skip


# -- what there is ---------------------------------------------------------------------------------------------------


@cache
def targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.M))


@cache
def command_line() -> dict[str, Any]:
    """Verbs of `kvstrata` by name."""
    return subcommands(typer.main.get_command(cli.app))


def subcommands(command: Any) -> dict[str, Any]:
    return dict(getattr(command, "commands", {}))


def anchors(text: str) -> set[str]:
    """Anchors of the headings as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@cache
def said_by_the_code() -> str:
    """Every text constant of the package less docstrings; of an f-string its fixed parts. And the bootstrap script."""
    parts: list[str] = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text())
        silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        texts = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
        parts += [str(text.value) for text in texts if id(text) not in silent]
    return "\n".join([*parts, (ROOT / "scripts" / "bootstrap").read_text()])


# -- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", documents(), ids=lambda p: str(p.relative_to(ROOT)))
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_a_document_says_nothing_wrong(path: Path, check: Check) -> None:
    assert check(path.read_text(), path) == []


@pytest.mark.parametrize(
    ("check", "planted", "complaint"),
    [
        (unknown_programs, "```sh\nmake up\nkubectl get pods   # ours\n```", "kubectl get pods"),
        (commands_nobody_runs, "```sh\nmake status\nmake status ARGS=--never\n```", "make status ARGS=--never"),
        (curls_that_show_nothing, "```sh\ncurl -s http://127.0.0.1:8000/x\n```", "curl -s http://127.0.0.1:8000/x"),
        (unknown_targets, "`make up`, then `KV_PERSIST=0 make restart`", "restart"),
        (unknown_verbs, "`kvstrata status`, `kvstrata lock update`, `kvstrata lock upgrade`", "kvstrata lock upgrade"),
        (unknown_settings, "set KV_PORT and KV_PROT", "KV_PROT"),
        (unknown_settings, "```ini\nKV_PORT=1\nMODELDIR=x\n```", "MODELDIR"),
        (broken_links, "[a](README.md) [b](docs/nowhere.md)", "docs/nowhere.md"),
        (broken_links, "# There\n[a](#there) [b](#not-there)", "#not-there"),
        (broken_links, "[b](docs/operations.md#not-there)", "docs/operations.md#not-there"),
        (machine_paths, "see ../home/x and " + "/home" + "/me/x", "/home" + "/me/x"),
        (messages_that_nothing_says, "| it says | x |\n|---|---|\n| `is in use`, `is in disuse` | y |", "is in disuse"),
    ],
)
def test_a_planted_mistake_is_found_and_nothing_else(check: Check, planted: str, complaint: str) -> None:
    assert check(planted, ROOT / "README.md") == [complaint]


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_every_target_stands_in_the_table_of_verbs_with_options_that_exist() -> None:
    rows = dict(re.findall(r"^\| `make ([a-z-]+)` (\|.*)$", (ROOT / "docs" / "operations.md").read_text(), flags=re.M))
    assert set(rows) == targets()
    for verb, row in rows.items():
        options = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", row.rstrip("|").rsplit("|", 1)[1]))
        command = command_line().get(verb)
        for word in verb.split("-") if command is None else ():  # bench-store is `bench store`
            command = (subcommands(command) if command else command_line()).get(word)
        known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} if command else set()
        assert options <= known, f"make {verb}: {options - known}"


def test_tables_name_tests_and_sections_that_exist() -> None:
    commands = {step.text for step in on_stack.steps() if step.kind == "sh"}
    assert set(on_stack.RUN_ELSEWHERE) <= commands, "a command that no document has any more"
    for where in on_stack.RUN_ELSEWHERE.values():
        file, _, name = where.partition("::")
        text = (ROOT / file).read_text()
        assert re.search(rf"^def {name}\(", text, flags=re.M) if name else "make test" in text, where
    assert set(on_stack.SHOWS) <= commands
    assert all(any(c.startswith(start) for c in commands) for start in on_stack.SHOWS_BY_START)
    assert set(on_stack.FOLLOWED) <= {step.section for step in on_stack.steps()}


def test_settings_to_write_stand_in_followed_sections_only() -> None:
    """Elsewhere nobody would write them before the command that needs them."""
    loose = [step for step in on_stack.steps() if step.kind == "ini" and step.section not in on_stack.FOLLOWED]
    assert loose == []


def test_figures_are_those_of_the_checks() -> None:
    images = {device: size // GIB for device, size in checks_disk._IMAGES.items()}
    sizes = (checks_disk._CACHE_LEAST, checks_disk._DEMO_MODEL, checks_disk._ENGINE_RUNNING)
    cache, demo, later = (size // GIB for size in sizes)
    assert f"{images['cpu'] + cache + demo} GiB free for the first `make up`" in (ROOT / "README.md").read_text()
    said = f"({images['cpu']} GiB on a CPU, {images['nvidia']} on a GPU, before the first build; {later} later)"
    said += f", the cache ({cache}) and the demo model ({demo})"
    assert said in (ROOT / "docs" / "operations.md").read_text()


def test_the_sizing_table_is_what_the_command_prints() -> None:
    text = (ROOT / "docs" / "storage.md").read_text()
    assert sizing.markdown(sizing.common()) in text
    llama = sizing.common()[0]
    assert f"`KV_L2_GB={llama.capacity_gib}` (GiB) for {llama.working_set_gb:g} GB" in text


def test_the_reader_of_blocks_joins_lines_drops_comments_and_keeps_quotes() -> None:
    sh = ["```sh", "make a # why", "# alone", "echo '#1' \\", "two", "```"]
    other = ["```", "make b", "```", "```ini", "A=1", "```"]
    read = [(step.section, step.kind, step.text) for step in on_stack.steps_of("\n".join(["## S", *sh, *other]), "x")]
    assert read == [("S", "sh", "make a"), ("S", "sh", "echo '#1'  two"), ("S", "ini", "A=1")]
