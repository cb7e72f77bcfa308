"""Measurements by `opd check` of experts with another tokenizer: how much of the text can be compared token by token, and how far apart
student and expert begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from opd.interfaces import RolloutEngine
from opd.records.types import EncodedRollout, Rollout, Teacher, WeightedTeacher
from opd.text import format_or_dash
from opd.vocabularies.response_encoder import UnreadableResponseError
from opd.vocabularies.spelling import Spelling
from pipelines.check.comparison import TokensComparison
from pipelines.check.judge import FAR_APART, CheckFinding
from pipelines.inputs.read import Inputs

COMPARED = 8
"""Number of responses of each domain on which student and expert are compared."""
CompareTokens = Callable[[Teacher, Spelling, Sequence[EncodedRollout]], TokensComparison]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTokens:
    """One expert with another tokenizer, in one domain."""

    domain: str
    expert: str
    responses: int
    unreadable: tuple[str, ...]
    """Reason why the expert cannot read a response, for each one that it cannot."""
    compared: TokensComparison

    def describe(self) -> str:
        """Return the figures as one line."""
        compared = self.compared
        return (
            f"{self.domain}: expert {self.expert} reads tokens of its own: {format_or_dash(compared.single, '.0%')} of the pieces of "
            f"text are one token on both sides; tokens that are not longer than its own have "
            f"{format_or_dash(compared.student_mass, '.1%')} of the student's probability; gap "
            f"{format_or_dash(compared.gap, '.3f')} nats a token; same first token "
            f"{format_or_dash(compared.overlap, '.0%')}; unreadable {len(self.unreadable)} of {self.responses} responses"
        )


def measure_own_tokens(inputs: Inputs, engine: RolloutEngine, compare: CompareTokens) -> list[MeasuredTokens]:
    """Compare the student, which the engine holds, with every expert that reads tokens of its own."""
    assigned = {domain: own[0] for domain, own in inputs.scoring.items() if own[0].encoder is not None}
    prompts = [
        inputs.prompts[domain][i] for domain in assigned for i in range(min(COMPARED, len(inputs.prompts[domain])))
    ]
    rollouts = engine.generate(prompts, step=0, policy_version=0).rollouts if prompts else ()
    return [
        _measure_expert(expert, domain, [r for r in rollouts if r.domain == domain], compare)
        for domain, expert in assigned.items()
    ]


def _measure_expert(
    expert: WeightedTeacher, domain: str, rollouts: Sequence[Rollout], compare: CompareTokens
) -> MeasuredTokens:
    assert expert.encoder is not None and expert.prompts is not None
    encoded: list[EncodedRollout] = []
    unreadable: list[str] = []
    for rollout in rollouts:
        try:
            encoded.append(expert.encoder.encode_rollout(rollout, expert.prompts(rollout)))
        except UnreadableResponseError as error:
            unreadable.append(str(error))
    return MeasuredTokens(
        domain=domain,
        expert=expert.teacher.name,
        responses=len(rollouts),
        unreadable=tuple(unreadable),
        compared=compare(expert.teacher, expert.encoder.spelling, encoded),
    )


def judge_tokens(measured: Sequence[MeasuredTokens], max_quarantined: float) -> Iterator[CheckFinding]:
    """Yield findings about experts that do not load, cannot read the student's text or are strangers to it."""
    for expert in measured:
        compared = expert.compared
        if compared.broken:
            fix = "see whether the expert's files are whole"
            yield CheckFinding(level="fail", domain=expert.domain, message=compared.broken, fix=fix)
        if len(expert.unreadable) > max_quarantined * expert.responses:
            yield CheckFinding(
                level="fail",
                domain=expert.domain,
                message=f"expert `{expert.expert}` cannot read {len(expert.unreadable)} of {expert.responses} responses: "
                f"{expert.unreadable[0]}",
                fix="raise teachers.max_quarantined, which these count against, or take an expert whose tokenizer takes such text",
            )
        if compared.overlap is not None and compared.overlap < FAR_APART:
            yield CheckFinding(
                level="warn",
                domain=expert.domain,
                message=f"expert `{expert.expert}` and the student rank the same token first on {compared.overlap:.0%} of the tokens "
                f"that both have, less than {FAR_APART:.0%}: of another lineage",
                fix=f"let the student learn some of its answers first: `vllm serve` it, and begin with a round of some 50 steps "
                f"with experts.{expert.expert}={{domain: {expert.domain}, engine: {{kind: text, base_url: "
                f"http://127.0.0.1:8000/v1, model: {expert.expert}, temperature: 1}}}} and "
                f"domains.{expert.domain}.objective={{kind: sft}} (docs/tokenizers.md); or choose a student that is nearer to it",
            )
