"""An engine that gets some weights alone takes the others from where it is told, and reads them no more often than it must."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opd.errors import RunError
from opd.rollouts import worker
from opd.rollouts.worker import EngineOptions, VLLMWorker

BASE = Path("/base")
OPTIONS = EngineOptions(
    model_dir=BASE, dtype="float32", max_model_len=64, max_num_seqs=8, gpu_memory_utilization=0.4, vocab_size=76
)


@pytest.fixture
def swaps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Record what was put into the engine: a directory's name, and True if it was taken for the whole model."""
    made: list[tuple[str, bool]] = []

    def swap(llm: Any, model_dir: Path, *, whole: bool = True) -> None:
        made.append((model_dir.name, whole))
        if model_dir.name == "broken":
            raise RunError("vLLM refused")

    monkeypatch.setattr(worker, "start_engine", lambda options: object())
    monkeypatch.setattr(worker, "read_model_shape", lambda model_dir: {"model_type": "llama"})
    monkeypatch.setattr(worker, "cut_vocabulary", lambda llm, vocab_size: None)
    monkeypatch.setattr(worker, "swap_weights", swap)
    return made


def test_the_base_is_read_again_only_where_other_weights_came_between(swaps: list[tuple[str, bool]]) -> None:
    engine = VLLMWorker(OPTIONS, (2,))
    engine.load(Path("first"), BASE)
    engine.load(Path("second"), BASE)
    assert swaps == [("first", False), ("second", False)]
    engine.load(Path("expert"))
    engine.load(Path("third"), BASE)
    engine.load(Path("fourth"), BASE)
    assert swaps[2:] == [("expert", True), ("base", True), ("third", False), ("fourth", False)]


@pytest.mark.parametrize("base", [BASE, None])
def test_after_a_load_that_failed_nothing_is_taken_for_granted(
    swaps: list[tuple[str, bool]], base: Path | None
) -> None:
    engine = VLLMWorker(OPTIONS, (2,))
    with pytest.raises(RunError):
        engine.load(Path("broken"), base)
    engine.load(Path("again"), BASE)
    assert swaps[1:] == [("base", True), ("again", False)]
