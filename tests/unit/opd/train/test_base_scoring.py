"""Teachers on the student's base, with which a rank scores in place of a scoring worker: the same loss, and the same gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from opd import cluster
from opd.config import PipelineConfig
from opd.errors import RunError
from opd.models.heads import HeadSource, head_array, head_key
from opd.models.layouts import LAYOUTS, SHARED
from opd.models.logit_rule import IDENTITY
from opd.models.lora import attach_updates, load_updates
from opd.models.weights import load_causal_lm
from opd.payloads.answer import Answer
from opd.payloads.hidden_states import HiddenStates
from opd.payloads.none import Unscored
from opd.payloads.sampled_logprobs import SampledLogprobs
from opd.payloads.top_k import TopTokens
from opd.records.types import Probe, Rollout, Teacher, WeightedTeacher
from opd.stream.schema import TargetRow, write_stream
from opd.train import deepspeed
from opd.train.base_scoring import BaseScorer, BaseTeacher
from opd.train.components import Component
from opd.train.lora import add_adapters, without_adapters
from opd.train.rank import RankOptions, RankResult, RankWork, TrainerRank
from opd.train.student import Student
from pipelines.routes import scoring_routes
from pipelines.specs import rank_options, trainer_spec
from tests.engines import Still
from tests.rows import make_rollout
from tests.unit.opd.train.test_rank import FakeRank, Optimizer, Targets

Make = Callable[..., Path]
Assigned = tuple[str, Path, Path | None, float]
"""Name, model, adapter and weight of a teacher."""
FACTOR = 1.5
SAMPLED = {"objective": {"kind": "sampled"}, "teachers": {"payload": "sampled_logprobs"}}
TOP_K = 8
TOP = {
    "domains": {"beyond": {}, "plain": {}},
    "objective": {"kind": "top_k", "k": TOP_K},
    "teachers": {"payload": "top_k"},
}
"""Likeliest tokens are of one teacher, and of a target that is not beyond it."""


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


def on_base(student: Path, adapters: dict[str, Path], **sections: Any) -> RankOptions:
    """A rank that scores with LoRA experts of the student; `plain` has a mixture of both, where the payload has mixtures."""
    teachers = {name: Teacher(name=name, model_dir=student, adapter_dir=path) for name, path in adapters.items()}
    mixed = {"plain": 1.0} if sections == TOP else {"plain": 0.75, "beyond": 0.25}
    shares = {"beyond": {"beyond": 1.0}, "plain": mixed}
    routes = {
        domain: tuple(WeightedTeacher(teacher=teachers[name], weight=weight) for name, weight in own.items())
        for domain, own in shares.items()
    }
    sections = {**sections, "teachers": {"engine": "trainer"} | sections.get("teachers", {})}
    made = config(student, **sections)
    start = Teacher(name="start student", model_dir=student)
    return rank_options(made, 76, scoring_routes(made, routes, start))


@torch.no_grad()
def scored(teacher: Assigned, mine: Sequence[Rollout], payload: str, dtype: str) -> list[TargetRow]:
    """The rows of a teacher, by plain passes over one sequence each."""
    name, model_dir, adapter_dir, weight = teacher
    lm = load_causal_lm(model_dir, getattr(torch, dtype))
    if adapter_dir is not None:
        attach_updates(lm, load_updates(adapter_dir, lm.dtype))
    head = lm.get_output_embeddings().weight.detach()
    rows = []
    for rollout in mine:
        hidden_T_D = lm.base_model(torch.tensor([[*rollout.prompt_ids, *rollout.response_ids]])).last_hidden_state[0]
        hidden_N_D = hidden_T_D[[len(rollout.prompt_ids) - 1 + place for place in rollout.trained_positions]]
        answer: Answer = HiddenStates.from_states(hidden_N_D, head_key(head, IDENTITY))
        if payload == "sampled_logprobs":
            logp_N_V = (hidden_N_D @ head[:76].T).float().log_softmax(-1)
            answer = SampledLogprobs(logp_N_V.gather(1, torch.tensor(rollout.trained_ids)[:, None])[:, 0].tolist())
        if payload == "top_k":
            top = (hidden_N_D @ head[:76].T).float().log_softmax(-1).topk(TOP_K)
            answer = TopTokens(top.indices.flatten().tolist(), top.values.flatten().tolist())
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

    def __call__(self, batch: Any, heads: dict[str, Any], *more: Any) -> Any:
        self.heads.append(set(heads))
        return self.module(batch, heads, *more)

    def gradients(self) -> dict[str, torch.Tensor]:
        return {n: p.grad for n, p in self.module.named_parameters() if p.grad is not None}


@dataclasses.dataclass(frozen=True)
class Case:
    """The setting in which both ways are compared."""

    options: RankOptions
    models: dict[str, Path]
    layout: str = "packed"
    micro_batches: tuple[tuple[str, ...], ...] = (tuple(r.sample_id for r in ROLLOUTS),)
    dtype: str = "float32"
    read: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """Teacher -> what it reads in the place of every prompt."""

    def step(self, *, asks: bool) -> tuple[RankResult, Engine]:
        """One step, in which the rank scores by the student's base, or teachers have scored in the names of these."""
        scoring = self.options.base_scoring
        assert scoring is not None
        on_base = {teacher.name: teacher for teacher in scoring.teachers}
        mine = [r for r in ROLLOUTS if r.sample_id in {i for ids in self.micro_batches for i in ids}]
        rows = []
        for domain in ("beyond", "plain"):
            some = [r for r in mine if r.domain == domain]
            teachers: list[Assigned] = []
            if domain not in on_base:
                teachers.append((domain, self.models[domain], None, FACTOR if domain == "beyond" else 1.0))
            elif asks:
                rows += [TargetRow(rollout=r, teacher="nobody", answer=Unscored()) for r in some]
            if not asks:
                teachers += [
                    (name, self.options.model_dir, teacher.adapter_dir, teacher.weights[domain])
                    for name, teacher in on_base.items()
                    if domain in teacher.weights
                ]
            for one in teachers:
                read = self.read.get(one[0])
                sent = [r.as_read_by(read) for r in some] if read else some
                rows += [row.as_sampled() for row in scored(one, sent, scoring.payload, self.dtype)]
        rank = TrainerRank(dataclasses.replace(self.options, world_size=1), 0)
        engine: Any = Engine(self.options)
        rank._engine, rank._device, rank._layout = engine, torch.device("cpu"), self.layout
        rank._base_scorer = BaseScorer(scoring, engine.module, rank._device, compiled=False)
        weights = {r.sample_id: 0.01 + 0.001 * place for place, r in enumerate(mine)}
        work = RankWork(
            step=1,
            lr=0.0,
            micro_batches=self.micro_batches,
            components={"divergence": Component(weights=weights)},
            base_rounds=scoring.plan_rounds([self.micro_batches], mine) if asks else {},
            teacher_prompts={name: dict.fromkeys((r.sample_id for r in mine), ids) for name, ids in self.read.items()},
        )
        heads = [source(path, self.dtype) for name, path in self.models.items() if not (asks and name == "student")]
        rank.begin_step(work, {head.key: head for head in heads})
        payload = "none" if asks and len(on_base) > 1 else scoring.payload
        stream = np.frombuffer(write_stream(rows, self.dtype, payload), dtype=np.uint8)
        for index in range(len(self.micro_batches)):
            rank.accumulate_micro_batch(index, frozenset(), *([stream] if index == 0 else []))
        return rank.finish_step(1.0), engine


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def models(request: pytest.FixtureRequest, tmp_path: Path, make_model_dir: Make) -> dict[str, Path]:
    names = ("student", "beyond", "plain")
    return {name: make_model_dir(tmp_path / name, seed=i, tie=request.param) for i, name in enumerate(names)}


@pytest.fixture
def adapters(models: dict[str, Path], tmp_path: Path, make_adapter: Make) -> dict[str, Path]:
    for seed, name in enumerate(("beyond", "plain")):
        make_adapter(tmp_path / f"{name}-lora", models["student"], seed=seed)
    return {name: tmp_path / f"{name}-lora" for name in ("beyond", "plain")}


IDS = [r.sample_id for r in ROLLOUTS]
SPLITS = {
    "one": (tuple(IDS),),
    "several": (tuple(IDS[:2]), (), tuple(IDS[2:7]), tuple(IDS[7:])),
}


def is_the_same(case: Case) -> None:
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
    key = source(case.models["student"]).key
    assert all(key not in heads and "own" not in heads for heads in by_rank.heads), "its head is the student's own"
    scoring = case.options.base_scoring
    assert scoring and (scoring.payload != "hidden_states" or any(key in heads for heads in by_teacher.heads))


@pytest.mark.parametrize("sections", [{}, SAMPLED], ids=["states", "log-probs"])
@pytest.mark.parametrize(("layout", "split"), [("packed", "one"), (SHARED, "several"), ("padded", "several")])
def test_loss_and_gradients_are_those_with_a_teacher(
    sections: Any, layout: str, split: str, models: dict[str, Path], in_process: Any
) -> None:
    is_the_same(Case(rank_options(config(models["student"], **sections), 76), models, layout, SPLITS[split]))


@pytest.mark.parametrize("sections", [{}, SAMPLED], ids=["states", "log-probs"])
@pytest.mark.parametrize(("layout", "split"), [("packed", "one"), (SHARED, "several")])
def test_lora_experts_are_the_base_with_their_adapters(
    sections: Any, layout: str, split: str, adapters: dict[str, Path], models: dict[str, Path], in_process: Any
) -> None:
    """One domain with a mixture of experts, and one with a target beyond its expert."""
    student = models["student"]
    options = on_base(student, adapters, **sections)
    assert options.base_scoring is not None
    assert {t.name: dict(t.weights) for t in options.base_scoring.teachers} == {
        "beyond": {"beyond": FACTOR, "plain": 0.25},
        "plain": {"plain": 0.75},
        "start student": {"beyond": 1 - FACTOR},
    }
    case = Case(options, {"student": student}, layout, SPLITS[split])
    is_the_same(case)
    swapped = dict(zip(adapters, reversed(adapters.values()), strict=True))
    other = dataclasses.replace(case, options=on_base(student, swapped, **sections)).step(asks=True)[0].loss
    assert abs(other - case.step(asks=True)[0].loss) > 1e-3, "the adapters decide"


@pytest.mark.parametrize(("layout", "split"), [("packed", "one"), (SHARED, "several")])
def test_likeliest_tokens_are_those_of_the_base_with_its_adapter(
    layout: str, split: str, adapters: dict[str, Path], models: dict[str, Path], in_process: Any
) -> None:
    options = on_base(models["student"], adapters, **TOP)
    assert options.base_scoring is not None and options.base_scoring.top_k == TOP_K
    is_the_same(Case(options, {"student": models["student"]}, layout, SPLITS[split]))


@pytest.mark.parametrize(("layout", "split"), [("packed", "one"), (SHARED, "several")])
def test_a_teacher_on_the_base_may_read_a_prompt_of_its_own(
    layout: str, split: str, adapters: dict[str, Path], models: dict[str, Path], in_process: Any
) -> None:
    student = models["student"]
    case = Case(on_base(student, adapters), {"student": student}, layout, SPLITS[split])
    own = dataclasses.replace(case, read={"plain": tuple(range(10, 40)), "start student": (7,)})
    is_the_same(own)
    assert abs(own.step(asks=True)[0].loss - case.step(asks=True)[0].loss) > 1e-3, "its prompt decides"


def test_a_rank_gets_the_own_prompts_of_its_samples_alone() -> None:
    prompts = {"plain": {"a": (1,), "b": (2, 3)}}
    work = RankWork(step=1, lr=0.0, micro_batches=(), components={}, teacher_prompts=prompts)
    assert work.select_micro_batches([("b",), ("c",)]).teacher_prompts == {"plain": {"b": (2, 3)}}


def test_an_expert_is_compared_with_its_probe(adapters: dict[str, Path], models: dict[str, Path]) -> None:
    options = on_base(models["student"], adapters)
    assert options.base_scoring and options.lora
    ids = tuple(range(4, 24))
    rollout = Rollout.from_tokens("probe", ids[:1], ids[1:])
    answer: Any = scored(
        ("plain", models["student"], adapters["plain"], 1.0), [rollout], "sampled_logprobs", "float32"
    )[0].answer
    probe = Probe(token_ids=ids, logprobs=tuple(answer.teacher_logprobs), dtype="float32")

    def check(name: str) -> None:
        teachers = tuple(dataclasses.replace(t, probe=probe) for t in options.base_scoring.teachers if t.name == name)
        scoring = dataclasses.replace(options.base_scoring, teachers=teachers)
        BaseScorer(scoring, Engine(options).module, torch.device("cpu"), compiled=False).check_probes()

    check("plain")
    with pytest.raises(RunError, match=r"teacher beyond: log-probs differ by .* nats on average from those of its reg"):
        check("beyond")


def test_scores_that_are_not_finite_end_the_run_with_the_teachers_name(
    adapters: dict[str, Path], models: dict[str, Path]
) -> None:
    options = on_base(models["student"], adapters)
    file = adapters["plain"] / "adapter_model.safetensors"
    save_file({name: tensor * float("nan") for name, tensor in load_file(file).items()}, file)
    assert options.base_scoring
    scorer = BaseScorer(options.base_scoring, Engine(options).module, torch.device("cpu"), compiled=False)
    assert len(scorer.score_rollouts("beyond", ROLLOUTS, "packed", torch.float32)) == len(ROLLOUTS)
    with pytest.raises(RunError, match="teacher plain: what it says of plain/0/0 and others is not finite"):
        scorer.score_rollouts("plain", ROLLOUTS, "packed", torch.float32)


def test_compiled_layers_compute_with_the_adapter_too(adapters: dict[str, Path], models: dict[str, Path]) -> None:
    """torch.compile looks at a module's hooks only when it compiles: each teacher would be the first one."""
    options = on_base(models["student"], adapters)
    plain, compiled = Engine(options).module, Engine(options).module
    for layer in compiled.lm.model.layers:
        layer.forward = torch.compile(layer.forward, backend="eager", dynamic=True)
    answers = []
    for student, is_compiled in ((plain, False), (compiled, True)):
        student.compute_hidden_states(LAYOUTS["packed"]([[5, 6, 7]]))
        assert options.base_scoring
        scorer = BaseScorer(options.base_scoring, student, torch.device("cpu"), compiled=is_compiled)
        for name in ("start student", "beyond", "plain"):
            rows = scorer.score_rollouts(name, ROLLOUTS, "packed", torch.float32)
        answers.append([row.answer for row in rows])
    gaps = [a.gap(b, 1, torch.float32) for a, b in zip(*answers, strict=True)]
    assert max(gaps) < 1e-5


def test_the_target_is_not_that_of_the_expert_alone(models: dict[str, Path], in_process: Any) -> None:
    """Else the comparison would not notice a start student that is forgotten."""
    case = Case(rank_options(config(models["student"]), 76), models)
    scoring = case.options.base_scoring
    assert scoring is not None
    (start,) = scoring.teachers

    def changed(**fields: Any) -> Case:
        teachers = (dataclasses.replace(start, **fields),)
        options = dataclasses.replace(case.options, base_scoring=dataclasses.replace(scoring, teachers=teachers))
        return dataclasses.replace(case, options=options)

    other = changed(name="a teacher of another name").step(asks=True)[0]
    assert other.loss == pytest.approx(case.step(asks=True)[0].loss)
    with pytest.raises(RunError, match=r"scored by beyond 1\.5; the weights of its teachers do not add up to 1"):
        changed(weights={"nobody": -0.5}).step(asks=True)


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


def test_all_ranks_score_in_the_same_micro_batches_or_none_does(in_process: Any, tmp_path: Path) -> None:
    scoring = rank_options(config(tmp_path), 76).base_scoring
    assert scoring is not None and scoring.payload == "hidden_states"
    assert scoring.teachers == (BaseTeacher(name="start student", weights={"beyond": -0.5}),)
    beyond, plain = IDS[0], IDS[-1]
    plan = [[[plain], [plain], [beyond], []], [[], [beyond], [plain], [plain]]]
    assert scoring.plan_rounds(plan, ROLLOUTS) == {1: ("start student",), 2: ("start student",)}
    experts = on_base(tmp_path, {"beyond": tmp_path, "plain": tmp_path}).base_scoring
    assert experts is not None
    every = ("beyond", "plain", "start student")
    assert experts.plan_rounds(plan, ROLLOUTS) == {0: every[:2], 1: every, 2: every, 3: every[:2]}

    in_process.replace = Rank
    trainer = deepspeed.DeepSpeedTrainer(trainer_spec(config(tmp_path), 76))
    two = [r for r in ROLLOUTS if r.sample_id in (beyond, plain)]
    trainer.train_step(1, two, Targets(beyond, plain))  # type: ignore[arg-type]
    works = [fake.works[0][0] for fake in in_process.workers]
    assert [work.base_rounds for work in works] == [{0: every[2:]}] * 2 and len(works[0].micro_batches) == 1


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
    assert rank_options(config(tmp_path, **sections), 76).base_scoring is None


def test_a_layout_of_nothing_is_a_padding_token(models: dict[str, Path]) -> None:
    """A rank whose micro-batch has no such sample still computes, since the ranks gather weights together."""
    options = rank_options(config(models["student"]), 76)
    asked: list[Any] = []

    def hidden(packed: Any) -> torch.Tensor:
        asked.append(packed)
        return torch.zeros(packed.input_ids_B_T.numel(), 64)

    assert options.base_scoring is not None
    student: Any = SimpleNamespace(lm=Engine(options).module.lm, compute_hidden_states=hidden)
    plain = [r for r in ROLLOUTS if r.domain == "plain"]
    scorer = BaseScorer(options.base_scoring, student, torch.device("cpu"), compiled=False)
    for layout in LAYOUTS:
        assert scorer.score_rollouts("start student", plain, layout, torch.float32) == []
    assert [packed.input_ids_B_T.tolist()[0][0] for packed in asked] == [0] * len(LAYOUTS)
