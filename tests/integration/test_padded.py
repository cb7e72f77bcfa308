"""Students whose head has more rows than the tokenizer knows, as Qwen2.5, Qwen3 and GLM-4 have: no such id is ever
sampled, and what the engine says of the others is what the trainer says."""

from __future__ import annotations

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
from opd.rollouts.vllm import VLLMRolloutEngine
from opd.settings import validate
from opd.stream.schema import read_stream
from opd.types import Prompt, Rollout
from pipelines.specs import rollout_spec

ROOT = Path(__file__).parents[2]
VOCABULARY = 76
PADDED = 512


@pytest.fixture
def ray() -> Iterator[None]:
    from opd.config.sections import ClusterConfig

    with cluster.ray_session(ClusterConfig(), 8):
        yield


@pytest.fixture
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


def config(student: Path, temperature: float) -> PipelineConfig:
    return validate(
        PipelineConfig,
        {
            "name": "padded",
            "student": {"model": student},
            "experts": {"e": {"model": student, "domain": "d"}},
            "domains": {"d": {}},
            "rollout": {"temperature": temperature, "max_new_tokens": 48, "max_model_len": 64},
            "trainer": {"steps": 1, "samples_per_step": 1, "ranks": 1},
        },
        "test",
    )


def start(cfg: PipelineConfig, model_dir: Path, tokenizer: Any) -> VLLMRolloutEngine:
    engine = VLLMRolloutEngine(rollout_spec(cfg, model_dir, VOCABULARY, (2,)), tokenizer)
    engine.wait_ready()
    return engine


def written(engine: VLLMRolloutEngine, num: int) -> list[Rollout]:
    prompts = [Prompt(id=f"d/{i}", domain="d", token_ids=tuple(range(4 + i % 60, 10 + i % 60))) for i in range(num)]
    return list(engine.generate(prompts, step=1, policy_version=0).rollouts)


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


@pytest.mark.parametrize("tie", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["tied", "untied"])
def test_no_padding_row_is_sampled(
    ray: None, tmp_path: Path, make_padded: Callable[..., Path], tiny_tokenizer: Any, tie: bool
) -> None:
    """Also after a push, and after a model with another number of rows, for which the engine starts anew."""
    student = make_padded(tmp_path / "student", tie=tie)
    engine = start(config(student, 2.0), student, tiny_tokenizer)
    assert assert_says_what_it_drew(engine, student, 2.0, 150) > 2500
    for name, rows in (("pushed", PADDED), ("other", 140)):
        model_dir = make_padded(tmp_path / name, tie=tie, seed=1, rows=rows)
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


def merged_without_a_padding_id(
    tmp_path: Path, make_pipeline: Callable[..., Any], make_padded: Callable[..., Path], steps: int
) -> None:
    """Experts have other numbers of rows than the student."""
    rows = {0: PADDED, 1: 96, 2: 140}

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


def test_a_student_with_padding_rows_merges(
    tmp_path: Path, make_pipeline: Callable[..., Any], make_padded: Callable[..., Path]
) -> None:
    merged_without_a_padding_id(tmp_path, make_pipeline, make_padded, 6)


@pytest.mark.slow
def test_a_student_with_padding_rows_merges_for_long(
    tmp_path: Path, make_pipeline: Callable[..., Any], make_padded: Callable[..., Path]
) -> None:
    merged_without_a_padding_id(tmp_path, make_pipeline, make_padded, 200)
