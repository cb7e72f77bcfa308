"""The records that the parts of a merge hand to each other. All that belongs to one trained sequence is one record. No torch is imported.

Shape legend, here and in the whole tree: B sequences or packed rows, T tokens of a packed row, N trained response tokens of a
rollout or a micro-batch, V vocabulary ids, D hidden width, P prompt tokens, R response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from opd.records.drafts import DraftSpeeds
from opd.records.sums import Sums

if TYPE_CHECKING:
    from opd.records.episodes import EpisodeResult, EpisodeStats
    from opd.records.rewards import PolicyReport
    from opd.vocabularies.alignment import Alignment
    from opd.vocabularies.response_encoder import ResponseEncoder

Origin = Literal["policy", "masked", "environment", "blocked", "teacher", "taught"]
"""Origin of a response token, which decides whether it is trained: see `Span`."""
TurnStop = Literal["stop", "length"]
"""Reason why a turn ended, in vLLM's words: `stop`: with an end token; `length`: at the token limit."""
Broken = Literal["raised", "timeout", "observation", "template", "agent", "silent", "foreign"]
"""Reason why an episode broke. `raised`: the environment raised an exception. `timeout`: a call of the environment, or the agent's program,
did not end in time. `observation`: the environment returned something that is no observation. `template`: the chat template refuses
the observation. `agent`: the agent's program failed; `silent`: it asked the policy nothing; `foreign`: it asked in the name of another
episode."""
StopReason = Literal[TurnStop, "done", "turns", "curriculum", "tokens", "context", Broken]
"""Reason why a response or an episode ended. `done`: the environment or the agent's program ended the episode. `turns`: it reached its
limit of turns; `curriculum`: the step's limit of turns. `tokens`: it reached its limit of tokens; `context`: the model's context is
full."""
SegmentOrigin = Literal["main", "summary", "sub_agent", "aside"]
"""Beginning of a segment of an episode. `main`: the episode's dialogue. `summary`: a summary of the segment before it. `sub_agent`:
the task that a tool call gave to a sub-agent. `aside`: another dialogue of an agent's program, beside the main one: either it forked
from a segment that went on too, or its history has nothing that the student wrote."""


ToolCallParser = Literal[
    "auto",
    "hermes",
    "qwen3_json",
    "llama3_json",
    "llama4_json",
    "mistral",
    "pythonic",
    "llama4_pythonic",
    "qwen3_xml",
    "qwen3_coder",
]
"""Form of a model's calls of tools, by the names of `opd.tool_formats`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One line of a domain's prompts file, tokenised with the student's tokenizer."""

    id: str
    """Domain and zero-based line number; stable across runs."""
    domain: str
    """Key into the pipeline's `domains`; decides which expert scores the response."""
    token_ids: tuple[int, ...]
    """[P] exactly what the rollout engine reads; never decoded and tokenised again."""
    text: str | list[dict[str, Any]] = ""
    """The prompt as its file has it, text or messages: an environment's tools and first observation are rendered with it."""
    answer: str = ""
    """Value that the verifier compares with; empty where no evaluation is wanted."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Data that the verifier needs beyond the answer, e.g. a reasoning-gym entry."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Further columns of the row that teachers or a judge read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A run of consecutive response tokens that have one origin and one policy version."""

    length: int
    """Tokens in the run; the lengths of a rollout's spans add up to its response length."""
    origin: Origin
    """`policy`, `blocked`: the student sampled the tokens, and they are trained; rewards count against `blocked` ones, because the
    guard blocked the turn. `masked`: it sampled them, without loss. `environment`: a tool or an environment wrote them. `teacher`,
    `taught`: the domain's expert wrote them in the student's place, without or with loss."""
    policy_version: int
    """Number of weight pushes that the engine had received when the span was written, whoever wrote it."""

    @property
    def trained(self) -> bool:
        """True if the tokens carry loss, so that teachers have to score them."""
        return self.origin in ("policy", "blocked", "taught")

    @property
    def sampled(self) -> bool:
        """True if the student sampled the tokens."""
        return self.origin in ("policy", "masked", "blocked")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One token sequence as the engine saw it: a prompt, and the response that the student and its environment wrote.

    An episode of several turns may need more than one such sequence; each of them is a segment of the episode.
    """

    sample_id: str
    """Unique in a run: zero-padded step, then the prompt's id, then the repeat if a prompt came twice."""
    group: str
    """Shared by all responses to one prompt in a step: the sample id of the first of them."""
    episode: str
    """Id of the episode that the sequence belongs to. A rollout of a single turn is its own episode: the sample id."""
    step: int
    """Optimiser step (from 1) that will train on it."""
    domain: str
    """Copied from the prompt."""
    prompt_ids: tuple[int, ...]
    """[P]"""
    response_ids: tuple[int, ...]
    """[R] the end token included when the student wrote one."""
    behaviour_logprobs: tuple[float, ...]
    """[R] natural-log probability of each token in the distribution that the engine sampled from, the student's at the rollout
    temperature. Nothing reads it where the student did not sample the token."""
    spans: tuple[Span, ...]
    """Parts of the response, each with its writer; at least one, an empty response has one of length 0."""
    stop_reason: StopReason
    """Reason why the response ended, or the episode that it belongs to."""
    reward: float | None = None
    """Reward of the response by a verifier or an environment; None: nobody was asked."""
    origin: SegmentOrigin = "main"
    parent: str | None = None
    """Sample id of the segment from which this one was forked, or with whose summary it begins, or that started it; None if there is
    none."""
    next: str | None = None
    """Sample id of the segment that continues this one from its end, with its summary or without its thoughts; None if none does."""

    @classmethod
    def from_tokens(
        cls, sample_id: str, prompt_ids: tuple[int, ...], response_ids: tuple[int, ...], domain: str = "probe"
    ) -> Rollout:
        """Make a rollout of known tokens, so that a scorer can be asked about every token after the prompt."""
        return cls(
            sample_id=sample_id,
            group=sample_id,
            episode=sample_id,
            step=0,
            domain=domain,
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            behaviour_logprobs=(0.0,) * len(response_ids),
            spans=(Span(length=len(response_ids), origin="policy", policy_version=0),),
            stop_reason="stop",
        )

    def as_read_by(self, prompt_ids: tuple[int, ...]) -> TeacherRollout:
        """Return the rollout with a teacher's own prompt, [P], before the same response. Each position of the response stays."""
        values = {column.name: getattr(self, column.name) for column in fields(Rollout)}
        return TeacherRollout(**values | {"prompt_ids": prompt_ids}, student_prompt_ids=self.prompt_ids)

    def as_encoded(
        self, prompt_ids: tuple[int, ...], response_ids: tuple[int, ...], alignment: Alignment
    ) -> EncodedRollout:
        """Return the rollout in the tokens of a teacher with another tokenizer: its own prompt [P] and the response [M]."""
        values = {own.name: getattr(self, own.name) for own in fields(Rollout)}
        values |= {
            "prompt_ids": prompt_ids,
            "response_ids": response_ids,
            "behaviour_logprobs": (0.0,) * len(response_ids),
            "spans": (Span(length=len(response_ids), origin="policy", policy_version=self.policy_version),),
        }
        return EncodedRollout(**values, sampled=self, alignment=alignment)

    def as_sampled(self) -> Rollout:
        """Return the rollout as the student wrote it: the inverse of `as_read_by` and `as_encoded`."""
        return self

    @property
    def policy_version(self) -> int:
        """Version of the newest weights that were at work while the response was written."""
        return max(span.policy_version for span in self.spans)

    @property
    def truncated(self) -> bool:
        """True if the response ended at the token limit and not at an end token. Episodes have limits of their own."""
        return self.stop_reason == "length"

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """[R] True where the token is trained."""
        return tuple(span.trained for span in self.spans for _ in range(span.length))

    @property
    def num_trained(self) -> int:
        """Trained tokens of the response."""
        return sum(span.length for span in self.spans if span.trained)

    @property
    def trained_positions(self) -> tuple[int, ...]:
        """[N] position in the response of each trained token."""
        return tuple(position for position, trained in enumerate(self.loss_mask) if trained)

    @property
    def turns(self) -> tuple[int, ...]:
        """[N] number of the turn, from 0, of each trained token. A turn ends at a span of the environment, even an empty one."""
        turn_numbers, turn, has_begun = [], 0, False
        for span in self.spans:
            if span.origin == "environment":
                turn, has_begun = turn + has_begun, False
            else:
                has_begun = has_begun or span.length > 0
                turn_numbers += [turn] * (span.length if span.trained else 0)
        return tuple(turn_numbers)

    @property
    def sampled_mask(self) -> tuple[bool, ...]:
        """[N] True for the trained tokens that the student sampled itself."""
        return tuple(span.sampled for span in self.spans if span.trained for _ in range(span.length))

    @property
    def trained_ids(self) -> tuple[int, ...]:
        """[N] the trained tokens."""
        return tuple(self.response_ids[position] for position in self.trained_positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherRollout(Rollout):
    """A rollout on its way to a teacher that reads a prompt of its own, which stands in `prompt_ids`."""

    student_prompt_ids: tuple[int, ...]
    """[P] the prompt that the student read."""

    def as_sampled(self) -> Rollout:
        values = {column.name: getattr(self, column.name) for column in fields(Rollout)}
        return Rollout(**values | {"prompt_ids": self.student_prompt_ids})


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRollout(Rollout):
    """A rollout on its way to a teacher with another tokenizer. Prompt and response are in the teacher's tokens, all of them trained."""

    sampled: Rollout
    """The rollout as the student wrote it."""
    alignment: Alignment
    """Tokens of the two responses that are the same text."""

    def as_sampled(self) -> Rollout:
        return self.sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """One turn of the policy, as the engine sampled it."""

    token_ids: tuple[int, ...]
    """[R] the end token included when the policy wrote one."""
    logprobs: tuple[float, ...]
    """[R] log-prob of each token in the distribution that it was drawn from."""
    stop_reason: TurnStop
    policy_version: int
    """Weight pushes that the engine had received when it sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedPrompt:
    """A prompt that was left out of a step, and why. Counted in the metrics, never silently dropped."""

    prompt_id: str
    domain: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """Result of one rollout phase."""

    rollouts: tuple[Rollout, ...]
    quarantined: tuple[QuarantinedPrompt, ...]
    restarted: tuple[str, ...] = ()
    """Names of rollout workers that died since the batch before, and were started again."""
    episodes: Mapping[str, EpisodeStats] = field(default_factory=dict)
    """Domain -> counts of its episodes; only domains with an environment or an agent's program."""
    accepted: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Domain -> number of the engines' passes in which 0, 1, ... guesses of the draft were kept; only single responses, and only with a
    draft."""
    speeds: DraftSpeeds | None = None
    """Speeds with and without the draft; None where they were not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer, for evaluation."""

    prompt: Prompt
    text: str
    """Decoded without special tokens."""
    num_tokens: int
    truncated: bool = False
    """True if the answer ended at a limit and not by itself."""
    episode: EpisodeResult | None = None
    """Result of the episode; None if the answer is a single response."""
    accepted: tuple[int, ...] = ()
    """[K + 1] number of passes in which 0, 1, ... K guesses of the draft were kept; empty without a draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """An expert's log-probs of a few fixed token ids, taken when it was registered."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-prob of each id after the first, nats."""
    dtype: str
    """torch's name of the type in which the log-probs were computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """An expert, as the teacher pool knows it. Its domains are not here: they are in the pipeline."""

    name: str
    model_dir: Path
    """Hugging Face directory; for a LoRA expert the directory of its base."""
    adapter_dir: Path | None = None
    """PEFT directory of a LoRA expert."""
    digest: str = ""
    """BLAKE3 of all its weight files: experts with equal digests are one teacher. Empty: not known."""
    base_digest: str = ""
    """For a LoRA expert: the digest that its base would have as an expert of its own. Equal bases are loaded once."""
    probe: Probe | None = None
    """Lets the worker that loads the expert check that it is the registered one; None: not registered, or without a probe."""
    has_model: bool = True
    """False if it only writes text, behind a server: `model_dir` is the student's, and must not stand for it."""


TeacherPrompts = Callable[[Rollout], tuple[int, ...]]
"""Function that returns [P] the token ids of what a teacher reads before a rollout's response. It stays in the driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedTeacher:
    """One of the teachers of a domain."""

    teacher: Teacher
    weight: float
    """Weight of this teacher in the domain's objective. The weights of a domain add up to 1, together with the start student's, which
    is negative if the domain's target lies beyond its experts."""
    prompts: TeacherPrompts | None = None
    """Prompts that the teacher reads in place of the domain's; None: what the student reads."""
    encoder: ResponseEncoder | None = None
    """Encoder that puts responses into the teacher's tokens, if these are not the student's; it needs `prompts`. It stays in the driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainStats(Sums):
    """Sums over one domain's trained tokens in one step. A sum is NaN if the teachers' payload does not give its numbers."""

    tokens: int
    samples: int
    """Responses with a trained token."""
    kl_sum: float
    """The objective's value, nats: KL(student || teacher) for `reverse_kl`."""
    gap_sum: float
    """|trainer - engine| log-prob at the temperature of sampling, nats, of the tokens that the student sampled, except stale ones."""
    entropy_sum: float
    """Student's entropy, nats."""
    teacher_entropy_sum: float
    agree_sum: float
    """Number of tokens where student and teacher rank the same token first."""
    teacher_top1_sum: float
    """Number of tokens that the teacher ranks first."""
    clipped_sum: float
    """Number of tokens where the objective clipped."""
    student_mass_sum: float
    """Student's probability of the tokens that a top-k teacher gave."""
    teacher_mass_sum: float
    """Teacher's probability of them."""
    stale_tokens: int = 0
    """Sampled tokens of responses that older weights than the trainer's wrote, in part at least."""
    drift_sum: float = 0.0
    """The differences of `gap_sum`, but of the stale tokens: how far the policy has moved since it wrote them."""
    taught_tokens: int = 0
    """Tokens that the domain's expert wrote. For these no log-prob of the student is known from an engine."""
    end_tokens: int = 0
    """Tokens that end thoughts or turns; counted only with `efforts`."""
    end_sum: float = 0.0
    """The objective's value at these, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionStats(Sums):
    """Sums over the trained tokens at some positions of their responses."""

    tokens: int
    kl_sum: float
    """The objective's value, nats: see `DomainStats.kl_sum`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStats(Sums):
    """Sums over the trained tokens of one domain that were written in the same turn; fields as those of `DomainStats`."""

    tokens: int
    kl_sum: float
    gap_sum: float
    stale_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The trainer's report on one optimiser step, summed over all ranks."""

    step: int
    loss: float
    """The objective's weighted mean over the step's trained tokens, nats; without the policy gradient."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    logprob_gap: float
    """Mean |trainer log-prob - engine log-prob| over the sampled tokens at their temperature, nats, without stale ones; 0
    if all are stale. Near 0 if both compute the same."""
    domains: dict[str, DomainStats]
    positions: dict[int, PositionStats] = field(default_factory=dict)
    """Key: number of bits of the token's place in its response. 0 is the first token, b > 0 the places 2^(b-1) to 2^b - 1."""
    turns: dict[tuple[str, int], TurnStats] = field(default_factory=dict)
    """Key: domain, and number of the turn of its dialogue, from 0: see `opd.train.turns.count_earlier_turns`."""
    token_losses: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Sample id -> the objective's value at each trained token, nats; of the samples that `opd.traces.selection` watches."""
    skipped: bool = False
    """True if the batch held no trained token, or a critic learns alone: no optimiser step was taken."""
    drift: float = 0.0
    """The mean of `logprob_gap`, but over the stale tokens; 0 if there are none."""
    early_micro_batches: int = 0
    """Rounds of micro-batches that were sent to the ranks before the last row was scored."""
    waited_s: float = 0.0
    """Seconds in which no rank had a micro-batch, because its rows were not scored yet."""
    peak_bytes: int = 0
    """Most bytes of parts that had come and were not trained yet, at one time."""
    policy: PolicyReport | None = None
    """The policy gradient's numbers; None without a reward."""
    companions: dict[str, dict[str, float]] = field(default_factory=dict)
    """Name of a companion -> the numbers that its optimiser step returned."""
    indexer_loss: float | None = None
    """Mean KL of the student's sparse indexers, nats a position; None if they learn nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file of a checkpoint as the process that wrote and synced it knows it."""

    name: str
    blake3: str
    size: int
    """Bytes."""
    seconds: float
    """Seconds from the first byte to the end of the sync and the hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that was committed."""

    step: int
    background_s: float
    """Seconds in which the slowest trainer rank wrote while the run went on."""
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """Outcome of one weight push."""

    version: int
    """Policy version the engines now hold."""
    gap: float
    """Mean |trainer log-prob - engine log-prob| over the probe tokens, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutProof:
    """The layout that was proven for a model (see `opd.models.layouts`), and the errors that were measured."""

    layout: str
    """Key of `opd.models.layouts.LAYOUTS`."""
    tried: Mapping[str, float]
    """Layout -> its error, relative to what rounding explains, for every layout that was tried, in order. At most 1 passes. NaN: the
    model's states are not finite. Infinity: the model's config rules the layout out."""

    @property
    def proven(self) -> bool:
        """False where the model's states are not finite."""
        return self.tried.get(self.layout, 2.0) <= 1
