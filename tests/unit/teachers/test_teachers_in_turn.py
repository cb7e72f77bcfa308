"""A scoring worker takes its teachers in turn: each is read once a step, ahead if there is room, with equal answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from opd.records.types import Rollout, Teacher
from teachers.scorers import ScorerOptions
from teachers.shares import TeacherRows
from teachers.worker import TeacherWorker
from tests.rows import make_rollout


def rollouts(domain: str) -> tuple[Rollout, ...]:
    rng = random.Random(domain)
    return tuple(
        make_rollout(
            sample_id=f"000001/{domain}/{i}", step=1, domain=domain, policy_version=0,
            prompt_ids=tuple(rng.choices(range(76), k=4)), response_ids=tuple(rng.choices(range(76), k=3 + i)),
            behaviour_logprobs=(-1.0,) * (3 + i),
        )
        for i in range(4)
    )  # fmt: skip


@pytest.fixture(scope="module")
def groups(make_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[TeacherRows]:
    """Four full models of one shape, each with rows of its own."""
    root = tmp_path_factory.mktemp("many")
    dirs = {f"e{seed}": make_model_dir(root / f"e{seed}", seed=seed) for seed in range(4)}
    return [(Teacher(name=name, model_dir=path), 1.0, rollouts(name)) for name, path in dirs.items()]


def model_bytes(groups: list[TeacherRows]) -> int:
    return sum(t.nbytes for t in load_file(groups[0][0].model_dir / "model.safetensors").values())


def worker(memory_bytes: int, dtype: str = "float32") -> Any:
    return TeacherWorker(
        "transformers",
        ScorerOptions(dtype=dtype, payload="hidden_states", top_k=4, vocab_size=76, memory_bytes=memory_bytes),
    )


def score(scoring: Any, groups: list[TeacherRows]) -> list[bytes]:
    """All parts of a step."""
    scoring.begin_rows(groups, 0)
    parts = []
    while (part := scoring.next_part()[1]) is not None:
        parts.append(bytes(part))
    return parts


@pytest.mark.parametrize(("kept", "loads"), [(0, [4, 8]), (1, [4, 8]), (2, [4, 8]), (4, [4, 4])])
def test_a_step_reads_each_teacher_once_and_any_budget_gives_the_same(
    kept: int, loads: list[int], groups: list[TeacherRows]
) -> None:
    wanted = score(worker(1 << 30), groups)
    scoring = worker(max(1, kept * model_bytes(groups)))
    for total in loads:
        assert score(scoring, groups) == wanted
        assert scoring._scorer._weights.loads == total
        assert scoring._scorer._weights.nbytes <= max(1, kept) * model_bytes(groups)
    assert len({id(one.skeleton) for one in scoring._scorer._architectures.values()}) == 1, (
        "equal but for where they lie"
    )


def test_the_next_teacher_is_read_while_this_one_scores(
    groups: list[TeacherRows], monkeypatch: pytest.MonkeyPatch
) -> None:
    scoring = worker(1 << 30)
    events: list[str] = []
    weights, scorer = scoring._scorer._weights, scoring._scorer
    get, prefetch, forward = weights.get, weights.prefetch, scorer._compute_trained_states

    def noted_get(teacher: Teacher) -> Any:
        events.append(f"load {teacher.name}")
        return get(teacher)

    def noted_prefetch(teacher: Teacher) -> None:
        events.append(f"ahead {teacher.name}")
        prefetch(teacher)

    def noted_forward(rows: Any, layout: str) -> Any:
        events.append(f"score {rows[0].domain}")
        return forward(rows, layout)

    monkeypatch.setattr(weights, "get", noted_get)
    monkeypatch.setattr(weights, "prefetch", noted_prefetch)
    monkeypatch.setattr(scorer, "_compute_trained_states", noted_forward)
    score(scoring, groups[:3])
    assert events == [
        *("load e0", "ahead e1", "score e0"),
        *("load e1", "ahead e2", "score e1"),
        *("load e2", "score e2"),
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_of_the_teacher_before_is_held_while_the_next_is_read(
    dtype: str, groups: list[TeacherRows], monkeypatch: pytest.MonkeyPatch
) -> None:
    scoring = worker(1, dtype)
    scorer = scoring._scorer
    read, held = scorer._weights._read, []

    def noted(directory: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        if scorer._model is not None:
            held.append([name for name, p in scorer._model.named_parameters() if p.device.type != "meta"])
        return read(directory, dtype)

    monkeypatch.setattr(scorer._weights, "_read", noted)
    score(scoring, groups)
    assert held == [[], [], []]


def test_teachers_in_memory_take_each_others_place_without_torchs_loading(
    groups: list[TeacherRows], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [score(worker(1 << 30), [group]) for group in groups]
    scoring = worker(1 << 30)
    score(scoring, groups)  # all are in memory now
    calls: list[str] = []
    load = torch.nn.Module.load_state_dict

    def noted(module: torch.nn.Module, *args: Any, **options: Any) -> Any:
        calls.append(type(module).__name__)
        return load(module, *args, **options)

    monkeypatch.setattr(torch.nn.Module, "load_state_dict", noted)
    assert [score(scoring, [group]) for group in groups] == wanted
    assert calls == []
    head = scoring._scorer._model.get_output_embeddings().weight
    assert head is scoring._scorer._model.get_input_embeddings().weight, "still tied"


def test_a_teacher_with_other_tensors_takes_the_long_way(groups: list[TeacherRows]) -> None:
    scoring = worker(1 << 30)
    score(scoring, groups[:2])
    architecture = scoring._scorer._get_architecture(groups[0][0].model_dir)
    state = load_file(groups[0][0].model_dir / "model.safetensors")
    first = next(iter(state))
    assert not architecture.replace_tensors({name: tensor for name, tensor in state.items() if name != first})
    assert not architecture.replace_tensors({**state, first: state[first][:1]})
    assert architecture.replace_tensors(state)
