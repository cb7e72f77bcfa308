"""The method lies at most ten of our own frames deep, from `opd merge` to the objective, the driver's and the rank's."""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from typer.testing import CliRunner

import pipelines.merging.run
from cli import app
from opd.errors import RunError
from opd.losses.reverse_kl import ReverseKL
from opd.stream.schema import write_stream
from tests.unit.opd.train.test_rank import NONE, WORK, one_rank, row
from tests.unit.sources import ROOT

MAX_DRIVER_FRAMES = 5
"""From the command to the trainer's step, both among them."""
MAX_RANK_FRAMES = 5
"""From what the step asks of a rank to the objective, both among them."""


def own_frames() -> list[str]:
    """Those of the product on the present stack, outermost first."""
    found = []
    for frame in traceback.extract_stack():
        path = frame.filename.removeprefix(f"{ROOT}/")
        if path != frame.filename and not path.startswith(("tests/", ".venv/")):
            found.append(f"{path}:{frame.lineno} {frame.name}")
    return found


def test_a_step_is_few_calls_below_the_command(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stack: list[str] = []

    def train_step(*_: Any) -> None:
        stack.extend(own_frames())
        raise RunError("as deep as the driver goes")

    parts = MagicMock()
    parts.trainer.train_step = train_step
    monkeypatch.setattr(pipelines.merging.run, "build_merge", lambda *_: parts)
    monkeypatch.setattr(pipelines.merging.run, "ray_session", lambda *_: nullcontext())
    monkeypatch.setattr(pipelines.merging.run, "record_layouts", lambda *_: None)
    monkeypatch.setattr(pipelines.merging.run, "_take_starting_exams", lambda *_: (None, None))
    result = CliRunner().invoke(app, ["merge", str(world.write())])
    assert (result.exit_code, "as deep as the driver goes" in result.stderr) == (1, True), result.output
    print("\n".join(stack))
    assert stack[-1].startswith("opd/loop.py") and stack[-1].endswith(" run")
    (command,) = [index for index, frame in enumerate(stack) if frame.endswith(" merge")]
    assert len(stack[command:]) + 1 <= MAX_DRIVER_FRAMES, "\n".join(stack)


def test_the_objective_is_few_calls_below_a_rank(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack: list[str] = []

    def objective(*_: Any) -> None:
        stack.extend(own_frames())
        raise RunError("as deep as a rank goes")

    monkeypatch.setattr(ReverseKL, "__call__", objective)
    made = one_rank(tiny_model_dir, {"kind": "reverse_kl"})
    head = np.ones((76, 2), np.float32)
    made._fetch_head = lambda source: source  # type: ignore[method-assign,assign,return-value]
    made.begin_step(WORK, {"h": _head(head)})  # type: ignore[dict-item]
    part = np.frombuffer(write_stream([row(i) for i in "ac"], "float32"), dtype=np.uint8)
    with pytest.raises(RunError, match="as deep as a rank goes"):
        made.accumulate_micro_batch(0, NONE, part)
    print("\n".join(stack))
    assert stack[0].endswith(" accumulate_micro_batch")
    assert len(stack) + 1 <= MAX_RANK_FRAMES, "\n".join(stack)


def _head(weight_V_D: np.ndarray) -> Any:
    import torch

    from opd.models.heads import Head
    from opd.models.logit_rule import IDENTITY

    return Head(torch.from_numpy(weight_V_D), IDENTITY)
