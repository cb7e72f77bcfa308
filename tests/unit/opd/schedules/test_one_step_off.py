"""A merge that writes one step ahead: what runs beside what, how old the tokens are, and that a kill changes nothing.

Loop, schedule, target log, checkpoints, records and prompts are the real ones. The student is a hash that every step
changes, and what it writes follows from the hash and the prompt; a thread writes while the trainer trains.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from opd.cluster import background
from opd.config.balance import TokensBalance
from opd.config.sections import CheckpointConfig
from opd.errors import RunError, StorageError
from opd.files import blake3_file, sweep_temporary_files
from opd.interfaces import Schedule
from opd.loop import Components, Plan, run
from opd.prompts import Balance, BalancedPrompts, MixedPrompts
from opd.records.step import StepRecord
from opd.records.types import DomainStats, Prompt, PushReport, Rollout, RolloutBatch, StepReport, WrittenFile
from opd.run.checkpoints import CheckpointStore, choose_checkpoint, set_newer_aside
from opd.run.metrics import MetricsFile
from opd.schedules import SCHEDULES
from opd.schedules.spec import ScheduleSpec
from opd.stream.log import ArrowTargetLog
from opd.stream.part_files import PartsDirectory, read_part
from opd.stream.schema import PartRecord, read_stream, write_stream
from opd.stream.targets import ExpectedRow, StreamPart, TargetStream, TeacherRequest, make_part
from tests.rows import make_rollout, make_row

DOMAINS = ("a", "b")
PROMPTS = {d: [Prompt(id=f"{d}/{i}", domain=d, token_ids=(1, 2 + i)) for i in range(40)] for d in DOMAINS}
VOCABULARY = 76
STEPS, EVERY = 7, 3
NO_SUMS = dict.fromkeys(
    ("entropy_sum", "teacher_entropy_sum", "agree_sum", "teacher_top1_sum", "clipped_sum", "student_mass_sum",
     "teacher_mass_sum", "gap_sum"), 0.0,
)  # fmt: skip


class Killed(BaseException):
    """The process is gone: nothing may catch it."""


@dataclass
class Merge:
    """One sitting of a merge in a directory, killed at a moment of a step."""

    root: Path
    mode: str = "one_step_off"
    kill: tuple[str, int] = ("", 0)
    balanced: bool = False
    keeps_targets: bool = True
    """False: the log has the rollouts alone."""
    max_staleness: int | None = None
    seen: Callable[[str, int], None] = lambda moment, step: None
    """Told of every moment, in the thread in which it happens."""
    told: list[str] = field(default_factory=list)
    wrote: list[int] = field(default_factory=list)
    """Steps whose responses the engine wrote."""
    ages: dict[int, dict[str, int]] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)
    trained: dict[str, Rollout] = field(default_factory=dict)
    """Every response that was trained, by its sample id."""
    last: int = STEPS

    dead: bool = False

    def moment(self, name: str, step: int) -> None:
        self.seen(name, step)
        if self.dead or self.kill == (name, step):
            raise Killed(name)

    def take_to(self, last: int = STEPS, wanted: str = "latest") -> str:
        """The weights after step `last`."""
        self.last = last
        self.root.mkdir(parents=True, exist_ok=True)
        for directory in ("targets", "checkpoints"):
            sweep_temporary_files(self.root / directory)
        checkpoint = choose_checkpoint(self.root / "checkpoints", wanted, self.told.append)
        done = checkpoint.step if checkpoint else 0
        set_newer_aside(self.root / "checkpoints", done)
        metrics = MetricsFile(self.root / "metrics.jsonl")
        metrics.rewind(done)
        student = Student(self)
        engine = Engine(self, student.weights)
        parts = self.parts(student, engine, metrics)
        if checkpoint:
            parts.log.prune(done)
            parts.log.bring_back(done + 1, checkpoint.path)
            student.load(checkpoint.path)
            parts.sync.push(checkpoint.policy_version)
        version = checkpoint.policy_version if checkpoint else 0
        plan = Plan(
            first_step=done + 1, last_step=last, policy_version=version, checkpoint_every=EVERY, evaluate_every=0,
            overlap=False,
        )  # fmt: skip
        try:
            assert run(parts, plan) == last
        finally:  # a process that is killed takes its threads along
            self.dead = True
            for thread in list(background._running):
                thread.join(10)
        self.records = metrics.read()
        return student.weights

    def parts(self, student: Student, engine: Engine, metrics: MetricsFile) -> Components:
        prompts = self.prompts(metrics)
        pool: Any = SimpleNamespace(score=self.score, heads=dict)
        log = Log(self, pool)
        bound = self.max_staleness if self.max_staleness is not None else SCHEDULES[self.mode].STEPS_AHEAD
        spec = ScheduleSpec(
            prompts=prompts, engine=engine, log=log, max_staleness=bound, timeout_s=30,  # type: ignore[arg-type]
        )  # fmt: skip
        schedule: Schedule = SCHEDULES[self.mode](spec)

        def push(version: int) -> PushReport:
            self.moment("push", version)
            assert not engine.writing.locked(), "weights are replaced while the engine writes"
            engine.weights, engine.version = student.weights, version
            return PushReport(version=version, gap=0.0)

        def report(record: StepRecord) -> None:
            self.moment("record", record.step)
            metrics.write(record)
            self.ages[record.step] = dict(record.token_ages)
            if isinstance(prompts, BalancedPrompts):
                prompts.step(record)

        checkpoints = CheckpointStore(
            self.root / "checkpoints", student, CheckpointConfig(keep=9), world_size=1, identity={}, timeout_s=30  # type: ignore[arg-type]
        )  # fmt: skip
        others: dict[str, Any] = {
            "sync": SimpleNamespace(push=push), "evaluator": None,
            "reporter": SimpleNamespace(step=report, phase=lambda _: None),
            "monitors": SimpleNamespace(judge=lambda *_: ()), "traces": SimpleNamespace(keep=lambda *_: None),
        }  # fmt: skip
        return Components(
            prompts=prompts, schedule=schedule, engine=engine, teachers=pool, log=log, trainer=student,  # type: ignore[arg-type]
            checkpoints=checkpoints, **others,
        )  # fmt: skip

    def prompts(self, metrics: MetricsFile) -> MixedPrompts | BalancedPrompts:
        if not self.balanced:
            return MixedPrompts(PROMPTS, dict.fromkeys(DOMAINS, 2), 3)
        balance = Balance(TokensBalance(kind="tokens", window=1), dict.fromkeys(DOMAINS, 1.0), 5, 3)
        return BalancedPrompts(PROMPTS, balance, 3, metrics.read(), ahead=SCHEDULES[self.mode].STEPS_AHEAD)

    def score(self, rollouts: Sequence[Rollout], directory: PartsDirectory | None = None) -> TargetStream:
        """Two parts: a worker that reaches the log writes the first, the log the second."""
        step = rollouts[0].step
        self.moment("score", step)
        rows = [
            make_row(
                sample_id=r.sample_id, step=r.step, domain=r.domain, teacher="t", weight=1.0, spans=r.spans,
                stop_reason=r.stop_reason, prompt_ids=r.prompt_ids, response_ids=r.response_ids,
                behaviour_logprobs=r.behaviour_logprobs, teacher_logprobs=tuple(-0.1 * t for t in r.response_ids),
            )
            for r in rollouts
        ]  # fmt: skip
        half = len(rows) // 2

        def parts() -> Iterator[StreamPart]:
            for number, some in enumerate((rows[:half], rows[half:])):
                record = PartRecord(number=number, teachers={"t": len(rows)} if number else None)
                raw = np.frombuffer(write_stream(some, "float32", "sampled_logprobs", record), dtype=np.uint8)
                part = make_part(raw, "teachers")
                if directory is not None and number == 0:
                    part = replace(part, summary=replace(part.summary, file=directory.write_part(record, raw.data)))
                yield part
                self.moment("part", step)

        asked = TeacherRequest(
            rollouts=rollouts, teachers={d: {"t": ExpectedRow(weight=1.0, head="")} for d in DOMAINS},
            kind=("float32", "sampled_logprobs"), max_quarantined=0.0,
        )  # fmt: skip
        return TargetStream(parts(), asked, heads={})


class Student:
    """The trainer: its weights are a hash of the weights before and of every row."""

    def __init__(self, merge: Merge) -> None:
        self._merge = merge
        self.weights = blake3(b"base").hexdigest()

    def train_step(
        self, step: int, rollouts: Sequence[Rollout], targets: Any, stale: frozenset[str], reward: Any = None
    ) -> StepReport:
        self._merge.moment("train", step)
        self._merge.trained |= {r.sample_id: r for r in rollouts}
        said = blake3(self.weights.encode())
        while (part := targets.take_part()) is not None:
            for row in read_stream(read_part(part.handle).data).rows:
                said.update(repr((row.rollout, row.answer)).encode())
        targets.wait_for_sinks()
        self.weights = said.hexdigest()
        self._merge.moment("trained", step)
        tokens = {d: sum(r.num_trained for r in rollouts if r.domain == d) for d in DOMAINS}
        samples = {d: sum(r.domain == d for r in rollouts) for d in DOMAINS}
        stats = {d: DomainStats(tokens=n, samples=samples[d], kl_sum=1.0 * n, **NO_SUMS) for d, n in tokens.items()}
        return StepReport(step=step, loss=1.0, grad_norm=1.0, lr=0.1, logprob_gap=0.0, domains=stats)

    def begin_save(self, path: Path) -> None:
        self._merge.moment("save", int(path.name[-6:]))
        self._file = path / "rank-0.safetensors"
        self._file.write_text(self.weights)

    def saved(self, wait_s: float) -> list[WrittenFile]:
        return [WrittenFile(name=self._file.name, blake3=blake3_file(self._file), size=64, seconds=0.0)]

    def load(self, path: Path) -> None:
        self.weights = (path / "rank-0.safetensors").read_text()


class Engine:
    """An engine whose responses follow from its weights and the prompt."""

    def __init__(self, merge: Merge, weights: str) -> None:
        self._merge = merge
        self.weights, self.version = weights, 0
        self.writing = threading.Lock()

    def generate(self, prompts: Sequence[Prompt], *, step: int, policy_version: int) -> RolloutBatch:
        assert policy_version == self.version, "it says that other weights wrote"
        with self.writing:
            self._merge.moment("write", step)
            rollouts = [self.respond(prompt, step) for prompt in prompts]
            self._merge.moment("written", step)
        self._merge.wrote.append(step)
        return RolloutBatch(rollouts=tuple(rollouts), quarantined=())

    def respond(self, prompt: Prompt, step: int) -> Rollout:
        digest = blake3(f"{self.weights} {prompt.id} {step}".encode()).digest()
        ids = tuple(byte % VOCABULARY for byte in digest[1 : 2 + digest[0] % 5])
        return make_rollout(
            sample_id=f"{step:06d}/{prompt.id}", step=step, domain=prompt.domain, policy_version=self.version,
            prompt_ids=prompt.token_ids, response_ids=ids, behaviour_logprobs=(-0.5,) * len(ids),
        )  # fmt: skip


class Log(ArrowTargetLog):
    """The real one, which tells its moments."""

    def __init__(self, merge: Merge, pool: Any) -> None:
        super().__init__(merge.root / "targets", pool, VOCABULARY, merge.told.append, keeps_targets=merge.keeps_targets)
        self._merge = merge

    def keep_written(self, step: int, policy_version: int, prompts: Sequence[Prompt], batch: RolloutBatch) -> None:
        self._merge.moment("keep", step)
        super().keep_written(step, policy_version, prompts, batch)
        self._merge.moment("kept", step)

    def prune(self, step: int) -> None:
        self._merge.moment("prune", step)
        super().prune(step)


pytestmark = pytest.mark.usefixtures("in_process")


def whole(tmp_path: Path, **options: Any) -> tuple[str, Merge]:
    """The weights of a merge that nobody disturbed."""
    merge = Merge(tmp_path / "whole", **options)
    return merge.take_to(), merge


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[str, Merge]]:
    """`whole`, once for all tests with the same options."""

    @cache
    def found(balanced: bool) -> tuple[str, Merge]:
        return whole(tmp_path_factory.mktemp("whole"), balanced=balanced)

    return found


def test_the_next_step_is_written_while_one_is_trained(tmp_path: Path) -> None:
    begun = {(m, step): threading.Event() for m in ("train", "write") for step in range(1, STEPS + 2)}

    def meet(moment: str, step: int) -> None:
        """Training of a step and writing of the next one: neither goes on before the other has begun."""
        if (moment, step) in begun:
            begun[moment, step].set()
        beside = ("write", step + 1) if moment == "train" and step < STEPS else ("train", step - 1)
        if (moment == "write" and step > 1) or (moment == "train" and step < STEPS):
            assert begun[beside].wait(10), f"{moment} {step} waits for {beside} for ever"

    _, merge = whole(tmp_path, seen=meet)
    assert merge.wrote == list(range(1, STEPS + 1)), "each once, and none after the last step"


def test_what_is_written_is_scored_while_the_weights_are_pushed(tmp_path: Path) -> None:
    order: list[str] = []
    whole(tmp_path, seen=lambda moment, step: order.append(f"{moment} {step}"))
    plain = [line for line in order if line.split()[0] in ("score", "trained", "push", "record")]
    last = [f"{m} {STEPS}" for m in ("trained", "push", "record")]
    each = [[f"trained {s}", f"score {s + 1}", f"push {s}", f"record {s}"] for s in range(1, STEPS)]
    assert plain == ["score 1", *[line for lines in each for line in lines], *last]


def test_in_the_sync_schedule_they_take_turns(tmp_path: Path) -> None:
    order: list[str] = []
    whole(tmp_path, mode="sync", seen=lambda moment, step: order.append(f"{moment} {step}"))
    plain = [line for line in order if line.split()[0] in ("write", "train", "push")]
    assert plain == [f"{m} {step}" for step in range(1, STEPS + 1) for m in ("write", "train", "push")]
    assert not list((tmp_path / "whole" / "targets").glob("written-*"))
    assert all({f.name for f in p.iterdir()} == {"rank-0.safetensors", "checkpoint.json"} for p in saved(tmp_path))


def saved(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "whole" / "checkpoints").iterdir())


def test_every_token_but_those_of_the_first_step_is_one_version_old(tmp_path: Path) -> None:
    _, merge = whole(tmp_path)
    assert {step: set(ages) for step, ages in merge.ages.items()} == {1: {"0"}} | {
        s: {"1"} for s in range(2, STEPS + 1)
    }
    _, sync = whole(tmp_path / "sync", mode="sync")
    assert all(set(ages) == {"0"} for ages in sync.ages.values())


def test_a_row_that_is_too_old_is_refused_before_it_is_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def older(engine: Engine, prompt: Prompt, step: int) -> Rollout:
        rollout = respond(engine, prompt, step)
        if step == 4 and prompt.domain == "b":
            spans = tuple(replace(span, policy_version=1) for span in rollout.spans)
            return replace(rollout, spans=spans)
        return rollout

    respond = Engine.respond
    monkeypatch.setattr(Engine, "respond", older)
    scored: list[int] = []
    merge = Merge(tmp_path, seen=lambda moment, step: scored.append(step) if moment == "score" else None)
    with pytest.raises(
        RunError, match=r"sample 000004/b/\d+ of domain b: policy version 1 .* version 3 .* age of 2, .* is 1"
    ):
        merge.take_to()
    assert scored == [1, 2, 3]
    assert Merge(tmp_path / "allowed", max_staleness=2).take_to()


MOMENTS = ("write", "written", "keep", "kept", "score", "part", "train", "trained", "push", "record")
KILLS = [
    pytest.param(moment, step, id=f"{moment}-{step}")
    for step in (1, 2, 4, 5, 7)
    for moment in MOMENTS
    # the first step's responses are written when it begins, and scored at once
    if (moment, step) not in {("keep", 1), ("kept", 1)}
]


@pytest.mark.parametrize("balanced", [False, True], ids=["fixed", "balanced"])
@pytest.mark.parametrize(("moment", "step"), KILLS)
def test_killed_at_any_moment_and_resumed_it_ends_with_the_same_weights(
    moment: str, step: int, balanced: bool, undisturbed: Callable[..., tuple[str, Merge]], tmp_path: Path
) -> None:
    wanted, merge = undisturbed(balanced)
    broken = tmp_path / "broken"
    with pytest.raises(Killed):
        Merge(broken, kill=(moment, step), balanced=balanced).take_to()
    resumed = Merge(broken, balanced=balanced)
    assert resumed.take_to() == wanted
    assert [(r.step, r.token_ages, r.prompts) for r in resumed.records] == [
        (r.step, r.token_ages, r.prompts) for r in merge.records
    ]
    assert resumed.told == []
    assert (len({tuple(r.prompts.values()) for r in merge.records}) > 1) == balanced


@pytest.mark.parametrize(("moment", "step"), [("save", 3), ("prune", 3), ("save", 6), ("prune", 6)])
def test_killed_around_a_checkpoint(moment: str, step: int, tmp_path: Path) -> None:
    wanted, _ = whole(tmp_path)
    with pytest.raises(Killed):
        Merge(tmp_path / "broken", kill=(moment, step)).take_to()
    assert Merge(tmp_path / "broken").take_to() == wanted


@pytest.mark.parametrize("keeps_targets", [True, False])
def test_killed_again_and_again(keeps_targets: bool, tmp_path: Path) -> None:
    """Also if the log has the rollouts alone, so that their steps are scored again."""
    wanted, _ = whole(tmp_path)
    for kill in (
        ("written", 3), ("train", 2), ("part", 4), ("push", 4), ("trained", 4), ("kept", 6), ("record", 6),
    ):  # fmt: skip
        with pytest.raises(Killed):
            Merge(tmp_path / "broken", kill=kill, keeps_targets=keeps_targets).take_to()
    assert Merge(tmp_path / "broken", keeps_targets=keeps_targets).take_to() == wanted


def test_what_was_written_is_not_written_again(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        Merge(tmp_path, kill=("push", 5)).take_to()
    resumed = Merge(tmp_path)
    resumed.take_to()
    assert resumed.wrote == [7], "4 is in the checkpoint, 5 and 6 are in the log"
    assert [r.step for r in resumed.records if r.replayed] == [4, 5]


def test_an_older_checkpoint_has_what_it_needs_without_a_log(tmp_path: Path) -> None:
    wanted, merge = whole(tmp_path)
    for path in (merge.root / "targets").iterdir():
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    again = Merge(merge.root)
    assert again.take_to(wanted="3") == wanted
    assert again.wrote == [5, 6, 7], "the weights that wrote step 4 are gone, its responses are in the checkpoint"


@pytest.mark.parametrize("name", ["written.arrow", "written.json"])
def test_damaged_responses_are_written_again_by_the_weights_that_wrote_them(name: str, tmp_path: Path) -> None:
    wanted, _ = whole(tmp_path)
    with pytest.raises(Killed):
        Merge(tmp_path / "broken", kill=("record", 5)).take_to()
    file = tmp_path / "broken" / "targets" / "written-000006" / name
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    resumed = Merge(tmp_path / "broken")
    assert resumed.take_to() == wanted
    assert resumed.wrote == [6, 7]
    assert len(resumed.told) == 1 and "step 6 is rolled out again, what was written ahead" in resumed.told[0]


def test_what_the_writing_raises_ends_the_step_before_the_push(tmp_path: Path) -> None:
    def full(moment: str, step: int) -> None:
        order.append(f"{moment} {step}")
        if (moment, step) == ("written", 3):
            raise StorageError("targets: could not be written: No space left on device")

    order: list[str] = []
    with pytest.raises(StorageError, match="No space"):
        Merge(tmp_path, seen=full).take_to()
    assert "trained 2" in order and "push 2" not in order


def test_busy_seconds_are_of_the_step_in_which_the_engine_wrote(tmp_path: Path) -> None:
    def slow(moment: str, step: int) -> None:
        if (moment, step) == ("write", 4):
            threading.Event().wait(0.3)

    _, merge = whole(tmp_path, seen=slow)
    busy = {record.step: record.busy_s for record in merge.records}
    assert busy[3]["rollout"] >= 0.3 > busy[4]["rollout"]
    assert busy[STEPS]["rollout"] == 0
    assert all(set(one) == {"rollout", "teachers", "trainer"} for one in busy.values())
    assert 0.5 < merge.records[2].utilisation["rollout"] < 1.1
