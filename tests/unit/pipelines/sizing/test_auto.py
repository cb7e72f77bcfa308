"""Numbers that a pipeline leaves open: what they are on a CPU and on GPUs, in how much memory, and where they stay for good."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from opd.config import PipelineConfig, load_pipeline
from opd.run.paths import RunPaths
from opd.settings.auto import OpenNumber
from opd.settings.yaml_files import validate_section
from pipelines.catalog import find_pipeline
from pipelines.inputs.read import read_inputs
from pipelines.inputs.template_date import as_recorded
from pipelines.merging import run as merging
from pipelines.plan.models import read_models
from pipelines.sizing import auto
from pipelines.sizing.auto import ORDER, choose_numbers, describe_numbers, keep_numbers, local_machine
from pipelines.sizing.gpu_memory import fits_machine
from pipelines.sizing.machine import MachineFacts
from pipelines.sizing.memory import head_sizes

GIB = 1 << 30
OWN_CARDS: dict[str, dict[str, Any]] = {
    "student": {"lora": {"r": 16}},
    "rollout": {"workers": 1, "sleep": False, "gpu_memory_utilization": 0.7},
    "objective": {"chunk": "auto"},
    "trainer": {"ranks": 1, "micro_batch_tokens": "auto"},
    "teachers": {"workers": 1},
    "cluster": {"rollout_gpus": 1, "teacher_gpus": 1, "trainer_gpus": 1},
}
"""Changes of the shipped `merge-7b` by which each role has a card of its own, and every number is open."""


def numbers(config: PipelineConfig) -> dict[str, Any]:
    keys = (key.split(".") for key in ORDER)
    return {name: getattr(getattr(config, section), name) for section, name in keys}


def seven_billion(**sections: dict[str, Any]) -> PipelineConfig:
    data = load_pipeline(find_pipeline("merge-7b")).model_dump(mode="json", exclude_unset=True)
    for changes in (OWN_CARDS, sections):
        data |= {name: data.get(name, {}) | keys for name, keys in changes.items()}
    return validate_section(PipelineConfig, data, "test")


def cards(gib: int) -> MachineFacts:
    return MachineFacts(cores=16, memory=256 * GIB, gpus=(gib * GIB,) * 3)


def test_a_cpu_has_what_it_had_before_there_was_auto() -> None:
    for name in ("quickstart", "smollm2", "smollm2-tools"):
        config = load_pipeline(find_pipeline(name))
        models = read_models(config).merge
        for cores, memory in ((2, 24 * GIB), (64, 512 * GIB)):
            chosen = numbers(choose_numbers(config, models, MachineFacts(cores=cores, memory=memory)))
            assert not any(isinstance(number, OpenNumber) for number in chosen.values())
            wanted = {"chunk": 128, "kv_cache_gib": 1, "queue": 256 << 20, "bucket": None}
            assert {key: chosen[key] for key in wanted} == wanted
            assert chosen["head_memory"] == sum(head_sizes(config, models)) < GIB
            assert chosen["micro_batch_tokens"] == {"quickstart": 4096, "smollm2": 8192, "smollm2-tools": 2048}[name]


def test_a_card_gets_long_chunks_and_full_micro_batches() -> None:
    config = seven_billion()
    models = read_models(config).merge
    chosen = choose_numbers(config, models, cards(80))
    assert fits_machine(chosen, models, cards(80))
    assert chosen.objective.chunk == 1024
    assert chosen.trainer.micro_batch_tokens == 16384
    head = 2 * 152_064 * 3584
    assert chosen.trainer.head_memory == head > GIB, "ten adapters of one base have one head"
    exact = choose_numbers(seven_billion(trainer={"dtype": "float32"}), models, None)
    assert exact.objective.chunk == 512 and exact.trainer.micro_batch_tokens == 4096
    assert choose_numbers(config, models, cards(141)).objective.chunk == 2048


def test_what_memory_does_not_hold_is_halved_in_order() -> None:
    config = seven_billion()
    models = read_models(config).merge
    chosen = choose_numbers(config, models, cards(80))
    tight = cards(26)
    smaller = choose_numbers(config, models, tight)
    assert not fits_machine(chosen, models, tight) and fits_machine(smaller, models, tight)
    assert smaller.objective.chunk == 1024, "chosen before the micro-batches"
    assert smaller.trainer.micro_batch_tokens == 8192
    assert choose_numbers(config, models, cards(23)).objective.chunk == 512
    none = choose_numbers(config, models, cards(1))
    assert (none.objective.chunk, none.trainer.micro_batch_tokens) == (128, config.rollout.max_model_len)


def test_a_micro_batch_has_room_for_the_longest_row() -> None:
    config = load_pipeline(find_pipeline("smollm2"), ["trainer.micro_batch_tokens=auto", "rollout.max_model_len=8192"])
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"share_prefixes": False})})
    chosen = choose_numbers(config, read_models(config).merge, None)
    assert chosen.trainer.micro_batch_tokens == 8192


def test_a_queue_holds_two_rounds_but_no_more_than_a_step() -> None:
    config = load_pipeline(find_pipeline("merge-7b"))
    models = read_models(config).merge
    a_token = 2 * 3584 + 16
    a_round = config.trainer.ranks * (config.trainer.micro_batch_tokens + config.rollout.max_model_len) * a_token
    assert choose_numbers(config, models, None).teachers.queue == 2 * a_round > GIB
    few = config.model_copy(update={"trainer": config.trainer.model_copy(update={"samples_per_step": 40})})
    assert choose_numbers(few, models, None).teachers.queue == 40 * config.rollout.max_new_tokens * a_token


def test_a_bucket_is_as_large_as_memory_allows_where_it_is_asked_for() -> None:
    config = seven_billion(trainer={"bucket": "auto", "micro_batch_tokens": 4096})
    models = read_models(config).merge
    assert choose_numbers(config, models, cards(80)).trainer.bucket == 1_000_000_000
    tight = cards(22)
    assert 10_000_000 <= choose_numbers(config, models, tight).trainer.bucket < 1_000_000_000  # type: ignore[operator]


def test_numbers_that_are_given_stay() -> None:
    given = seven_billion(
        trainer={"micro_batch_tokens": 9000, "head_memory": "3GiB"}, objective={"chunk": 77}, teachers={"queue": 5}
    )
    models = read_models(given).merge
    chosen = choose_numbers(given, models, cards(80))
    assert (chosen.objective.chunk, chosen.trainer.micro_batch_tokens, chosen.trainer.head_memory) == (
        77,
        9000,
        3 * GIB,
    )
    assert chosen.teachers.queue == 5 and describe_numbers(given, chosen) == ""
    assert describe_numbers(seven_billion(), choose_numbers(seven_billion(), models, cards(80))) == (
        "objective.chunk 1,024, trainer.head_memory 1,040 MiB, trainer.micro_batch_tokens 16,384, teachers.queue 281 MiB"
    )


def test_a_run_records_its_numbers_and_a_resume_keeps_them(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_pipeline(world.write())
    assert isinstance(config.objective.chunk, OpenNumber) and config.model_dump()["objective"]["chunk"] == "auto"
    root = world.root / "run"
    merging.begin(config, root)
    recorded = yaml.safe_load(RunPaths(root).pipeline.read_text())
    assert recorded["objective"]["chunk"] == 128 and recorded["teachers"]["queue"] == 256 << 20
    assert "auto" not in {recorded[section][name] for section, name in (key.split(".") for key in ORDER)}
    begun = load_pipeline(RunPaths(root).pipeline)
    earlier = begun.model_copy(update={"objective": begun.objective.model_copy(update={"chunk": 7})})
    assert keep_numbers(config, earlier).objective.chunk == 7
    assert as_recorded(config, earlier).objective.chunk == 7
    reopened = merging.reopen(root, load_pipeline(world.root / "pipeline.yaml"))
    assert reopened.new_manifest is None and numbers(reopened.config) == numbers(begun)


def test_the_inputs_of_a_merge_choose_as_a_plan_does(world: Any) -> None:
    config = load_pipeline(world.write())
    machine = MachineFacts(cores=2, memory=24 * GIB)
    planned = choose_numbers(config, read_models(config).merge, machine)
    assert choose_numbers(config, read_inputs(config), machine) == planned


def test_gpus_that_are_not_seen_are_of_unknown_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config, on_cpus = seven_billion(), load_pipeline(find_pipeline("quickstart"))
    without = MachineFacts(cores=2, memory=GIB)
    monkeypatch.setattr(auto, "read_machine", lambda: without)
    assert local_machine(config) is None and local_machine(on_cpus) == without
    monkeypatch.setattr(auto, "read_machine", lambda: cards(80))
    assert local_machine(config) == cards(80)
    monkeypatch.setattr(auto, "read_machine", lambda: pytest.fail("it is another machine's"))
    assert local_machine(seven_billion(cluster={"address": "auto"})) is None
