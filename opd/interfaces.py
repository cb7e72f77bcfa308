"""Protocols of the parts of a merge: first those that the loop calls, then those that other parts call. `pipelines.build` chooses the
classes that implement them."""

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

    from opd.cluster import Pending, Worker
    from opd.losses.objective import Slope, StudentChunk
    from opd.models.buckets import WeightStream
    from opd.models.heads import HeadFile, HeadSource
    from opd.models.logit_rule import LogitRule
    from opd.prompts.conversation import Messages
    from opd.records.rewards import PolicyReport, RewardRecord, RewardStep
    from opd.records.texts import TextSpending
    from opd.stream.part_files import PartsDirectory
    from opd.stream.schema import TargetRow
    from opd.stream.targets import TargetStream
    from opd.transfer.routes import DirectPush, MeetingPoint, Route


class PromptSource(Protocol):
    def take(self, step: int) -> Sequence[Prompt]:
        """Return the step's prompts, from every domain. A prompt that gets several responses comes several times, side by side.

        They depend only on (seed, step) and the records of earlier steps, so a resume needs no stored position.
        """
        ...


class RolloutEngine(Protocol):
    def generate(self, prompts: Sequence[Prompt], *, step: int, policy_version: int) -> RolloutBatch:
        """Sample one response to each prompt. Prompts that do not fit the context come back as quarantined.

        A schedule may call this in a thread; no other method is called until it has returned.
        """
        ...

    def answer(self, prompts: Sequence[Prompt], *, n: int = 1, temperature: float = 0.0) -> list[Completion]:
        """Return `n` answers to each prompt side by side, in the order of `prompts`. At temperature 0 they are greedy, else
        each has a seed made of its prompt's id and its number. A prompt that does not fit gets empty answers."""
        ...

    def load(
        self,
        model_dir: Path,
        restart_weights: Callable[[], AbstractContextManager[Path]] | None = None,
        base: Path | None = None,
    ) -> None:
        """Load the weights of a Hugging Face directory into every worker, and reset caches.

        If the directory may be deleted, `restart_weights` makes one with the same weights for a worker that died and restarts.
        With `base`, `model_dir` has only some weights; the others are in `base`, a directory of the same model.
        """
        ...

    def receive(self, send: Callable[[], WeightStream]) -> None:
        """Load the weights of the stream that `send` returns, like `load`. For a worker that died and restarts, `send` is called
        again, and returns the same weights."""
        ...

    def receive_directly(self, source: DirectSource) -> str:
        """Load the weights of a push that goes straight from the trainer's ranks into the engines' processes, like `load`. If it breaks
        off, all engines take the stream of the same source; returns the reason then, else an empty text. A worker that died and restarts
        takes the stream, too. Raises: RunError if there is no direct way."""
        ...

    def load_draft(self, weights: dict[str, Tensor]) -> None:
        """Load the weights of the draft for speculative decoding into every worker. What is sampled stays the student's."""
        ...

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Return [worker][sequence][token - 1] the log-prob of each token after the first, given the tokens before it."""
        ...


class TokenEngine(Protocol):
    """Samples the policy's turns, one in each call. Calls that run at the same time share a batch, which later calls join."""

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, seed: int) -> SampledTurn:
        """Sample at most `max_tokens` tokens that follow `token_ids`. The engine has all other sampling settings.

        A call that is cancelled leaves the batch. Raises: RunError if the context has no room, or if the engine failed; after a
        failure all calls fail.
        """
        ...


class Environment(Protocol):
    """The world in which an episode acts; each episode has an object of its own. It may block, because it is called in a thread.

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
    """Teacher's name -> layout in which its rows share a forward pass, for teachers that the pool computes itself; filled once the
    pool is ready."""

    def score(self, rollouts: Sequence[Rollout], directory: PartsDirectory | None = None) -> TargetStream:
        """Have every rollout scored by the teachers of its domain. Returns at once; rows come through the stream as they are
        scored. Processes of the pool that reach `directory` write their parts there; the stream's summaries say so."""
        ...

    def heads(self) -> Mapping[str, HeadSource]:
        """Return every output head that rows of this pool can name, by content hash."""
        ...


class TargetLog(Protocol):
    def replay(
        self, step: int, policy_version: int, prompts: Sequence[Prompt]
    ) -> tuple[RolloutBatch, TargetStream | None] | None:
        """Return what `record` stored of this step, if it is whole and belongs to the same policy version and prompts.

        The stream is None if the log keeps rollouts alone. Otherwise the log deletes the step and all later ones, and this returns
        None.
        """
        ...

    def begin(self, step: int) -> PartsDirectory | None:
        """Make the directory into which scoring workers write the step's parts; None if no parts are stored. `record` follows.

        Raises: StorageError.
        """
        ...

    def record(
        self, step: int, policy_version: int, prompts: Sequence[Prompt], batch: RolloutBatch, targets: TargetStream
    ) -> None:
        """Store a step's parts as they are taken from `targets`. They are in the log, all or none, once `targets.wait_for_sinks`
        returns. Taking parts and waiting raise: StorageError."""
        ...

    def lacks_room(self, steps: int) -> bool:
        """Return True if the log may not hold so many further steps before `prune` frees room."""
        ...

    def prune(self, step: int) -> None:
        """Drop the steps up to `step`: a checkpoint has their result."""
        ...

    def keep_written(self, step: int, policy_version: int, prompts: Sequence[Prompt], batch: RolloutBatch) -> None:
        """Store the rollouts of a step that were written ahead with the weights of `policy_version`. Raises: StorageError."""
        ...

    def written(self, step: int, policy_version: int, prompts: Sequence[Prompt]) -> RolloutBatch | None:
        """Return what `keep_written` stored of this step, if it is whole and belongs to the same policy version and prompts; else
        None."""
        ...

    def written_files(self, step: int) -> dict[str, bytes]:
        """Return the files that `keep_written` made, by name, for a checkpoint to carry; empty if there are none."""
        ...

    def bring_back(self, step: int, directory: Path) -> None:
        """Copy the files of `written_files` from a directory (a checkpoint's) back into the log, if they are there.

        Raises: StorageError.
        """
        ...


class Rewards(Protocol):
    """Gives rewards and turns them into what the policy is trained on; what it learns goes into checkpoints.

    The calls of a step: `judged`, unless the step comes from the target log; `step`; `record`.
    """

    def judged(self, batch: RolloutBatch, prompts: Sequence[Prompt]) -> RolloutBatch:
        """Return the batch with a reward on every response of the domains that take part and whose environment gives none."""
        ...

    def step(self, step: int, rollouts: Sequence[Rollout]) -> RewardStep:
        """Return the advantages and the weight that the policy trains on in this step. Raises: RunError if a critic fails."""
        ...

    def record(self, rollouts: Sequence[Rollout], trained: PolicyReport | None) -> RewardRecord:
        """Return the last step's record; `trained` is None if no token was trained on a reward."""
        ...

    def load(self, checkpoint: Path) -> None:
        """Restore the state of the checkpoint in this directory."""
        ...


class Schedule(Protocol):
    STEPS_AHEAD: ClassVar[int]
    """Number of steps between the taking of a step's prompts and its training."""
    max_staleness: int
    """Most weight pushes between the writing of a token and its training; the loop refuses rows that are older."""

    def rollouts(self, step: int, policy_version: int, prompts: Sequence[Prompt]) -> RolloutBatch:
        """Return the responses of this step; `policy_version` is the version of the weights that it trains."""
        ...

    def sleep_engines(self) -> None:
        """Put engines to sleep, if they are of a kind that sleeps: this step comes from the log, and needs no engine."""
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
        """Take one optimiser step over the rows of all rollouts that are not quarantined.

        Before the step, the trainer takes every part of `targets` and waits for the sinks. `stale`: samples that older weights
        wrote, whose log-probs may differ from the engine's without anything being wrong. `reward`: the policy gradient's part.
        """
        ...

    def begin_logprobs(self, token_ids: Sequence[Sequence[int]]) -> Callable[[], list[list[float]]]:
        """Begin to compute log-probs under the trainer's weights. Returns a function that waits for them, and returns them as
        [sequence][token - 1], like those of one worker in `RolloutEngine.logprobs`."""
        ...

    def export(self, path: Path) -> None:
        """Write the weights as a Hugging Face directory (config and safetensors)."""
        ...

    def export_changed(self, path: Path) -> Path | None:
        """Write only the weights that training changes, else like `export`. Returns the directory that has the other weights; None
        if all were written."""
        ...

    def stream_changed(self, nbytes: int) -> WeightStream:
        """Stream the tensors of `export_changed` in buckets of at most `nbytes` bytes. Each is gathered when it is taken; until the
        last one was taken, no other method may be called."""
        ...

    def direct_source(self, nbytes: int, *, keeps: bool) -> DirectSource:
        """Return the source of a direct push of the tensors of `export_changed`, in buckets of about `nbytes` bytes. With `keeps` its
        stream has the same weights until the next push, whatever the trainer does meanwhile."""
        ...

    def companion_weights(self, name: str) -> dict[str, Tensor]:
        """Return the weights of a model that learns beside the student, by their names in its exported file."""
        ...

    def export_companions(self, path: Path) -> None:
        """Write every model that learns beside the student into a directory of its name in `path`."""
        ...

    def export_adapter(self, path: Path) -> None:
        """Write the adapters that LoRA trained as a PEFT directory."""
        ...

    def begin_save(self, path: Path) -> None:
        """Copy weights and optimiser state, and begin to write them, without pickle, into an existing directory."""
        ...

    def saved(self, wait_s: float) -> Sequence[WrittenFile] | None:
        """Return the files of the last `begin_save` once they are synced; None if they are not after `wait_s` seconds.

        Raises: StorageError.
        """
        ...

    def load(self, path: Path) -> None:
        """Restore what `begin_save` wrote; the number of ranks may have been another one then."""
        ...


class TextExperts(Protocol):
    """The experts that only write text."""

    def teach(self, batch: RolloutBatch, prompts: Sequence[Prompt]) -> RolloutBatch:
        """Return the step's batch with experts' answers in the place of the student's responses, where the step learns them as text.

        Experts are asked about prompts that they have not answered in this run. A response without an answer is quarantined.
        `prompts` are those of the step. Raises: RunError if too many are, or if a budget ends; StorageError.
        """
        ...

    def is_taught(self, rollout: Rollout) -> bool:
        """Return True if the rollout's response is an expert's answer."""
        ...

    def find_response(self, rollout: Rollout) -> tuple[tuple[int, ...], bool]:
        """Return [R] the expert's answer to the rollout's prompt, in the student's tokens, and True unless it is cut. `teach` has had the
        step before, in this session or an earlier one. Raises: RunError if the answer is lost."""
        ...

    def sum_spending(self) -> Mapping[str, TextSpending]:
        """Return expert -> what its answers have taken since the run began."""
        ...


class DirectSource(Protocol):
    """The trainer's ranks in one direct push: see `opd.transfer`. Each pending answer is the reason of a failure, or an empty text."""

    def is_joined(self, engines: Sequence[Worker[Any]]) -> bool:
        """Return True if these very engines, and no others, are in the channel of the last push."""
        ...

    def open_channel(
        self, engines: Sequence[Worker[Any]], memory_ids: Sequence[Sequence[str]]
    ) -> tuple[MeetingPoint, list[list[Route]]]:
        """Open a new channel to these engines. `memory_ids` has the `find_memory_id` of each engine's processes. Returns the meeting point,
        and [engine][process] the routes. Raises: RunError if two processes share a GPU, as `plan_routes` does."""
        ...

    def join(self) -> list[Pending[str]]:
        """Have the ranks join the channel; the engines join at the same time."""
        ...

    def plan(self) -> tuple[Path, DirectPush]:
        """Plan the push, without gathering a weight. Returns the directory of the student's own weights, which has those that do not come,
        and the plan."""
        ...

    def send(self) -> list[Pending[str]]:
        """Have the ranks send the weights; the engines take them at the same time."""
        ...

    def give_up(self) -> None:
        """Have everybody who waits in the channel give up. The next push opens a new channel."""
        ...

    def stream(self) -> WeightStream:
        """Stream the weights of this push through the object store."""
        ...


class WeightSync(Protocol):
    def begin(self) -> None:
        """Compare engine and trainer before the first step, when both hold the student's own weights. Raises: RunError."""

    def push(self, version: int) -> PushReport:
        """Send the trainer's weights to every engine, and prove on the probe tokens that they are there. Raises: RunError."""
        ...

    def hold(self, model_dir: Path, *, shape_of: Path) -> None:
        """Have every engine load the model in `model_dir`, even if the engine cannot read that directory.

        `shape_of`: a model of the same shape that the engine can read.
        """
        ...


class Evaluator(Protocol):
    def evaluate(self, domains: Sequence[str] | None = None, *, model: str, as_expert: bool = False) -> Evaluation:
        """Evaluate the weights that the rollout engine holds, on these domains or all; `model` is their name in reports. `as_expert`:
        they are asked what the domains' experts are asked."""
        ...


class Checkpoints(Protocol):
    def save(self, step: int, policy_version: int, carried: Mapping[str, bytes]) -> None:
        """Begin a checkpoint of this step, after waiting for an earlier one that is still being written.

        `carried`: name -> content of files that go into it. Raises: what `committed` raises.
        """
        ...

    def committed(self, wait: bool) -> SavedCheckpoint | None:
        """Return the newest checkpoint that was committed since the last call; None if there is none.

        With `wait`, wait for one that is being written. Raises: StorageError; RunError past the deadline.
        """
        ...


class Monitors(Protocol):
    def begin(self, records: Sequence[StepRecord], expert: Evaluation) -> None:
        """Read the records of the steps that are done. `expert`: the evaluation of the domains' experts.

        Raises: RunError if a monitor stopped the run after the last of these steps, and nothing has changed since.
        """
        ...

    def judge(self, record: StepRecord, rollouts: Sequence[Rollout]) -> tuple[AlarmRecord, ...]:
        """Return an alarm for each limit that the step's readings reach, and write the samples behind them to disk.

        Raises: StorageError.
        """
        ...

    def end_error(self) -> RunError | None:
        """Return the error with which the run ends after the step that was judged last; None if it goes on."""
        ...


class Traces(Protocol):
    def keep(self, step: int, batch: RolloutBatch, report: StepReport) -> None:
        """Store some episodes of a step for people to read, with the trainer's numbers. Raises: StorageError."""
        ...


class Objective(Protocol):
    """One way to measure how far the student is from the teacher."""

    mixes: ClassVar[bool]
    """True if the objective can compute with a mixture's log-measure (`opd.payloads.hidden_states.MixtureBlock`) in place of its
    teachers. That is so if it is linear in log q, or is defined by the teachers' normalised product."""

    def __call__(self, student: StudentChunk, teacher: Any) -> Slope:
        """Return value and slope at each token. `teacher`: the `TeacherChunk` of a payload that the objective can use."""
        ...


class Scorer(Protocol):
    """One way to ask a teacher about tokens that the student wrote."""

    def score(self, teacher: Teacher, rollouts: Sequence[Rollout], broken: dict[str, str]) -> Iterator[list[TargetRow]]:
        """Yield target rows in batches. A response that cannot be scored gets no row, but an entry in `broken`: id -> reason.

        A scorer that reads ahead has loaded the teacher when this returns, so that `prefetch` may be called before the first
        batch is taken.
        """
        ...

    def prefetch(self, teacher: Teacher) -> None:
        """Begin to load the teacher that scores next; returns at once."""
        ...

    def head(self, teacher: Teacher) -> Tensor:
        """Return [V, D] the output head, on the CPU; only under a payload that sends heads."""
        ...

    def head_key(self, teacher: Teacher) -> str:
        """Return the content hash of head and logit rule; empty if there is no head. Every scorer also tries the teacher here.

        Raises: RunError if the teacher cannot be used.
        """
        ...

    def head_file(self, teacher: Teacher) -> HeadFile | None:
        """Return the file that has the head, None if there is no head."""
        ...

    def head_rule(self, teacher: Teacher) -> LogitRule:
        """Return the scale and cap that the teacher's architecture puts on its logits."""
        ...

    def layout(self, teacher: Teacher) -> LayoutProof | None:
        """Return the proven layout in which several rows share a forward pass; None if a scoring engine sees to that itself."""
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
        """Return the reason why a row with this answer and metadata cannot be judged; empty if it can. It is asked before a run
        computes anything."""
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
