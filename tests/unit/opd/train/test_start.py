"""The student as the merge begins, asked by a rank and not by a scoring worker: the same loss, and the same gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from opd import cluster
from opd.config import PipelineConfig
from opd.errors import RunError
from opd.models.heads import HeadSource, head_array, head_key
from opd.models.layouts import LAYOUTS, SHARED
from opd.models.logit_rule import IDENTITY
from opd.models.weights import load_causal_lm
from opd.payloads.answer import Answer
from opd.payloads.hidden_states import HiddenStates
from opd.payloads.sampled_logprobs import SampledLogprobs
from opd.records.types import Rollout
from opd.stream.schema import TargetRow, write_stream
from opd.train import deepspeed
from opd.train.lora import add_adapters, without_adapters
from opd.train.rank import RankOptions, RankResult, RankWork, TrainerRank
from opd.train.student import Student
from pipelines.specs import rank_options, trainer_spec
from tests.engines import Still
from tests.rows import make_rollout
from tests.unit.opd.train.test_rank import FakeRank, Optimizer, Targets

Make = Callable[..., Path]
Assigned = tuple[str, Path, float]
"""Name, model and weight of a teacher."""
FACTOR = 1.5
SAMPLED = {"objective": {"kind": "sampled"}, "teachers": {"payload": "sampled_logprobs"}}
NONE: frozenset[str] = frozenset()


def config(model: Path, **sections: Any) -> PipelineConfig:
    """`beyond` has a target beyond its expert, `plain` has not."""
    data: dict[str, Any] = {
        "name": "n",
        "student": {"model": model, "lora": {"r": 4, "alpha": 8}},
        "experts": {name: {"model": "m", "domain": name} for name in ("beyond", "plain")},
        "domains": {"beyond": {"extrapolate": FACTOR}, "plain": {}},
        "trainer": {"steps": 4, "samples_per_step": 8, "lr": 1.0, "ranks": 2},
        "sync": {"tolerance": 9.0},
    }
    return PipelineConfig.model_validate(data | sections)


def rollouts() -> list[Rollout]:
    """Three responses to each of two prompts in each domain; one token of each is an environment's."""
    generator = torch.Generator().manual_seed(5)

    def ids(num: int) -> list[int]:
        return torch.randint(4, 70, (num,), generator=generator).tolist()

    made = []
    for domain in ("beyond", "plain"):
        for number in range(2):
            prompt = ids(5 + 3 * number)
            for one in range(3):
                response = ids(3 + one + number)
                mask = [place != 1 for place in range(len(response))]
                made.append(
                    make_rollout(
                        sample_id=f"{domain}/{number}/{one}", step=1, domain=domain, prompt_ids=prompt,
                        response_ids=response, behaviour_logprobs=[-1.0] * len(response), loss_mask=mask,
                    )
                )  # fmt: skip
    return made


ROLLOUTS = rollouts()


@torch.no_grad()
def scored(teacher: Assigned, mine: Sequence[Rollout], payload: str, dtype: str) -> list[TargetRow]:
    """The rows of a teacher, by plain passes over one sequence each."""
    name, model_dir, weight = teacher
    lm = load_causal_lm(model_dir, getattr(torch, dtype))
    head = lm.get_output_embeddings().weight.detach()
    rows = []
    for rollout in mine:
        hidden_T_D = lm.base_model(torch.tensor([[*rollout.prompt_ids, *rollout.response_ids]])).last_hidden_state[0]
        hidden_N_D = hidden_T_D[[len(rollout.prompt_ids) - 1 + place for place in rollout.trained_positions]]
        answer: Answer = HiddenStates.from_states(hidden_N_D, head_key(head, IDENTITY))
        if payload == "sampled_logprobs":
            logp_N_V = (hidden_N_D @ head[:76].T).float().log_softmax(-1)
            answer = SampledLogprobs(logp_N_V.gather(1, torch.tensor(rollout.trained_ids)[:, None])[:, 0].tolist())
        rows.append(TargetRow(rollout=rollout, teacher=name, weight=weight, answer=answer))
    return rows


def source(model_dir: Path, dtype: str = "float32") -> HeadSource:
    head = load_causal_lm(model_dir, getattr(torch, dtype)).get_output_embeddings().weight.detach()
    return HeadSource(key=head_key(head, IDENTITY), rule=IDENTITY, handle=cluster.StoredValue(head_array(head)))


class Engine(Still):
    """A LoRA student that was trained for a while, without DeepSpeed; it never takes its step."""

    def __init__(self, options: RankOptions) -> None:
        assert options.lora
        lm = load_causal_lm(options.model_dir, getattr(torch, options.dtype))
        add_adapters(lm, options.lora)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for param in lm.parameters():
                if param.requires_grad:
                    param += 0.1 * torch.randn(param.shape, generator=generator).to(param.dtype)
        self.module = Student(lm, options.objective.build(), chunk=5, vocab_size=76).eval()
        self.optimizer = Optimizer([p for p in lm.parameters() if p.requires_grad], lr=0.0)
        self.heads: list[set[str]] = []

    def __call__(self, batch: Any, heads: dict[str, Any], weight_N: torch.Tensor) -> Any:
        self.heads.append(set(heads))
        return self.module(batch, heads, weight_N)

    def gradients(self) -> dict[str, torch.Tensor]:
        return {n: p.grad for n, p in self.module.named_parameters() if p.grad is not None}


@dataclasses.dataclass(frozen=True)
class Case:
    """What both ways are compared in."""

    options: RankOptions
    models: dict[str, Path]
    layout: str = "packed"
    micro_batches: tuple[tuple[str, ...], ...] = (tuple(r.sample_id for r in ROLLOUTS),)
    dtype: str = "float32"

    def step(self, *, asks: bool) -> tuple[RankResult, Engine]:
        """One step, in which the rank asks the start student, or a teacher has scored in its name."""
        start = self.options.start
        assert start is not None
        mine = [r for r in ROLLOUTS if r.sample_id in {i for ids in self.micro_batches for i in ids}]
        rows = []
        for domain, factor in (("beyond", FACTOR), ("plain", 1.0)):
            some = [r for r in mine if r.domain == domain]
            teachers = [(domain, self.models[domain], factor)]
            if factor > 1 and not asks:
                teachers.append((start.name, self.options.model_dir, 1 - factor))
            rows += [row for one in teachers for row in scored(one, some, start.payload, self.dtype)]
        rank = TrainerRank(dataclasses.replace(self.options, start=start if asks else None, world_size=1), 0)
        engine: Any = Engine(self.options)
        rank._engine, rank._device, rank._layout = engine, torch.device("cpu"), self.layout
        rounds = start.scored_micro_batches([self.micro_batches], mine) if asks else NONE
        weights = {r.sample_id: 0.01 + 0.001 * place for place, r in enumerate(mine)}
        work = RankWork(step=1, lr=0.0, micro_batches=self.micro_batches, weights=weights, start_rounds=rounds)
        teaching = [name for name in self.models if not (asks and name == "student")]
        heads = [source(self.models[name], self.dtype) for name in teaching]
        rank.begin_step(work, {head.key: head for head in heads})
        stream = np.frombuffer(write_stream(rows, self.dtype, start.payload), dtype=np.uint8)
        for index in range(len(self.micro_batches)):
            rank.accumulate_micro_batch(index, NONE, *([stream] if index == 0 else []))
        return rank.finish_step(1.0), engine


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def models(request: pytest.FixtureRequest, tmp_path: Path, make_model_dir: Make) -> dict[str, Path]:
    names = ("student", "beyond", "plain")
    return {name: make_model_dir(tmp_path / name, seed=i, tie=request.param) for i, name in enumerate(names)}


IDS = [r.sample_id for r in ROLLOUTS]
SPLITS = {
    "one": (tuple(IDS),),
    "several": (tuple(IDS[:2]), (), tuple(IDS[2:7]), tuple(IDS[7:])),
}


@pytest.mark.parametrize("sections", [{}, SAMPLED], ids=["states", "log-probs"])
@pytest.mark.parametrize(("layout", "split"), [("packed", "one"), (SHARED, "several"), ("padded", "several")])
def test_loss_and_gradients_are_those_with_a_teacher(
    sections: Any, layout: str, split: str, models: dict[str, Path], in_process: Any
) -> None:
    options = rank_options(config(models["student"], **sections), 76)
    case = Case(options, models, layout, SPLITS[split])
    (wanted, by_teacher), (found, by_rank) = case.step(asks=False), case.step(asks=True)
    assert abs(wanted.loss) > 1e-3 and found.loss == pytest.approx(wanted.loss, abs=1e-5)
    for name, stats in wanted.domains.items():
        assert dataclasses.astuple(found.domains[name]) == pytest.approx(
            dataclasses.astuple(stats), rel=1e-4, abs=1e-4, nan_ok=True
        )
    gradients = by_rank.gradients()
    assert gradients.keys() == by_teacher.gradients().keys() and all(".lora_" in name for name in gradients)
    for name, gradient in by_teacher.gradients().items():
        assert torch.allclose(gradients[name], gradient, rtol=0, atol=1e-5), name
    assert max(float(g.abs().max()) for g in gradients.values()) > 1e-3
    key = source(models["student"]).key
    assert all(key not in heads and "own" not in heads for heads in by_rank.heads), "its head is the student's own"
    assert sections or any(key in heads for heads in by_teacher.heads)


def test_the_target_is_not_that_of_the_expert_alone(models: dict[str, Path], in_process: Any) -> None:
    """Else the comparison would not notice a start student that is forgotten."""
    case = Case(rank_options(config(models["student"]), 76), models)
    start = case.options.start
    assert start is not None
    other = dataclasses.replace(case.options, start=dataclasses.replace(start, name="a teacher of another name"))
    assert dataclasses.replace(case, options=other).step(asks=True)[0].loss == pytest.approx(
        case.step(asks=True)[0].loss
    )
    with pytest.raises(RunError, match=r"scored by beyond 1\.5; the weights of its teachers do not add up to 1"):
        wrong = dataclasses.replace(case.options, start=dataclasses.replace(start, weights={"nobody": -0.5}))
        dataclasses.replace(case, options=wrong).step(asks=True)


@pytest.mark.parametrize(("student", "teachers"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_student_and_teachers_may_be_of_two_types(
    student: str, teachers: str, models: dict[str, Path], in_process: Any
) -> None:
    case = Case(rank_options(config(models["student"]), 76), models)
    mixed = dataclasses.replace(case, options=dataclasses.replace(case.options, dtype=student), dtype=teachers)
    assert mixed.step(asks=True)[0].loss == pytest.approx(case.step(asks=True)[0].loss, rel=0.05)


# The student without its adapters


def test_without_adapters_the_student_is_what_it_was_bit_for_bit(models: dict[str, Path]) -> None:
    options = rank_options(config(models["student"]), 76)
    lm, base = Engine(options).module.lm, load_causal_lm(models["student"], torch.float32)
    ids = torch.arange(4, 24)[None]
    wants = {name: param.requires_grad for name, param in lm.named_parameters()}
    with torch.no_grad():
        trained = lm(ids).logits
        with without_adapters(lm):
            assert torch.equal(lm(ids).logits, base(ids).logits)
            assert {name: param.requires_grad for name, param in lm.named_parameters()} == wants
        assert torch.equal(lm(ids).logits, trained) and not torch.allclose(trained, base(ids).logits, atol=0.1)
    with pytest.raises(RuntimeError, match="broken"), without_adapters(lm):
        raise RuntimeError("broken")
    with torch.no_grad():
        assert torch.equal(lm(ids).logits, trained)
    with pytest.raises(AssertionError, match="a model without adapters"), without_adapters(base):
        pass


# The driver's side


class Rank(FakeRank):
    def layout_error(self, layout: str) -> float:
        return 0.5


def test_all_ranks_ask_in_the_same_micro_batches_or_none_does(in_process: Any, tmp_path: Path) -> None:
    start = rank_options(config(tmp_path), 76).start
    assert start is not None
    assert (start.name, dict(start.weights), start.payload) == ("start student", {"beyond": -0.5}, "hidden_states")
    beyond, plain = IDS[0], IDS[-1]
    plan = [[[plain], [plain], [beyond], []], [[], [beyond], [plain], [plain]]]
    assert start.scored_micro_batches(plan, ROLLOUTS) == {1, 2}

    in_process.replace = Rank
    trainer = deepspeed.DeepSpeedTrainer(trainer_spec(config(tmp_path), 76))
    two = [r for r in ROLLOUTS if r.sample_id in (beyond, plain)]
    trainer.train_step(1, two, Targets(beyond, plain))  # type: ignore[arg-type]
    works = [fake.works[0][0] for fake in in_process.workers]
    assert [work.start_rounds for work in works] == [{0}, {0}] and len(works[0].micro_batches) == 1


@pytest.mark.parametrize(
    "sections",
    [
        {"student": {"model": "base"}},
        {"domains": {"beyond": {}, "plain": {}}},
        {
            "objective": {"kind": "sampled", "baseline": "leave_one_out"},
            "teachers": {"payload": "sampled_logprobs"},
        },
    ],
    ids=["all weights are trained", "toward the experts", "a baseline that has to be known before"],
)
def test_nobody_is_asked_without_need(sections: Any, tmp_path: Path) -> None:
    assert rank_options(config(tmp_path, **sections), 76).start is None


def test_a_layout_of_nothing_is_a_padding_token(models: dict[str, Path]) -> None:
    """A rank whose micro-batch has no such sample still computes, since the ranks gather weights together."""
    options = rank_options(config(models["student"]), 76)
    asked: list[Any] = []

    def hidden(packed: Any) -> torch.Tensor:
        asked.append(packed)
        return torch.zeros(packed.input_ids_B_T.numel(), 64)

    assert options.start is not None
    student: Any = SimpleNamespace(lm=Engine(options).module.lm, hidden_states=hidden)
    plain = [r for r in ROLLOUTS if r.domain == "plain"]
    for layout in LAYOUTS:
        assert options.start.score_rollouts(student, plain, layout, torch.float32, torch.device("cpu")) == []
    assert [packed.input_ids_B_T.tolist()[0][0] for packed in asked] == [0] * len(LAYOUTS)
