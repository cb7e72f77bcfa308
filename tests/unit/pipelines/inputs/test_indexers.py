"""`student.indexers`: the patterns that a student may begin with, what is refused, and the files that a merge makes of it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from opd.config import load_pipeline
from opd.draft.companion import DraftSpec
from opd.errors import ConfigError
from opd.indexers.patterns import set_pattern
from opd.run.paths import RunPaths
from pipelines.baselines.run import check_methods
from pipelines.inputs.indexers import spell_pattern
from pipelines.inputs.read import read_inputs
from pipelines.merging.branch import _refuse_other_pattern
from pipelines.merging.origin import Origin
from pipelines.merging.run import read_facts
from pipelines.shared_student import open_shared_student, share_student_indexers
from pipelines.specs import rank_options
from tests.sparse_models import TOPK, build_sparse_model_dir


@pytest.fixture(scope="session")
def sparse_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sparse_model_dir(
        tmp_path_factory.mktemp("sparse") / "glm", layers=4, indexer_types=["full"] * 3 + ["shared"]
    )


@pytest.fixture
def sparse_world(world: Any, sparse_dir: Path) -> Any:
    """A merge of sparse models, whose last layer has no indexer."""
    shutil.copytree(sparse_dir, world.root / "glm")
    world.data["student"] = {"model": "glm", "indexers": {"pattern": "FSFS"}}
    for expert in world.data["experts"].values():
        expert["model"] = "glm"
    world.data["rollout"]["engine"] = "transformers"
    return world


def write_search(root: Path, pattern: str) -> Path:
    """A directory as a search leaves it."""
    directory = root / "found"
    directory.mkdir()
    config = set_pattern(json.loads((root / "glm" / "config.json").read_text()), pattern)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("FSF", "'FSF', 3 letters\n  wanted: 4 letters"),
        ("SFFS", "S for the first layer"),
        ("FSFF", "F for layer 3, counted from 0, which has no indexer in this model"),
        ("FXFS", "FXFS\n  wanted: a pattern such as FSSF, or a directory with a config.json"),
        ("nowhere", "nowhere\n  wanted: a pattern such as FSSF"),
    ],
)
def test_patterns_that_do_not_fit_are_refused(sparse_world: Any, pattern: str, message: str) -> None:
    sparse_world.data["student"]["indexers"]["pattern"] = pattern
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_inputs(load_pipeline(sparse_world.write()))


def test_other_families_are_refused(world: Any) -> None:
    world.data["student"]["indexers"] = {"pattern": "FS"}
    with pytest.raises(ConfigError, match="a student of the family llama\n  wanted: glm_moe_dsa"):
        read_inputs(load_pipeline(world.write()))


def test_the_config_of_another_family_is_no_pattern(sparse_world: Any) -> None:
    sparse_world.data["student"]["indexers"]["pattern"] = str(sparse_world.root / "base")
    with pytest.raises(ConfigError, match="a config of the family llama"):
        read_inputs(load_pipeline(sparse_world.write()))


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [
        ("student", {"lora": {"r": 2}}, "student.indexers\n  found:  with student.lora"),
        ("trainer", {"compile": True}, "trainer.compile\n  found:  true with student.indexers.loss_weight 1"),
    ],
)
def test_what_indexers_cannot_learn_with_is_refused(
    sparse_world: Any, section: str, settings: dict[str, Any], message: str
) -> None:
    sparse_world.data[section] |= settings
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_inputs(load_pipeline(sparse_world.write()))


def test_baselines_refuse_it(sparse_world: Any) -> None:
    config = load_pipeline(sparse_world.write())
    with pytest.raises(ConfigError, match="which a baseline does not give the student"):
        check_methods(config, read_inputs(config), ["average"])


def test_a_sparse_student_may_have_a_draft_that_nobody_serves(sparse_world: Any) -> None:
    sparse_world.data["draft"] = {}
    with pytest.raises(ConfigError, match="a student of the family glm_moe_dsa, kind eagle3") as refusal:
        read_inputs(load_pipeline(sparse_world.write()))
    assert "set draft.kind to shared_kv, or remove the section" in str(refusal.value)
    sparse_world.data["draft"] = {"kind": "shared_kv"}
    config = load_pipeline(sparse_world.write())
    read_inputs(config)
    (spec,) = rank_options(config, 76).companions
    assert isinstance(spec, DraftSpec) and spec.shape.indexer is not None and spec.shape.indexer.topk == TOPK


@pytest.mark.parametrize("inside", ["", "config.json"])
def test_a_search_gives_the_pattern_and_the_run_keeps_its_letters(sparse_world: Any, inside: str) -> None:
    found = write_search(sparse_world.root, "FSSS") / inside
    sparse_world.data["student"]["indexers"]["pattern"] = str(found)
    config, *_ = read_facts(load_pipeline(sparse_world.write()))
    assert config.student.indexers is not None and config.student.indexers.pattern == "FSSS"


def test_a_branch_shares_what_its_origin_does(sparse_world: Any) -> None:
    origin = load_pipeline(sparse_world.write())
    sparse_world.data["student"]["indexers"] = {"loss_weight": 0.5}
    branch = load_pipeline(sparse_world.write())
    place = Origin(RunPaths(sparse_world.root / "run"), 3)
    _refuse_other_pattern(origin, origin, place)
    with pytest.raises(ConfigError, match="none\n  wanted: FSFS, as in"):
        _refuse_other_pattern(branch, origin, place)


def test_a_weight_of_0_is_the_pattern_alone(sparse_world: Any) -> None:
    config = load_pipeline(sparse_world.write())
    spec: Any = rank_options(config, 76).indexers
    assert spec.loss_weight == 1.0
    sparse_world.data["student"]["indexers"]["loss_weight"] = 0
    assert rank_options(load_pipeline(sparse_world.write()), 76).indexers is None


def test_a_context_within_the_choice_is_said(sparse_world: Any) -> None:
    assert not any("student.indexers" in line for line in read_inputs(load_pipeline(sparse_world.write())).warnings)
    sparse_world.data["rollout"] |= {"max_model_len": 16}
    config = json.loads((sparse_world.root / "glm" / "config.json").read_text())
    assert config["index_topk"] == TOPK
    (sparse_world.root / "glm" / "config.json").write_text(json.dumps(config | {"index_topk": 16}))
    (warning,) = [w for w in read_inputs(load_pipeline(sparse_world.write())).warnings if "student.indexers" in w]
    assert "rollout.max_model_len is 16, and an indexer chooses 16 tokens" in warning


def test_a_merge_begins_with_the_pattern(sparse_world: Any) -> None:
    from opd.models.weights import load_causal_lm, load_config

    config = load_pipeline(sparse_world.write())
    inputs = read_inputs(config)
    paths = RunPaths(sparse_world.root / "run")
    shared, begun = share_student_indexers(config, inputs, paths.student)
    assert shared.student.model == paths.student.absolute() and Path(begun.student.path) == paths.student
    assert load_config(paths.student).indexer_types == ["full", "shared", "full", "shared"]
    lm = load_causal_lm(paths.student, torch.float32)
    own = load_causal_lm(config.student.model, torch.float32).state_dict()
    assert all(tensor.equal(own[name]) for name, tensor in lm.state_dict().items())
    assert begun.student.parameters < inputs.student.parameters == inputs.experts["rev"].info.parameters
    written = (paths.student / "config.json").stat().st_mtime_ns
    assert share_student_indexers(config, inputs, paths.student)[0] == shared
    assert (paths.student / "config.json").stat().st_mtime_ns == written, "a resume finds it"
    assert share_student_indexers(shared, begun, sparse_world.root / "next")[0] == shared, "it has the pattern"
    assert not (sparse_world.root / "next").exists()
    with open_shared_student(config, inputs) as (_, lent):
        assert lent.student.path != begun.student.path
        assert lent.student.weight_files == begun.student.weight_files != inputs.student.weight_files
    assert not Path(lent.student.path).exists()
    assert spell_pattern(shared) == shared
