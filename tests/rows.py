"""Rows of the target stream, written as their columns: what a test says of a row is flat, whatever its payload."""

from __future__ import annotations

import dataclasses
from typing import Any

from opd.payloads.answer import Answer
from opd.payloads.hidden_states import HiddenStates
from opd.payloads.sampled_logprobs import SampledLogprobs
from opd.payloads.top_k import TopTokens
from opd.stream.schema import TargetRow


def make_row(**columns: Any) -> TargetRow:
    """The payload is that of the columns that are there; columns of another one are left out."""
    answers: type[Answer] = HiddenStates
    if "topk_ids" in columns:
        answers = TopTokens
    elif "teacher_logprobs" in columns:
        answers = SampledLogprobs
    own = {f.name for f in dataclasses.fields(TargetRow)}
    answer = {f.name: columns[f.name] for f in dataclasses.fields(answers)}  # type: ignore[arg-type]
    return TargetRow(answer=answers(**answer), **{name: value for name, value in columns.items() if name in own})


def changed(row: TargetRow, **columns: Any) -> TargetRow:
    """The same row with other columns."""
    return make_row(**columns_of_row(row) | columns)


def columns_of_row(row: TargetRow) -> dict[str, Any]:
    """Inverse of `make_row`."""
    kept = {f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.name != "answer"}
    return kept | {f.name: getattr(row.answer, f.name) for f in dataclasses.fields(row.answer)}  # type: ignore[arg-type]
