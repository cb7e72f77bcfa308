"""vLLM's log-probs without the ranks that nobody reads."""

from __future__ import annotations

import pytest
import torch

from opd.rollouts.worker_extension import WorkerExtension


def test_logprobs_stay_and_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = pytest.importorskip("vllm.v1.sample.sampler")
    # So that it is put back afterwards.
    monkeypatch.setattr(sampler, "batched_count_greater_than", sampler.batched_count_greater_than)
    WorkerExtension().opd_skip_rank_counts()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    logprobs_N_V = torch.randn(3, 11, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    ids_N = torch.tensor([4, 0, 10])
    found = sampler.Sampler.gather_logprobs(logprobs_N_V, 0, ids_N)
    assert found.logprob_token_ids[:, 0].tolist() == ids_N.tolist()
    assert torch.equal(found.logprobs[:, 0], logprobs_N_V.gather(1, ids_N[:, None])[:, 0])
    assert found.selected_token_ranks.tolist() == [0, 0, 0]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
