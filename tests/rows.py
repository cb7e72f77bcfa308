"""Rollouts and rows of the target stream, written as their columns: what a test says of one is flat, whatever its payload."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from opd.payloads.answer import Answer
from opd.payloads.hidden_states import HiddenStates
from opd.payloads.sampled_logprobs import SampledLogprobs
from opd.payloads.top_k import TopTokens
from opd.records.types import Rollout, Span
from opd.stream.part_summaries import PartSummary, RowSummary
from opd.stream.schema import PartRecord, TargetRow
from opd.stream.targets import StreamPart


def spans_of(mask: Sequence[bool], policy_version: int = 0) -> tuple[Span, ...]:
    """A span of the policy for each run of trained tokens, one of the environment for each other run."""
    runs = [(trained, len(list(run))) for trained, run in groupby(mask)] or [(True, 0)]
    return tuple(
        Span(length=num, origin="policy" if trained else "environment", policy_version=policy_version)
        for trained, num in runs
    )


def make_rollout(
    *, loss_mask: Sequence[bool] | None = None, policy_version: int = 0, truncated: bool = False, **columns: Any
) -> Rollout:
    """A rollout of a single turn. `loss_mask`: the policy wrote what is trained, an environment the rest; default: all
    is trained."""
    ids = tuple(columns.pop("response_ids"))
    sample_id = columns.pop("sample_id")
    values: dict[str, Any] = {
        "group": sample_id, "episode": sample_id, "behaviour_logprobs": (0.0,) * len(ids),
        "spans": spans_of((True,) * len(ids) if loss_mask is None else loss_mask, policy_version),
        "stop_reason": "length" if truncated else "stop",
    } | columns  # fmt: skip
    lists = {name: tuple(values.pop(name)) for name in ("prompt_ids", "behaviour_logprobs")}
    return Rollout(sample_id=sample_id, response_ids=ids, **lists, **values)


def make_row(**columns: Any) -> TargetRow:
    """The payload is that of the columns that are there; columns of another one are left out."""
    answers: type[Answer] = HiddenStates
    if "topk_ids" in columns:
        answers = TopTokens
    elif "teacher_logprobs" in columns:
        answers = SampledLogprobs
    answer = {f.name: columns[f.name] for f in dataclasses.fields(answers)}  # type: ignore[arg-type]
    payloads = {f.name for kind in (HiddenStates, TopTokens, SampledLogprobs) for f in dataclasses.fields(kind)}
    said = {name: columns.pop(name) for name in ("teacher", "weight") if name in columns}
    rollout = make_rollout(**{name: value for name, value in columns.items() if name not in payloads})
    return TargetRow(rollout=rollout, answer=answers(**answer), **said)


def changed(row: TargetRow, **columns: Any) -> TargetRow:
    """The same row with other columns; `loss_mask` and `policy_version` make new spans."""
    kept = columns_of_row(row)
    if {"loss_mask", "policy_version"} & set(columns):
        del kept["spans"]
        kept |= {"loss_mask": row.rollout.loss_mask, "policy_version": row.rollout.policy_version}
    return make_row(**kept | columns)


def columns_of_row(row: TargetRow) -> dict[str, Any]:
    """Inverse of `make_row`."""
    kept = {f.name: getattr(row.rollout, f.name) for f in dataclasses.fields(row.rollout)}
    answer = {f.name: getattr(row.answer, f.name) for f in dataclasses.fields(row.answer)}  # type: ignore[arg-type]
    return kept | {"teacher": row.teacher, "weight": row.weight} | answer


def make_stream_part(handle: Any, sample_ids: Sequence[str] = (), *, nbytes: int = 10) -> StreamPart:
    """A part with a row for each of these samples, for code that reads no more of it."""
    rows = tuple(RowSummary(sample_id=i, teacher="t", weight=1.0, head="", width=None, rollout="") for i in sample_ids)
    summary = PartSummary(record=PartRecord(), dtype="float32", payload="hidden_states", rows=rows, nbytes=nbytes)
    return StreamPart(handle=handle, summary=summary, driver_bytes=0)
