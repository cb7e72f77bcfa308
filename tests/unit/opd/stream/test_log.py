"""The target log holds a step's streams bit by bit, whole or not at all, and gives back what a step was trained on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opd.errors import StorageError
from opd.interfaces import TargetSet
from opd.losses.chunked import LogitRule
from opd.stream.heads import head_array, head_tensor
from opd.stream.log import ArrowTargetLog
from opd.stream.schema import TargetRow, write_stream
from opd.types import Prompt, Quarantined, Rollout, RolloutBatch, Segment

PROMPTS = [Prompt(id=f"{d}/{i}", domain=d, token_ids=(1, 2 + i)) for d in "ab" for i in range(2)]
RULES = {"h": LogitRule(scale=2.0), "other": LogitRule(scale=3.0)}


class Teachers:
    """Have two heads."""

    def heads(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        return {"h": "handle of h", "other": "handle of other"}, RULES


def rollout(name: str, *, step: int = 12, mask: tuple[int, ...] = (3,), truncated: bool = False) -> Rollout:
    """`mask`: lengths of runs, trained and untrained in turn."""
    segments = tuple(Segment(length=n, trained=i % 2 == 0) for i, n in enumerate(mask))
    num = sum(mask)
    return Rollout(
        sample_id=f"{step:06d}/{name}", step=step, domain=name[0], policy_version=step - 1, prompt_ids=(1, 2),
        response_ids=tuple(range(3, 3 + num)), behaviour_logprobs=(-0.5,) * num, segments=segments, truncated=truncated,
    )  # fmt: skip


def scored(r: Rollout, teacher: str = "t", weight: float = 1.0) -> TargetRow:
    return TargetRow(
        sample_id=r.sample_id, step=r.step, domain=r.domain, teacher=teacher, weight=weight,
        policy_version=r.policy_version, prompt_ids=r.prompt_ids, response_ids=r.response_ids, loss_mask=r.loss_mask,
        behaviour_logprobs=r.behaviour_logprobs, head="h", hidden_size=2,
        hidden=np.arange(2 * len(r.response_ids), dtype=np.float32).tobytes(),
    )  # fmt: skip


def array(*rows: TargetRow) -> np.ndarray:
    return np.frombuffer(write_stream([rows], "float32"), dtype=np.uint8)


def a_step(step: int = 12) -> tuple[RolloutBatch, TargetSet]:
    """Four responses, one that its second teacher could not score, and one prompt that was too long."""
    one, two = rollout("b/0", step=step, mask=(2, 1, 1), truncated=True), rollout("a/0", step=step)
    three, lost = rollout("b/1", step=step, mask=(1,)), rollout("a/1", step=step, mask=(2, 3), truncated=True)
    batch = RolloutBatch(
        rollouts=(one, lost, two, three), quarantined=(Quarantined(prompt_id="b/9", domain="b", reason="long"),)
    )
    targets = TargetSet(
        streams=(array(scored(two), scored(lost)), array(scored(three), scored(one))),
        heads={"h": "handle of h"},
        head_rules={"h": RULES["h"]},
        quarantined={lost.sample_id: "teacher s: not finite"},
        rows=3,
    )
    return batch, targets


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def log(tmp_path: Path, said: list[str], in_process: Any) -> ArrowTargetLog:
    return ArrowTargetLog(tmp_path / "targets", Teachers(), said.append)  # type: ignore[arg-type]


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_streams_are_stored_as_they_are(log: ArrowTargetLog, tmp_path: Path) -> None:
    batch, targets = a_step()
    path = log.write(12, 11, PROMPTS, batch, targets)
    assert path == tmp_path / "targets" / "step-000012"
    assert names(path) == ["part-0.arrow", "part-1.arrow", "step.json"]
    for index, stream in enumerate(targets.streams):
        assert (path / f"part-{index}.arrow").read_bytes() == stream.tobytes()


def test_a_step_comes_back_as_it_was_written(log: ArrowTargetLog, said: list[str]) -> None:
    batch, targets = a_step()
    log.write(12, 11, PROMPTS, batch, targets)
    found = log.replay(12, 11, PROMPTS)
    assert found is not None
    assert found[0] == batch
    assert [s.tobytes() for s in found[1].streams] == [s.tobytes() for s in targets.streams]
    for field in ("heads", "head_rules", "quarantined", "rows", "restarted"):
        assert getattr(found[1], field) == getattr(targets, field)
    assert said == []


def test_steps_are_replayed_one_after_the_other(log: ArrowTargetLog, tmp_path: Path) -> None:
    for step in (5, 6):
        log.write(step, step - 1, PROMPTS, *a_step(step))
    found = [log.replay(step, step - 1, PROMPTS) for step in (5, 6, 7)]
    assert [f and f[0].rollouts[0].step for f in found] == [5, 6, None]
    assert names(tmp_path / "targets") == ["step-000005", "step-000006"]


def flip(data: bytes) -> bytes:
    return data[:200] + bytes([data[200] ^ 1]) + data[201:]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("part-1.arrow", flip, "part-1.arrow: its bytes were changed"),
        ("part-0.arrow", lambda data: data[:-1], "part-0.arrow: "),
        ("part-0.arrow", None, "part-0.arrow"),
        ("step.json", None, "step.json"),
        ("step.json", lambda data: data[:-5], "cannot be used"),
        ("step.json", lambda _: b"[]", "cannot be used"),
        ("step.json", lambda data: data.replace(b'"format": 1', b'"format": 2'), "format is 2, wanted 1"),
        ("step.json", lambda data: data.replace(b'"rows": 3', b'"rows": 4'), "4 rows in the streams"),
        ("step.json", lambda data: data.replace(b"000012/b/1", b"000012/b/2"), "000012/b/2"),
    ],
)
def test_a_damaged_step_and_all_after_it_are_rolled_out_again(
    name: str, change: Callable[[bytes], bytes] | None, words: str, log: ArrowTargetLog, said: list[str], tmp_path: Path
) -> None:
    for step in (11, 12, 13):
        log.write(step, step - 1, PROMPTS, *a_step(step))
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
        log.write(12, 11, PROMPTS, *a_step())
        assert log.replay(12, version, prompts) is None
        assert names(tmp_path / "targets") == []
    assert "policy_version is 11, wanted 10" in said[0]
    assert all("prompts is" in line for line in said[1:])


def test_a_step_whose_teacher_is_gone_is_not_taken(log: ArrowTargetLog, said: list[str]) -> None:
    batch, targets = a_step()
    stranger = dataclasses.replace(scored(batch.rollouts[0]), head="stranger")
    log.write(
        12,
        11,
        PROMPTS,
        batch,
        dataclasses.replace(targets, streams=(targets.streams[0], array(stranger, scored(batch.rollouts[3])))),
    )
    assert log.replay(12, 11, PROMPTS) is None
    assert "no teacher has the output head stranger" in said[0]


def test_what_lies_behind_a_gap_is_not_replayed(log: ArrowTargetLog, said: list[str], tmp_path: Path) -> None:
    """A resume from an older checkpoint: the log begins later, and was written by weights of another course."""
    for step in (5, 6):
        log.write(step, step - 1, PROMPTS, *a_step(step))
    assert log.replay(3, 2, PROMPTS) is None
    assert names(tmp_path / "targets") == []
    assert said == []


def test_a_step_that_is_taken_again_replaces_the_first(log: ArrowTargetLog, tmp_path: Path) -> None:
    batch, targets = a_step()
    log.write(12, 11, PROMPTS, batch, targets)
    log.write(12, 11, PROMPTS, batch, dataclasses.replace(targets, streams=targets.streams[:1]))
    assert names(tmp_path / "targets") == ["step-000012"]
    assert names(tmp_path / "targets" / "step-000012") == ["part-0.arrow", "step.json"]


def test_a_failure_half_way_leaves_no_step(log: ArrowTargetLog, tmp_path: Path) -> None:
    class Lost:
        @property
        def data(self) -> bytes:
            raise RuntimeError("the store is gone")

    batch, targets = a_step()
    with pytest.raises(RuntimeError, match="gone"):
        log.write(12, 11, PROMPTS, batch, dataclasses.replace(targets, streams=(targets.streams[0], Lost())))
    assert names(tmp_path / "targets") == []


def test_a_full_disk_leaves_the_steps_before(
    log: ArrowTargetLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.write(11, 10, PROMPTS, *a_step(11))
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
            StorageError, match=r"step-000012/part-1.arrow: could not be written: No space left on device"
        ):
            log.write(12, 11, PROMPTS, *a_step())
    assert written == ["part-0.arrow", "part-1.arrow"]
    assert names(tmp_path / "targets") == ["step-000011"]
    assert log.replay(11, 10, PROMPTS) is not None


def test_prune_drops_what_a_checkpoint_holds(log: ArrowTargetLog, tmp_path: Path) -> None:
    for step in (9, 10, 11):
        log.write(step, step - 1, PROMPTS, *a_step(step))
    log.prune(10)
    assert names(tmp_path / "targets") == ["step-000011"]


def test_the_manifest_is_small(log: ArrowTargetLog) -> None:
    """Ids and hidden states are in the streams alone."""
    batch, targets = a_step()
    data = json.loads((log.write(12, 11, PROMPTS, batch, targets) / "step.json").read_text())
    assert data["samples"] == [r.sample_id for r in batch.rollouts]
    assert [r["sample_id"] for r in data["unscored"]] == list(targets.quarantined)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_travels_bit_by_bit(dtype: torch.dtype) -> None:
    head = torch.randn(7, 3).to(dtype)
    back = head_tensor(head_array(head))
    assert back.dtype == dtype
    assert torch.equal(back, head)
