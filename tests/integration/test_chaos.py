"""One cell of the fault matrix; the others are played by `python -m tests.chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import Cell, run_cells


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_trains(tmp_path: Path) -> None:
    """All workers are started again from the last checkpoint, and the weights are those of an undisturbed merge."""
    said: list[str] = []
    cell = Cell("trainer", "backward")
    found = run_cells([cell], tmp_path, said.append)["cells"]
    assert str(cell) in found, said
    assert found[str(cell)]["complaints"] == [] and found[str(cell)]["restarts"] == 1
