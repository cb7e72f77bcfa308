"""The user's objects that a pipeline names: found from the current directory, refused with the way out."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from opd import ROOT
from opd.config import PipelineConfig
from opd.errors import ConfigError
from opd.losses.reverse_kl import ReverseKL
from opd.settings.user_objects import import_user_object, is_import_name
from opd.settings.yaml_files import validate_section
from pipelines.inputs.read import read_inputs

SECTION = """
from opd.config.objectives import ObjectiveConfig
from opd.losses.reverse_kl import ReverseKL
class MineConfig(ObjectiveConfig):
    OBJECTIVE = ReverseKL
    strength: float = 1.0
class Halved:
    pass
nothing = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_module_of_a_test.py").write_text(SECTION)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "users_module_of_a_test", raising=False)
    return "users_module_of_a_test"


@pytest.mark.parametrize(
    ("name", "answer"), [("a.b:C", True), ("vllm", False), ("a:", False), (":b", False), (7, False)]
)
def test_a_place_has_a_module_and_a_name(name: Any, answer: bool) -> None:
    assert is_import_name(name) is answer


def test_an_objective_of_the_users(module: str, world: Any) -> None:
    world.data["objective"] = {"kind": f"{module}:MineConfig", "strength": 0.5, "chunk": 7}
    config = validate_section(PipelineConfig, world.data, "p.yaml")
    assert isinstance(config.objective.build(), ReverseKL) and config.objective.chunk == 7
    again = PipelineConfig.model_validate(config.model_dump(mode="json"))
    assert again.objective == config.objective and again.objective.model_dump()["strength"] == 0.5


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no_such_module:X", ["objective.kind", "no module `no_such_module`", "start `opd` in the directory"]),
        ("{}:Absent", ["no `Absent`", "ObjectiveConfig, as module:Class", "after the colon"]),
        ("{}:nothing", ["`nothing` is a int"]),
        ("{}:Halved", ["found:  users_module_of_a_test:Halved", "docs/python.md"]),
        ("opd.config.objectives:ObjectiveConfig", ["ObjectiveConfig, as module:Class"]),
        ("mistake", ["reverse_kl", "or your own module:Class"]),
    ],
)
def test_an_objective_that_is_none(kind: str, words: list[str], module: str, world: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_section(PipelineConfig, world.data | {"objective": {"kind": kind.format(module)}}, "p.yaml")
    assert str(caught.value).startswith("p.yaml: ")
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_unknown_key_of_a_users_section_is_refused(module: str, world: Any) -> None:
    with pytest.raises(ConfigError, match="strenght"):
        validate_section(
            PipelineConfig, world.data | {"objective": {"kind": f"{module}:MineConfig", "strenght": 1}}, "p.yaml"
        )


def test_a_rollout_engine_that_is_none_is_refused_before_a_worker_starts(module: str, world: Any) -> None:
    world.data["rollout"] = {"engine": f"{module}:Absent"}
    config = validate_section(PipelineConfig, world.data, "p.yaml")
    with pytest.raises(ConfigError, match=r"rollout\.engine\n  found:  no `Absent`"):
        read_inputs(config)
    with pytest.raises(ConfigError, match=r"rollout\.engine"):
        validate_section(PipelineConfig, world.data | {"rollout": {"engine": "vlm"}}, "p.yaml")


def test_what_is_there_is_given(module: str) -> None:
    assert import_user_object(f"{module}:Halved", "here", "a class").__name__ == "Halved"


def test_no_file_here_stands_in_for_a_package_of_ours_that_is_imported_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an editable install our packages are on no path: Python would ask for them after the current directory."""
    (tmp_path / "mine.py").write_text("def judge(): ...\n")
    (tmp_path / "teachers.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ROOT)])
    import_user_object("mine:judge", "here", "a function")
    found = PathFinder.find_spec("teachers", sys.path)
    assert found is not None and found.origin == str(Path(ROOT, "teachers", "__init__.py"))
    del sys.modules["mine"]
