"""Protocols of the parts of a merge: first the parts that the loop calls, then those that other parts use or are handed.
`pipelines.build` chooses the classes behind them."""

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
    SampledTurn,
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
    from opd.stream.schema import TargetRow
    from opd.stream.targets import TargetStream


class PromptSource(Protocol):
    def take(self, step: int) -> Sequence[Prompt]:
        """Return the step's prompts, with every domain among them; for several responses the same prompt several times, side by
        side. They depend on (seed, step) and the records of earlier steps, and on nothing else, so a resume needs no cursor."""
        ...


class RolloutEngine(Protocol):
    def generate(self, prompts: Sequence[Prompt], *, step: int, policy_version: int) -> RolloutBatch:
        """Sample one response per prompt. Prompts that do not fit come back as quarantined. A schedule may call this in a thread,
        and no other method until it has returned."""
        ...

    def answer(self, prompts: Sequence[Prompt], *, n: int = 1, temperature: float = 0.0) -> list[Completion]:
        """Return `n` answers to each prompt side by side, in the order of `prompts`. At temperature 0 they are greedy, else
        each has a seed made of its prompt's id and its number. A prompt that does not fit gets empty answers."""
        ...

    def load(
        self, model_dir: Path, restart_weights: Callable[[], AbstractContextManager[Path]] | None = None, base: Path | None = None
    ) -> None:
        """Load the weights of this Hugging Face directory into every worker, and reset caches. If the directory may go away,
        `restart_weights` makes one with the same weights for a worker that died. With `base` the directory has only some weights; the
        others are in `base`, a directory of the same model."""
        ...

    def receive(self, send: Callable[[], WeightStream]) -> None:
        """Load weights that the trainer sends, like `load`. For a worker that died `send` is called a second time, and sends the
        same weights."""
        ...

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Return [worker][sequence][token - 1] the log-prob of each token after the first, given the tokens before it."""
        ...


class TokenEngine(Protocol):
    """The policy, one turn at a time. Concurrent calls share a batch, which a later call joins while it runs."""

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, seed: int) -> SampledTurn:
        """Sample at most `max_tokens` tokens that follow `token_ids`. A call that is cancelled leaves the batch. The engine has
        all other sampling settings. Raises: RunError if the engine failed, after which all calls fail, or if there is no room."""
        ...


class Environment(Protocol):
    """The world that an episode acts on; one object for each episode. Plain code: it may block, since it is called in a thread
    of its own.

    A class may also have `set_step_timeout(seconds)`, which is called before `reset` with the deadline of each call.
    """

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Tools that the policy can call; without any, the text of its turn is its action."""
        ...

    def reset(self, metadata: Mapping[str, Any], seed: int) -> str | Messages:
        """Begin the episode of a prompt with this metadata. Returns the first observation, which follows the prompt; it may
        be empty."""
        ...

    def step(self, action: Action) -> Outcome:
        """Carry out the policy's turn, and return what comes of it."""
        ...

    def close(self) -> None:
        """Free what the episode holds. Called once, also after an error."""
        ...


class TeacherPool(Protocol):
    layouts: dict[str, LayoutProof]
    """Teacher's name -> layout in which its rows share a forward pass, for teachers that this pool computes itself; there once
    the pool is ready."""

    def score(self, rollouts: Sequence[Rollout]) -> TargetStream:
        """Have every rollout scored by the teachers of its domain; returns at once, and rows come as they are scored."""
        ...

    def heads(self) -> Mapping[str, HeadSource]:
        """Return every output head that rows of this pool can name, by content hash."""
        ...


class TargetLog(Protocol):
    def replay(
        self, step: int, policy_version: int, prompts: Sequence[Prompt]
    ) -> tuple[RolloutBatch, TargetStream] | None:
        """Return what `record` stored of this step if it is whole, and for the same policy version and prompts; else None, and
        the log drops the step and all later ones."""
        ...

    def record(
        self, step: int, policy_version: int, prompts: Sequence[Prompt], batch: RolloutBatch, targets: TargetStream
    ) -> None:
        """Store a step's parts as they are taken, all or none: they are in the log once `targets.wait_for_sinks` returns. Taking
        parts and waiting raise: StorageError."""
        ...

    def prune(self, step: int) -> None:
        """Drop the steps up to `step`: a checkpoint has their result."""
        ...

    def keep_written(self, step: int, policy_version: int, prompts: Sequence[Prompt], batch: RolloutBatch) -> None:
        """Store responses that `policy_version` wrote ahead of their step. Raises: StorageError."""
        ...

    def written(self, step: int, policy_version: int, prompts: Sequence[Prompt]) -> RolloutBatch | None:
        """Return what `keep_written` stored of this step if it is whole, and for the same policy version and prompts; else None."""
        ...

    def written_files(self, step: int) -> dict[str, bytes]:
        """Return the files that `keep_written` made, by name, for a checkpoint to carry; empty if there are none."""
        ...

    def bring_back(self, step: int, directory: Path) -> None:
        """Store the files of `written_files` back into the log, from a directory that may have them. Raises: StorageError."""
        ...


class Schedule(Protocol):
    STEPS_AHEAD: ClassVar[int]
    """Steps that prompts are taken ahead of the step that is trained."""
    max_staleness: int
    """Pushes that may lie between the writing of a token and its training; the loop refuses rows that are older."""

    def rollouts(self, step: int, policy_version: int, prompts: Sequence[Prompt]) -> RolloutBatch:
        """Return the responses of this step; `policy_version` is the version of the weights that it trains."""
        ...

    def sleep_engines(self) -> None:
        """Let engines sleep that do: this step is trained from the log, so that nothing is written for it."""
        ...

    def begin_next(self, step: int, policy_version: int) -> None:
        """Begin to write the responses of `step` while the step before is scored and trained. Returns at once."""
        ...

    def finish_writing(self) -> None:
        """Wait until no engine writes: a push follows. Raises: what the engine raises; RunError past the deadline."""
        ...

    def carried(self, step: int) -> dict[str, bytes]:
        """Return name -> content of the files that a checkpoint of this step needs beside the weights."""
        ...

    def take_busy_s(self) -> float:
        """Return the seconds in which engines wrote responses since the last call."""
        ...


class Trainer(Protocol):
    layout: LayoutProof
    """Layout in which the student's rows share a forward pass, once the trainer is ready."""

    def train_step(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        targets: TargetStream,
        stale: frozenset[str] = frozenset(),
        reward: RewardStep | None = None,
    ) -> StepReport:
        """Take one optimiser step over the rows of all rollouts that are not quarantined. Before it steps, every part of
        `targets` was taken, and their sinks are done. `stale`: samples that older weights wrote, so that log-probs may differ
        from the engine's without a fault."""
        ...

    def begin_logprobs(self, token_ids: Sequence[Sequence[int]]) -> Callable[[], list[list[float]]]:
        """Begin to compute log-probs under the weights in training. Returns a function that waits for them, and returns them as
        [sequence][token - 1] like `RolloutEngine.logprobs`."""
        ...

    def export(self, path: Path) -> None:
        """Write the weights as a Hugging Face directory (config and safetensors)."""
        ...

    def export_changed(self, path: Path) -> Path | None:
        """Write the weights that training changes, like `export`. Returns the directory that has the others; None if all were
        written."""
        ...

    def stream_changed(self, nbytes: int) -> WeightStream:
        """Stream the tensors of `export_changed` in buckets of at most `nbytes`, which are gathered as they are taken; until the
        last one, no other method may be called."""
        ...

    def export_adapter(self, path: Path) -> None:
        """Write the adapters that LoRA trained as a PEFT directory."""
        ...

    def begin_save(self, path: Path) -> None:
        """Copy weights and optimiser state; they are written, without pickle, into an existing directory meanwhile."""
        ...

    def saved(self, wait_s: float) -> Sequence[WrittenFile] | None:
        """Return the files of the last `begin_save`, synced; None if they are not all written after `wait_s`. Raises:
        StorageError."""
        ...

    def load(self, path: Path) -> None:
        """Restore what `begin_save` wrote, by whatever number of ranks."""
        ...


class WeightSync(Protocol):
    def begin(self) -> None:
        """Compare engine and trainer before the first step, when both hold the student's own weights. Raises: RunError."""

    def push(self, version: int) -> PushReport:
        """Send the trainer's weights to every engine, and prove it on the probe tokens. Raises: RunError."""
        ...

    def hold(self, model_dir: Path, *, shape_of: Path) -> None:
        """Have every engine load the model of a directory that it may not be able to read; `shape_of` is a model of the same shape
        that it can read."""
        ...


class Evaluator(Protocol):
    def evaluate(self, domains: Sequence[str] | None = None, *, model: str) -> Evaluation:
        """Evaluate the weights that the rollout engine holds, on these domains or all; `model` is their name in reports."""
        ...


class Checkpoints(Protocol):
    def save(self, step: int, policy_version: int, carried: Mapping[str, bytes]) -> None:
        """Begin a checkpoint of this step, once one that is under way has ended; `carried` are files that go into it.
        Raises: as `committed`."""
        ...

    def committed(self, wait: bool) -> SavedCheckpoint | None:
        """Return the newest checkpoint that was committed since the last call; with `wait`, wait for one that is under way.
        Raises: StorageError; RunError past the deadline."""
        ...


class Monitors(Protocol):
    def begin(self, records: Sequence[StepRecord], expert: Evaluation) -> None:
        """Read the records of the steps that are done; `expert` is the evaluation of the domains' experts. Raises: RunError if
        the run was stopped after the last of them and nothing has changed."""
        ...

    def judge(self, record: StepRecord, rollouts: Sequence[Rollout]) -> tuple[AlarmRecord, ...]:
        """Return an alarm for each limit that the step's readings reach; the samples behind them are on disk. Raises:
        StorageError."""
        ...

    def end_error(self) -> RunError | None:
        """Return the error with which the run ends after the step that was judged last; None if it goes on."""
        ...


class Traces(Protocol):
    def keep(self, step: int, batch: RolloutBatch, trained: StepReport) -> None:
        """Store some episodes of a step for people to read, with the trainer's numbers. Raises: StorageError."""
        ...


class Objective(Protocol):
    """One way to measure how far the student is from the teacher."""

    mixes: ClassVar[bool]
    """True if a mixture's log-measure can stand for its teachers. So it is for a sum over teachers that is linear in log q, and
    for an objective that is defined by their normalised product."""

    def __call__(self, student: StudentChunk, teacher: Any) -> Slope:
        """Return value and slope at each token; `teacher` is the `TeacherChunk` of a payload that the objective can use."""
        ...


class Scorer(Protocol):
    """One way to ask a teacher about tokens that the student wrote."""

    def score(self, teacher: Teacher, rollouts: Sequence[Rollout], broken: dict[str, str]) -> Iterator[list[TargetRow]]:
        """Yield target rows in batches. A response that cannot be scored gets no row but an entry in `broken`: id -> reason.

        A scorer that reads ahead has loaded the teacher when this returns: `prefetch` may follow before the first batch.
        """
        ...

    def prefetch(self, teacher: Teacher) -> None:
        """Begin to load the teacher that scores next; returns at once."""
        ...

    def head(self, teacher: Teacher) -> Tensor:
        """Return [V, D] the output head, on the CPU; only under a payload that sends heads."""
        ...

    def head_key(self, teacher: Teacher) -> str:
        """Return the content hash of head and logit rule, empty if there is no head. Every scorer tries the teacher out here.
        Raises: RunError if it cannot be used."""
        ...

    def head_file(self, teacher: Teacher) -> HeadFile | None:
        """Return the file that has the head, None if there is no head."""
        ...

    def head_rule(self, teacher: Teacher) -> LogitRule:
        """Return the scale and cap that the teacher's architecture puts on its logits."""
        ...

    def layout(self, teacher: Teacher) -> LayoutProof | None:
        """Return the layout in which several rows share a forward pass, proven; None if an engine that scores does that itself."""
        ...


class HeadHandle(Protocol):
    """Handle to a head's matrix in another process, such as `cluster.objects.RemoteCall`; it may be sent to other workers."""

    def fetch(self) -> np.ndarray:
        """Fetch the matrix; `opd.models.heads.head_tensor` makes it a tensor."""
        ...


class ScoredRow(Protocol):
    """The part of `opd.stream.schema.TargetRow` that a payload reads."""

    @property
    def rollout(self) -> Rollout: ...
    @property
    def weight(self) -> float: ...
    @property
    def answer(self) -> Any: ...


class Verifier(Protocol):
    """Scores an answer."""

    def __call__(self, text: str, answer: str, metadata: Mapping[str, Any]) -> float:
        """Score `text` in 0..1, given the row's `answer` and `metadata`. An exception counts as a failed answer."""
        ...

    def problem(self, answer: str, metadata: Mapping[str, Any]) -> str:
        """Return the reason why a row with this answer and metadata cannot be judged, before a run computes anything; empty if
        it can."""
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
    """The method of a tokenizer that turns token ids into text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class Sink(Protocol):
    """A place for the numbers of each step."""

    def step(self, record: StepRecord) -> None: ...


class Reporter(Sink, Protocol):
    """The destination of a run's numbers: metrics file, evaluation files, progress on the terminal."""

    def phase(self, name: str) -> None: ...
    def evaluation(self, name: str, result: Evaluation) -> None: ...
