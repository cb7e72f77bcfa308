"""The target log holds a step's streams bit by bit, whole or not at all, and gives back what a step was trained on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3

from opd.errors import StorageError
from opd.models.heads import HeadSource, head_array, head_tensor
from opd.models.logit_rule import LogitRule
from opd.records.episodes import Audit, EpisodesRecord, EpisodeStats
from opd.records.guard import GuardEvent, GuardStats, Verdict
from opd.records.types import Prompt, QuarantinedPrompt, Rollout, RolloutBatch
from opd.stream.log import ArrowTargetLog
from opd.stream.part_files import PartsDirectory
from opd.stream.rollouts import read_file, write_file
from opd.stream.schema import PartRecord, StreamError, TargetRow, write_stream
from opd.stream.targets import ExpectedRow, StreamPart, TargetStream, TeacherRequest, make_part
from tests.rows import changed, make_rollout, make_row

PROMPTS = [Prompt(id=f"{d}/{i}", domain=d, token_ids=(1, 2 + i)) for d in "ab" for i in range(2)]
VOCABULARY = 76
RULES = {"h": LogitRule(scale=2.0), "other": LogitRule(scale=3.0)}
HEADS = {key: HeadSource(key=key, rule=rule) for key, rule in RULES.items()}


class Teachers:
    """Have two heads."""

    def heads(self) -> Mapping[str, HeadSource]:
        return HEADS


def rollout(name: str, *, step: int = 12, mask: tuple[int, ...] = (3,), truncated: bool = False) -> Rollout:
    """`mask`: lengths of runs, of the policy and of an environment in turn."""
    num = sum(mask)
    return make_rollout(
        sample_id=f"{step:06d}/{name}", step=step, domain=name[0], policy_version=step - 1, prompt_ids=(1, 2),
        response_ids=tuple(range(3, 3 + num)), behaviour_logprobs=(-0.5,) * num, truncated=truncated,
        loss_mask=[i % 2 == 0 for i, n in enumerate(mask) for _ in range(n)],
    )  # fmt: skip


def scored(r: Rollout, teacher: str = "t", weight: float = 1.0) -> TargetRow:
    return make_row(
        sample_id=r.sample_id, step=r.step, domain=r.domain, teacher=teacher, weight=weight,
        spans=r.spans, stop_reason=r.stop_reason, prompt_ids=r.prompt_ids, response_ids=r.response_ids,
        behaviour_logprobs=r.behaviour_logprobs, head="h", hidden_size=2,
        hidden=np.arange(2 * r.num_trained, dtype=np.float32).tobytes(),
    )  # fmt: skip


def part(*rows: TargetRow, **record: Any) -> np.ndarray:
    return np.frombuffer(write_stream(rows, "float32", part=PartRecord(**record)), dtype=np.uint8)


TEACHERS = {"a": {"t": ExpectedRow(weight=1.0, head="h")}, "b": {"t": ExpectedRow(weight=1.0, head="h")}}


def stream(
    batch: RolloutBatch, parts: list[np.ndarray], teachers: Any = TEACHERS, made: Iterator[StreamPart] | None = None
) -> TargetStream:
    return TargetStream(
        made or (make_part(raw, "teachers") for raw in parts),
        TeacherRequest(rollouts=batch.rollouts, teachers=teachers, kind=("float32", "hidden_states"), max_quarantined=0.0),
        heads={"h": HEADS["h"]},
    )  # fmt: skip


def a_step(step: int = 12) -> tuple[RolloutBatch, list[np.ndarray]]:
    """Four responses, one that its teacher could not score, and one prompt that was too long; three parts."""
    one, two = rollout("b/0", step=step, mask=(2, 1, 1), truncated=True), rollout("a/0", step=step)
    three, lost = rollout("b/1", step=step, mask=(1,)), rollout("a/1", step=step, mask=(2, 3), truncated=True)
    batch = RolloutBatch(
        rollouts=(one, lost, two, three), quarantined=(QuarantinedPrompt(prompt_id="b/9", domain="b", reason="long"),),
        episodes={"a": EpisodeStats(episodes=2, audit=Audit(turns=5, forks=1), stop_reasons={"done": 2}, reward_sum=0.5)},
    )  # fmt: skip
    parts = [
        part(scored(two), broken={lost.sample_id: "teacher t: not finite"}),
        part(scored(three), worker=1, teachers={"t": 1}),
        part(scored(one), number=1, teachers={"t": 2}),
    ]
    return batch, parts


def record(
    log: ArrowTargetLog, step: int, version: int, prompts: list[Prompt], batch: RolloutBatch, parts: list[np.ndarray],
    teachers: Any = TEACHERS,
) -> None:  # fmt: skip
    targets = stream(batch, parts, teachers)
    log.record(step, version, prompts, batch, targets)
    targets.wait_for_parts()
    targets.wait_for_sinks()


PARTS = ["worker-0-part-0000.arrow", "worker-0-part-0001.arrow", "worker-1-part-0000.arrow"]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def log(tmp_path: Path, said: list[str], in_process: Any) -> ArrowTargetLog:
    return ArrowTargetLog(tmp_path / "targets", Teachers(), VOCABULARY, said.append)  # type: ignore[arg-type]


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_what_the_guard_and_its_judge_said_comes_back_with_the_step(log: ArrowTargetLog) -> None:
    batch, parts = a_step()
    said = Verdict(allowed=False, stage="judge", suspicion="rule", rule="network", reason="It said so: ünique.")
    event = GuardEvent(episode="000012/a/0", turn=1, tool="shell", text="curl x.org", verdict=said)
    stats = dataclasses.replace(batch.episodes["a"], guard=GuardStats(checked=3, blocked_turns=1, events=(event,)))
    one, lost, two, three = batch.rollouts
    spans = tuple(dataclasses.replace(span, origin="blocked") for span in two.spans)
    two = dataclasses.replace(two, spans=spans)
    batch = dataclasses.replace(batch, rollouts=(one, lost, two, three), episodes={"a": stats})
    parts[0] = part(scored(two), broken={lost.sample_id: "teacher t: not finite"})
    record(log, 12, 11, PROMPTS, batch, parts)
    replayed = log.replay(12, 11, PROMPTS)
    assert replayed is not None and replayed[0] == batch
    assert EpisodesRecord.from_stats(replayed[0].episodes["a"], {}) == EpisodesRecord.from_stats(stats, {})


def test_parts_are_stored_as_they_are(log: ArrowTargetLog, tmp_path: Path) -> None:
    batch, parts = a_step()
    record(log, 12, 11, PROMPTS, batch, parts)
    path = tmp_path / "targets" / "step-000012"
    assert names(path) == ["rollouts.arrow", "step.json", *PARTS]
    for name, index in zip(PARTS, (0, 2, 1), strict=True):
        assert (path / name).read_bytes() == parts[index].tobytes()


def test_a_part_is_on_disk_before_it_is_trained_and_the_step_is_there_once_all_have_settled(
    log: ArrowTargetLog, tmp_path: Path
) -> None:
    batch, parts = a_step()
    targets = stream(batch, parts)
    log.record(12, 11, PROMPTS, batch, targets)
    for index in range(3):
        assert targets.take_part() is not None
        assert names(tmp_path / "targets") == [".tmp-step-000012"]
        assert len(names(tmp_path / "targets" / ".tmp-step-000012")) == index + 1
    assert targets.take_part() is None
    targets.wait_for_sinks()
    assert names(tmp_path / "targets") == ["step-000012"]


def test_a_step_comes_back_as_it_was_written(log: ArrowTargetLog, said: list[str]) -> None:
    batch, parts = a_step()
    record(log, 12, 11, PROMPTS, batch, parts)
    found = log.replay(12, 11, PROMPTS)
    assert found is not None
    assert found[0] == batch
    targets = found[1]
    assert targets.arrived and targets.quarantined == {"000012/a/1": "teacher t: not finite"}
    assert (targets.heads, targets.rows) == ({"h": HEADS["h"]}, 3)
    taken = []
    while (each := targets.take_part()) is not None:
        taken.append(each.handle.read_bytes())
    assert taken == [p.tobytes() for p in parts]
    assert said == []


def test_steps_are_replayed_one_after_the_other(log: ArrowTargetLog, tmp_path: Path) -> None:
    for step in (5, 6):
        record(log, step, step - 1, PROMPTS, *a_step(step))
    found = [log.replay(step, step - 1, PROMPTS) for step in (5, 6, 7)]
    assert [f and f[0].rollouts[0].step for f in found] == [5, 6, None]
    assert names(tmp_path / "targets") == ["step-000005", "step-000006"]


def flip(data: bytes) -> bytes:
    return data[:200] + bytes([data[200] ^ 1]) + data[201:]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (PARTS[1], flip, f"{PARTS[1]}: its bytes were changed"),
        (PARTS[0], lambda data: data[:-1], f"{PARTS[0]}: "),
        (PARTS[2], None, PARTS[2]),
        ("step.json", None, "step.json"),
        ("step.json", lambda data: data[:-5], "cannot be used"),
        ("step.json", lambda _: b"[]", "cannot be used"),
        ("step.json", lambda data: data.replace(b'"format": 6', b'"format": 5'), "format is 5, wanted 6"),
        ("step.json", lambda data: data.replace(b'{"weight": 1.0', b'{"weight": 0.5'), "another weight or head"),
        ("step.json", lambda data: data.replace(b'"t": {', b'"s": {'), "not asked for"),
        ("rollouts.arrow", flip, "rollouts.arrow: its bytes were changed"),
        ("rollouts.arrow", None, "rollouts.arrow"),
    ],
)
def test_a_damaged_step_and_all_after_it_are_rolled_out_again(
    name: str, change: Callable[[bytes], bytes] | None, words: str, log: ArrowTargetLog, said: list[str], tmp_path: Path
) -> None:
    for step in (11, 12, 13):
        record(log, step, step - 1, PROMPTS, *a_step(step))
    file = tmp_path / "targets" / "step-000012" / name
    file.write_bytes(change(file.read_bytes())) if change else file.unlink()
    assert log.replay(11, 10, PROMPTS) is not None
    assert log.replay(12, 11, PROMPTS) is None
    assert len(said) == 1
    assert "step 12 is rolled out again" in said[0]
    assert words in said[0]
    assert names(tmp_path / "targets") == ["step-000011"]


def test_an_answer_to_another_question_is_not_taken(log: ArrowTargetLog, said: list[str], tmp_path: Path) -> None:
    others = [PROMPTS[:-1], [*PROMPTS[1:], PROMPTS[0]], [dataclasses.replace(PROMPTS[0], token_ids=(1,)), *PROMPTS[1:]]]
    for version, prompts in [(10, PROMPTS), *((11, other) for other in others)]:
        record(log, 12, 11, PROMPTS, *a_step())
        assert log.replay(12, version, prompts) is None
        assert names(tmp_path / "targets") == []
    assert "policy_version is 11, wanted 10" in said[0]
    assert all("prompts is" in line for line in said[1:])


def test_a_step_whose_teacher_is_gone_is_not_taken(log: ArrowTargetLog, said: list[str]) -> None:
    batch, parts = a_step()
    teachers = TEACHERS | {"b": {"t": ExpectedRow(weight=1.0, head="stranger")}}
    one, three = batch.rollouts[0], batch.rollouts[3]
    parts[1] = part(changed(scored(three), head="stranger"), worker=1, teachers={"t": 1})
    parts[2] = part(changed(scored(one), head="stranger"), number=1, teachers={"t": 2})
    record(log, 12, 11, PROMPTS, batch, parts, teachers)
    assert log.replay(12, 11, PROMPTS) is None
    assert "no teacher has the output head stranger" in said[0]


def test_what_lies_behind_a_gap_is_not_replayed(log: ArrowTargetLog, said: list[str], tmp_path: Path) -> None:
    """A resume from an older checkpoint: the log begins later, and was written by weights of another course."""
    for step in (5, 6):
        record(log, step, step - 1, PROMPTS, *a_step(step))
    assert log.replay(3, 2, PROMPTS) is None
    assert names(tmp_path / "targets") == []
    assert said == []


def test_a_step_that_is_taken_again_replaces_the_first(log: ArrowTargetLog, tmp_path: Path) -> None:
    batch, parts = a_step()
    record(log, 12, 11, PROMPTS, batch, parts)
    two, lost = batch.rollouts[2], batch.rollouts[1]
    fewer = dataclasses.replace(batch, rollouts=(lost, two))
    record(log, 12, 11, PROMPTS, fewer, [part(scored(two), broken={lost.sample_id: "why"}, teachers={"t": 1})])
    assert names(tmp_path / "targets") == ["step-000012"]
    assert names(tmp_path / "targets" / "step-000012") == ["rollouts.arrow", "step.json", PARTS[0]]


def test_a_step_that_does_not_end_is_not_in_the_log(log: ArrowTargetLog, tmp_path: Path) -> None:
    batch, parts = a_step()
    with pytest.raises(StreamError):
        record(log, 12, 11, PROMPTS, batch, parts[:2])
    assert names(tmp_path / "targets") == [".tmp-step-000012"], "which the next command sweeps"
    assert log.replay(12, 11, PROMPTS) is None
    record(log, 12, 11, PROMPTS, batch, parts)
    assert names(tmp_path / "targets") == ["step-000012"]


def test_a_full_disk_leaves_the_steps_before(
    log: ArrowTargetLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(log, 11, 10, PROMPTS, *a_step(11))
    write_bytes, written = Path.write_bytes, []

    def fills_up(self: Path, data: Any) -> int:
        written.append(self.name)
        if len(written) == 2:
            write_bytes(self, bytes(data)[:40])
            raise OSError(28, "No space left on device", str(self))
        return write_bytes(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fills_up)
        with pytest.raises(
            StorageError, match=r"step-000012/worker-1-part-0000.arrow: could not be written: No space left on device"
        ):
            record(log, 12, 11, PROMPTS, *a_step())
    assert written == [PARTS[0], PARTS[2]]
    assert names(tmp_path / "targets") == ["step-000011"]
    assert log.replay(11, 10, PROMPTS) is not None


def own_part(raw: np.ndarray, directory: PartsDirectory) -> StreamPart:
    """As from a worker that wrote it; the bytes themselves nobody may fetch."""
    made = make_part(raw, "teachers")
    file = directory.write_part(made.summary.record, raw.data)
    return StreamPart(handle="far away", summary=dataclasses.replace(made.summary, file=file), driver_bytes=300)


def test_what_workers_wrote_goes_into_the_log_without_the_driver(log: ArrowTargetLog, tmp_path: Path) -> None:
    batch, parts = a_step()
    record(log, 11, 10, PROMPTS, *a_step(11))
    directory = log.begin(12)
    assert directory is not None and directory.is_here()
    (directory.path / "worker-7-part-0000.arrow").write_bytes(b"of a worker that died")
    targets = stream(batch, parts, made=(own_part(raw, directory) for raw in parts))
    log.record(12, 11, PROMPTS, batch, targets)
    targets.wait_for_parts()
    targets.wait_for_sinks()
    assert targets.driver_bytes == 900
    path = tmp_path / "targets" / "step-000012"
    assert names(path) == ["rollouts.arrow", "step.json", *PARTS]
    found = log.replay(12, 11, PROMPTS)
    assert found is not None and found[1] is not None and found[1].driver_bytes == 0
    assert [path / PARTS[i] for i in (0, 2, 1)] == [part.handle for part in found[1].collected]


def test_rollouts_alone_come_back_without_targets(tmp_path: Path, said: list[str], in_process: Any) -> None:
    log = ArrowTargetLog(tmp_path / "targets", Teachers(), VOCABULARY, said.append, keeps_targets=False)  # type: ignore[arg-type]
    batch, parts = a_step()
    assert log.begin(12) is None
    record(log, 12, 11, PROMPTS, batch, parts)
    assert names(tmp_path / "targets" / "step-000012") == ["rollouts.arrow", "step.json"]
    assert log.replay(12, 11, PROMPTS) == (batch, None) and said == []


def test_the_log_says_when_it_lacks_room(tmp_path: Path, in_process: Any) -> None:
    def opened(max_bytes: int | None) -> ArrowTargetLog:
        return ArrowTargetLog(tmp_path / "targets", Teachers(), VOCABULARY, print, max_bytes=max_bytes)  # type: ignore[arg-type]

    log = opened(None)
    record(log, 11, 10, PROMPTS, *a_step(11))
    size = sum(path.stat().st_size for path in (tmp_path / "targets" / "step-000011").iterdir())
    assert not log.lacks_room(10**9)
    log = opened(3 * size)
    assert (log.lacks_room(2), log.lacks_room(3)) == (False, True), "a resume counts what is there"
    record(log, 12, 11, PROMPTS, *a_step(12))
    assert (log.lacks_room(1), log.lacks_room(2)) == (False, True)
    log.prune(11)
    assert not log.lacks_room(2)
    log.prune(12)
    assert (log.lacks_room(3), log.lacks_room(4)) == (False, True)


def test_prune_drops_what_a_checkpoint_holds(log: ArrowTargetLog, tmp_path: Path) -> None:
    for step in (9, 10, 11):
        record(log, step, step - 1, PROMPTS, *a_step(step))
    log.prune(10)
    assert names(tmp_path / "targets") == ["step-000011"]


def test_the_manifest_is_small(log: ArrowTargetLog, tmp_path: Path) -> None:
    """Rollouts are in a file of their own, hidden states in the streams alone."""
    batch, parts = a_step()
    record(log, 12, 11, PROMPTS, batch, parts)
    data = json.loads((tmp_path / "targets" / "step-000012" / "step.json").read_text())
    assert set(data) == {
        "format",
        "step",
        "policy_version",
        "prompts",
        "files",
        "parts",
        "kind",
        "teachers",
        "refused",
        "episodes",
    }
    assert read_file((tmp_path / "targets" / "step-000012" / "rollouts.arrow").read_bytes(), 76) == list(batch.rollouts)


def test_a_row_about_another_rollout_than_the_logged_one_is_not_taken(
    log: ArrowTargetLog, said: list[str], tmp_path: Path
) -> None:
    batch, parts = a_step()
    record(log, 12, 11, PROMPTS, batch, parts)
    directory = tmp_path / "targets" / "step-000012"
    other = dataclasses.replace(batch.rollouts[2], reward=1.0)
    raw = write_file([*batch.rollouts[:2], other, batch.rollouts[3]]).to_pybytes()
    (directory / "rollouts.arrow").write_bytes(raw)
    manifest = json.loads((directory / "step.json").read_text())
    manifest["files"]["rollouts.arrow"] = {"blake3": blake3(raw).hexdigest(), "bytes": len(raw)}
    (directory / "step.json").write_text(json.dumps(manifest))
    assert log.replay(12, 11, PROMPTS) is None
    assert "row 000012/a/0 of teacher t: not the rollout that was sent" in said[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_travels_bit_by_bit(dtype: torch.dtype) -> None:
    head = torch.randn(7, 3).to(dtype)
    back = head_tensor(head_array(head))
    assert back.dtype == dtype
    assert torch.equal(back, head)


@pytest.mark.parametrize("unscored", [False, True])
def test_a_logged_id_that_is_no_token_is_rolled_out_again(
    unscored: bool, log: ArrowTargetLog, said: list[str], tmp_path: Path
) -> None:
    """Refuse what a padding row of the student's head once wrote: it would crash the trainer at every resume."""
    batch, parts = a_step()
    one, lost, two, three = batch.rollouts
    if unscored:
        lost = dataclasses.replace(lost, response_ids=(VOCABULARY, *lost.response_ids[1:]))
    else:
        two = dataclasses.replace(two, response_ids=(3, VOCABULARY, 5))
        parts[0] = part(scored(two), broken={lost.sample_id: "teacher t: not finite"})
    record(log, 12, 11, PROMPTS, dataclasses.replace(batch, rollouts=(one, lost, two, three)), parts)
    assert log.replay(12, 11, PROMPTS) is None
    assert names(tmp_path / "targets") == []
    wrong = lost if unscored else two
    assert said == [
        "warning: step 12 is rolled out again, the target log cannot be used: "
        f"rollout {wrong.sample_id}: token id 76, the tokenizer knows 0 to 75"
    ]
