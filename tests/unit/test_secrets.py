"""Keys and tokens reach who they are for: they are in no output and in no file of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import pipelines.merging.run
from cli import app

TOKEN, KEY, PASSWORD = "t0ken-hunter2-aaaa", "sk-hunter2-bbbb", "pa55-hunter2-cccc"


class Started(Exception):
    pass


@pytest.fixture
def opd(world: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run a command; at the end, nothing that was printed or written anywhere in the test's directory holds a secret."""
    monkeypatch.setenv("OPD_TEACHERS_TOKEN", TOKEN)
    monkeypatch.setenv("TEACHERS_KEY", KEY)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    printed: list[str] = []

    def started(*_: Any) -> None:
        raise Started

    monkeypatch.setattr(pipelines.merging.run, "_run_session", started)

    def run(*args: str | Path) -> Result:
        result = CliRunner().invoke(app, [str(a) for a in args])
        printed.append(result.output + result.stderr + repr(result.exception))
        return result

    yield run
    assert printed and "hunter2" not in "".join(printed)
    written = [p for p in world.root.rglob("*") if p.is_file() and p.name != "token" and b"hunter2" in p.read_bytes()]
    assert written == []


def test_a_token_of_the_environment(opd: Any, world: Any) -> None:
    world.data["teachers"] = {"engine": "flight", "address": "grpc://127.0.0.1:1"}
    assert isinstance(opd("merge", world.write()).exception, Started)
    assert list((world.root / "runs").rglob("pipeline.yaml"))
    opd("teachers", "serve", "pipeline.yaml", "--listen", "0.0.0.0:0")
    opd("pipelines", "show", "pipeline.yaml", "--resolved")


def test_an_unfit_token(opd: Any, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPD_TEACHERS_TOKEN", f"{TOKEN} with spaces")
    world.data["teachers"] = {"engine": "flight", "address": "grpc://127.0.0.1:1"}
    refused = opd("merge", world.write())
    assert refused.exit_code == 2 and "a token with spaces" in refused.stderr
    file = world.root / "token"
    file.write_text(TOKEN)
    file.chmod(0o644)
    world.data["teachers"]["token_file"] = "token"
    refused = opd("merge", world.write())
    assert refused.exit_code == 2 and "chmod 600" in refused.stderr


def test_a_servers_key(opd: Any, world: Any) -> None:
    server = {"base_url": "https://host.example/v1", "model": "m"}
    teachers = {"engine": "openai", "payload": "sampled_logprobs", "servers": {"rev": server, "up": server}}
    world.data |= {"objective": {"kind": "sampled"}, "teachers": teachers | {"api_key_env": "TEACHERS_KEY"}}
    assert isinstance(opd("merge", world.write()).exception, Started)
    # Written in the wrong place, on the command line, so that the test's own files do not hold it.
    for wrong in (
        f"teachers.api_key_env={KEY}",
        f"teachers.api_key={KEY}",
        f"teachers.servers.rev.base_url=https://me:{PASSWORD}@host.example/v1",
        f"teachers.servers.rev.base_url=ftp://me:{PASSWORD}@host.example/v1",
        f"teachers.servers.rev.base_url=https://host.example/v1?key={KEY}",
    ):
        refused = opd("merge", "pipeline.yaml", "--set", wrong)
        assert refused.exit_code == 2 and refused.stderr.startswith("error: pipeline.yaml: teachers."), refused.stderr


def test_files_of_a_run_follow_the_umask(opd: Any, world: Any) -> None:
    before = os.umask(0o077)
    try:
        assert isinstance(opd("merge", "pipeline.yaml").exception, Started)
        opd("experts", "add", "new", "--model", "rev", "--domain", "reverse")
    finally:
        os.umask(before)
    made = [*(world.root / "runs").rglob("*"), *(world.root / "registry").rglob("*")]
    assert len(made) > 4
    assert {oct(path.stat().st_mode & 0o077) for path in made} == {"0o0"}
