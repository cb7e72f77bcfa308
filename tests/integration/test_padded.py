"""Students whose head has more rows than the tokenizer knows, as Qwen2.5, Qwen3 and GLM-4 have: no such id is ever
sampled, and what the engine says of the others is what the trainer says."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from opd import cluster
from opd.config import PipelineConfig
from opd.records.types import Prompt, Rollout
from opd.rollouts.vllm import VLLMRolloutEngine
from opd.settings.yaml_files import validate_section
from opd.stream.schema import read_stream
from pipelines.specs import rollout_spec
from tests.integration.parts import start_pool, start_sync, start_trainer, stop

ROOT = Path(__file__).parents[2]
VOCABULARY = 76
PADDED = 512


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    from opd.config.sections import ClusterConfig

    with cluster.ray_session(ClusterConfig(), 8):
        yield


@pytest.fixture(scope="module")
def make_padded(tiny_tokenizer: Any) -> Callable[..., Path]:
    """make_padded(path, *, seed, tie, rows): a Qwen3 of random weights whose head has `rows` rows, all alike likely."""

    def make(path: Path, *, seed: int = 0, tie: bool = True, rows: int = PADDED) -> Path:
        from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

        ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = Qwen3Config(
            vocab_size=rows, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, max_position_embeddings=512, tie_word_embeddings=tie,
            initializer_range=0.1, **ids,
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = Qwen3ForCausalLM(config)
        model.generation_config = GenerationConfig(**ids)
        model.save_pretrained(path)
        tiny_tokenizer.save_pretrained(path)
        return path

    return make


def config(student: Path, temperature: float, max_new_tokens: int = 48, **trainer: Any) -> PipelineConfig:
    return validate_section(
        PipelineConfig,
        {
            "name": "padded",
            "student": {"model": student},
            "experts": {"e": {"model": student, "domain": "d"}},
            "domains": {"d": {}, "other": {}},
            "rollout": {"temperature": temperature, "max_new_tokens": max_new_tokens, "max_model_len": 64},
            "trainer": {"steps": 1, "samples_per_step": 2, "ranks": 1} | trainer,
        },
        "test",
    )


def start(cfg: PipelineConfig, model_dir: Path, tokenizer: Any) -> VLLMRolloutEngine:
    engine = VLLMRolloutEngine(rollout_spec(cfg, model_dir, VOCABULARY, (2,)), tokenizer)
    engine.wait_ready()
    return engine


def written(engine: VLLMRolloutEngine, num: int, *, step: int = 1, domain: str = "d") -> list[Rollout]:
    places = [(i, 4 + i % 60) for i in range(num)]
    prompts = [Prompt(id=f"{domain}/{i}", domain=domain, token_ids=tuple(range(at, at + 6))) for i, at in places]
    return list(engine.generate(prompts, step=step, policy_version=step - 1).rollouts)


def wanted(model_dir: Path, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
    """[sequence][token - 1] by plain transformers, over the ids that the tokenizer knows."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    found = []
    for ids in sequences:
        with torch.no_grad():
            logits_T_v = model(torch.tensor([list(ids)])).logits[0, :, :VOCABULARY]
        logp_T_v = (logits_T_v / temperature).log_softmax(-1)
        found.append([float(logp_T_v[t - 1, ids[t]]) for t in range(1, len(ids))])
    return found


def assert_says_what_it_drew(engine: VLLMRolloutEngine, model_dir: Path, temperature: float, num: int) -> int:
    """Ids, and log-probs at the temperature; returns the number of tokens."""
    rollouts = written(engine, num)
    assert max(token for r in rollouts for token in r.response_ids) < VOCABULARY
    truth = wanted(model_dir, [(*r.prompt_ids, *r.response_ids) for r in rollouts], temperature)
    for r, logp in zip(rollouts, truth, strict=True):
        assert r.behaviour_logprobs == pytest.approx(logp[len(r.prompt_ids) - 1 :], abs=1e-4)
    return sum(len(r.response_ids) for r in rollouts)


@dataclasses.dataclass(frozen=True)
class Padded:
    """A student whose head has more rows than the tokenizer knows, and an engine that holds it at temperature 2."""

    student: Path
    tie: bool
    engine: VLLMRolloutEngine


@pytest.fixture(
    scope="module",
    params=[True, pytest.param(False, marks=pytest.mark.slow)],
    ids=lambda tie: "tied" if tie else "untied",
)
def padded(
    ray: None,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    make_padded: Callable[..., Path],
    tiny_tokenizer: Any,
) -> Iterator[Padded]:
    student = make_padded(tmp_path_factory.mktemp("padded") / "student", tie=request.param)
    engine = start(config(student, 2.0), student, tiny_tokenizer)
    yield Padded(student, request.param, engine)
    stop(engine)


def test_a_student_learns_from_experts_with_other_numbers_of_rows(
    padded: Padded, tmp_path: Path, make_padded: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six steps as a merge takes them, each pushed; no padding id is written, and engine and trainer agree."""
    engine, student = padded.engine, padded.student
    engine.load(student)
    cfg = config(student, 1.5, 8, steps=6, samples_per_step=24, lr=2e-3, micro_batch_tokens=256)
    monkeypatch.setattr(engine, "_spec", rollout_spec(cfg, student, VOCABULARY, (2,)))
    experts = {
        "d": make_padded(tmp_path / "d", seed=1, rows=96),
        "other": make_padded(tmp_path / "o", seed=2, rows=140),
    }
    trainer, pool = start_trainer(cfg), start_pool(cfg, experts)
    sync = start_sync("shared_memory", trainer, engine, tolerance=1e-3)
    losses = []
    for step in range(1, 7):
        rollouts = [r for domain in experts for r in written(engine, 12, step=step, domain=domain)]
        assert max(token for r in rollouts for token in r.response_ids) < VOCABULARY
        report = trainer.train_step(step, rollouts, pool.score(rollouts))
        assert max(report.logprob_gap, sync.push(step).gap) < 1e-3
        losses.append(report.loss)
    assert losses[-1] < 0.9 * losses[0]
    stop(trainer, pool)


def test_no_padding_row_is_sampled(padded: Padded, tmp_path: Path, make_padded: Callable[..., Path]) -> None:
    """Also after a push, and after a model with another number of rows, for which the engine starts anew."""
    engine = padded.engine
    engine.load(padded.student)
    assert assert_says_what_it_drew(engine, padded.student, 2.0, 150) > 2500
    for name, rows in (("pushed", PADDED), ("other", 140)):
        model_dir = make_padded(tmp_path / name, tie=padded.tie, seed=1, rows=rows)
        engine.load(model_dir)
        assert_says_what_it_drew(engine, model_dir, 2.0, 40)
        probe = [tuple(range(5 + i, 26 + i)) for i in range(4)]
        for found, truth in zip(engine.logprobs(probe)[0], wanted(model_dir, probe), strict=True):
            assert found == pytest.approx(truth, abs=1e-4), "the probe is at temperature 1"


def merge_and_keep_the_log(root: Path, data: dict[str, Any], steps: int) -> Path:
    """Without a checkpoint before the end the log keeps every step until the last is trained: what is in it then."""
    data["checkpoint"] = {"every": steps + 1}
    run, kept, file = root / "run", root / "kept", root / "pipeline.yaml"
    file.write_text(yaml.safe_dump(data))
    with (root / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "cli", "merge", str(file), "--run-dir", str(run)],
            cwd=root, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, stderr=stderr,
        )  # fmt: skip
        deadline = time.monotonic() + 120 + 5 * steps
        while not (run / "targets" / f"step-{steps:06d}").exists():
            assert process.poll() is None and time.monotonic() < deadline, (root / "stderr").read_text()
            time.sleep(0.01)
        shutil.copytree(run / "targets", kept, copy_function=os.link)
        assert process.wait(timeout=120) == 0, (root / "stderr").read_text()
    return kept


@pytest.mark.slow  # above, six steps of its engines; test_models.py has a whole merge of models with padding rows
def test_a_student_with_padding_rows_merges_for_long(
    tmp_path: Path, make_pipeline: Callable[..., Any], make_padded: Callable[..., Path]
) -> None:
    """Experts have other numbers of rows than the student."""
    rows, steps = {0: PADDED, 1: 96, 2: 140}, 200

    def make(path: Path, *, seed: int, tie: bool) -> Path:
        return make_padded(path, seed=seed, tie=tie, rows=rows[seed])

    data = make_pipeline(tmp_path, make, tie=True)
    data["rollout"]["temperature"] = 1.5
    for domain in data["domains"].values():
        domain["eval"] = None
    data["trainer"] |= {"steps": steps, "ranks": 1}
    log = merge_and_keep_the_log(tmp_path, data, steps)
    found = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in found] == list(range(1, steps + 1))
    assert max(max(r["probe_gap"], r["logprob_gap"]) for r in found) < 1e-3
    assert found[-1]["loss"] < 0.9 * found[0]["loss"]
    logged = [row for part in log.glob("step-*/worker-*.arrow") for row in read_stream(part.read_bytes()).rows]
    assert {row.rollout.step for row in logged} == set(range(1, steps + 1))
    ids = [token for row in logged for token in row.rollout.response_ids]
    assert len(ids) == sum(r["response_tokens"] for r in found)
    assert max(ids) < VOCABULARY
