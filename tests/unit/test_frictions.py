"""Obstacles met by people who tried `opd` for the first time: each has a message that says the way out, at once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from experts.model_dir import inspect_model
from experts.registry import ExpertManifest
from tests import messages
from tests.messages import opd
from tests.plain_models import TOKENS, plain_model_dir
from tests.unit.sources import ROOT
from tests.unit.test_import_law import HEAVY

LOADED_ONLY_FOR_COMPUTE = {*HEAVY, "pandas", "matplotlib", "sklearn", "scipy"}


class Stage:
    """A directory in which `opd merge pipeline.yaml` would work as far as headers tell."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("base", "math", "law"):
            plain_model_dir(root / name)
        for name in ("math", "law"):
            (root / f"{name}.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
        self.data: dict[str, Any] = {
            "name": "mine",
            "student": {"model": "base"},
            "experts": {name: {"model": name, "domain": name} for name in ("math", "law")},
            "domains": {name: {"prompts": f"{name}.jsonl", "eval": {"holdout": 0.5}} for name in ("math", "law")},
            "trainer": {"steps": 2, "samples_per_step": 4},
        }

    def write(self) -> None:
        (self.root / "pipeline.yaml").write_text(yaml.safe_dump(self.data, sort_keys=False))


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPD_REGISTRY", raising=False)
    messages.forget()
    return Stage(tmp_path)


MERGE = ["merge", "pipeline.yaml"]
Spoil = Callable[[Stage], Any]


def key(path: str, value: Any) -> Spoil:
    """Set a key of the pipeline; a key that is there is replaced."""

    def spoil(stage: Stage) -> None:
        node = stage.data
        *above, last = path.split(".")
        for name in above:
            node = node.setdefault(name, {})
        node[last] = value

    return spoil


def text(content: str) -> Spoil:
    def spoil(stage: Stage) -> None:
        stage.write()
        stage.data = {}
        (stage.root / "pipeline.yaml").write_text(content)

    return spoil


def without(*path: str) -> Spoil:
    return lambda stage: stage.root.joinpath(*path).unlink()


def no_directory(name: str) -> Spoil:
    return lambda stage: (stage.root / name).rename(stage.root / "elsewhere")


def only_bin(stage: Stage) -> None:
    (stage.root / "law" / "model.safetensors").rename(stage.root / "law" / "pytorch_model.bin")


def other_tokens(stage: Stage) -> None:
    no_directory("law")(stage)
    plain_model_dir(stage.root / "law", (*TOKENS[:-1], "z"))


def csv_of_others(stage: Stage) -> None:
    (stage.root / "math.csv").write_text("question,answer\na,b\n")
    key("domains.math.prompts", "math.csv")(stage)


def registered_expert(registry: Path, model: Path) -> None:
    """Put a manifest of the model there, as `opd experts add` does after it has run the model once."""
    name = model.name
    (registry / name).mkdir(parents=True)
    info = inspect_model(model)
    manifest = ExpertManifest(
        name=name, domain=name, model=str(model), info=info, registered_at="2026-11-23T00:00:00+00:00"
    )
    (registry / name / "manifest.json").write_text(manifest.model_dump_json())


def registered(stage: Stage) -> None:
    """`math` is in the registry; the pipeline asks for `maths`."""
    registered_expert(stage.root / "registry", stage.root / "math")
    stage.data["experts"] = {"use": ["maths"]}


def nothing(stage: Stage) -> None: ...


def a_run(stage: Stage) -> None:
    (stage.root / "runs" / "mine").mkdir(parents=True)
    (stage.root / "runs" / "mine" / "pipeline.yaml").write_text("name: mine\n")


def spec(**expert: Any) -> Spoil:
    """A training spec for an expert by reinforcement."""
    made = {"base": {"model": "base"}, "output_dir": "out", "method": "ppo", "trainer": {"steps": 2}}
    eval_ = {"prompts": "math.jsonl", "verifier": "exact_match"}
    made["experts"] = {"law": {"domain": "law", "prompts": "law.jsonl", "eval": eval_} | expert}
    return lambda stage: (stage.root / "spec.yaml").write_text(yaml.safe_dump(made))


FRICTIONS: dict[str, tuple[Spoil, list[str], str]] = {
    # what is spoilt, the command, a word of the way out
    "a pipeline file that is not there": (nothing, ["merge", "nowhere.yaml"], "opd pipelines list"),
    "a pipeline file with another name": (nothing, ["merge", "pipline.yaml"], "did you mean `pipeline.yaml`?"),
    "a shipped pipeline, misspelt": (nothing, ["merge", "quikstart"], "did you mean `quickstart`?"),
    "a training spec, misspelt": (
        nothing,
        ["experts", "train", "quikstart-experts"],
        "did you mean `quickstart-experts`?",
    ),
    "learning_rate for lr": (key("trainer.learning_rate", 1e-5), MERGE, "did you mean `lr`?"),
    "batch_size for samples_per_step": (key("trainer.batch_size", 8), MERGE, "did you mean `samples_per_step`?"),
    "max_tokens for max_new_tokens": (key("rollout.max_tokens", 8), MERGE, "did you mean `max_new_tokens`?"),
    "learning_rate at the top": (key("learning_rate", 1e-5), MERGE, "did you mean `trainer.lr`?"),
    "a key in another section": (key("trainer.temperature", 1.0), MERGE, "did you mean `rollout.temperature`?"),
    "epochs, which there are none of": (key("trainer.num_train_epochs", 3), MERGE, "trainer.steps"),
    "output_dir, which is an option": (key("output_dir", "out"), MERGE, "--run-dir"),
    "model_name_or_path": (key("student.model_name_or_path", "base"), MERGE, "did you mean `model`?"),
    "a name with a space": (key("name", "my merge"), MERGE, "1 to 64 of A-Z a-z 0-9 . _ -"),
    "text for a number": (key("trainer.steps", "many"), MERGE, "a whole number"),
    "a number that is too small": (key("trainer.steps", 0), MERGE, "at least 1"),
    "a type that there is not": (key("trainer.dtype", "bflot16"), MERGE, "did you mean `bfloat16`?"),
    "a value of a union": (key("schedule.overlap", "maybe"), MERGE, "true or false or auto"),
    "a key left out": (key("trainer", {"steps": 2}), MERGE, "samples_per_step"),
    "a tab in YAML": (text("name: a\n\ttrainer: {}\n"), MERGE, "pipeline.yaml: line 2, column 1"),
    "an open bracket in YAML": (text("name: a\nexperts: {a: [b}\n"), MERGE, "pipeline.yaml: line 2, column"),
    "a key twice in YAML": (text("name: a\nname: b\n"), MERGE, "pipeline.yaml: line 2, column 1"),
    "--set without a value that is YAML": (nothing, [*MERGE, "--set", "trainer.lr=[1"], "quote the value"),
    "only pickled weights": (only_bin, MERGE, "AutoTokenizer"),
    "another tokenizer": (other_tokens, MERGE, "'h'"),
    "a student that is not there": (no_directory("base"), MERGE, "no such directory"),
    "an expert that is not there": (no_directory("law"), MERGE, "no such directory"),
    "a registered expert, misspelt": (registered, MERGE, "did you mean `math`?"),
    "an expert of the registry, misspelt": (registered, ["experts", "show", "mth"], "did you mean `math`?"),
    "an expert's domain, misspelt": (key("experts.law.domain", "lav"), MERGE, "law"),
    "prompts that are not there": (without("law.jsonl"), MERGE, "law.jsonl"),
    "prompts of another form": (
        lambda stage: (stage.root / "law.jsonl").write_text('{"question": "a"}\n'),
        MERGE,
        "columns",
    ),
    "a CSV file of another form": (csv_of_others, MERGE, "columns"),
    "a verifier, misspelt": (key("domains.law.eval.verifier", "exact_mach"), MERGE, "did you mean `exact_match`?"),
    "a verifier of one's own that is not there": (
        key("domains.law.eval.verifier", {"kind": "python", "function": "my_judge:judge"}),
        MERGE,
        "my_judge.py",
    ),
    "a verifier of one's own with other parameters": (
        lambda stage: (
            (stage.root / "one_judge.py").write_text("def judge(answer): return 1.0\n"),
            key("domains.law.eval.verifier", {"kind": "python", "function": "one_judge:judge"})(stage),
        ),
        MERGE,
        "these three parameters",
    ),
    "an expert's environment, misspelt": (
        spec(environment={"name": "mase"}),
        ["experts", "train", "spec.yaml"],
        "did you mean `maze`?",
    ),
    "an expert's verifier that is not there": (
        spec(eval={"prompts": "math.jsonl", "verifier": {"kind": "python", "function": "my_judge:judge"}}),
        ["experts", "train", "spec.yaml"],
        "my_judge.py",
    ),
    "a method of reinforcement, misspelt": (
        spec(),
        ["experts", "train", "spec.yaml", "--method", "pppo"],
        "did you mean `ppo`?",
    ),
    "rules of a guard that are a list": (
        lambda stage: (stage.root / "guard.yaml").write_text("- a\n"),
        ["guard", "test", "shipped", "--config", "guard.yaml"],
        "docs/guard.md",
    ),
    "a rule of one's own that misses its example": (
        lambda stage: (
            (stage.root / "rules.yaml").write_text(
                "rules:\n- {id: vault, about: a, verdict: block, dummy: denied, any: [{program: [cat]}], hit: [less a], miss: [ls]}\n"
            ),
            (stage.root / "guard.yaml").write_text("rules: [rules.yaml]\n"),
        ),
        ["guard", "check", "--config", "guard.yaml", "--", "ls"],
        "less a",
    ),
    "the guard's own set, misspelt": (nothing, ["guard", "test", "shiped"], "did you mean `shipped`?"),
    "an environment, misspelt": (key("domains.law.environment", {"name": "mase"}), MERGE, "did you mean `maze`?"),
    "an objective, misspelt": (key("objective", {"kind": "revers_kl"}), MERGE, "did you mean `reverse_kl`?"),
    "a teachers' engine, misspelt": (key("teachers", {"engine": "transformer"}), MERGE, "did you mean `transformers`?"),
    "a domain, misspelt": (nothing, ["prompts", "show", "pipeline.yaml", "--domain", "maths"], "did you mean `math`?"),
    "a method, misspelt": (nothing, ["baseline", "pipeline.yaml", "--method", "tis"], "did you mean `ties`?"),
    "a suite, misspelt": (nothing, ["prompts", "make", "leters", "--output", "x"], "did you mean `letters`?"),
    "a run directory that exists": (a_run, MERGE, "--resume"),
    "a model in the place of a run directory": (nothing, [*MERGE, "--run-dir", "base"], "that is no run"),
    "a run that is not there": (nothing, ["report", "runs/mine"], "check the path"),
    "a resume of nothing": (nothing, ["merge", "--resume", "runs/mine"], "check the path"),
    "episodes of a run that is not there": (nothing, ["traces", "runs/mine"], "runs/mine"),
    "a model that is not there": (nothing, ["evaluate", "models/mine", "--pipeline", "pipeline.yaml"], "models/mine"),
    "a command, misspelt": (nothing, ["mrege", "pipeline.yaml"], "did you mean `merge`?"),
    "a command of a group, misspelt": (nothing, ["experts", "lst"], "did you mean `list`?"),
    "an option, misspelt": (nothing, ["check", "pipeline.yaml", "--smples", "3"], "did you mean `--samples`?"),
    "an argument left out": (nothing, ["check"], "opd check --help"),
    "a value of an option": (nothing, ["check", "pipeline.yaml", "--samples", "0"], "at least 1"),
    "a file to write in no directory": (
        nothing,
        ["evaluate", "base", "--pipeline", "pipeline.yaml", "--output", "out/scores.json"],
        "no directory out",
    ),
    "a page in the place of its data": (nothing, ["report", "runs/mine", "--output", "x.json"], "x.html"),
    "a path that leads through a file": (
        nothing,
        ["environments", "tasks", "maze", "--output", "math.jsonl/tasks.jsonl", "-n", "2"],
        "--debug",
    ),
    "options that do not go together": (nothing, ["merge", "--resume", "r", "--run-dir", "x"], "opd merge --help"),
}


@pytest.mark.parametrize("name", FRICTIONS)
def test_the_way_out_is_named(name: str, stage: Stage) -> None:
    spoil, command, word = FRICTIONS[name]
    spoil(stage)
    if stage.data:
        stage.write()
    before = sorted(stage.root.rglob("*"))
    result = opd(*command)
    assert result.exit_code == 2, (result.output, result.exception)
    assert re.fullmatch(r"error: .+\n  found:  (?s:.+)\n  wanted: (?s:.+)\n  fix:    .+\n", result.stderr), (
        result.stderr
    )
    assert word in result.stderr, result.stderr
    assert not re.search(r"Input should|should match|unicode string|Traceback|pydantic", result.stderr), result.stderr
    assert sorted(stage.root.rglob("*")) == before
    messages.check(f"friction: {name}", stage.root)


AT_ONCE = """
import json, os, sys
import cli
told = {}
for name, (directory, command) in json.load(sys.stdin).items():
    os.chdir(directory)
    try:
        cli.app(command)
    except SystemExit as end:
        told[name] = [end.code, sorted({module.partition(".")[0] for module in sys.modules})]
print(json.dumps(told))
"""
ELSEWHERE = {
    "check": ["check"],
    "compare": ["compare"],
    "a baseline": ["baseline", "--method", "ties"],
    "serving": ["teachers", "serve", "--listen", "127.0.0.1:0"],
}
"""Other commands that a pipeline with an expert that is not there is given to."""


def test_a_refusal_imports_nothing_large(stage: Stage) -> None:
    """One process meets them all, each in a directory of its own; what one imports is there for those after it too."""
    cases = {name: (spoil, command) for name, (spoil, command, _) in FRICTIONS.items()}
    cases |= {name: (no_directory("law"), [*command, "pipeline.yaml"]) for name, command in ELSEWHERE.items()}
    work = {}
    for number, (name, (spoil, command)) in enumerate(cases.items()):
        one = Stage(stage.root / str(number))
        spoil(one)
        if one.data:
            one.write()
        work[name] = (str(one.root), command)
    done = subprocess.run(
        [sys.executable, "-c", AT_ONCE],
        input=json.dumps(work),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told.keys() == work.keys()
    for name, (code, modules) in told.items():
        large = LOADED_ONLY_FOR_COMPUTE & set(modules)
        assert (code, large) == (2, set()), f"{name}: {large}\n{done.stderr}"


def test_a_refusal_starts_quickly(stage: Stage) -> None:
    """Nearly all of its time is imports, so they are counted: seconds depend on the machine and on what else it does."""
    without("law.jsonl")(stage)
    stage.write()
    count = "import atexit, runpy, sys; atexit.register(lambda: print(len(sys.modules))); runpy.run_module('cli', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", count, *MERGE],
        cwd=stage.root,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 1000


@pytest.mark.parametrize(
    ("command", "debug"),
    [
        (["merge", "nowhere.yaml"], False),
        (["--debug", "merge", "nowhere.yaml"], True),
        (["merge", "nowhere.yaml", "--debug"], True),
        (["mrege", "--debug"], False),
    ],
)
def test_debug_shows_the_traceback(command: list[str], debug: bool, stage: Stage) -> None:
    result = opd(*command)
    assert result.exit_code == 2
    assert ("Traceback" in result.stderr and "no_such_yaml" in result.stderr) == debug
    assert "error: " in result.stderr


def test_debug_as_an_environment_variable(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPD_DEBUG", "1")
    assert "Traceback" in opd("merge", "nowhere.yaml").stderr
    monkeypatch.setenv("OPD_DEBUG", "0")
    assert "Traceback" not in opd("merge", "nowhere.yaml").stderr
