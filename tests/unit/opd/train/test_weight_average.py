"""The average of a rank's shards, and how it stands in for the student, with parameters of the test's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opd.train.rank import TrainerRank
from opd.train.weight_average import WeightAverage


class Parameter:
    def __init__(self, values: list[float]) -> None:
        self.master = torch.tensor(values)
        self.ds_tensor = self.master.to(torch.bfloat16)


class Optimizer:
    """Notes in which order it is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda: self.calls.append(name)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], Optimizer]:
    import deepspeed.utils

    monkeypatch.setattr(deepspeed.utils, "safe_get_local_fp32_param", lambda param: param.master)
    return {"a": Parameter([1.0, -2.0]), "b": Parameter([0.5])}, Optimizer()


def test_it_is_the_average_by_hand(parts: tuple[dict[str, Any], Optimizer]) -> None:
    params, optimizer = parts
    average = WeightAverage(0.75, list(params.items()), optimizer)
    wanted = torch.tensor([1.0, -2.0], dtype=torch.float64)
    for step in range(3):
        params["a"].master += torch.tensor([0.25, 1.0]) * (step + 1)
        average.add_student()
        wanted = 0.75 * wanted + 0.25 * params["a"].master.double()
    torch.testing.assert_close(average.shards["a"].double(), wanted, rtol=0, atol=1e-7)
    assert average.shards["b"].tolist() == [0.5]
    kept = {name: shard.clone() for name, shard in average.shards.items()}
    average.load_shards(None)
    assert torch.equal(average.shards["a"], params["a"].master)
    average.load_shards(kept)
    assert torch.equal(average.shards["a"], kept["a"])


def test_the_student_has_its_own_weights_again_bit_for_bit_also_after_an_error(
    parts: tuple[dict[str, Any], Optimizer],
) -> None:
    params, optimizer = parts
    average = WeightAverage(0.5, list(params.items()), optimizer)
    params["a"].master.fill_(3.0)
    params["a"].ds_tensor.fill_(3.1)
    own = params["a"].ds_tensor.clone()
    average.add_student()
    with pytest.raises(InterruptedError), average.in_place_of_student():
        assert params["a"].ds_tensor.tolist() == [2.0, 0.5]
        raise InterruptedError
    assert torch.equal(params["a"].ds_tensor, own)
    swap = ["checkpoint_event_prologue", "invalidate_secondary_tensor", "checkpoint_event_epilogue"]
    assert optimizer.calls == swap * 2


def test_a_resume_forgets_the_head_of_the_weights_before() -> None:
    """The probes at the start have gathered it; the rows of the first step are of the average that the checkpoint has."""
    trainer: Any = object.__new__(TrainerRank)
    trainer._averages, trainer._base_scorer = {}, SimpleNamespace(heads={"average-0.5": "of the start"})
    trainer._take_more_shards({})
    assert trainer._base_scorer.heads == {}
