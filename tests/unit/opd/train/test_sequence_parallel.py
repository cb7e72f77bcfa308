"""Columns and tokens of a rank that shares rows: together the ranks train every token once."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from opd.records.types import LayoutProof
from opd.stream.schema import TargetRow
from opd.train.batch import build_micro_batch
from opd.train.components import Component
from opd.train.deepspeed import _make_step_report
from opd.train.rank import RankResult
from opd.train.ranks import Ranks
from opd.train.sequence_parallel import Shard, select_shard
from tests.rows import make_row


def row(sample_id: str, prompt: int, mask: list[bool], **answer: object) -> TargetRow:
    states = np.arange(2 * sum(mask), dtype=np.float32)
    fields = answer or {"head": "h", "hidden_size": 2, "hidden": states.tobytes()}
    return make_row(
        sample_id=sample_id, step=3, domain="d", teacher="t", policy_version=2, prompt_ids=list(range(prompt)),
        response_ids=list(range(30, 30 + len(mask))), loss_mask=mask, behaviour_logprobs=[-float(i) for i in range(len(mask))],
        **fields,
    )  # fmt: skip


LONG = row("long", 3, [True] * 9 + [False, True, True])
SHORT = row("short", 2, [True, False, True])
SAMPLES = [(LONG,), (SHORT,)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 15, 20])
def test_together_the_ranks_train_every_token_once(count: int) -> None:
    whole = build_micro_batch(SAMPLES, torch.float32, layout="padded")
    parts = [build_micro_batch(SAMPLES, torch.float32, layout="padded", shard=Shard(i, count)) for i in range(count)]
    assert len({part.packed.input_ids_B_T.shape for part in parts}) == 1, "an exchange needs equal widths"
    width = whole.packed.input_ids_B_T.shape[1]
    ids = torch.cat([part.packed.input_ids_B_T for part in parts], dim=1)
    assert torch.equal(ids[:, :width], whole.packed.input_ids_B_T) and not ids[:, width:].any()
    positions = torch.cat([part.packed.position_ids_B_T for part in parts], dim=1)
    assert torch.equal(positions, torch.arange(ids.shape[1]).expand(2, -1))
    for name in ("token_N", "place_N", "turn_N", "sampled_N", "behaviour_N"):
        for sample in range(2):
            pieces = [getattr(part, name).split(list(part.trained_lengths))[sample] for part in parts]
            assert torch.equal(torch.cat(pieces), getattr(whole, name).split(list(whole.trained_lengths))[sample])
    for index, part in enumerate(parts):
        # The token that a position predicts is the next one of the row, and the last of a part predicts one of the next part.
        row_N, column_N = part.predict_N // (ids.shape[1] // count), part.predict_N % (ids.shape[1] // count)
        first = index * (ids.shape[1] // count)
        assert torch.equal(ids[row_N, first + column_N + 1], part.token_N)


def test_answers_and_values_follow_their_tokens() -> None:
    parts = [build_micro_batch(SAMPLES, torch.float32, layout="padded", shard=Shard(i, 2)) for i in range(2)]
    states = [torch.cat([block.hidden[0] for block in part.blocks]) for part in parts]
    lengths = [part.trained_lengths for part in parts]
    assert lengths == [(6, 2), (5, 0)]
    assert [part.earlier_tokens for part in parts] == [(0, 0), (6, 0)]
    assert torch.equal(torch.cat([states[0][:6], states[1]]).flatten(), torch.arange(22.0))
    column = {"long": np.arange(11.0), "short": np.arange(2.0)}
    component = Component(weights={"long": 0.5, "short": 0.25}, columns={"advantage": column})
    found = [component.token_columns(part, ["long", "short"])["advantage"].tolist() for part in parts]
    assert found == [[0, 1, 2, 3, 4, 5, 0, 1], [6, 7, 8, 9, 10]]
    assert component.token_weights(parts[1], ["long", "short"]).tolist() == [0.5] * 5


@pytest.mark.parametrize(
    "answer",
    [
        {"teacher_logprobs": [-float(i) for i in range(11)]},
        {"topk_ids": list(range(22)), "topk_logprobs": [-float(i) for i in range(22)]},
    ],
)
def test_other_payloads_are_divided_too(answer: dict[str, list[float]]) -> None:
    sample = row("a", 3, [True] * 11, **answer)
    shards = [select_shard([(sample,)], Shard(i, 3))[0][0] for i in range(3)]
    for name, values in answer.items():
        assert [x for shard in shards for x in getattr(shard.answer, name)] == values
    assert [shard.rollout.num_trained for shard in shards] == [3, 5, 3]
    assert all(shard.answer.fits(shard.rollout.num_trained, 4) for shard in shards)


def test_losses_of_a_row_come_from_its_ranks_in_their_order() -> None:
    results = [
        RankResult(loss=0.0, grad_norm=0.0, domains={}, positions={}, token_losses=losses)
        for losses in ({"a": (0.1, 0.2)}, {"a": (0.3,), "b": (0.5,)})
    ]
    assert _make_step_report(1, 0.1, results).token_losses == {"a": (0.1, 0.2, 0.3), "b": (0.5,)}


def test_the_plan_gives_ranks_that_share_rows_the_same() -> None:
    ranks = object.__new__(Ranks)
    ranks.layout = LayoutProof(layout="padded", tried={})
    ranks._ranks_spec = SimpleNamespace(micro_batch_tokens=16, short_first=False)
    ranks._ranks, ranks._sharing = [None] * 4, 2
    plan = ranks.plan_micro_batches([LONG.rollout, SHORT.rollout])
    assert plan == [[["long"]], [["long"]], [["short"]], [["short"]]]
