"""Teachers that stay on a GPU; the CPU stands for it, with copies of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from opd.records.types import Teacher
from teachers.device_cache import DeviceCache
from teachers.scorers import ScorerOptions
from teachers.scorers.transformers import TransformersScorer
from teachers.staged_copies import StagedCopies
from tests.unit.teachers.conftest import rollout


def state(size: int = 4) -> dict[str, torch.Tensor]:
    """Three names of two tensors, with 4 bytes for each of `size` numbers."""
    one, two = torch.rand(size // 2), torch.rand(size // 2)
    return {"one": one, "two": two, "tied": one}


def cache(budget_bytes: int) -> DeviceCache:
    made = DeviceCache(torch.device("cpu"), budget_bytes)
    made._copies_weights = True
    return made


def test_copies_are_kept_and_a_tensor_under_two_names_is_one() -> None:
    near, given = cache(16), state()
    brought = near.copy_to_device("a", given)
    assert all(torch.equal(brought[name], given[name]) for name in given)
    assert brought["one"] is brought["tied"] and brought["one"].data_ptr() != given["one"].data_ptr()
    assert near.copy_to_device("a", {}) is brought and near.find("a") is brought and near.find("b") is None


def test_the_least_recently_used_goes_first_and_the_one_in_use_stays() -> None:
    near = cache(32)  # two of them
    for key in ("a", "b", "a", "c"):
        near.copy_to_device(key, state())
    assert [key for key in "abc" if near.find(key)] == ["a", "c"]
    near.copy_to_device("large", state(400))
    assert [key for key in ("a", "c", "large") if near.find(key)] == ["large"]


def test_whether_the_next_one_fits_beside_the_one_in_use() -> None:
    assert cache(0).has_room_for("a", state(400)), "nothing is there yet"
    near = cache(32)
    near.copy_to_device("a", state())
    near.copy_to_device("b", state())
    assert near.has_room_for("c", state()), "in the place of `a`"
    assert near.has_room_for("a", state(8)), "it is here"
    assert not near.has_room_for("c", state(8)), "nor with `a` gone"


def read_in_thread(given: dict[str, torch.Tensor]) -> Future[dict[str, torch.Tensor]]:
    reading = Future[dict[str, torch.Tensor]]()
    reading.set_result(given)
    return reading


def test_the_next_one_is_copied_ahead_if_it_fits_beside_the_one_in_use() -> None:
    near, given = cache(32), state()
    for key in ("a", "b"):
        near.copy_to_device(key, state())
    near.copy_ahead("c", read_in_thread(given), 16)
    assert [key for key in "abc" if near.find(key)] == ["b"], "`a` made room"
    brought = near.copy_to_device("c", given)
    assert all(torch.equal(brought[name], given[name]) for name in given)
    assert brought["one"] is brought["tied"] and brought["one"].data_ptr() != given["one"].data_ptr()
    assert [key for key in "abc" if near.find(key)] == ["b", "c"] and near._copying is None


def test_what_was_copied_ahead_in_vain_is_dropped() -> None:
    near, other = cache(32), state()
    near.copy_to_device("a", state())
    near.copy_ahead("b", read_in_thread(state()), 16)
    assert torch.equal(near.copy_to_device("c", other)["two"], other["two"])
    assert near.find("b") is None and near._copying is None
    cancelled = Future[dict[str, torch.Tensor]]()
    cancelled.cancel()
    cancelled.set_running_or_notify_cancel()
    near.copy_ahead("d", cancelled, 16)
    assert torch.equal(near.copy_to_device("d", other)["two"], other["two"]), "it is copied when it is needed"


def test_nothing_is_copied_ahead_without_room() -> None:
    near = cache(31)
    near.copy_to_device("a", state())
    near.copy_ahead("b", read_in_thread(state()), 16)
    assert near._copying is None and near.find("a") is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_staged_copies_are_the_same_bits_whatever_their_size(dtype: torch.dtype) -> None:
    copies = StagedCopies(torch.device("cpu"), nbytes=64)
    for shape in ((), (0, 3), (5,), (16,), (7, 9), (3, 5, 11)):
        given = torch.randn(shape).mul(50).to(dtype)
        copied = copies.copy(given)
        assert torch.equal(copied, given) and copied.shape == given.shape and copied.dtype == dtype
        assert given.numel() == 0 or copied.data_ptr() != given.data_ptr()
    turned = torch.randn(6, 4).T
    assert torch.equal(copies.copy(turned), turned)


def test_a_cpu_has_its_weights_where_they_are() -> None:
    near, given = DeviceCache(torch.device("cpu"), 1 << 30), state()
    assert (
        near.copy_to_device("a", given) is given and near.find("a") is None and near.has_room_for("a", state(1 << 20))
    )


@pytest.fixture(scope="module")
def teachers(make_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[Teacher]:
    root = tmp_path_factory.mktemp("near")
    found = [Teacher(name=f"e{seed}", model_dir=make_model_dir(root / f"e{seed}", seed=seed)) for seed in range(3)]
    other = make_model_dir(root / "other", seed=3, layers=1)
    return [*found, Teacher(name="other", model_dir=other)]


def scorer(gpu_memory_bytes: int = 0, memory_bytes: int = 1) -> TransformersScorer:
    options = {"payload": "hidden_states", "top_k": 4, "vocab_size": 76, "memory_bytes": memory_bytes}
    return TransformersScorer(ScorerOptions(dtype="float32", gpu_memory_bytes=gpu_memory_bytes, **options))  # type: ignore[arg-type]


def answers(scoring: Any, teachers: list[Teacher], *, ahead: bool = False) -> list[bytes]:
    """Of two steps, in which each teacher scores the same rows; with `ahead` the next one is announced, as a worker does."""
    rows = [rollout(i) for i in range(3)]
    turns = [teacher for _ in range(2) for teacher in teachers]
    found = []
    for teacher, following in zip(turns, [*turns[1:], None], strict=True):
        batches = scoring.score(teacher, rows, {})
        if ahead and following is not None:
            scoring.prefetch(following)
        found += [row.answer.hidden for batch in batches for row in batch]
    return found


@pytest.mark.parametrize(("kept", "copied"), [(0, 8), (1, 8), (2, 8), (3, 8), (4, 4)])
def test_any_budget_gives_the_same_answers(
    kept: int, copied: int, teachers: list[Teacher], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = answers(scorer(), teachers)
    one = sum(t.nbytes for t in scorer()._weights.get(teachers[0])[0].values())
    scoring = scorer(kept * one)
    scoring._device_cache._copies_weights = True
    bring, sizes = scoring._device_cache.copy_to_device, []

    def noted(key: str, given: Any) -> Any:
        known = scoring._device_cache.find(key)
        found = bring(key, given)
        sizes.append((known is None, sum(scoring._device_cache._sizes.values())))
        return found

    monkeypatch.setattr(scoring._device_cache, "copy_to_device", noted)
    assert answers(scoring, teachers) == wanted
    assert sum(new for new, _ in sizes) == copied
    assert max(size for _, size in sizes) <= max(1, kept) * one


@pytest.mark.parametrize("kept", [0, 2, 3])
def test_teachers_that_are_copied_ahead_give_the_same_answers(
    kept: int, teachers: list[Teacher], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = answers(scorer(), teachers)
    one = sum(t.nbytes for t in scorer()._weights.get(teachers[0])[0].values())
    scoring = scorer(kept * one, 1 << 30)
    near = scoring._device_cache
    near._copies_weights = True
    copied, ahead = near._copy_in_thread, []

    def noted(reading: Any) -> Any:
        ahead.append(sum(near._sizes.values()))
        return copied(reading)

    monkeypatch.setattr(near, "_copy_in_thread", noted)
    assert answers(scoring, teachers, ahead=True) == wanted
    assert len(ahead) == (7 if kept else 0) and all(held <= (kept - 1) * one for held in ahead)


def test_the_teacher_before_goes_before_the_next_one_comes(
    teachers: list[Teacher], monkeypatch: pytest.MonkeyPatch
) -> None:
    scoring = scorer()
    scoring._device_cache._copies_weights = True
    bring, held = scoring._device_cache.copy_to_device, []

    def noted(key: str, given: Any) -> Any:
        if scoring._device_cache._states:
            held.append([name for name, p in scoring._model.named_parameters() if p.device.type != "meta"])
        return bring(key, given)

    monkeypatch.setattr(scoring._device_cache, "copy_to_device", noted)
    answers(scoring, teachers)
    assert held == [[]] * 7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_any_budget_gives_the_same_answers(teachers: list[Teacher]) -> None:
    few, many = scorer(), scorer(1 << 30)
    assert answers(few, teachers) == answers(many, teachers)
    assert len(few._device_cache._states) == 1 and len(many._device_cache._states) == len(teachers)
    assert {t.device.type for state in many._device_cache._states.values() for t in state.values()} == {"cuda"}
