"""A guard that could not do its work is refused before any compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from opd.config import load_pipeline
from opd.errors import ConfigError, RunDirError
from pipelines.inputs.environments import episode_options
from pipelines.inputs.read import read_inputs
from pipelines.merging.changes import refuse_changed_inputs
from pipelines.merging.manifest import make_manifest

WORLD = """
from opd.records.environments import Outcome, Tool

class Shell:
    tools = (Tool(name="shell", description="Run."),)
    def reset(self, metadata, seed):
        return ""
    def step(self, action):
        return Outcome(done=True)
    def close(self):
        pass

class Maze(Shell):
    tools = ()

def score(prompt, verdicts):
    return [-1.0, -2.0]
"""
RULE: dict[str, Any] = {
    "id": "vault",
    "about": "Opens the vault.",
    "verdict": "block",
    "dummy": "denied",
    "any": [{"program": ["cat"], "reads": ["/vault/**"]}],
    "hit": ["cat /vault/key"],
    "miss": ["cat src/key"],
}


@pytest.fixture
def guarded(world: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The pipeline's first domain has a shell, and a guard looks on."""
    (world.root / "shells.py").write_text(WORLD)
    monkeypatch.chdir(world.root)
    monkeypatch.syspath_prepend(str(world.root))
    world.data["domains"]["reverse"]["environment"] = {"name": "shells:Shell"}
    world.data["guard"] = {}
    rules(world.root)
    return world


def rules(root: Path, **changes: Any) -> None:
    (root / "ours.yaml").write_text(yaml.safe_dump({"rules": [RULE | changes]}))


def test_a_pipeline_with_a_guard(guarded: Any) -> None:
    guarded.data["guard"] = {"rules": ["shipped", "ours.yaml"], "judge": {"kind": "local", "scorer": "shells:score"}}
    config = load_pipeline(guarded.write())
    read_inputs(config)
    (options,) = episode_options(config, Path("/run/judged.jsonl")).values()
    assert options.guard is not None and options.guard.judged == Path("/run/judged.jsonl")
    assert [rule.id for rule in options.guard.rules[1].rules] == ["vault"]


def test_a_pipeline_without_one(guarded: Any) -> None:
    guarded.data["domains"]["upper"]["environment"] = {"name": "shells:Maze"}
    guarded.data["domains"]["reverse"]["guard"] = False
    guarded.data["guard"] = {"answers": True}
    options = episode_options(load_pipeline(guarded.write()))
    assert options["reverse"].guard is None and options["upper"].guard is not None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"any": [{"reads": ["/vault/{a,b"]}]}, ["rule vault: reads", "'/vault/{a,b'", "braces"]),
        ({"any": [{"reads": ["vault/**"]}]}, ["rule vault: reads", "begins with `/` or `**/`"]),
        ({"any": [{"program": ["@readers"]}]}, ["rule vault", "@readers"]),
        ({"any": [{}]}, ["rule vault", "a clause without keys"]),
        ({"any": [{"reads": ["/safe/**"]}]}, ["ours.yaml: rule vault", "`cat /vault/key` is not hit"]),
        ({"miss": ["cat /vault/door"]}, ["ours.yaml: rule vault", "`cat /vault/door` is hit"]),
        ({"verdict": "maybe"}, ["ours.yaml", "rules.0.verdict"]),
        ({"hit": []}, ["ours.yaml", "rules.0.hit"]),
    ],
)
def test_rules_that_cannot_work(changes: dict[str, Any], told: list[str], guarded: Any) -> None:
    rules(guarded.root, **changes)
    refuses(guarded, {"rules": ["ours.yaml"]}, told)


def test_a_name_that_stands_for_itself(guarded: Any) -> None:
    names = {"a": ["@b"], "b": ["@a"]}
    (guarded.root / "ours.yaml").write_text(
        yaml.safe_dump({"names": names, "rules": [RULE | {"any": [{"reads": ["@a"]}]}]})
    )
    refuses(guarded, {"rules": ["ours.yaml"]}, ["rule vault", "@a"])


@pytest.mark.parametrize(
    ("guard", "told"),
    [
        ({"rules": ["nowhere.yaml"]}, ["nowhere.yaml", "no such file"]),
        ({"only_tools": ["shel"]}, ["guard.only_tools", "`shel`", "shell"]),
        ({"tools": {"bash": {"command": "shell"}}}, ["guard.tools", "`bash`", "shell"]),
        ({"judge": {"kind": "local", "scorer": "shells:nothing"}}, ["guard.judge.scorer", "no `nothing` in shells"]),
        (
            {"judge": {"kind": "endpoint", "base_url": "http://127.0.0.1:1/v1", "model": "j", "api_key_env": "NO_KEY"}},
            ["guard.judge.api_key_env", "NO_KEY is empty"],
        ),
    ],
)
def test_sections_that_cannot_work(guard: dict[str, Any], told: list[str], guarded: Any) -> None:
    refuses(guarded, guard, told)


def test_nothing_to_look_at(guarded: Any) -> None:
    guarded.data["domains"]["reverse"]["environment"] = {"name": "shells:Maze"}
    refuses(guarded, {}, ["guard", "environments without tools: reverse", "guard.answers"])
    guarded.data["guard"] = {"answers": True}
    read_inputs(load_pipeline(guarded.write()))


def refuses(world: Any, guard: dict[str, Any], told: list[str]) -> None:
    world.data["guard"] = guard
    with pytest.raises(ConfigError) as error:
        read_inputs(load_pipeline(world.write()))
    assert all(part in str(error.value) for part in told), error.value


def test_a_resume_with_other_rules_is_refused(guarded: Any) -> None:
    guarded.data["guard"] = {"rules": ["shipped", "ours.yaml"]}
    config = load_pipeline(guarded.write())
    before = make_manifest(config, read_inputs(config))
    assert before["config"]["guard"]["rules"] == ["shipped", str(guarded.root / "ours.yaml")]
    refuse_changed_inputs(before, make_manifest(config, read_inputs(config)), Path("manifest.json"))
    rules(guarded.root, about="Another reason.")
    with pytest.raises(RunDirError, match="guard changed since the run began: reverse"):
        refuse_changed_inputs(before, make_manifest(config, read_inputs(config)), Path("manifest.json"))
