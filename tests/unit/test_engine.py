"""Docker Engine: what is decided from which facts, and what the refusals say."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvstrata.deploy import engine, engine_apt
from kvstrata.deploy.engine import Action, Facts, decide, parse_version, warnings_for
from kvstrata.deploy.steps import Steps

BOOKWORM = {"ID": "debian", "VERSION_ID": "12", "VERSION_CODENAME": "bookworm"}
TRIXIE = {"ID": "debian", "VERSION_ID": "13", "VERSION_CODENAME": "trixie"}
UBUNTU = {"ID": "ubuntu", "VERSION_ID": "24.04", "VERSION_CODENAME": "noble"}
FEDORA = {"ID": "fedora", "VERSION_ID": "43"}
GOOD = {"server": "26.1.5+dfsg1", "compose": "2.26.1-4", "buildx": "0.13.1"}


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("26.1.5+dfsg1", (26, 1, 5)),
        ("v2.26.1-4", (2, 26, 1)),
        ("5.6.1", (5, 6, 1)),
        ("28.0.0-rc.1", (28, 0, 0)),
        ("", ()),
        ("unknown", ()),
    ],
)
def test_versions_are_compared_by_their_leading_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_version(text) == numbers


@pytest.mark.parametrize(
    ("facts", "install", "action", "words"),
    [
        (Facts(**GOOD), True, Action.USE, ""),
        (Facts(**GOOD), False, Action.USE, ""),
        (Facts(server="25.0.0", compose="2.24.0"), True, Action.USE, ""),
        (Facts(server="24.0.9", compose="2.26.1", root=True), True, Action.REFUSE, "never upgraded"),
        (Facts(server="26.1.5", compose="2.23.3", root=True), True, Action.REFUSE, "Compose 2.23.3"),
        (Facts(server="26.1.5", root=True, os_release=BOOKWORM), True, Action.REFUSE, "no Compose plugin"),
        (Facts(dockerd="/usr/sbin/dockerd", root=True), True, Action.START, ""),
        (Facts(dockerd="/usr/sbin/dockerd", root=True), False, Action.START, ""),
        (Facts(dockerd="/usr/sbin/dockerd"), True, Action.REFUSE, "sudo systemctl start docker"),
        (Facts(root=True, os_release=BOOKWORM), True, Action.INSTALL, ""),
        (Facts(root=True, os_release=UBUNTU), True, Action.INSTALL, ""),
        (Facts(root=True, os_release=BOOKWORM), False, Action.REFUSE, "KV_INSTALL_ENGINE=0 forbids"),
        (Facts(os_release=BOOKWORM), True, Action.REFUSE, "no root rights"),
        (Facts(root=True, os_release=FEDORA), True, Action.REFUSE, "docs.docker.com"),
        (Facts(error="permission denied while trying", dockerd="x"), True, Action.REFUSE, "usermod -aG docker"),
        (Facts(remote="tcp://h:1", error="refused", root=True, dockerd="x"), True, Action.REFUSE, "unset DOCKER_HOST"),
    ],
)
def test_the_action_follows_from_the_facts(facts: Facts, install: bool, action: Action, words: str) -> None:
    got, error = decide(facts, install)
    assert got is action
    assert (error is not None) == (action is Action.REFUSE)
    assert words in str(error)


def test_a_refused_engine_tells_the_exact_commands_for_debian_12() -> None:
    _, error = decide(Facts(os_release=BOOKWORM), True)
    assert error is not None
    assert "Pin-Priority: -1" in error.fix
    assert "apt-get install --no-install-recommends docker.io docker-cli docker-buildx docker-compose" in error.fix
    assert error.exit_code == 2


def test_debian_12_takes_the_engine_alone_from_debian_13_and_relaxes_no_check() -> None:
    plan = engine_apt.plan(BOOKWORM, "http://mirror.example/debian")
    assert plan is not None
    source = plan.files[engine_apt.SOURCE_FILE]
    assert "URIs: http://mirror.example/debian\nSuites: trixie\n" in source
    assert "Signed-By: /usr/share/keyrings/" in source
    pins = plan.files[engine_apt.PIN_FILE].split("\n\n")
    assert pins[0].splitlines() == ["Package: *", "Pin: release n=trixie", "Pin-Priority: -1"]
    assert "docker.io" in pins[1]
    for word in ("trusted", "allow-insecure", "check-valid-until", "unauthenticated"):
        assert word not in "".join(plan.files.values()).lower()


@pytest.mark.parametrize(("release", "compose"), [(TRIXIE, "docker-compose"), (UBUNTU, "docker-compose-v2")])
def test_other_distributions_use_their_own_packages_and_no_extra_source(release: dict[str, str], compose: str) -> None:
    plan = engine_apt.plan(release, "")
    assert plan is not None
    assert compose in plan.packages
    assert not plan.files


def test_an_older_debian_is_not_guessed_at() -> None:
    assert engine_apt.plan({"ID": "debian", "VERSION_ID": "11", "VERSION_CODENAME": "bullseye"}, "") is None
    assert engine_apt.plan({"ID": "debian", "VERSION_CODENAME": "forky"}, "") is None


DEB822 = """\
Types: deb
# a comment
URIs: https://packages.example/debian
Suites: bookworm bookworm-updates
Components: main

Types: deb
URIs: https://security.example/
Suites: bookworm-security
"""


@pytest.mark.parametrize(
    ("texts", "uri"),
    [
        ([DEB822], "https://packages.example/debian"),
        (["deb http://a.example/debian bookworm main\n"], "http://a.example/debian"),
        (["deb [arch=amd64 signed-by=/k.gpg] http://a.example/debian bookworm main\n"], "http://a.example/debian"),
        (["# deb http://no.example bookworm main\ndeb-src http://src.example bookworm main\n"], ""),
        (["Enabled: no\n" + DEB822, "deb http://b.example/debian bookworm main"], "http://b.example/debian"),
        (["deb http://third.example/tool stable main\n", DEB822], "https://packages.example/debian"),
        ([], ""),
    ],
)
def test_the_mirror_is_the_one_that_the_machine_uses_for_its_own_suite(texts: list[str], uri: str) -> None:
    assert engine_apt.mirror_uri(texts, "bookworm") == uri


def test_an_engine_with_the_loopback_hole_is_warned_about() -> None:
    assert "CVE-2025-54388" in warnings_for("28.3.2")[0]
    assert warnings_for("28.3.3") == ()
    assert warnings_for("29.0.0") == ()


def test_a_good_engine_is_one_line_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "look", lambda: Facts(**GOOD))
    out = io.StringIO()
    info = engine.ensure(True, Steps(Console(file=out, width=200)))
    assert info.engine_version == "26.1.5+dfsg1"
    lines = out.getvalue().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(" ✓ Docker Engine")
    assert "buildx 0.13.1" in lines[0]
    assert lines[0].endswith(" s")
