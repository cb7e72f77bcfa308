"""`opd demo`: the three commands of the quickstart one after the other, and what it does when it is called again."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from experts.rl.spec import load_training
from experts.spec import ExpertsSpec, find_spec
from experts.suites import DOMAINS
from opd.config import load_pipeline
from opd.config.domains import RegisteredExperts
from pipelines.catalog import find_pipeline
from pipelines.commands import demo as command
from tests.messages import forget, opd
from tests.unit.docs.test_commands import Tree
from tests.unit.opd.report.conftest import build_run
from tests.unit.sources import ROOT


class Stage:
    """An empty directory, in which the three commands are recorded; the first writes its files, as the real one does."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.called: list[tuple[str, dict[str, Any]]] = []
        self.killed_in = ""
        """The command that a Ctrl-C ends."""
        monkeypatch.chdir(root)
        monkeypatch.setattr(command.prompts, "make", self._make)
        monkeypatch.setattr(command.experts, "train", lambda spec: self._note("experts train", spec=spec))
        monkeypatch.setattr(command, "merge", self._merge)

    def _note(self, name: str, **given: Any) -> None:
        self.called.append((name, given))
        if self.killed_in == name:
            raise KeyboardInterrupt

    def _make(self, suite: str, output: Path) -> None:
        for domain in DOMAINS[suite]:
            for part in ("train", "eval"):
                (output / domain).mkdir(parents=True, exist_ok=True)
                (output / domain / f"{part}.jsonl").write_text("{}\n")
                self._stop_after(domain)
        self._note("prompts make", suite=suite, output=output)

    def _stop_after(self, domain: str) -> None:
        if self.killed_in == domain:
            raise KeyboardInterrupt

    def _merge(self, pipeline: str | None = None, run_dir: Path | None = None, resume: Path | None = None) -> None:
        given = {"pipeline": pipeline, "run_dir": run_dir, "resume": resume}
        self._note("merge", **{key: value for key, value in given.items() if value is not None})

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.called]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    forget()
    return Stage(tmp_path, monkeypatch)


RUN = Path("runs/quickstart")
NEEDED = {"prompts make": ["agents", "--output", "x"], "experts train": ["x"], "merge": []}
"""The fewest arguments of each command, none of them those of the demo."""


def said_commands(told: str) -> list[tuple[str, dict[str, Any]]]:
    """The commands that it says it runs, as the real command line reads them, without what is left at its default."""
    found = []
    for line in re.findall(r"^[123] of 3: opd (.+)$", told, re.MULTILINE):
        words = shlex.split(line)
        name = " ".join(words[: 1 if words[0] == "merge" else 2])
        defaults = Tree().parse([*name.split(), *NEEDED[name]])
        given = {key: value for key, value in Tree().parse(words).items() if value != defaults[key]}
        found.append((name, given))
    return found


def test_it_does_what_it_says_in_this_order(stage: Stage) -> None:
    result = opd("demo")
    assert result.exit_code == 0, result.output
    assert stage.called == [
        ("prompts make", {"suite": "letters", "output": Path("prompts/letters")}),
        ("experts train", {"spec": "quickstart-experts"}),
        ("merge", {"pipeline": "quickstart", "run_dir": RUN}),
    ]
    assert said_commands(result.stderr) == stage.called


@pytest.mark.parametrize("killed_in", ["rotate", "prompts make", "experts train"])
def test_after_an_interruption_it_goes_on(killed_in: str, stage: Stage) -> None:
    stage.killed_in = killed_in
    assert opd("demo").exit_code == 130
    whole, stage.killed_in = killed_in != "rotate", ""
    stage.called.clear()
    (stage.root / "prompts/letters/reverse/train.jsonl").write_text("mine\n")

    result = opd("demo")

    assert result.exit_code == 0 and ("is there, and is kept" in result.stderr) is whole
    assert stage.names == ["experts train", "merge"] if whole else ["prompts make", "experts train", "merge"]
    kept = (stage.root / "prompts/letters/reverse/train.jsonl").read_text()
    assert kept == ("mine\n" if whole else "{}\n")


def test_a_merge_that_has_begun_is_resumed(stage: Stage) -> None:
    (build_run(stage.root / RUN) / "report.json").unlink()
    result = opd("demo")
    assert result.exit_code == 0 and stage.called == said_commands(result.stderr) == [("merge", {"resume": RUN})]


def test_a_merge_that_is_finished_is_left_alone(stage: Stage) -> None:
    build_run(stage.root / RUN)
    before = sorted(stage.root.rglob("*"))
    result = opd("demo")
    assert result.exit_code == 0 and stage.called == [] and sorted(stage.root.rglob("*")) == before
    assert "finished before: `opd report runs/quickstart` shows it" in result.stderr
    assert all(str(path) in result.stderr for path in command.OUTPUTS)


def test_everything_goes_where_the_user_says(stage: Stage) -> None:
    where = stage.root / "new" / "place"
    result = opd("demo", "--output", "new/place")
    assert result.exit_code == 0 and Path.cwd() == where
    assert stage.called[2] == ("merge", {"pipeline": "quickstart", "run_dir": where / RUN})
    assert all(str(where / path) in result.stderr for path in command.OUTPUTS)


def test_a_place_that_is_a_file_is_refused(stage: Stage) -> None:
    (stage.root / "file").touch()
    result = opd("demo", "--output", "file")
    assert result.exit_code == 2 and "file exists" in result.stderr and stage.called == []


def test_what_it_names_is_where_the_shipped_files_write() -> None:
    config, spec = load_pipeline(find_pipeline(command.PIPELINE)), load_training(find_spec(command.SPEC))
    assert isinstance(spec, ExpertsSpec)
    assert isinstance(config.experts, RegisteredExperts)
    inputs = {path for expert in spec.experts.values() for path in (expert.data, *spec.base.data)}
    inputs |= {domain.eval.prompts for domain in config.domains.values() if domain.eval and domain.eval.prompts}
    assert {path.parents[1] for path in inputs} == {command.PROMPTS}
    assert (spec.output_dir, spec.registry, config.registry) == (
        command.OUTPUTS[1],
        command.OUTPUTS[2],
        command.OUTPUTS[2],
    )
    assert Path("runs") / config.name == command.RUN


def test_make_demo_starts_over_and_calls_it() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(r"^demo: setup\n\trm -rf (.+)\n\t\$\(OPD\) demo\n", makefile, re.MULTILINE)
    assert found and {Path(word) for word in found[1].split()} == set(command.OUTPUTS)
