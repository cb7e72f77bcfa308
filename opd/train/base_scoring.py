"""Teachers that share the student's base: each rank of a LoRA student scores with its own weights, the student's adapters switched off.

LoRA leaves the base as it is, and the ranks hold it anyway. So no scoring worker has to load it: the start student (the student as the
merge begins) is the base alone, and a LoRA expert is the base with the expert's adapter, which every rank keeps whole in the machine's
memory. These rows are neither sent nor logged, and their output head is the student's own. The scores become rows like those of any
teacher before the tensors of a micro-batch are made, so that later code treats all teachers alike.

A moving average of the student is a teacher of this kind, too, with or without LoRA: for its pass the ranks put it in the place of the
student's weights. An output head that training changes is averaged with them, and gathered once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from opd.errors import RunError
from opd.machine.devices import to_device
from opd.models.heads import OWN_HEAD, Head, logit_rule
from opd.models.layouts import LAYOUTS, Packed, find_positions_before_trained
from opd.models.lora import Update, attach_updates, load_updates
from opd.models.probe_gap import refuse_other_weights
from opd.payloads.answer import Answer
from opd.payloads.hidden_states import HiddenStates
from opd.payloads.sampled_logprobs import SampledLogprobs
from opd.payloads.top_k import TopTokens
from opd.records.types import Probe, Rollout
from opd.stream.schema import TargetRow
from opd.train.export import gather_parameters
from opd.train.lora import without_adapters
from opd.train.student import Student
from opd.train.weight_average import WeightAverage, name_average


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseTeacher:
    """A teacher with the weights of the student's base."""

    name: str
    """The teacher's name in rows."""
    weights: Mapping[str, float]
    """Domain -> weight of the teacher in the domain's target, for the domains that it scores."""
    adapter_dir: Path | None = None
    """Directory of the expert's adapter; None for the start student, which is the base alone."""
    probe: Probe | None = None
    """Log-probs that were recorded of the expert, if there are any."""
    decay: float | None = None
    """The teacher is the moving average of the student with this decay; None: it is on the base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseScoring:
    """Settings with which the ranks of a LoRA student score. They are plain values, because they cross process boundaries."""

    teachers: tuple[BaseTeacher, ...]
    payload: str
    """Payload of all teachers' answers, a key of `ANSWERS`."""
    top_k: int = 0
    """With payload `top_k`: how many of the likeliest tokens an answer has for each position."""

    def plan_rounds(
        self, plan: Sequence[Sequence[Sequence[str]]], rollouts: Sequence[Rollout]
    ) -> dict[int, tuple[str, ...]]:
        """Return the index of a micro-batch -> the teachers that score a sample in it on at least one rank, in a fixed order.

        All ranks call `BaseScorer.score_rollouts` for each of these, and for no other.
        """
        domain_by_id = {r.sample_id: r.domain for r in rollouts}
        rounds: dict[int, tuple[str, ...]] = {}
        for index in range(len(plan[0])):
            domains = {domain_by_id[i] for part in plan for i in part[index]}
            if names := tuple(t.name for t in self.teachers if domains.intersection(t.weights)):
                rounds[index] = names
        return rounds


_Compute = Callable[[Student, Packed, Sequence[Rollout], int], torch.Tensor]
"""Function that returns [N, ...] what the student says of the trained tokens of these rollouts, on the CPU. The number is
`BaseScoring.top_k`."""


class BaseScorer:
    """Scores by a LoRA student's own base. Every method is called on all ranks at once, because they gather weights together."""

    def __init__(
        self,
        scoring: BaseScoring,
        student: Student,
        device: torch.device,
        *,
        compiled: bool,
        averages: Mapping[float, WeightAverage] = MappingProxyType({}),
    ) -> None:
        """Read the experts' adapters, in the student's type. `compiled`: the student's layers are. `averages`: decay -> average."""
        self._averages = averages
        self.heads: dict[str, Head] = {}
        """Key in rows -> output head of an average, until the next optimiser step."""
        self._student = student
        self._device = device
        self._compiled = compiled
        self._answers = ANSWERS[scoring.payload]
        self._top_k = scoring.top_k
        self._teachers = {teacher.name: teacher for teacher in scoring.teachers}
        self._updates = {
            teacher.name: load_updates(teacher.adapter_dir, student.lm.dtype)
            for teacher in scoring.teachers
            if teacher.adapter_dir is not None
        }
        """Teacher -> its adapter, in the machine's memory."""

    def check_probes(self) -> None:
        """Compare each teacher's log-probs of its probe with the recorded ones. Raises: RunError if they differ."""
        for teacher in self._teachers.values():
            if teacher.probe is None:
                continue
            rollout = Rollout.from_tokens("probe", teacher.probe.token_ids[:1], teacher.probe.token_ids[1:])
            logprobs = self._compute(teacher, _compute_logprobs, [rollout], "packed").tolist()
            differences = [abs(now - was) for now, was in zip(logprobs, teacher.probe.logprobs, strict=True)]
            dtypes = (str(self._student.lm.dtype).removeprefix("torch."), teacher.probe.dtype)
            refuse_other_weights(teacher.name, differences, dtypes, f"the student or {teacher.adapter_dir}")

    def score_rollouts(
        self, name: str, rollouts: Sequence[Rollout], layout: str, dtype: torch.dtype
    ) -> list[TargetRow]:
        """Score those of the rollouts that are of the teacher's domains. `dtype` is the type of the stream's hidden states.

        A rank without such a rollout runs the forward pass for a single padding token. Raises: RunError for states that are not
        finite.
        """
        teacher = self._teachers[name]
        own_rollouts = [r for r in rollouts if r.domain in teacher.weights]
        scores_N = self._compute(teacher, self._answers.compute, own_rollouts, layout)
        head = OWN_HEAD if teacher.decay is None or not self._trains_head else name_average(teacher.decay)
        if not bool(torch.isfinite(scores_N).all()):
            raise RunError(f"teacher {name}: what it says of {own_rollouts[0].sample_id} and others is not finite")
        parts = scores_N.split([r.num_trained for r in own_rollouts])
        return [
            TargetRow(
                rollout=rollout,
                teacher=name,
                weight=teacher.weights[rollout.domain],
                answer=self._answers.make(part, dtype, head),
            )
            for rollout, part in zip(own_rollouts, parts, strict=True)
        ]

    def _compute(
        self, teacher: BaseTeacher, compute: _Compute, rollouts: Sequence[Rollout], layout: str
    ) -> torch.Tensor:
        """Return what the teacher computes for these rollouts, or for a padding token if there are none."""
        sequences = [[*r.prompt_ids, *r.response_ids] for r in rollouts] or [[0]]
        packed = to_device(LAYOUTS[layout](sequences), self._device)
        with torch.no_grad(), self._with_weights(teacher):
            return compute(self._student, packed, rollouts, self._top_k)

    @property
    def _trains_head(self) -> bool:
        return bool(self._student.loss_head.weight.requires_grad)

    @contextmanager
    def _with_weights(self, teacher: BaseTeacher) -> Iterator[None]:
        """Within, the student computes as the teacher does."""
        if teacher.decay is None:
            with self._with_adapter(self._updates.get(teacher.name, {})):
                yield
            return
        with self._averages[teacher.decay].in_place_of_student():
            yield
            key, weight = name_average(teacher.decay), self._student.loss_head.weight
            if self._answers.sends_head and self._trains_head and key not in self.heads:
                with gather_parameters([weight]):
                    self.heads[key] = Head(weight.detach().clone(), logit_rule(self._student.lm.config))

    @contextmanager
    def _with_adapter(self, updates: Mapping[str, Update]) -> Iterator[None]:
        """Within, the student computes as its base does with this adapter; with no update, as the base alone."""
        lm = self._student.lm
        with without_adapters(lm):
            if not updates:
                yield
                return
            moved = {module: update.to(self._device) for module, update in updates.items()}
            hooks = attach_updates(lm, moved)
            try:
                # Compiled code does not notice hooks that come and go.
                with torch.compiler.set_stance("force_eager") if self._compiled else nullcontext():
                    yield
            finally:
                for hook in hooks:
                    hook.remove()


@dataclass(frozen=True, slots=True)
class _Answers:
    """Way to score a payload."""

    compute: _Compute
    make: Callable[[torch.Tensor, torch.dtype, str], Answer]
    """Function that makes the answer about one rollout from its part of that, in the stream's type, and the key of the output head."""
    sends_head: bool = False
    """True if what is computed is before the output head."""


def _compute_states(student: Student, packed: Packed, rollouts: Sequence[Rollout], _top_k: int) -> torch.Tensor:
    return student.compute_hidden_states(packed)[find_positions_before_trained(packed, rollouts)].cpu()


def _make_states(hidden_N_D: torch.Tensor, dtype: torch.dtype, head: str) -> Answer:
    return HiddenStates.from_states(hidden_N_D.to(dtype), head)


def _compute_logprobs(student: Student, packed: Packed, rollouts: Sequence[Rollout], _top_k: int) -> torch.Tensor:
    token_N = torch.tensor([token for r in rollouts for token in r.trained_ids], dtype=torch.long)
    predict_N = find_positions_before_trained(packed, rollouts)
    return student.compute_logprobs(packed, predict_N, token_N.to(packed.input_ids_B_T.device)).cpu()


def _make_logprobs(logprob_N: torch.Tensor, dtype: torch.dtype, head: str) -> Answer:
    return SampledLogprobs(logprob_N.tolist())


def _compute_top_tokens(student: Student, packed: Packed, rollouts: Sequence[Rollout], top_k: int) -> torch.Tensor:
    """Return [N, 2, K] the ids and the log-probs of the likeliest tokens, in float64, which holds both exactly."""
    top = student.compute_top_logprobs(packed, find_positions_before_trained(packed, rollouts), top_k)
    return torch.stack([part_N_K.double() for part_N_K in top], dim=1).cpu()


def _make_top_tokens(top_N_2_K: torch.Tensor, dtype: torch.dtype, head: str) -> Answer:
    ids_N_K, logprobs_N_K = top_N_2_K.unbind(1)
    return TopTokens(ids_N_K.long().flatten().tolist(), logprobs_N_K.flatten().tolist())


ANSWERS: Mapping[str, _Answers] = {
    "hidden_states": _Answers(_compute_states, _make_states, sends_head=True),
    "sampled_logprobs": _Answers(_compute_logprobs, _make_logprobs),
    "top_k": _Answers(_compute_top_tokens, _make_top_tokens),
}
"""Payload -> how it is scored."""
