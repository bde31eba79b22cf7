"""Every command of README.md and docs/ is run here on the stack, or the test that runs it is named.

The text is the source: a command in a ```sh block that nobody runs fails tests/unit/test_docs.py. This module also
holds what both files share: reading the documents, and the tables.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvstrata.deploy.knobs import MANAGED_KEYS, USER_KEYS
from tests.stack.harness import REPOSITORY, Answer, Stack, chunks, prompt

pytestmark = pytest.mark.stack

#: Commands that a test of its own runs (`make` calls the command line one to one), or that run this very file.
RUN_ELSEWHERE = {
    'make engine ARGS="check http://127.0.0.1:9130 --token-file data/secrets/engine-client/token"': (
        "tests/interop/test_engine_check.py::test_it_passes_against_ours_with_a_token_and_leaves_nothing"
    ),
    "make test": ".ci/run",
    "make verify ARGS=--live": (
        "tests/stack/test_docs.py::test_a_command_of_the_docs_does_what_it_says"  # with --json
    ),
    "make verify": "tests/stack/test_up.py::test_the_first_up_ends_with_the_proof",
    "make rollback": "tests/stack/test_up.py::test_rollback_switch_down_and_back_to_hits",
    "make down": "tests/stack/test_up.py::test_rollback_switch_down_and_back_to_hits",
    "make pull": "tests/unit/test_images_pull.py::test_pull_refuses_an_unresolved_digest",
}

#: Sections of the documents that are followed step by step, settings included (test_a_section_can_be_followed).
FOLLOWED = ("Move the cache", "Delete the cache", "Change what is stored")
#: How a command is typed there, where the same command by itself is run in full.
QUICKER = {"make up": "make up ARGS=--no-proof"}

#: What a command has to show besides exit code 0. `curl -s` ends with 0 whatever it was told, so it needs a row.
SHOWS = {
    "make up": "docker compose up -d --wait",
    "make plan": "vllm serve /model",
    "make build": "kvstrata/vllm:",
    "make status": "kvstrata.connector.KvstrataConnector",
    "make status ARGS=--json": '"mode": "shm"',
    "make logs": "vllm",
    'make logs ARGS="vllm --tail 50"': "vllm",
    'make verify ARGS="--live --json proof.json"': "proof passed",
    'make bench ARGS="--lengths 600,1200 --repeats 1"': "same text from every tier: yes",
    'make bench-store ARGS="--quick --json bench-store.json --markdown bench-store.md"': "kvstrata raw",
    'make size ARGS="--model Llama-3.1-8B --tokens 100000"': "0.131 GB",
    'make size ARGS="--tokens 100000 --json"': '"model": "smollm2-135m-instruct"',
    "make size ARGS=--common": "| Llama-3.3-70B | 320 | 80 | 0.328 |",
    "make store ARGS=namespaces": "smollm2-135m-instruct--",
    "make store ARGS=report": "smollm2-135m-instruct--",
    'make store ARGS="ls --sort age --limit 5"': " blocks, ",
    'make store ARGS="ls --json --limit 5"': '"last_use_ns"',
    "make store ARGS=verify": "; 0 bad, 0 removed",
    'make store ARGS="verify --repair"': "; 0 bad, 0 removed",
    'make store ARGS="evict --bytes 1M"': "1 blocks removed",
    "make store ARGS=\"pin 'smollm2*' --class keep\"": "class keep",
    "make store ARGS=\"unpin 'smollm2*'\"": "class normal",
    "docker compose ps": "lmcache",
    "docker compose logs --tail 50 vllm": "vllm",
    "curl -s http://127.0.0.1:9400/status": "storage_manager",
    "curl -s http://127.0.0.1:9400/metrics": "lmcache_mp_",
    "grep -E '^KV_(UID|GID|CACHE_DIR)=' .env": "KV_UID=",
    'docker image ls "kvstrata/*"': "kvstrata/proxy",
}
#: The same by how a long command begins.
SHOWS_BY_START = {"curl -s http://127.0.0.1:8000/v1/completions": "num_lmcache_cached_tokens"}

_DEFAULT_VLLM, _DEFAULT_METRICS = (f"127.0.0.1:{USER_KEYS[key]}" for key in ("KV_PORT", "KV_METRICS_PORT"))


@dataclass(frozen=True)
class Step:
    """One thing that a document tells the reader to do: a command ("sh"), or settings to write into .env ("ini")."""

    file: str
    section: str
    kind: str
    text: str


def documents() -> list[Path]:
    """README first, as people read."""
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def steps_of(text: str, file: str) -> list[Step]:
    """The sh and ini blocks of a document, in order: each command without its comment, each ini block as one step."""
    found: list[Step] = []
    section, kind, body = "", "", list[str]()
    for line in text.splitlines():
        if not kind:
            if heading := re.match(r"#+ (.+)", line):
                section = heading[1].strip()
            elif line.startswith("```"):
                kind, body = line[3:].strip() or "text", []
        elif line.startswith("```"):
            if kind == "sh":
                commands = (command_of(row) for row in "\n".join(body).replace("\\\n", " ").splitlines())
                found += [Step(file, section, "sh", command) for command in commands if command]
            elif kind == "ini":
                found.append(Step(file, section, "ini", "\n".join(body)))
            kind = ""
        else:
            body.append(line)
    return found


def command_of(line: str) -> str:
    """A line of a sh block without the comment behind it."""
    return re.sub(r"(^|\s+)# .*$", "", line).strip()


def steps() -> list[Step]:
    return [step for path in documents() for step in steps_of(path.read_text(), path.name)]


def here() -> list[str]:
    """Commands for this module, each once, in the order of the documents."""
    commands = (step.text for step in steps() if step.kind == "sh" and step.section not in FOLLOWED)
    return [command for command in dict.fromkeys(commands) if command not in RUN_ELSEWHERE]


def shown_by(command: str) -> str | None:
    starts = (word for start, word in SHOWS_BY_START.items() if command.startswith(start))
    return SHOWS.get(command) or next(starts, None)


# -- running them ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    """Somebody who types the documents' commands in the stack's checkout, with nothing set in his shell."""

    stack: Stack
    backup: Path

    def types(self, command: str, timeout: float = 1800) -> str:
        command = command.replace(_DEFAULT_VLLM, urlsplit(self.stack.url).netloc)
        command = command.replace(_DEFAULT_METRICS, urlsplit(self.stack.metrics_url).netloc)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.stack.root, env=self._environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", timeout=timeout, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"$ {command}\n{done.stdout[-6000:]}\nexit code {done.returncode}"
        return done.stdout

    def _environment(self) -> dict[str, str]:
        """Without what the test run itself was started with: its settings, its make's arguments, its .venv."""
        ours = {*USER_KEYS, *MANAGED_KEYS, "ARGS", "MFLAGS", "VIRTUAL_ENV", "PYTHONPATH", "KVSTRATA_ROOT"}
        prefixes = ("COMPOSE_", "KV_", "MAKE", "PYTEST_")
        env = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith(prefixes)}
        own = str(Path(sys.prefix) / "bin")
        env["PATH"] = os.pathsep.join(p for p in env.get("PATH", "").split(os.pathsep) if p and p != own)
        return {**env, "NO_PROXY": "127.0.0.1,localhost", "COLUMNS": "160", "BACKUP_DIR": str(self.backup)}


@pytest.fixture(scope="module")
def reader(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A working stack with some blocks on disk, before and after, for the modules that come after this one."""
    stack.settle()
    stack.store(prompt("before the documents"))
    try:
        yield Reader(stack, tmp_path_factory.mktemp("backup"))
    finally:
        stack.ok("up", "--no-proof")
        stack.wait_ready()
        stack.store(prompt("after the documents"))


@pytest.mark.parametrize("command", here())
def test_a_command_of_the_docs_does_what_it_says(reader: Reader, command: str) -> None:
    output = reader.types(command)
    if needed := shown_by(command):
        assert needed in output, output[-6000:]
    reader.stack.wait_ready()  # whatever it restarted, the next reader finds a stack that works


def test_the_documented_copy_of_the_salt_key_is_the_key(reader: Reader) -> None:
    command = next(step.text for step in steps() if "salt_key" in step.text and step.kind == "sh")
    reader.types(command)
    copy, key = reader.backup / "salt_key", reader.stack.root / "data" / "secrets" / "salt_key"
    assert copy.read_bytes() == key.read_bytes()
    assert copy.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("section", "hits"), [("Delete the cache", False), ("Change what is stored", None), ("Move the cache", True)]
)
def test_a_section_can_be_followed(reader: Reader, section: str, hits: bool | None) -> None:
    """Commands and settings of the section, in its order; then moved blocks hit, and deleted ones do not.

    None: some of them may be gone, as the section says. The one with settings comes last: `reader` brings them back.
    """
    stack = reader.stack
    assert section in FOLLOWED
    todo = [step for step in steps() if step.section == section]
    assert any(step.kind == "sh" for step in todo)
    text = prompt(section)
    cold = stack.store(text)
    dot_env = (stack.root / ".env").read_text()
    try:
        for step in todo:
            if step.kind == "ini":
                stack.set(**dict(line.split("=", 1) for line in step.text.splitlines()))
            else:
                output = reader.types(QUICKER.get(step.text, step.text))
                assert (shown_by(step.text) or "") in output, output[-6000:]
        stack.wait_ready()
        answer: Answer = stack.ask(text)
        assert answer.text == cold.text
        if hits is not None:
            assert answer.lmcache == (chunks(cold.prompt_tokens) if hits else 0)
    except BaseException:
        (stack.root / ".env").write_text(dot_env)
        stack.ok("up", "--no-proof")
        raise
    (stack.root / ".env").write_text(dot_env)
