"""New weights from a trainer rank into an engine on one GPU, each in a process of Ray: GB/s of every way, the probe's gap, sleep.

On one GPU the direct way is CUDA IPC, on two it is NCCL between them; on the CPU it is gloo.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.check import Check
from benchmarks.gpu.runner import RunnerWorker
from benchmarks.gpu.work import MODELS, build_model, used_bytes
from benchmarks.push import WAYS, push_once
from opd import cluster
from opd.config import PipelineConfig
from opd.rollouts.worker import GenerateRequest, VLLMWorker
from opd.settings.yaml_files import validate_section

REQUEST = GenerateRequest(token_ids=(5, 6, 7), max_tokens=8, temperature=1.0, seed=7)


def measure(check: Check) -> None:
    """Each way in turn, on one GPU, and on two if they are here."""
    size = "tiny" if check.quick else "medium"
    places = {"the CPU": 0.0}
    if check.device == "cuda":
        places = {"one GPU": 0.45}
        if torch.cuda.device_count() > 1:
            places["two GPUs"] = 1.0
        else:
            check.leave_out("NCCL from GPU to GPU", "one GPU is here")
    else:
        check.leave_out("CUDA IPC, NCCL, sleep", "they are a GPU's")
    with tempfile.TemporaryDirectory() as folder:
        models = [
            build_model(Path(folder) / str(seed), size, dtype=torch.bfloat16, seed=seed, device=check.device)
            for seed in (0, 1)
        ]
        for place, gpus in places.items():
            if check.in_time(f"pushes on {place}", 0 if check.quick else 60):
                _measure_place(check, place, gpus, size, models)


def _measure_place(check: Check, place: str, gpus: float, size: str, models: list[Path]) -> None:
    """Rounds of pushes from and to this place; the first round warms up. With a GPU's engine, every push finds it asleep."""
    from opd.rollouts import vllm
    from opd.train.deepspeed import DeepSpeedTrainer
    from pipelines.specs import rollout_spec, trainer_spec

    student, other = models
    vocab = MODELS[size]["vocab_size"]
    config = _make_config(student, gpus)
    nbytes = sum(path.stat().st_size for path in student.glob("*.safetensors"))
    vllm.VLLMWorker = RunnerWorker  # type: ignore[misc]
    with cluster.ray_session(config.cluster, 4):
        trainer = DeepSpeedTrainer(trainer_spec(config, vocab))
        trainer.wait_ready()
        nobody: Any = None  # nothing is decoded
        engine = vllm.VLLMRolloutEngine(rollout_spec(config, student, vocab, (2,)), nobody)
        engine.wait_ready()
        worker: Any = engine._workers[0]
        (runner,) = cluster.wait_for_all([worker.submit(RunnerWorker.model_runner)], timeout_s=60)
        rounds = 2 if check.quick else 4
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        gaps: dict[str, float] = {}
        for number in range(rounds):
            for way in WAYS:
                engine.load(other)
                cluster.wait_for_all([worker.submit(VLLMWorker.generate, [REQUEST])], timeout_s=300)
                if config.rollout.sleep and number == 0 and way == WAYS[0]:
                    check.add("engine asleep", place=place, used_bytes=used_bytes())
                took, gaps[way] = push_once(trainer, engine, way, len(WAYS) * number + WAYS.index(way) + 1)
                if number:
                    seconds[way].append(took)
        for way, each in seconds.items():
            median = statistics.median(each)
            check.add(
                "weight push", place=place, way=way, runner=runner, model=size, weights_bytes=nbytes, seconds=median,
                GB_per_s=nbytes / 1e9 / median, probe_gap=gaps[way],
            )  # fmt: skip


def _make_config(student: Path, gpus: float) -> PipelineConfig:
    return validate_section(
        PipelineConfig,
        {
            "name": "gpu-check",
            "student": {"model": student},
            "experts": {"expert": {"model": student, "domain": "d"}},
            "domains": {"d": {}},
            "rollout": {
                "max_new_tokens": 8, "max_model_len": 64, "dtype": "bfloat16", "gpu_memory_utilization": 0.2,
                "sleep": gpus > 0,
            },
            "trainer": {"steps": 1, "samples_per_step": 1, "ranks": 1, "dtype": "bfloat16"},
            "cluster": {"rollout_gpus": gpus, "trainer_gpus": gpus},
        },
        "gpu-check",
    )  # fmt: skip
