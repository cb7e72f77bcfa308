"""Engines take specs of their own, and every key that is about an engine reaches its spec."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from experts.sft import ImitationSpec
from opd.config import PipelineConfig
from opd.config.sections import RolloutConfig, TrainerConfig
from opd.config.teachers import ENGINES
from opd.records.types import Teacher, WeightedTeacher
from opd.rollouts.vllm import RolloutSpec
from opd.train.base_scoring import BaseScoring, BaseTeacher
from opd.train.deepspeed import TrainerSpec
from opd.train.lora import LoraOptions
from opd.train.optimizer import AdamWOptions
from opd.train.rank import RankOptions
from opd.train.schedule import LearningRate
from opd.train.zero import ZeroOptions
from pipelines.specs import (
    flight_spec,
    imitation_spec,
    pool_spec,
    rollout_spec,
    teacherless_spec,
    text_spec,
    trainer_spec,
)
from teachers.flight.client import FlightSpec
from teachers.pool import PoolSpec

ROOT = Path(__file__).parents[3]
SPECS = [
    RolloutSpec, TrainerSpec, RankOptions, ZeroOptions, AdamWOptions, LearningRate, PoolSpec, FlightSpec, ImitationSpec,
]  # fmt: skip
SERVER = {"base_url": "http://127.0.0.1:8000/v1", "model": "m"}
ELSEWHERE = {"engine", "samples_per_step", "mask_tokens", "num_speculative_tokens"}
"""Keys that say which engine, that take one value only, that decide what an engine is asked, or that need a model's files
(tests/unit/pipelines/test_draft.py)."""
ROLLOUT = {
    "workers": 2, "n": 2, "dtype": "bfloat16", "max_new_tokens": 5, "temperature": 0.5, "max_model_len": 64,
    "max_num_seqs": 3, "kv_cache_gib": 2, "gpu_memory_utilization": 0.5, "sleep": True,
    "tensor_parallel_size": 2, "kv_cache_dtype": "fp8", "engine_args": {"max_num_batched_tokens": 99}, "share_prefixes": True,
}  # fmt: skip
TRAINER = {
    "ranks": 3, "dtype": "bfloat16", "steps": 9, "lr": 0.5, "warmup_steps": 1, "lr_scheduler_type": "linear",
    "min_lr_ratio": 0.5, "adam_beta1": 0.5, "adam_beta2": 0.5, "adam_epsilon": 0.5, "weight_decay": 0.5,
    "deepspeed": {"communication_data_type": "bf16"}, "sequence_parallel_size": 2,
    "max_grad_norm": 0.5, "micro_batch_tokens": 99, "head_memory": 99, "grad_accum_dtype": "bfloat16",
    "gradient_checkpointing": True, "activation_offloading": True, "mlp_tile_tokens": 99, "compile": True, "bucket": 99, "extended": [{"at": 2, "steps": 3}],
}  # fmt: skip
TEACHERS = {
    "payload": "top_k", "dtype": "bfloat16", "queue": 99, "max_quarantined": 0.5, "workers": 2, "memory": 99,
    "kv_cache_gib": 2, "gpu_memory_utilization": 0.5, "servers": {"e": SERVER | {"model": "other"}},
    "api_key_env": "KEY", "server_timeout_s": 9, "address": "grpc://localhost:2", "tls_root_certs": "ca.pem",
    "token_file": "token", "tensor_parallel_size": 2, "device_map": "auto", "max_memory": {"cpu": 99},
    "gpu_memory": 99, "base_url": "https://other.example/v1", "model": "other", "api": "completions", "served_model": "else",
    "request": {"stop": ["x"]}, "temperature": 0.5, "steps": 3, "max_calls": 9, "max_cost": 9, "price": {"input": 1.0},
}  # fmt: skip
"""A value that is no default for every other key."""
NEEDED: dict[str, dict[str, Any]] = {"activation_offloading": {"gradient_checkpointing": True}}
"""Key -> the other keys without which it is refused."""
OWN: dict[str, dict[str, Any]] = {
    "transformers": {},
    "vllm": {},
    "openai": {"payload": "sampled_logprobs", "servers": {"e": SERVER}},
    "flight": {"address": "grpc://localhost:1"},
    "text": {"base_url": "https://h.example/v1", "model": "m"},
    "trainer": {},
    "none": {},
}
ALONE: dict[str, Any] = {
    "experts": {},
    "domains": {"d": {"environment": {"name": "maze"}}},
    "objective": {"kind": "none", "reward": {}},
}
"""Sections that go with `teachers.engine: none`."""


def config(**sections: Any) -> PipelineConfig:
    data: dict[str, Any] = {
        "name": "n",
        "student": {"model": "base"},
        "experts": {"e": {"model": "m", "domain": "d"}},
        "domains": {"d": {"loss_weight": 3.0}},
        "rollout": sections.pop("rollout", {}),
        "trainer": {"steps": 4, "samples_per_step": 2} | sections.pop("trainer", {}),
        "cluster": {"rollout_gpus": 1, "trainer_gpus": 1},
    }
    return PipelineConfig.model_validate(data | sections)


def specs(config: PipelineConfig) -> list[Any]:
    expert = Teacher(name="e", model_dir=Path("base"), adapter_dir=Path("m"))
    scoring = {"d": (WeightedTeacher(teacher=expert, weight=1.0),)}
    made = {"flight": flight_spec} | dict.fromkeys(("trainer", "none"), lambda config, _: teacherless_spec(config))
    made["text"] = lambda config, _: [teacherless_spec(config), text_spec(config, scoring, (2,))]
    teachers = made.get(config.teachers.engine, pool_spec)(config, 76)
    return [rollout_spec(config, Path("base"), 76, (2,)), trainer_spec(config, 76, scoring), teachers]


@pytest.mark.parametrize(
    ("section", "known", "values"), [("rollout", RolloutConfig, ROLLOUT), ("trainer", TrainerConfig, TRAINER)]
)
def test_every_key_of_an_engine_reaches_its_spec(section: str, known: Any, values: dict[str, Any]) -> None:
    assert set(known.model_fields) == set(values) | ELSEWHERE & set(known.model_fields)
    for key, value in values.items():
        needed = NEEDED.get(key, {})
        assert specs(config(**{section: needed | {key: value}})) != specs(config(**{section: needed})), key


@pytest.mark.parametrize("engine", ENGINES)
def test_every_key_of_a_teachers_engine_reaches_its_spec(engine: str) -> None:
    def made(**changes: Any) -> list[Any]:
        teachers = {"engine": engine} | OWN[engine] | changes
        kinds = {"hidden_states": "reverse_kl", "sampled_logprobs": "sampled", "top_k": "top_k", "text": "sft"}
        objective = {"kind": kinds[teachers.get("payload", "text" if engine == "text" else "hidden_states")]}
        alone = ALONE if engine == "none" else {"objective": objective}
        without = teachers.get("device_map") or engine == "trainer"
        cluster = {"rollout_gpus": 1, "trainer_gpus": 1, "teacher_gpus": 0 if without else 1}
        student = {"model": "base", "lora": {} if engine == "trainer" else None}
        return specs(config(teachers=teachers, cluster=cluster, student=student, **alone))

    before = made()
    one_value = {"payload"} if engine in ("none", "text") else set()
    for key in set(ENGINES[engine].model_fields) - ELSEWHERE - one_value:
        more = {"tls_root_certs": {"address": "grpc+tls://h:1"}, "max_memory": {"device_map": "auto"}}.get(key, {})
        more |= {"price": {"output": 1.0}} if key == "max_cost" else {}
        value = "sampled_logprobs" if (engine, key) == ("trainer", "payload") else TEACHERS[key]
        assert made(**{key: value}, **more) != (made(**more) if key == "max_memory" else before), key
    if engine == "transformers":
        assert made(device_map="auto")[2].scorer.device_map == "auto"


def test_the_first_round_is_short_where_teachers_score_elsewhere_whether_or_not_they_overlap() -> None:
    """`schedule.overlap` may be changed when a run goes on, and the weights must not depend on it."""

    def short(gpus: float, overlap: bool) -> bool:
        cluster = {"rollout_gpus": gpus and 1 - gpus % 1, "trainer_gpus": gpus}
        return trainer_spec(config(cluster=cluster, schedule={"overlap": overlap}), 76).short_first

    assert [short(gpus, overlap) for gpus in (0, 0.5, 1) for overlap in (False, True)] == [False] * 4 + [True] * 2
    own = config(teachers={"engine": "trainer"}, student={"model": "base", "lora": {}})
    assert not trainer_spec(own, 76).short_first, "the ranks score themselves"


def test_requests_that_begin_alike_are_kept_in_small_blocks() -> None:
    def shared(**changes: Any) -> bool:
        return rollout_spec(config(**changes), Path("base"), 76, (2,)).engine.share_prompts

    turns = {"d": {"environment": {"name": "maze"}}}
    assert (shared(), shared(rollout={"n": 2}), shared(domains=turns)) == (False, True, True)
    assert shared(rollout={"share_prefixes": True}) and not shared(rollout={"n": 2, "share_prefixes": False})


def test_a_baseline_is_trained_as_the_merge_is() -> None:
    made = config(trainer={"lr": 0.5, "lr_scheduler_type": "cosine", "max_grad_norm": 0.25}, seed=7)
    spec, merge = imitation_spec(made, 3, 2), trainer_spec(made, 76)
    assert (spec.adamw, spec.rate, spec.max_grad_norm) == (merge.rank.adamw, merge.rate, merge.rank.max_grad_norm)
    assert (spec.micro_batch, spec.accumulate, spec.seed) == (3, 2, 7)


def test_no_engine_knows_the_pipeline() -> None:
    files = [p for name in ("opd", "teachers", "experts") for p in (ROOT / name).rglob("*.py")]
    assert [p for p in files if p.parent.name != "config" and "PipelineConfig" in p.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("spec", SPECS)
def test_every_field_of_a_spec_says_what_it_is(spec: type) -> None:
    (made,) = ast.parse(inspect.getsource(spec)).body
    assert isinstance(made, ast.ClassDef)
    for field, after in zip(made.body, [*made.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant), ast.unparse(field)


def test_a_lora_student_reaches_the_rank_with_the_runs_seed() -> None:
    assert trainer_spec(config(), 76).rank.lora is None
    student = {"model": "base", "lora": {"r": 2, "alpha": 3, "targets": ["q_proj", "v_proj"]}}
    spec = trainer_spec(config(student=student, seed=5), 76)
    assert spec.rank.lora == LoraOptions(r=2, alpha=3, targets=("q_proj", "v_proj"), seed=5)
    default = trainer_spec(config(student={"model": "base", "lora": {}}), 76).rank.lora
    assert default == LoraOptions(r=16, alpha=32, targets="all-linear", seed=0)


def test_the_rank_scores_with_lora_experts_where_the_pipeline_says_so() -> None:
    lora = {"student": {"model": "base", "lora": {}}, "objective": {"extrapolate": 1.5}}
    expert = Teacher(name="e", model_dir=Path("base"), adapter_dir=Path("m"))
    scoring = {"d": (WeightedTeacher(teacher=expert, weight=1.5),)}
    start = BaseTeacher(name="start student", weights={"d": -0.5})
    by_workers = trainer_spec(config(**lora), 76, scoring).rank.base_scoring
    assert by_workers == BaseScoring(teachers=(start,), payload="hidden_states")
    by_ranks = trainer_spec(config(**lora, teachers={"engine": "trainer"}), 76, scoring).rank.base_scoring
    on_base = BaseTeacher(name="e", weights={"d": 1.5}, adapter_dir=Path("m"))
    assert by_ranks == BaseScoring(teachers=(on_base, start), payload="hidden_states")


def test_a_seed_that_torch_does_not_take_gives_adapters_all_the_same() -> None:
    """It decides prompts and tokens whatever its size; only LoRA's first values come from torch."""
    spec = trainer_spec(config(student={"model": "base", "lora": {}}, seed=(1 << 64) + 5), 76)
    assert spec.rank.lora is not None
    assert torch.Generator().manual_seed(spec.rank.lora.seed).initial_seed() == 5
    largest = trainer_spec(config(student={"model": "base", "lora": {}}, seed=(1 << 64) - 1), 76)
    assert largest.rank.lora is not None and largest.rank.lora.seed == (1 << 64) - 1, "as it was"
