"""The order of things in a merge, told by fakes that write down what happens to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any

import pytest

from opd.errors import RunError
from opd.loop import Components, Plan, run
from opd.records.scores import DomainScore, Evaluation
from opd.records.step import AlarmRecord, StepRecord
from opd.records.types import (
    DomainStats,
    PositionStats,
    Prompt,
    PushReport,
    QuarantinedPrompt,
    Rollout,
    RolloutBatch,
    SavedCheckpoint,
    StepReport,
)
from opd.schedules.spec import ScheduleSpec
from opd.schedules.sync import SyncSchedule
from tests.rows import make_rollout

PROMPTS = [Prompt(id=f"{d}/0", domain=d, token_ids=(1, 2)) for d in ("a", "b")]


def domain_stats(**changes: Any) -> DomainStats:
    values: dict[str, Any] = {"tokens": 4, "samples": 1, "kl_sum": 2.0}
    sums = {"gap_sum": 0, "entropy_sum": 4.0, "teacher_entropy_sum": 1, "agree_sum": 3, "teacher_top1_sum": 2}
    return DomainStats(
        **values | sums | {"clipped_sum": nan, "student_mass_sum": nan, "teacher_mass_sum": nan} | changes
    )


NOTHING = domain_stats(
    tokens=0, samples=0, kl_sum=0.0, entropy_sum=0.0, teacher_entropy_sum=nan, agree_sum=nan, teacher_top1_sum=nan
)


class Targets:
    """Stands for a `TargetStream`."""

    def __init__(self, events: Events, restarted: tuple[str, ...]) -> None:
        self._events = events
        self.restarted = list(restarted)
        self.quarantined: dict[str, str] = {}
        self.num_parts, self.nbytes = 3, 999
        self.busy_s = 0.25

    def wait_for_parts(self) -> None:
        self._events.seen.append("collect")


@dataclass
class Events:
    """Every part of a merge in one; each call is one line of `seen`."""

    seen: list[str] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    push_fails_at: int = 0
    quarantined: dict[str, str] = field(default_factory=dict)
    """By the teachers, of two rollouts; without any there is only one."""
    written: list[str] = field(default_factory=list)
    """Rollouts of the step."""
    skips: bool = False
    """Nothing is trained, as while a critic learns alone."""
    known: dict[str, float] = field(default_factory=dict)
    """The trainer's values for domain `a` beyond the usual."""
    restarted: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Step -> scoring workers that died in it."""
    logged: frozenset[int] = frozenset()
    """Steps that the log has."""
    sleeps: bool = False
    """True: the engine gives its memory back after it has written or answered."""
    stopped_at: int = 0
    """The step after which a monitor ends the run."""
    commits_after: int = 0
    """Times that a checkpoint is asked for before its files are there."""
    logs_targets: bool = True
    """False: the log has rollouts alone."""
    max_logged: int | None = None
    """Steps for which the log has room."""
    steps_in_log: list[int] = field(default_factory=list)
    most_in_log: int = 0
    under_way: list[int] = field(default_factory=list)
    """Step of the checkpoint that is being written, and how often it was asked for."""

    def take(self, step: int) -> list[Prompt]:
        self.seen.append(f"take {step}")
        return PROMPTS

    def generate(self, prompts: Sequence[Prompt], *, step: int, policy_version: int) -> RolloutBatch:
        assert list(prompts) == PROMPTS
        self.seen.append(f"generate {step} v{policy_version}")
        rollout = make_rollout(
            sample_id=f"{step:06d}/a/0", step=step, domain="a", policy_version=policy_version, prompt_ids=(1, 2),
            response_ids=(3, 4, 5), behaviour_logprobs=(0.0,) * 3,
            truncated=True,
        )  # fmt: skip
        other = replace(rollout, sample_id=f"{step:06d}/a/1")
        rollouts = (rollout, other) if self.quarantined else (rollout,)
        self.written = [r.sample_id for r in rollouts]
        return RolloutBatch(
            rollouts=rollouts, quarantined=(QuarantinedPrompt(prompt_id="b/0", domain="b", reason="long"),)
        )

    def answer(self, prompts: Sequence[Prompt]) -> list[Any]:
        assert not prompts
        self.seen.append("answer nothing")
        return []

    def begin(self, step: int) -> str:
        return f"directory of {step}"

    def lacks_room(self, steps: int) -> bool:
        return self.max_logged is not None and len(self.steps_in_log) + steps > self.max_logged

    def score(self, rollouts: Sequence[Rollout], directory: str | None = None) -> Any:
        assert directory in (None, f"directory of {rollouts[0].step}")
        self.seen.append(f"score {rollouts[0].sample_id}")
        self.step_of_targets = rollouts[0].step
        self.targets = Targets(self, self.restarted.get(rollouts[0].step, ()))
        return self.targets

    def replay(self, step: int, policy_version: int, prompts: Sequence[Prompt]) -> Any:
        if step not in self.logged:
            return None
        assert list(prompts) == PROMPTS
        before = list(self.seen)
        batch = self.generate(prompts, step=step, policy_version=policy_version)
        targets = self.score(batch.rollouts)
        self.seen = [*before, f"replay {step} v{policy_version}"]
        return batch, targets if self.logs_targets else None

    def record(
        self, step: int, policy_version: int, prompts: Sequence[Prompt], batch: RolloutBatch, targets: Any
    ) -> None:
        assert targets is self.targets
        assert {r.policy_version for r in batch.rollouts} == {policy_version}
        assert list(prompts) == PROMPTS
        self.seen.append(f"log {step}")
        self.steps_in_log.append(step)
        self.most_in_log = max(self.most_in_log, len(self.steps_in_log))

    def prune(self, step: int) -> None:
        self.seen.append(f"prune {step}")
        self.steps_in_log = [logged for logged in self.steps_in_log if logged > step]

    def train_step(
        self, step: int, rollouts: Sequence[Rollout], targets: Any, stale: frozenset[str], reward: Any = None
    ) -> StepReport:
        assert reward is None
        assert [r.sample_id for r in rollouts] == self.written
        assert targets is self.targets and self.step_of_targets == step
        self.seen.append(f"train {step}")
        targets.quarantined = self.quarantined  # known when all parts came
        if self.skips:
            return StepReport(step=step, loss=0.0, grad_norm=0.0, lr=0.1, logprob_gap=0.0, domains={}, skipped=True)
        stats = {"a": domain_stats(**self.known), "b": NOTHING}
        places = {bits: PositionStats(tokens=2, kl_sum=1.0 + bits) for bits in (0, 1, 3)}
        return StepReport(
            step=step, loss=0.5, grad_norm=1.5, lr=0.1, logprob_gap=1e-6, domains=stats, positions=places,
            early_micro_batches=2, peak_bytes=77,
        )  # fmt: skip

    def push(self, version: int) -> PushReport:
        self.seen.append(f"push {version}")
        if self.push_fails_at == version:
            raise RunError("did not arrive")
        return PushReport(version=version, gap=2e-6)

    def evaluate(self, domains: Sequence[str] | None = None, *, model: str, as_expert: bool = False) -> Evaluation:
        self.seen.append(f"evaluate {model}")
        return Evaluation(
            model=model, scores={"a": DomainScore(accuracy=0.5, stderr=0.1, low=0.3, high=0.7, questions=9)}
        )

    def phase(self, name: str) -> None:
        """Nobody looks on."""

    def evaluation(self, name: str, result: Evaluation) -> None:
        self.seen.append(f"store {name} of {result.model}")

    def save(self, step: int, policy_version: int, carried: Mapping[str, bytes]) -> None:
        assert carried == {}
        self.seen.append(f"save {step} v{policy_version}")
        self.under_way = [step, 0]

    def committed(self, wait: bool) -> SavedCheckpoint | None:
        if not self.under_way or not (wait or self.under_way[1] >= self.commits_after):
            self.under_way = self.under_way and [self.under_way[0], self.under_way[1] + 1]
            return None
        step, self.under_way = self.under_way[0], []
        self.seen.append(f"commit {step}")
        return SavedCheckpoint(step=step, background_s=0.25, size=9)

    def judge(self, record: StepRecord, rollouts: Sequence[Rollout]) -> tuple[AlarmRecord, ...]:
        assert [r.sample_id for r in rollouts] == self.written and record.alarms == ()
        alarm = AlarmRecord(signal="gap", domain="", value=2, limit=1, action="stop", since=record.step)
        return (alarm,) if record.step == self.stopped_at else ()

    def step(self, record: StepRecord) -> None:
        self.seen.append(f"record {record.step}")
        self.records.append(record.to_json())
        assert StepRecord.from_json(json.loads(json.dumps(self.records[-1]))) == record, "what is written is read"

    def keep(self, step: int, batch: RolloutBatch, report: StepReport) -> None:
        assert self.seen[-1] == f"record {step}" and report.step == step, "a resume takes both back"
        assert [r.sample_id for r in batch.rollouts] == self.written

    def parts(self) -> Components:
        every: Any = self
        bounds: Any = {"max_staleness": 0, "timeout_s": 60}
        spec = ScheduleSpec(prompts=every, engine=every, log=every, sleeps=self.sleeps, **bounds)
        return Components(
            prompts=every, schedule=SyncSchedule(spec), engine=every, teachers=every, log=every, trainer=every, sync=every, evaluator=every,
            monitors=every, traces=every, checkpoints=every, reporter=every,
        )  # fmt: skip

    def of(self, kind: str) -> list[str]:
        return [line for line in self.seen if line.split()[0] == kind]


def plan(**changes: Any) -> Plan:
    values = {"first_step": 1, "last_step": 4, "policy_version": 0, "checkpoint_every": 100, "evaluate_every": 0}
    return Plan(**values | {"overlap": False} | changes)  # type: ignore[arg-type]


def test_the_order_within_a_step() -> None:
    events = Events()
    assert run(events.parts(), plan(last_step=1, evaluate_every=1)) == 1
    assert events.seen == [
        "take 1",
        "generate 1 v0",
        "score 000001/a/0",
        "log 1",
        "collect",
        "train 1",
        "push 1",
        "evaluate step 1",
        "store step-000001 of step 1",
        "record 1",
        "save 1 v1",
        "commit 1",
        "prune 1",
    ]


def test_with_overlap_the_trainer_begins_while_teachers_score() -> None:
    events = Events()
    run(events.parts(), plan(overlap=True))
    assert "collect" not in events.seen and len(events.of("train")) == 4


def test_the_log_is_pruned_when_its_checkpoint_is_committed_and_not_before() -> None:
    events = Events(commits_after=2)
    run(events.parts(), plan(last_step=7, checkpoint_every=3))
    assert [line for line in events.seen if line.split()[0] in ("record", "save", "commit", "prune")] == [
        "record 1", "record 2", "record 3", "save 3 v3",
        "record 4", "record 5", "commit 3", "prune 3",
        "record 6", "save 6 v6",
        "record 7", "save 7 v7", "commit 7", "prune 7",
    ]  # fmt: skip
    told = {"step": 3, "background_s": 0.25, "size": 9}
    assert [r["checkpoint"] for r in events.records if "checkpoint" in r] == [told]
    assert [r["step"] for r in events.records if "checkpoint" in r] == [6], "the record after the commit"


def test_steps_of_the_log_are_trained_without_the_engine_and_the_teachers() -> None:
    events = Events(logged=frozenset({5, 6}))
    run(events.parts(), plan(first_step=5, last_step=7, policy_version=4))
    assert events.of("replay") == ["replay 5 v4", "replay 6 v5"]
    assert events.of("generate") == ["generate 7 v6"]
    assert events.of("score") == ["score 000007/a/0"]
    assert events.of("log") == ["log 7"]
    assert events.of("train") == ["train 5", "train 6", "train 7"]
    assert events.of("push") == ["push 5", "push 6", "push 7"]
    assert [r.get("replayed") for r in events.records] == [True, True, None]


@pytest.mark.parametrize("sleeps", [True, False])
def test_an_engine_that_sleeps_does_so_while_a_step_of_the_log_is_trained(sleeps: bool) -> None:
    """The push before has woken it, and it has nothing to write, after which it would."""
    events = Events(logged=frozenset({5, 6}), sleeps=sleeps)
    run(events.parts(), plan(first_step=5, last_step=7, policy_version=4))
    kinds = [line for line in events.seen if line.split()[0] in ("answer", "generate", "train", "push")]
    asleep = ["answer nothing"] if sleeps else []
    assert kinds == [
        *[*asleep, "train 5", "push 5"],
        *[*asleep, "train 6", "push 6"],
        *["generate 7 v6", "train 7", "push 7"],
    ]


def test_versions_count_pushes_and_the_engine_writes_with_the_last_one() -> None:
    events = Events()
    assert run(events.parts(), plan(first_step=7, last_step=9, policy_version=20)) == 9
    assert events.of("generate") == ["generate 7 v20", "generate 8 v21", "generate 9 v22"]
    assert events.of("push") == ["push 21", "push 22", "push 23"]
    assert [r["policy_version"] for r in events.records] == [21, 22, 23]


@pytest.mark.parametrize(
    ("every", "last", "saved"),
    [(1, 3, [1, 2, 3]), (2, 5, [2, 4, 5]), (2, 4, [2, 4]), (100, 3, [3])],
)
def test_checkpoints_come_every_so_often_and_once_at_the_end(every: int, last: int, saved: list[int]) -> None:
    events = Events()
    run(events.parts(), plan(last_step=last, checkpoint_every=every))
    assert events.of("save") == [f"save {step} v{step}" for step in saved]
    assert events.of("prune") == [f"prune {step}" for step in saved]


def test_a_resumed_run_keeps_the_cadence() -> None:
    events = Events()
    run(events.parts(), plan(first_step=4, last_step=7, policy_version=3, checkpoint_every=3, evaluate_every=3))
    assert events.of("save") == ["save 6 v6", "save 7 v7"]
    assert [r["step"] for r in events.records if "accuracy" in r] == [6]


@pytest.mark.parametrize(("every", "steps"), [(0, []), (1, [1, 2, 3, 4]), (3, [3])])
def test_evaluations_come_every_so_often(every: int, steps: list[int]) -> None:
    events = Events()
    run(events.parts(), plan(evaluate_every=every))
    assert [r["step"] for r in events.records if "accuracy" in r] == steps
    assert len(events.of("evaluate")) == len(steps)


def stop_after(step: int) -> Callable[[], bool]:
    calls = iter(range(1, 100))
    return lambda: next(calls) >= step


def test_stop_ends_after_the_step_with_a_checkpoint() -> None:
    events = Events()
    assert run(events.parts(), plan(last_step=10), stop_after(3)) == 3
    assert events.of("take") == ["take 1", "take 2", "take 3"]
    assert events.seen[-4:] == ["record 3", "save 3 v3", "commit 3", "prune 3"]
    assert events.of("save") == ["save 3 v3"]


def test_a_monitor_ends_the_run_after_the_step_with_a_checkpoint() -> None:
    events = Events(stopped_at=3)
    assert run(events.parts(), plan(last_step=10)) == 3
    assert events.seen[-4:] == ["record 3", "save 3 v3", "commit 3", "prune 3"]
    assert [[a["signal"] for a in r.get("alarms", ())] for r in events.records] == [[], [], ["gap"]]


def test_nothing_left_to_do() -> None:
    events = Events()
    assert run(events.parts(), plan(first_step=5, last_step=4)) == 4
    assert events.seen == []


def test_a_scoring_worker_that_died_is_in_the_record_of_its_step() -> None:
    events = Events(restarted={2: ("teacher worker 1", "teacher worker 0")})
    run(events.parts(), plan(last_step=3))
    assert [r.get("restarted") for r in events.records] == [None, ("teacher worker 1", "teacher worker 0"), None]


def test_a_push_that_did_not_arrive_leaves_no_record_and_no_checkpoint() -> None:
    events = Events(push_fails_at=2)
    with pytest.raises(RunError, match="did not arrive"):
        run(events.parts(), plan(checkpoint_every=1))
    assert events.of("record") == ["record 1"]
    assert events.of("save") == ["save 1 v1"]


def test_the_record_of_a_step() -> None:
    events = Events()
    run(events.parts(), plan(last_step=2, evaluate_every=2, checkpoint_every=1))
    first, second = events.records
    assert {k: v for k, v in first.items() if k not in ("phase_s", "busy_s")} == {
        "step": 1,
        "loss": 0.5,
        # What the payload does not tell is left out.
        "domains": {
            "a": {
                "loss": 0.5,
                "student_entropy": 1.0,
                "teacher_entropy": 0.25,
                "argmax_agreement": 0.75,
                "teacher_top1": 0.5,
                "tokens": 4,
                "samples": 1,
            },
            "b": {"tokens": 0, "samples": 0},  # means over no token are left out too
        },
        "positions": {
            "0": {"loss": 0.5, "tokens": 2},
            "1": {"loss": 1.0, "tokens": 2},
            "4-7": {"loss": 2.0, "tokens": 2},
        },
        "response_tokens": 3,
        "prompt_tokens": 2,
        "truncated": 1,
        "prompts": {"a": 1, "b": 1},
        "truncated_by_domain": {"a": 1},
        "quarantined": {"b": 1},
        "quarantined_reasons": {"b/0": "long"},
        "skipped": False,
        "stream": {"parts": 3, "bytes": 999, "peak_bytes": 77, "early_micro_batches": 2},
        "grad_norm": 1.5,
        "lr": 0.1,
        "logprob_gap": 1e-6,
        "drift": 0.0,
        "token_ages": {"0": 3},
        "policy_version": 1,
        "probe_gap": 2e-6,
    }
    assert set(first["phase_s"]) == {"rollout", "score", "train", "sync"}
    assert set(first["busy_s"]) == {"rollout", "teachers", "trainer"} and first["busy_s"]["teachers"] == 0.25
    # A checkpoint is begun after its step's record: its time is in the next one.
    assert set(second["phase_s"]) == {"rollout", "score", "train", "sync", "checkpoint", "evaluate"}
    assert second["checkpoint"]["step"] == 1
    assert second["accuracy"] == {"a": 0.5}


def test_the_record_has_what_the_objective_knows_of_clips_and_masses() -> None:
    events = Events(known={"clipped_sum": 1.0, "student_mass_sum": 3.0, "teacher_mass_sum": 3.5})  # over 4 tokens
    run(events.parts(), plan(last_step=1))
    domains = events.records[0]["domains"]
    names = ("clip_rate", "student_mass", "teacher_mass")
    assert [domains["a"][name] for name in names] == [0.25, 0.75, 0.875]
    assert not set(names) & set(domains["b"])


def test_what_a_teacher_could_not_score_is_not_trained_but_counted() -> None:
    events = Events(quarantined={"000001/a/0": "teacher t: hidden states are not finite"})
    run(events.parts(), plan(last_step=1))
    (record,) = events.records
    assert events.of("train") == ["train 1"]
    assert record["quarantined"] == {"a": 1, "b": 1}
    assert record["quarantined_reasons"] == {
        "b/0": "long",
        "000001/a/0": "teacher t: hidden states are not finite",
    }
    assert record["truncated"] == 2 and record["domains"]["a"]["samples"] == 1
    assert record["truncated_by_domain"] == {"a": 1}, "a share of the samples is never above 1"
    assert record["token_ages"] == {"0": 3}, "of two responses one is trained"


def test_a_step_that_trains_nothing_counts_no_truncated_response() -> None:
    events = Events(skips=True)
    run(events.parts(), plan(last_step=1))
    (record,) = events.records
    assert record["skipped"] and record["truncated"] == 1
    assert record["domains"] == {} and record["token_ages"] == {}
    assert record["truncated_by_domain"] == {}, "a share needs samples to be a share of"


@pytest.mark.parametrize("commits_after", [0, 1, 3])
@pytest.mark.parametrize("room", [1, 2, 3, 5])
def test_a_checkpoint_comes_early_where_the_log_lacks_room(room: int, commits_after: int) -> None:
    events = Events(max_logged=room, commits_after=commits_after)
    run(events.parts(), plan(last_step=12))
    assert events.most_in_log <= room
    assert len(events.of("save")) <= 12 // max(1, room - 1) + 1, "no more checkpoints than the room asks for"
    assert events.seen[-1] == "prune 12" and events.steps_in_log == []


def test_a_log_with_room_asks_for_no_checkpoint() -> None:
    events = Events(max_logged=12)
    run(events.parts(), plan(last_step=10))
    assert events.of("save") == ["save 10 v10"]


def test_a_step_of_which_the_log_has_the_rollouts_alone_is_scored_again() -> None:
    events = Events(logged=frozenset({1}), logs_targets=False)
    run(events.parts(), plan(last_step=2))
    assert events.of("replay") == ["replay 1 v0"] and events.of("generate") == ["generate 2 v1"]
    assert events.of("score") == ["score 000001/a/0", "score 000002/a/0"]
    assert events.of("log") == ["log 2"], "it is in the log already"
    assert [record.get("replayed") for record in events.records] == [True, None]
