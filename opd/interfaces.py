"""What the parts of a merge have to be able to do: first the parts as the loop sees them, then what stands behind one of them
or is handed to it. All protocols are here; `pipelines.build` chooses the classes behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from opd.errors import RunError
from opd.records.environments import Action, Outcome, Tool
from opd.records.scores import Evaluation
from opd.records.step import AlarmRecord, StepRecord
from opd.records.types import (
    Completion,
    LayoutProof,
    Prompt,
    PushReport,
    Rollout,
    RolloutBatch,
    Sampled,
    SavedCheckpoint,
    StepReport,
    Teacher,
    WrittenFile,
)

if TYPE_CHECKING:  # they need pyarrow and torch, which those who only name them do not
    import numpy as np
    from torch import Tensor

    from opd.losses.objective import Slope, StudentChunk
    from opd.models.buckets import WeightStream
    from opd.models.heads import HeadFile, HeadSource
    from opd.models.logit_rule import LogitRule
    from opd.prompts.conversation import Messages
    from opd.records.rewards import RewardStep
    from opd.rollouts.groups import Early
    from opd.rollouts.partial import Cuts
    from opd.stream.schema import TargetRow
    from opd.stream.targets import TargetStream


class PromptSource(Protocol):
    def take(self, step: int) -> Sequence[Prompt]:
        """The step's prompts, every domain among them; the same one several times, side by side, for several responses. They
        depend on (seed, step) and the records of the steps before, and on nothing else, so a resume needs no cursor."""
        ...


class RolloutEngine(Protocol):
    def generate(
        self, prompts: Sequence[Prompt], *, step: int, policy_version: int, cuts: Cuts = ..., early: Early | None = ...
    ) -> RolloutBatch:
        """Sample one response per prompt. Prompts that do not fit come back as quarantined. A schedule may call this in a thread,
        and no other method until it has returned. `cuts` comes only with `schedule.partial_rollout`, `early` with `score_early`."""
        ...

    def answer(self, prompts: Sequence[Prompt], *, n: int = 1, temperature: float = 0.0) -> list[Completion]:
        """`n` answers to each prompt side by side, in the order of `prompts`; at temperature 0 they are greedy, else
        each has a seed of its prompt's id and its number. A prompt that does not fit gets empty answers."""
        ...

    def load(
        self, model_dir: Path, again: Callable[[], AbstractContextManager[Path]] | None = None, base: Path | None = None
    ) -> None:
        """Hold the weights of this Hugging Face directory in every worker, caches reset. Where it goes away, `again` makes one with
        the same weights for a worker that died. With `base` it has some weights alone; the others are `base`'s, of the same model."""
        ...

    def receive(self, send: Callable[[], WeightStream]) -> None:
        """The same with weights that the trainer sends. `send` is called anew for a worker that died, and gives the same then."""
        ...

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """[worker][sequence][token - 1] log-prob of each token after the first, given those before it."""
        ...


class TokenEngine(Protocol):
    """The policy, one turn at a time. Calls that wait at the same time are one batch, which a later call joins as it runs."""

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, seed: int) -> Sampled:
        """Sample what follows the given tokens, at most `max_tokens`. A call that is cancelled leaves the batch. All else about
        sampling is the engine's. Raises: RunError, and nobody's turn ends well from then on."""
        ...


class Environment(Protocol):
    """What an episode acts on; one object for each episode. Plain code: it may block, it is called in a thread of its own.

    A class may also have `set_step_timeout(seconds)`, which is told the deadline of each call, before `reset`.
    """

    @property
    def tools(self) -> tuple[Tool, ...]:
        """What the policy can call; without any, the text of its turn is its action."""
        ...

    def reset(self, metadata: Mapping[str, Any], seed: int) -> str | Messages:
        """Begin the episode of a prompt with this metadata. Returns the first observation, which follows the prompt; it may
        be empty."""
        ...

    def step(self, action: Action) -> Outcome:
        """What the policy's turn brings about."""
        ...

    def close(self) -> None:
        """Free what the episode holds. Called once, also after an error."""
        ...


class TeacherPool(Protocol):
    layouts: dict[str, LayoutProof]
    """Teacher's name -> how its rows share a forward pass, for teachers that this pool computes itself, once it is ready."""

    def score(self, rollouts: Sequence[Rollout]) -> TargetStream:
        """Have every rollout scored by the teachers of its domain; rows come while they are at it."""
        ...

    def heads(self) -> Mapping[str, HeadSource]:
        """Every output head that rows of this pool can name, by content hash."""
        ...


class TargetLog(Protocol):
    def replay(
        self, step: int, policy_version: int, prompts: Sequence[Prompt]
    ) -> tuple[RolloutBatch, TargetStream] | None:
        """What `record` stored of this step, if all of it is there and answers this question; else None, and the log
        forgets the step and all later ones."""
        ...

    def record(
        self, step: int, policy_version: int, prompts: Sequence[Prompt], batch: RolloutBatch, targets: TargetStream
    ) -> None:
        """Store a step's parts as they pass, all or none: all are there once `targets` settled. Both raise: StorageError."""
        ...

    def prune(self, step: int) -> None:
        """Drop the steps up to `step`: a checkpoint holds what they taught."""
        ...

    def keep_written(self, step: int, policy_version: int, prompts: Sequence[Prompt], batch: RolloutBatch) -> None:
        """Store responses that `policy_version` wrote ahead of their step. Raises: StorageError."""
        ...

    def written(self, step: int, policy_version: int, prompts: Sequence[Prompt]) -> RolloutBatch | None:
        """What `keep_written` stored of this step, if it is whole and answers this question; else None."""
        ...

    def written_files(self, step: int) -> dict[str, bytes]:
        """The files that `keep_written` made, by name, for a checkpoint to carry; empty if there are none."""
        ...

    def bring_back(self, step: int, directory: Path) -> None:
        """Store such files of a step once more, from a directory that may have them. Raises: StorageError."""
        ...


class Schedule(Protocol):
    STEPS_AHEAD: ClassVar[int]
    """Steps that prompts are taken ahead of the step that is trained."""
    max_staleness: int
    """Pushes that may lie between the writing of a token and its training; the loop refuses rows that are older."""

    def rollouts(self, step: int, policy_version: int, prompts: Sequence[Prompt], early: Early | None) -> RolloutBatch:
        """The responses of the step that comes now; `policy_version` is that of the weights it trains."""
        ...

    def rest(self) -> None:
        """The step that comes now is trained from the log, so nothing is written for it: engines that sleep go to sleep."""
        ...

    def begin_next(self, step: int, policy_version: int, unfinished: Sequence[Rollout]) -> None:
        """What `step` trains can be written beside the step before, which left `unfinished` responses. Returns at once."""
        ...

    def finish_writing(self) -> None:
        """Wait until no engine writes: a push follows. Raises: what the engine raises; RunError past the deadline."""
        ...

    def carried(self, step: int) -> dict[str, bytes]:
        """Name -> content of the files that a checkpoint of this step needs beside the weights to go on."""
        ...

    def take_busy_s(self) -> float:
        """Seconds in which engines wrote responses since the last call."""
        ...


class Trainer(Protocol):
    layout: LayoutProof
    """How the student's rows share a forward pass, once the trainer is ready."""

    def train_step(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        targets: TargetStream,
        stale: frozenset[str] = frozenset(),
        reward: RewardStep | None = None,
    ) -> StepReport:
        """One optimiser step over the rows of all rollouts that are not quarantined; takes every part of `targets` and settles
        them first. `stale`: samples that older weights wrote, whose log-probs differ from the engine's without a fault."""
        ...

    def begin_logprobs(self, token_ids: Sequence[Sequence[int]]) -> Callable[[], list[list[float]]]:
        """Begin to compute log-probs, [sequence][token - 1] as in RolloutEngine, of the weights in training; the result waits."""
        ...

    def export(self, path: Path) -> None:
        """Write the weights as a Hugging Face directory (config and safetensors)."""
        ...

    def export_changed(self, path: Path) -> Path | None:
        """The same without weights that training leaves alone. Returns the directory that has these; None if all were written."""
        ...

    def stream_changed(self, nbytes: int) -> WeightStream:
        """Its tensors in buckets of at most `nbytes`, gathered as they are taken; nothing else may be asked meanwhile."""
        ...

    def export_adapter(self, path: Path) -> None:
        """Write what LoRA trained as a PEFT directory."""
        ...

    def begin_save(self, path: Path) -> None:
        """Copy weights and optimiser state; they are written, without pickle, into an existing directory meanwhile."""
        ...

    def saved(self, wait_s: float) -> Sequence[WrittenFile] | None:
        """The files of the last `begin_save`, synced; None if they are not all written after `wait_s`. Raises: StorageError."""
        ...

    def load(self, path: Path) -> None:
        """Restore what `begin_save` wrote, by whatever number of ranks."""
        ...


class WeightSync(Protocol):
    def begin(self) -> None:
        """Compare engine and trainer before the first step, when both hold the student's own weights. Raises: RunError."""

    def push(self, version: int) -> PushReport:
        """Bring the trainer's weights to every engine and prove it on the probe tokens. Raises: RunError."""
        ...

    def hold(self, model_dir: Path, *, like: Path) -> None:
        """Have every engine hold the model of a directory that may be out of its reach; it reads `like`, a model of that shape."""
        ...


class Evaluator(Protocol):
    def evaluate(self, domains: Sequence[str] | None = None, *, model: str) -> Evaluation:
        """The weights that the rollout engine holds now, on the named domains or all; `model` names them for people."""
        ...


class Checkpoints(Protocol):
    def save(self, step: int, policy_version: int, carried: Mapping[str, bytes]) -> None:
        """Begin a checkpoint of this step, after the end of one that is under way; `carried` are files that go into it.
        Raises: as `committed`."""
        ...

    def committed(self, wait: bool) -> SavedCheckpoint | None:
        """The newest checkpoint that was committed since the last call, of one under way only if it `wait`s. Raises:
        StorageError; RunError past the deadline."""
        ...


class Monitors(Protocol):
    def begin(self, records: Sequence[StepRecord], expert: Evaluation) -> None:
        """Take up the records of the steps that are done; `expert` is the exam of the domains' experts. Raises: RunError if the run
        was stopped after the last of them and nothing has changed."""
        ...

    def judge(self, record: StepRecord, rollouts: Sequence[Rollout]) -> tuple[AlarmRecord, ...]:
        """The limits that a step's readings reach; what they were reached by is on disk. Raises: StorageError."""
        ...

    def verdict(self) -> RunError | None:
        """Why the run ends after the step that was judged last; None if it goes on."""
        ...


class Traces(Protocol):
    def keep(self, step: int, batch: RolloutBatch, trained: StepReport) -> None:
        """Store some episodes of a step for people, with what the trainer says of them. Raises: StorageError."""
        ...


class Objective(Protocol):
    """One way to measure how far the student is from the teacher."""

    mixes: ClassVar[bool]
    """Whether a mixture's log-measure can stand for its teachers: true of a sum over teachers that is linear in log q, and
    of what is defined by their normalised product."""

    def __call__(self, student: StudentChunk, teacher: Any) -> Slope:
        """`teacher` is the `TeacherChunk` of a payload that the objective can use."""
        ...


class Scorer(Protocol):
    """One way to ask a teacher about tokens that the student wrote."""

    def score(self, teacher: Teacher, rollouts: Sequence[Rollout], broken: dict[str, str]) -> Iterator[list[TargetRow]]:
        """Target rows in batches. A response that cannot be scored gets no row but an entry in `broken`: id -> reason.

        A scorer that reads ahead has loaded the teacher when this returns: `prefetch` may follow before the first batch.
        """
        ...

    def prefetch(self, teacher: Teacher) -> None:
        """Begin to load a teacher that is asked next; returns at once."""
        ...

    def head(self, teacher: Teacher) -> Tensor:
        """[V, D] the output head, on the CPU; only under a payload that sends heads."""
        ...

    def head_key(self, teacher: Teacher) -> str:
        """Content hash of head and logit rule, empty where no head is at hand. Raises: RunError if the teacher cannot be
        used: this is where every scorer tries it out."""
        ...

    def head_file(self, teacher: Teacher) -> HeadFile | None:
        """Where the head lies, None where no head is at hand."""
        ...

    def head_rule(self, teacher: Teacher) -> LogitRule:
        """What the teacher's architecture does to its logits."""
        ...

    def layout(self, teacher: Teacher) -> LayoutProof | None:
        """How several rows share a forward pass, proven; None where the engine that scores sees to that."""
        ...


class HeadHandle(Protocol):
    """Leads to a head's matrix in another process, such as `opd.cluster.Remote`; may travel to other workers."""

    def fetch(self) -> np.ndarray:
        """The matrix, see `head_tensor`."""
        ...


class ScoredRow(Protocol):
    """The part of `opd.stream.schema.TargetRow` that a payload looks at."""

    @property
    def rollout(self) -> Rollout: ...
    @property
    def weight(self) -> float: ...
    @property
    def answer(self) -> Any: ...


class Verifier(Protocol):
    """Says how right an answer is."""

    def __call__(self, text: str, answer: str, metadata: Mapping[str, Any]) -> float:
        """Score in 0..1 of `text`, given the row's `answer` and `metadata`. Whatever it raises counts as a failed answer."""
        ...

    def problem(self, answer: str, metadata: Mapping[str, Any]) -> str:
        """Why a row with this answer and metadata cannot be judged, before anything is computed; empty if it can."""
        ...


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts need."""

    @property
    def all_special_ids(self) -> list[int]: ...

    def __call__(self, text: list[str], **options: Any) -> Any: ...

    def apply_chat_template(
        self, conversation: Messages, *, add_generation_prompt: bool, tokenize: bool, **variables: Any
    ) -> Any: ...


class Decoder(Protocol):
    """The one method of a tokenizer that makes token ids readable."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class Sink(Protocol):
    """A place for the numbers of each step."""

    def step(self, record: StepRecord) -> None: ...


class Reporter(Sink, Protocol):
    """Where a run's numbers go: metrics file, evaluation files, progress on the terminal."""

    def phase(self, name: str) -> None: ...
    def evaluation(self, name: str, found: Evaluation) -> None: ...
