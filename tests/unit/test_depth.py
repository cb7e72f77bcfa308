"""How deep the method lies under the command: from `opd merge` to a step of the trainer, and who stands in between."""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
from typer.testing import CliRunner

import pipelines.merging.run
from cli import app
from opd.errors import RunError
from tests.unit.sources import ROOT

MAX_DRIVER_FRAMES = 4
"""From the command to the loop, both among them; the trainer's own step is the fifth."""


def test_a_step_is_few_calls_below_the_command(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stack: list[str] = []

    def train_step(*_: Any) -> None:
        for frame in traceback.extract_stack():
            path = frame.filename.removeprefix(f"{ROOT}/")
            if path != frame.filename and not path.startswith(("tests/", ".venv/")):
                stack.append(f"{path}:{frame.lineno} {frame.name}")
        raise RunError("as deep as the driver goes")

    parts = MagicMock()
    parts.trainer.train_step = train_step
    monkeypatch.setattr(pipelines.merging.run, "build", lambda *_: parts)
    monkeypatch.setattr(pipelines.merging.run, "ray_session", lambda *_: nullcontext())
    monkeypatch.setattr(pipelines.merging.run, "record_layouts", lambda *_: None)
    monkeypatch.setattr(pipelines.merging.run, "_before_and_experts", lambda *_: (None, None))
    result = CliRunner().invoke(app, ["merge", str(world.write())])
    assert (result.exit_code, "as deep as the driver goes" in result.stderr) == (1, True), result.output
    print("\n".join(stack))
    assert stack[-1].startswith("opd/loop.py") and stack[-1].endswith(" run")
    (command,) = [index for index, frame in enumerate(stack) if frame.endswith(" merge")]
    assert len(stack[command:]) <= MAX_DRIVER_FRAMES, "\n".join(stack)
