"""KV_ENGINE_CA: the CA of an engine elsewhere, from .env to where the door of path A looks for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trustme
import yaml

from kvstrata.deploy import envfile, kv_engine, settings, up
from kvstrata.deploy.errors import KvError
from kvstrata.deploy.steps import Steps

REPOSITORY = Path(__file__).parents[2]


def load(root: Path, **env: str) -> settings.Settings:
    return settings.load(root, env)


TLS = {"KV_LAYERS": "path-a", "KV_ENGINE_URL": "https://kv.example:9130"}


def pem(file: Path) -> str:
    file.write_bytes(trustme.CA().cert_pem.bytes())
    return str(file)


def test_the_ca_is_copied_to_where_the_door_of_the_layer_looks_and_follows_its_setting(tmp_path: Path) -> None:
    layer = yaml.safe_load((REPOSITORY / "compose" / "path-a.yaml").read_text())["services"]["lmcache"]
    (mount,) = layer["volumes"]
    seen = Path(layer["environment"]["KV_REMOTE_CA_FILE"]).relative_to(mount["target"])
    assert mount["source"] == "${KV_SECRETS_PATH:?run make up}/engine-client" and mount["read_only"]

    def made(**env: str) -> str:
        current = load(tmp_path, **TLS, **env)
        kv_engine.check_ca(current)
        envfile.ensure_secrets(current)
        file = current.secrets_dir / "engine-client" / seen
        assert file.stat().st_mode & 0o777 == 0o600
        return file.read_text()

    assert made() == "", "the system's"
    for name in ("one.pem", "another.pem"):
        file = Path(pem(tmp_path / name))
        assert made(KV_ENGINE_CA=name) == file.read_text()
    assert made() == ""


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "No such file"),
        ("a folder", "Is a directory"),
        ("", "no certificate in it"),
        ("no PEM at all", "no certificate in it"),
        ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "no certificate in it"),
        ("a key", "no certificate in it"),
    ],
)
def test_a_ca_that_is_none_is_refused_before_anything_is_changed(
    tmp_path: Path, content: str | None, found: str
) -> None:
    file = tmp_path / "engine-ca.pem"
    if content == "a folder":
        file.mkdir()
    elif content == "a key":
        trustme.CA().private_key_pem.write_to_path(file)
    elif content is not None:
        file.write_text(content)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(KvError) as refused:
        kv_engine.check_ca(load(tmp_path, **TLS, KV_ENGINE_CA="engine-ca.pem"))
    assert f"KV_ENGINE_CA={file}" in refused.value.found and found in refused.value.found
    assert "PEM" in refused.value.needed and "KV_ENGINE_CA in .env" in refused.value.fix
    assert sorted(tmp_path.rglob("*")) == before
    kv_engine.check_ca(load(tmp_path, **TLS, KV_ENGINE_CA="engine-ca.pem", KV_PERSIST="0"))
    kv_engine.check_ca(load(tmp_path, KV_ENGINE_CA="engine-ca.pem"))


def test_a_ca_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    Path(pem(tmp_path / "ca.pem")).chmod(0)
    current, me = load(tmp_path, **TLS, KV_ENGINE_CA="ca.pem"), os.geteuid()
    try:
        if me == 0:
            os.seteuid(65534)  # root reads every file
        with pytest.raises(KvError, match="Permission denied"):
            kv_engine.check_ca(current)
    finally:
        os.seteuid(me)


def test_up_and_plan_refuse_such_a_ca_before_they_ask_for_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in {**TLS, "KV_ENGINE_CA": "none.pem"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(up.engine, "ensure", lambda *_: pytest.fail("something is about to be installed"))
    for verb in (lambda: up.prepare(tmp_path, Steps()), lambda: up.make_plan(tmp_path)):
        with pytest.raises(KvError, match=r"none\.pem: No such file"):
            verb()


def test_what_prepare_has_asked_about_the_ca_is_not_asked_again_with_the_other_checks(tmp_path: Path) -> None:
    current = load(tmp_path, **TLS)
    envfile.ensure_secrets(current)
    (kv_engine.client_dir(current) / "url_token").write_text("of-that-engine\n")
    kv_engine.check(load(tmp_path, **TLS, KV_ENGINE_CA="none.pem"))
