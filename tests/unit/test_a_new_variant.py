"""A new payload, objective, scorer and signal take what stands in this file, and a line of a dictionary each.

The payload is each position's likeliest token alone, the objective cross-entropy against it, the scorer one that knows the
answer without a model, the signal one that counts skipped steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pytest
import torch
from pydantic import Field
from torch import Tensor

from opd.config import PipelineConfig
from opd.config.monitors import MonitorsConfig, SignalLimits
from opd.config.objectives import OBJECTIVES, ObjectiveConfig
from opd.config.payloads import PAYLOADS
from opd.errors import ConfigError
from opd.interfaces import ScoredRow
from opd.losses.blocks import Block, BlockChunk
from opd.losses.objective import Slope, StudentChunk, TeacherChunk
from opd.models.logit_rule import IDENTITY, LogitRule
from opd.monitors import SIGNALS
from opd.monitors.acting import RunMonitors
from opd.monitors.signals import WHOLE_STEP, Signal
from opd.payloads import answer_class
from opd.payloads.answer import Answer, Columns, TeacherStates
from opd.records.types import Rollout, Teacher, WeightedTeacher
from opd.run.paths import RunPaths
from opd.settings.yaml_files import validate_section
from opd.stream.schema import StreamError, TargetRow, read_stream
from opd.stream.targets import ExpectedRow, TargetStream, TeacherRequest, make_part
from opd.train import rank
from opd.train.rank import RankWork
from opd.train.student import Student
from pipelines.specs import pool_spec
from teachers.pool import Pool
from teachers.scorers import SCORERS, ScorerOptions
from teachers.worker import TeacherWorker
from tests.rows import make_rollout
from tests.steps import Letters, step

VOCABULARY = 76

# ---- The payload -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Greedy(Answer):
    """The teacher's likeliest token at each position."""

    ROW: ClassVar[Columns] = (("greedy_ids", pa.list_(pa.int32())),)
    TOKEN_IDS: ClassVar[tuple[str, ...]] = ("greedy_ids",)

    greedy_ids: Sequence[int]

    @property
    def nbytes(self) -> int:
        return 4 * len(self.greedy_ids)

    @property
    def size(self) -> str:
        return str(len(self.greedy_ids))

    def fits(self, num: int, itemsize: int) -> bool:
        return len(self.greedy_ids) == num

    @classmethod
    def token_bytes(cls, *, hidden_size: int, itemsize: int, top_k: int) -> int:
        return 4

    @classmethod
    def of_states(cls, states: TeacherStates) -> Greedy:
        return cls(states.logprobs().argmax(-1).tolist())

    @classmethod
    def blocks(
        cls, samples: Sequence[Sequence[ScoredRow]], dtype: torch.dtype, baselines: Mapping[str, float] | None
    ) -> tuple[Block, ...]:
        return (GreedyBlock(torch.tensor([i for (row,) in samples for i in row.answer.greedy_ids])),)


@dataclass(frozen=True, slots=True)
class GreedyBlock(Block, BlockChunk):
    first_N: Tensor

    def __len__(self) -> int:
        return len(self.first_N)

    def select_chunk(self, part: slice, vocab_size: int) -> GreedyBlock:
        return self.select_rows(part)

    def select_rows(self, rows: slice) -> GreedyBlock:
        return GreedyBlock(self.first_N[rows])

    def view_chunk(self, token_C: Tensor, dtype: torch.dtype) -> GreedyChunk:
        return GreedyChunk(self.first_N)


@dataclass(frozen=True, slots=True)
class GreedyChunk(TeacherChunk):
    token_C: Tensor

    def first_C(self) -> Tensor:
        return self.token_C


# ---- The objective ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Imitate:
    """f(p) = -strength log p_first, so p_v f'_v is -strength at that token and 0 elsewhere."""

    mixes: ClassVar[bool] = False

    strength: float = 1.0

    def __call__(self, student: StudentChunk, teacher: GreedyChunk) -> Slope:
        first_C_1 = teacher.token_C[:, None]
        p_slope_C_V = torch.zeros_like(student.p_C_V).scatter_(1, first_C_1, -self.strength)
        return Slope(-self.strength * student.logp_C_V.gather(1, first_C_1)[:, 0], p_slope_C_V)


class ImitateConfig(ObjectiveConfig):
    OBJECTIVE: ClassVar[type[Any]] = Imitate
    PAYLOADS: ClassVar[tuple[str, ...]] = ("greedy",)

    kind: Literal["imitate"]
    strength: float = Field(1.0, gt=0)
    """Factor of the loss."""


# ---- The scorer ------------------------------------------------------------------------------------------------------


class NextLetter:
    """Says that after each token the next one of the vocabulary is the likeliest, of the token that stands there."""

    def __init__(self, options: ScorerOptions) -> None:
        self._vocab_size = options.vocab_size

    def score(self, teacher: Teacher, rollouts: Sequence[Rollout], broken: dict[str, str]) -> Iterator[list[Any]]:
        for rollout in rollouts:
            ids = [(token + 1) % self._vocab_size for token in rollout.trained_ids]
            yield [TargetRow(rollout=rollout, teacher=teacher.name, answer=Greedy(ids))]

    def prefetch(self, teacher: Teacher) -> None: ...

    def head(self, teacher: Teacher) -> Tensor:
        raise AssertionError("no payload of this scorer needs a head")

    def head_key(self, teacher: Teacher) -> str:
        return ""

    def head_file(self, teacher: Teacher) -> None: ...

    def head_rule(self, teacher: Teacher) -> LogitRule:
        return IDENTITY

    def layout(self, teacher: Teacher) -> None: ...


# ---- The signal ------------------------------------------------------------------------------------------------------


SKIPPED = Signal(
    says="{value:.0f} steps in a row moved nothing",
    advice="look at the samples",
    read=lambda history: {WHOLE_STEP: float(sum(record.skipped for record in history.last))},
)


class MoreMonitors(MonitorsConfig):
    """`MonitorsConfig` with the limits of the new signal."""

    skipped: SignalLimits = SignalLimits(over=2, warn=2)
    """Skipped steps."""


# ---- Four lines ------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAYLOADS, "greedy", f"{__name__}:Greedy")
    monkeypatch.setitem(OBJECTIVES, "imitate", f"{__name__}:ImitateConfig")
    monkeypatch.setitem(SCORERS, "next_letter", f"{__name__}:NextLetter")
    monkeypatch.setitem(SIGNALS, "skipped", f"{__name__}:SKIPPED")


# ---- What follows from them ------------------------------------------------------------------------------------------

TEACHER = Teacher(name="t", model_dir=Path("nowhere"))
PIPELINE: dict[str, Any] = {
    "name": "n",
    "student": {"model": "base"},
    "experts": {"t": {"model": "t", "domain": "d"}},
    "domains": {"d": {}},
    "teachers": {"payload": "greedy"},
    "objective": {"kind": "imitate", "strength": 0.5, "chunk": 3},
    "trainer": {"steps": 1, "samples_per_step": 2},
}


def rollout(name: str, *response: int) -> Rollout:
    return make_rollout(
        sample_id=name, step=1, domain="d", policy_version=0, prompt_ids=(1, 2), response_ids=response,
        behaviour_logprobs=(-1.0,) * len(response),
    )  # fmt: skip


ROLLOUTS = [rollout("a", 5, 6, 7, 75), rollout("b", 8, 9)]


def of_the_worker() -> list[np.ndarray]:
    """The parts of a step as the real scoring worker makes them with the new scorer."""
    options = ScorerOptions(dtype="float32", payload="greedy", top_k=0, vocab_size=VOCABULARY, memory_bytes=1 << 20)
    worker = TeacherWorker("next_letter", options)
    assert worker.describe_head(TEACHER).key == ""
    worker.begin_rows([(TEACHER, 1.0, tuple(ROLLOUTS))], 0)
    parts = []
    while (part := worker.next_part()[1]) is not None:
        parts.append(part)
    return parts


def targets_of(parts: Sequence[np.ndarray], payload: str = "greedy") -> TargetStream:
    asked = TeacherRequest(
        rollouts=ROLLOUTS, teachers={"d": {"t": ExpectedRow(weight=1.0, head="")}}, kind=("float32", payload),
        max_quarantined=0.0,
    )  # fmt: skip
    return TargetStream((make_part(raw, "teachers") for raw in parts), asked, heads={})


def test_a_pipeline_names_them_and_their_options_are_checked() -> None:
    config = validate_section(PipelineConfig, PIPELINE, "p.yaml")
    assert config.objective.build() == Imitate(0.5)
    assert PipelineConfig.model_validate(config.model_dump(mode="json")) == config
    for section, changes, words in (
        ("objective", {"kind": "imitate", "strength": 0}, ["objective.strength", "above 0"]),
        ("objective", {"kind": "reverse_kl"}, ["reverse_kl with teachers.payload greedy"]),
        ("teachers", {"payload": "hidden_states"}, ["imitate with teachers.payload hidden_states"]),
        ("teachers", {"payload": "gready"}, ["none, greedy"]),
        ("objective", {"kind": "imitated"}, ["none, imitate"]),
    ):
        with pytest.raises(ConfigError) as caught:
            validate_section(PipelineConfig, PIPELINE | {section: changes}, "p.yaml")
        assert all(word in str(caught.value) for word in words), str(caught.value)


def test_rows_go_from_the_scorer_to_the_gradient(tiny_model_dir: Path, in_process: Any) -> None:
    from transformers import AutoModelForCausalLM

    targets = targets_of(of_the_worker())
    step = rank._StepInput(RankWork(step=1, lr=0.1, micro_batches=(("b", "a"),), components={}), {}, 76)
    while (part := targets.take_part()) is not None:
        step.keep_rows([part.handle])
    assert targets.arrived and targets.rows == 2

    batch = step.micro_batch(["b", "a"])
    (block,) = batch.blocks
    assert isinstance(block, GreedyBlock) and block.first_N.tolist() == [9, 10, 6, 7, 8, 0]

    config = validate_section(PipelineConfig, PIPELINE, "p.yaml").objective
    lm = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    weight_N = torch.full((6,), 0.2)
    student = Student(lm, config.build(), chunk=config.chunk, vocab_size=VOCABULARY)
    loss, stats = student(batch, {}, {"divergence": weight_N})
    found = torch.autograd.grad(loss, list(lm.parameters()))

    plain = torch.zeros(())
    for each in ROLLOUTS:
        ids = torch.tensor([[*each.prompt_ids, *each.response_ids]])
        logp_R_V = lm(input_ids=ids, use_cache=False).logits[0, 1:-1].log_softmax(-1)
        plain = plain - 0.5 * 0.2 * sum(logp_R_V[i, (t + 1) % VOCABULARY] for i, t in enumerate(each.response_ids))
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-5)
    for grad, want in zip(found, torch.autograd.grad(plain, list(lm.parameters())), strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-6)
    assert stats.teacher_entropy_N.isnan().all() and not stats.agree_N.isnan().any()


def test_what_does_not_fit_is_refused_as_of_any_payload(in_process: Any) -> None:
    (part,) = of_the_worker()
    answers = [row.answer for row in read_stream(memoryview(part)).rows]
    assert answers == [Greedy([6, 7, 8, 0]), Greedy([9, 10])]
    with pytest.raises(StreamError, match="greedy_ids from 0 to 10, wanted 0 to 9"):
        read_stream(memoryview(part), vocab_size=10)
    with pytest.raises(StreamError, match="greedy in float32 came"):
        targets_of([part], "hidden_states").wait_for_parts()


def test_a_shipped_scorer_and_the_pool_give_the_new_payload(
    expert_dirs: dict[str, Path], rows_of: Callable[[TargetStream], Any], in_process: Any
) -> None:
    from transformers import AutoModelForCausalLM

    teacher = Teacher(name="t", model_dir=expert_dirs["rev"])
    spec = pool_spec(PipelineConfig.model_validate(PIPELINE), 76)
    pool = Pool(spec, {"d": [WeightedTeacher(teacher=teacher, weight=1.0)]})
    pool.wait_ready()
    targets = pool.score(ROLLOUTS)
    rows = {row.rollout.sample_id: row for row in rows_of(targets)}
    assert dict(targets.heads) == {}
    lm = AutoModelForCausalLM.from_pretrained(expert_dirs["rev"], dtype=torch.float32)
    for each in ROLLOUTS:
        ids = torch.tensor([[*each.prompt_ids, *each.response_ids]])
        want = lm(input_ids=ids, use_cache=False).logits[0, 1:-1].argmax(-1)
        assert list(rows[each.sample_id].answer.greedy_ids) == want.tolist()
    assert answer_class("greedy").token_bytes(hidden_size=64, itemsize=4, top_k=0) == 4


def test_a_new_signal_is_read_after_each_step(tmp_path: Path) -> None:
    monitors = RunMonitors(MoreMonitors(), RunPaths(tmp_path), Letters(), tolerance=0.02)
    alarms = [monitors.judge(step(number, skipped=number > 1), []) for number in (1, 2, 3)]
    assert [[(alarm.signal, alarm.value) for alarm in of_step] for of_step in alarms] == [[], [], [("skipped", 2.0)]]
