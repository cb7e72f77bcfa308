"""The parts that integration tests put together: settings, made-up responses, and engines, some of which several tests share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from opd.config import PipelineConfig
from opd.records.types import Rollout, Teacher, WeightedTeacher
from opd.rollouts.vllm import VLLMRolloutEngine
from opd.settings.yaml_files import validate_section
from opd.sync import SYNCS, ProvenSync, SyncSpec
from opd.train.deepspeed import DeepSpeedTrainer
from pipelines.specs import pool_spec, rollout_spec, trainer_spec
from teachers.pool import Pool
from tests.rows import make_rollout

PROBE = [tuple(range(5 + i, 26 + i)) for i in range(4)]
EOS = 2
VOCABULARY = 76


def config(
    student: Path, *, objective: dict[str, Any] | None = None, payload: str = "hidden_states", **trainer: Any
) -> PipelineConfig:
    return validate_section(
        PipelineConfig,
        {
            "name": "test",
            "student": {"model": student},
            "experts": {"left": {"model": student, "domain": "left"}},
            "domains": {"left": {}, "right": {}},
            "rollout": {"max_new_tokens": 8, "max_model_len": 64},
            "objective": objective or {},
            "teachers": {"payload": payload},
            "trainer": {"ranks": 1, "steps": 10, "samples_per_step": 16, "lr": 1e-3, **trainer},
            "sync": {"tolerance": 20},  # responses are made up: no engine has said how likely they are
        },
        "test",
    )


def with_rollout(given: PipelineConfig, **settings: Any) -> PipelineConfig:
    return given.model_copy(update={"rollout": given.rollout.model_copy(update=settings)})


def with_n(given: PipelineConfig, n: int) -> PipelineConfig:
    return with_rollout(given, n=n)


def with_teachers(given: PipelineConfig, **settings: Any) -> PipelineConfig:
    return given.model_copy(update={"teachers": given.teachers.model_copy(update=settings)})


def plain_logprobs(model_dir: Path, sequences: list[tuple[int, ...]]) -> list[list[float]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    out = []
    for ids in sequences:
        with torch.no_grad():
            logp_T_V = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        out.append([float(logp_T_V[t - 1, ids[t]]) for t in range(1, len(ids))])
    return out


def mean_gap(a: list[list[float]], b: list[list[float]]) -> float:
    pairs = [(x, y) for s, t in zip(a, b, strict=True) for x, y in zip(s, t, strict=True)]
    return sum(abs(x - y) for x, y in pairs) / len(pairs)


def rollouts(num: int = 16, *, seed: int = 0) -> list[Rollout]:
    """Responses with made-up tokens: scoring and training do not care who wrote them."""
    rng = torch.Generator().manual_seed(seed)
    made = []
    for i in range(num):
        response = tuple(torch.randint(4, 70, (3 + i % 6,), generator=rng).tolist())
        made.append(
            make_rollout(
                sample_id=f"000001/{'left' if i % 2 else 'right'}/{i}",
                step=1,
                domain="left" if i % 2 else "right",
                policy_version=0,
                prompt_ids=tuple(torch.randint(4, 70, (4 + i % 5,), generator=rng).tolist()),
                response_ids=response,
                behaviour_logprobs=(-1.0,) * len(response),
            )
        )
    return made


def begun_alike(rows: list[Rollout]) -> list[Rollout]:
    """The rows, each domain's prompts behind an instruction of twelve tokens."""
    begins = {
        domain: tuple(20 + (i * k) % 50 for k in range(12)) for i, domain in enumerate(("left", "right"), start=3)
    }
    return [dataclasses.replace(r, prompt_ids=begins[r.domain] + r.prompt_ids) for r in rows]


def moved(rows: list[Rollout], **domains: str) -> list[Rollout]:
    """The rows, those of a domain given to another one: `moved(rows, right="wide")`."""
    return [dataclasses.replace(r, domain=domains.get(r.domain, r.domain)) for r in rows]


def break_weights(model_dir: Path) -> Path:
    """Make the model say NaN of every token."""
    from safetensors.torch import load_file, save_file

    file = model_dir / "model.safetensors"
    state = load_file(file)
    state["model.norm.weight"][:] = float("nan")
    save_file(state, file, metadata={"format": "pt"})
    return model_dir


def make_gpt2(path: Path, tokenizer: Any) -> Path:
    """A model with dropout, which the Llamas of the other tests do not have."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.3)
    GPT2LMHeadModel(shape).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def start_pool(cfg: PipelineConfig, teachers: Mapping[str, Path]) -> Pool:
    by_domain = {d: Teacher(name=f"{d}-expert", model_dir=p) for d, p in teachers.items()}
    routes = {d: (WeightedTeacher(teacher=t, weight=1.0),) for d, t in by_domain.items()}
    pool = Pool(pool_spec(cfg, VOCABULARY), routes)
    pool.wait_ready()
    return pool


def start_trainer(cfg: PipelineConfig, vocab_size: int = VOCABULARY) -> DeepSpeedTrainer:
    trainer = DeepSpeedTrainer(trainer_spec(cfg, vocab_size))
    trainer.wait_ready()
    return trainer


def start_engine(cfg: PipelineConfig, model_dir: Path, tokenizer: Any) -> VLLMRolloutEngine:
    engine = VLLMRolloutEngine(rollout_spec(cfg, model_dir, VOCABULARY, (EOS,)), tokenizer)
    engine.wait_ready()
    return engine


def start_sync(
    kind: str, trainer: DeepSpeedTrainer, engine: VLLMRolloutEngine, *, tolerance: float = 1e-4, **more: Any
) -> ProvenSync:
    """A way to push; over the network in buckets so small that a layer's weights come in several."""
    ends: dict[str, Any] = {"trainer": trainer, "engine": engine, "probe": PROBE}
    known: dict[str, Any] = {"tolerance": tolerance, "nbytes": 1 << 20, "bucket": 20_000, "tell": print}
    return SYNCS[kind](SyncSpec(**ends | known | more))


def stop(*parts: Any) -> None:
    """Free the workers' memory before the next test starts its own."""
    for part in parts:
        for worker in getattr(part, "_workers", None) or part._ranks:
            worker.kill()


def weights(trainer: DeepSpeedTrainer, path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    path.mkdir()
    trainer.export(path)
    return load_file(path / "model.safetensors")


def save(trainer: DeepSpeedTrainer, path: Path) -> Path:
    """A checkpoint, all files of which are there and as long as was said."""
    path.mkdir()
    trainer.begin_save(path)
    files = trainer.saved(60)
    assert files and {f.name: f.size for f in files} == {p.name: p.stat().st_size for p in path.iterdir()}
    return path


def altered(trainer: DeepSpeedTrainer, path: Path, factor: float = 1.1) -> Path:
    """A checkpoint of the trainer whose weights are larger by this factor."""
    from safetensors.torch import load_file, save_file

    path.mkdir()
    trainer.begin_save(path)
    assert trainer.saved(60)
    file = path / "rank-0.safetensors"
    tensors = {name: factor * t if name.startswith("param/") else t for name, t in load_file(file).items()}
    save_file(tensors, file)
    return path


@dataclasses.dataclass(frozen=True)
class Shared:
    """The parts that several tests use: to start them takes longer than what the tests do with them."""

    student: Path
    expert: Path
    pool: Pool
    """It keeps nothing of what it scored."""
    root: Path
    """Directory in which trainers save what they begin with."""
    trainers: list[DeepSpeedTrainer] = dataclasses.field(default_factory=list)

    def trainer(self, cfg: PipelineConfig) -> DeepSpeedTrainer:
        """A trainer like one that was just started: with the weights of its student, and no step behind it.

        One is started for each set of options that ranks are given; learning rate, micro-batches and queue are the driver's.
        """
        spec = trainer_spec(cfg, VOCABULARY)
        place = next((i for i, one in enumerate(self.trainers) if one._spec.rank == spec.rank), len(self.trainers))
        begun = self.root / f"trainer-{place}"
        if place == len(self.trainers):
            self.trainers.append(start_trainer(cfg))
            save(self.trainers[place], begun)
        trainer = self.trainers[place]
        trainer.load(begun)
        trainer._spec = trainer._ranks_spec = spec
        trainer.wait_ready()  # whether rows share a prompt is the driver's, too
        return trainer
