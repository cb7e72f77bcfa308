"""A teacher's hidden states are those that its own head turns into its log-probs of the student's tokens."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from opd.config import PipelineConfig
from opd.errors import RunError
from opd.stream.heads import head_tensor
from opd.stream.schema import read_stream
from opd.types import Rollout, Segment, Teacher
from teachers.pool import Pool, _share_out
from teachers.scorer import TransformersScorer, _batches


def rollout(i: int, domain: str = "reverse", prompt: int = 4, response: int = 5) -> Rollout:
    rng = random.Random(i)
    return Rollout(
        sample_id=f"000001/{domain}/{i}", step=1, domain=domain, policy_version=0,
        prompt_ids=tuple(rng.choices(range(76), k=prompt)), response_ids=tuple(rng.choices(range(76), k=response)),
        behaviour_logprobs=(-1.0,) * response, segments=(Segment(length=response, trained=True),), truncated=False,
    )  # fmt: skip


@pytest.fixture
def teachers(expert_dirs: dict[str, Path]) -> dict[str, Teacher]:
    """By domain."""
    names = {"reverse": "rev", "upper": "up"}
    return {d: Teacher(name=n, domain=d, model_dir=expert_dirs[n]) for d, n in names.items()}


@torch.no_grad()
def check_rows(rows: Sequence[Any], heads: dict[str, torch.Tensor], dirs: dict[str, Path]) -> None:
    """Each row's states times its head give what transformers gives for the sequence alone."""
    from transformers import AutoModelForCausalLM

    models = {n: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for n, path in dirs.items()}
    for row in rows:
        ids = [*row.prompt_ids, *row.response_ids]
        logits = models[row.teacher](input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        want = logits.log_softmax(-1)[len(row.prompt_ids) - 1 : -1]
        states = torch.frombuffer(bytearray(row.hidden), dtype=torch.float32).view(-1, row.hidden_size)
        found = (states @ heads[row.head].T).log_softmax(-1)
        torch.testing.assert_close(found, want, rtol=0, atol=1e-5)


def test_states_and_head_give_the_teachers_log_probs(
    teachers: dict[str, Teacher], expert_dirs: dict[str, Path]
) -> None:
    scorer = TransformersScorer("float32")
    rows, heads = [], {}
    for turn in range(2):  # back and forth: weights are swapped in place
        for domain, teacher in teachers.items():
            rollouts = [rollout(10 * turn + i, domain, prompt=1 + 3 * i, response=1 + i) for i in range(6)]
            scored = [row for batch in scorer.score(teacher, rollouts) for row in batch]
            assert {r.sample_id for r in scored} == {r.sample_id for r in rollouts}
            rows += scored
            heads[scorer.head_key(teacher)] = scorer.head(teacher)
    assert {r.teacher for r in rows} == {"rev", "up"}
    assert len(heads) == 2
    check_rows(rows, heads, expert_dirs)


def test_a_row_carries_its_rollout(teachers: dict[str, Teacher]) -> None:
    given = rollout(3)
    ((row,),) = TransformersScorer("float32").score(teachers["reverse"], [given])
    for name in ("sample_id", "step", "domain", "policy_version", "prompt_ids", "response_ids", "behaviour_logprobs"):
        assert getattr(row, name) == getattr(given, name)
    assert (row.teacher, row.loss_mask, row.hidden_size) == ("rev", given.loss_mask, 64)


def test_equal_heads_have_one_key(teachers: dict[str, Teacher], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(teachers["reverse"].model_dir, tmp_path / "copy"))
    scorer = TransformersScorer("float32")
    keys = [scorer.head_key(t) for t in teachers.values()]
    assert len(set(keys)) == 2
    assert scorer.head_key(Teacher(name="other", domain="other", model_dir=copy)) == keys[0]
    assert TransformersScorer("bfloat16").head_key(teachers["reverse"]) not in keys


def test_states_that_are_not_finite_stop_the_run(teachers: dict[str, Teacher], tmp_path: Path) -> None:
    broken = Path(shutil.copytree(teachers["reverse"].model_dir, tmp_path / "broken"))
    state = load_file(broken / "model.safetensors")
    state["model.norm.weight"][3] = torch.nan
    save_file(state, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunError, match=r"teacher bad: hidden states of 000001/reverse/3 are not finite"):
        list(TransformersScorer("float32").score(Teacher(name="bad", domain="d", model_dir=broken), [rollout(3)]))


@pytest.mark.parametrize("damage", ["missing", "unexpected"])
def test_weights_that_do_not_fit_their_config_stop_the_run(
    damage: str, teachers: dict[str, Teacher], tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(teachers["reverse"].model_dir, tmp_path / "broken"))
    state = load_file(broken / "model.safetensors")
    if damage == "missing":
        del state["model.layers.1.mlp.up_proj.weight"]
    else:
        state["model.layers.9.mlp.up_proj.weight"] = torch.zeros(1)
    state["model.norm.weight"] *= 2
    save_file(state, broken / "model.safetensors", {"format": "pt"})
    scorer = TransformersScorer("float32")
    (want,) = scorer.score(teachers["reverse"], [rollout(1)])
    bad = Teacher(name="bad", domain="d", model_dir=broken)
    for _ in range(2):  # a half-loaded teacher must not pass for the whole one the second time
        with pytest.raises(RunError, match=f"teacher bad: .*{damage} .*up_proj"):
            list(scorer.score(bad, [rollout(1)]))
    (again,) = scorer.score(teachers["reverse"], [rollout(1)])
    assert bytes(again[0].hidden) == bytes(want[0].hidden)


def test_batches_hold_every_row_once_and_stay_small() -> None:
    rollouts = [rollout(i, prompt=300, response=10 + i) for i in range(60)]
    batches = list(_batches(rollouts))
    assert sorted(r.sample_id for b in batches for r in b) == sorted(r.sample_id for r in rollouts)
    assert all(sum(len(r.prompt_ids) + len(r.response_ids) for r in b) <= 4096 for b in batches)
    assert list(_batches([])) == []
    assert [len(b) for b in _batches([rollout(0, prompt=9000), rollout(1)])] == [1, 1]


# The pool


def pool(teachers: dict[str, Teacher], workers: int) -> Pool:
    config = PipelineConfig.model_validate(
        {
            "name": "n",
            "student": {"model": "base"},
            "experts": {"e": {"model": "m", "domain": "d"}},
            "domains": {"d": {}},
            "trainer": {"steps": 1, "samples_per_step": 2},
            "teachers": {"workers": workers},
        }
    )
    made = Pool(config, teachers)
    made.wait_ready()
    return made


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_rollout_goes_to_the_teacher_of_its_domain(
    workers: int, teachers: dict[str, Teacher], expert_dirs: dict[str, Path], in_process: Any
) -> None:
    rollouts = [rollout(i, domain) for i in range(4) for domain in ("upper", "reverse")]
    targets = pool(teachers, workers).score(rollouts)
    rows = [row for s in targets.streams for row in read_stream(memoryview(s)).rows]
    assert {r.sample_id: r.teacher for r in rows} == {
        r.sample_id: {"upper": "up", "reverse": "rev"}[r.domain] for r in rollouts
    }
    assert targets.rows == len(rows) == 8
    assert len(targets.streams) == workers

    def head(value: Any) -> torch.Tensor:
        return head_tensor(value if isinstance(value, np.ndarray) else value[0])

    check_rows(rows, {key: head(value) for key, value in targets.heads.items()}, expert_dirs)


def test_only_heads_that_rows_need_are_sent(teachers: dict[str, Teacher], in_process: Any) -> None:
    scored = pool(teachers, 1)
    assert len(scored.score([rollout(0, "upper")]).heads) == 1
    assert len(scored.score([rollout(0, "upper"), rollout(1)]).heads) == 2


def test_a_domain_without_a_teacher_is_an_error(teachers: dict[str, Teacher], in_process: Any) -> None:
    with pytest.raises(RunError, match="no teacher for domain 'math'; teachers serve reverse, upper"):
        pool(teachers, 1).score([rollout(0), rollout(1, "math")])


def test_a_step_without_rollouts(teachers: dict[str, Teacher], in_process: Any) -> None:
    targets = pool(teachers, 2).score([])
    assert (targets.rows, dict(targets.heads)) == (0, {})
    assert [read_stream(memoryview(s)).rows for s in targets.streams] == [(), ()]


def test_a_teachers_rows_stay_together_and_workers_are_balanced() -> None:
    groups = [
        (
            Teacher(name=f"t{i}", domain=f"d{i}", model_dir=Path(f"t{i}")),
            tuple(rollout(j, f"d{i}") for j in range(i + 1)),
        )
        for i in range(8)
    ]
    shares = _share_out(groups, 3)
    assert sorted(t.name for share in shares for t, _ in share) == [f"t{i}" for i in range(8)]
    loads = [sum(9 * len(rows) for _, rows in share) for share in shares]
    assert max(loads) - min(loads) <= 9 * 8
