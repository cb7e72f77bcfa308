"""The records that the parts hand to each other: one for everything about a trained sequence. Nothing here imports torch.

Shape legend, here and in the whole tree: B sequences or packed rows, T tokens of a packed row, N trained response tokens of a
rollout or a micro-batch, V vocabulary ids, D hidden width, P prompt tokens, R response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from opd.records.sums import Sums

if TYPE_CHECKING:
    from opd.records.episodes import EpisodeResult, EpisodeStats
    from opd.records.rewards import PolicyReport

Origin = Literal["policy", "masked", "environment", "blocked", "teacher", "taught"]
"""Why a response token is there, and whether it is trained: see `Span`."""
TurnStop = Literal["stop", "length"]
"""vLLM's words for a response that ended with an end token, and for one that reached the token limit."""
Broken = Literal["raised", "timeout", "observation", "template", "agent", "silent", "foreign"]
"""Why an episode broke: the environment raised; a call of it, or the agent's program, was not back in time; it gave an
observation that nobody can use, or that the chat template refuses; the agent's program failed, asked nothing, or asked in
another episode's name."""
StopReason = Literal[TurnStop, "done", "turns", "curriculum", "tokens", "context", Broken]
"""Why a response or an episode ended. An episode is `done` when its environment or its agent says so, or it reaches its limit
of `turns` (`curriculum`: of the step), of `tokens`, or the model's `context`."""
SegmentOrigin = Literal["main", "summary", "sub_agent", "aside"]
"""What a segment of an episode begins with: the dialogue, a summary of the segment before it, what a tool was asked, or another
dialogue of an agent's program: one beside which the one that it left went on, or one that begins with nothing of the student's."""


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
"""How a model writes calls of tools, by the names of `opd.tool_formats`."""


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
    """What the verifier compares with; empty where no evaluation is wanted."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What the verifier needs beyond the answer, e.g. a reasoning-gym entry."""


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
    """Who wrote which part of the response; at least one, an empty response has one of length 0."""
    stop_reason: StopReason
    """Why the response ended, or the episode that it belongs to."""
    reward: float | None = None
    """What a verifier or an environment gave for the response; None: nobody was asked."""
    origin: SegmentOrigin = "main"
    parent: str | None = None
    """Sample id of the segment that this one was forked from, whose summary it begins with, or that started it; or None."""
    next: str | None = None
    """Sample id of the segment that goes on from the end of this one, with its summary or without its thoughts, or None."""

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
        """[N] number of the turn, from 0, of each trained token: a turn ends where an environment writes, be it
        nothing."""
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
class SampledTurn:
    """One turn of the policy: what the engine sampled after the tokens that it was given."""

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
    """The product of one rollout phase."""

    rollouts: tuple[Rollout, ...]
    quarantined: tuple[QuarantinedPrompt, ...]
    restarted: tuple[str, ...] = ()
    """Rollout workers that died since the batch before and were started again."""
    episodes: Mapping[str, EpisodeStats] = field(default_factory=dict)
    """Domain -> what became of its episodes; without domains whose student answers once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer, for evaluation."""

    prompt: Prompt
    text: str
    """Decoded without special tokens."""
    num_tokens: int
    truncated: bool = False
    """True if it ended at a limit and not by itself."""
    episode: EpisodeResult | None = None
    """What came of the episode, if the answer is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """An expert's log-probs of a few fixed token ids, taken when it was registered."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-prob of each id after the first, nats."""
    dtype: str
    """What it computed in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """An expert as the pool sees it; which domains it serves is the pipeline's business."""

    name: str
    model_dir: Path
    """Hugging Face directory; for a LoRA expert the directory of its base."""
    adapter_dir: Path | None = None
    """PEFT directory of a LoRA expert."""
    digest: str = ""
    """BLAKE3 of all its weight files: experts of equal digest are one teacher. Empty: not known."""
    base_digest: str = ""
    """For a LoRA expert: the digest that its base would have as an expert of its own. Equal bases are loaded once."""
    probe: Probe | None = None
    """Lets the worker that loads the expert check that it is the registered one; None: not registered, or without a probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedTeacher:
    """One of the teachers of a domain."""

    teacher: Teacher
    weight: float
    """Share of this teacher in the domain's objective; with the start student's, which is negative where the target lies
    beyond the experts, the weights of a domain add up to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainStats(Sums):
    """Sums over one domain's trained tokens in one step; NaN where the teachers' payload does not tell."""

    tokens: int
    samples: int
    """Responses with a trained token."""
    kl_sum: float
    """The objective's value, nats: KL(student || teacher) for `reverse_kl`."""
    gap_sum: float
    """|trainer - engine| log-prob of the tokens that the student sampled, at its temperature, nats; without the stale ones."""
    entropy_sum: float
    """Student's entropy, nats."""
    teacher_entropy_sum: float
    agree_sum: float
    """Tokens where student and teacher rank the same token first."""
    teacher_top1_sum: float
    """Tokens where the sampled token is the teacher's first."""
    clipped_sum: float
    """Tokens where the objective clipped."""
    student_mass_sum: float
    """Student's probability of the tokens that a top-k teacher gave."""
    teacher_mass_sum: float
    """Teacher's probability of them."""
    stale_tokens: int = 0
    """Sampled tokens of responses that older weights than the trainer's wrote, in part at least."""
    drift_sum: float = 0.0
    """The same difference as `gap_sum` over the stale tokens: how far the policy went since it wrote them."""
    taught_tokens: int = 0
    """Tokens that the domain's expert wrote: no engine's log-prob of the student is known of them."""


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
    """The optimised scalar: the objective's (weighted) mean over the global batch, nats."""
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
    """Sample id -> the objective's value at each trained token, nats; of the samples that `opd.traces.choose` watches."""
    skipped: bool = False
    """True if the batch held no trained token, or a critic learns alone: no optimiser step was taken."""
    drift: float = 0.0
    """The same mean over the stale tokens alone."""
    early_micro_batches: int = 0
    """Rounds of micro-batches that the ranks had before the last row was scored."""
    waited_s: float = 0.0
    """Seconds in which no rank had a micro-batch, because its rows were not scored yet."""
    peak_bytes: int = 0
    """Most bytes of parts that had come and were not yet trained."""
    policy: PolicyReport | None = None
    """The policy gradient's numbers; None without a reward."""
    companions: dict[str, dict[str, float]] = field(default_factory=dict)
    """Companion -> its numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file of a checkpoint as the process that wrote and synced it knows it."""

    name: str
    blake3: str
    size: int
    """Bytes."""
    seconds: float
    """From the first byte to the end of the sync."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that was committed."""

    step: int
    background_s: float
    """Seconds that the slowest trainer rank wrote beside the run."""
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
    """The layout of a model's sequences in one forward pass, and what was measured when it was chosen."""

    layout: str
    """Key of `opd.models.layouts.LAYOUTS`."""
    tried: Mapping[str, float]
    """Layout -> its error over what rounding explains, of every one that was tried, in order; at most 1 passes, NaN says that
    the model's states are not finite, infinity that its config rules the layout out."""

    @property
    def proven(self) -> bool:
        """False where the model's states are not finite."""
        return self.tried.get(self.layout, 2.0) <= 1
