"""Random episodes of many turns through the real engine, with real tokenizers: what is trained is what vLLM sampled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from experts.suites.letters import build_tokenizer
from opd import cluster
from opd.config import PipelineConfig
from opd.config.sections import ClusterConfig
from opd.prompts.encode import encode_text, render_prompt
from opd.records.types import Prompt, Rollout, RolloutBatch
from opd.rollouts import vllm
from opd.settings.yaml_files import validate_section
from pipelines.specs import rollout_spec
from tests.chatml import smollm2_tokenizer
from tests.integration.babel import TellingWorker, Told
from tests.integration.parts import plain_logprobs, start_trainer, stop

EPISODES, PROMPTS, CONTEXT, TURN = 200, 50, 512, 12
TOLERANCE = 1e-4
"""Nats between two ways to compute one log-prob in float32."""


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    with cluster.ray_session(ClusterConfig(), 8):
        yield


def student_of(path: Path, tokenizer: Any, make_model_dir: Callable[..., Path]) -> Path:
    """Random weights that end a turn at about one token of eight, so that some turns end and some are cut.

    Number 0 of the hidden states is nearly a constant, and of all rows of the head only that of the end token reads it.
    """
    from transformers import AutoModelForCausalLM

    make_model_dir(path, tie=False, tokenizer=tokenizer, positions=CONTEXT)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        constant = model.model(torch.arange(4, 68)[None]).last_hidden_state[0, :, 0].mean()
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[tokenizer.eos_token_id, 0] = math.log(len(tokenizer) / 8) / constant
    model.save_pretrained(path)
    return path


def pipeline(student: Path) -> PipelineConfig:
    environment = {"name": "tests.integration.babel:Babel", "max_turns": 8, "max_broken": 1.0}
    return validate_section(
        PipelineConfig,
        {
            "name": "test",
            "student": {"model": student},
            "experts": {"left": {"model": student, "domain": "left"}},
            "domains": {"left": {"environment": environment}},
            "rollout": {"max_new_tokens": TURN, "max_model_len": CONTEXT},
            "trainer": {"ranks": 1, "steps": 1, "samples_per_step": EPISODES, "micro_batch_tokens": 4096},
        },
        "test",
    )


def prompts(tokenizer: Any) -> list[Prompt]:
    """Texts and chat messages in turn, each several times."""
    made = []
    for number in range(PROMPTS):
        said = f"Say {number}:"
        chat: Any = [{"role": "user", "content": said}]
        ids = encode_text(tokenizer, said if number % 2 else render_prompt(tokenizer, chat, None))
        text = said if number % 2 else chat
        made.append(Prompt(id=f"left/{number}", domain="left", token_ids=tuple(ids), text=text))
    return made * (EPISODES // PROMPTS)


def play(student: Path, tokenizer: Any, config: PipelineConfig) -> tuple[RolloutBatch, list[Told]]:
    spec = rollout_spec(config, student, len(tokenizer), (tokenizer.eos_token_id,))
    engine = vllm.VLLMRolloutEngine(spec, tokenizer)
    engine.wait_ready()
    batch = engine.generate(prompts(tokenizer), step=1, policy_version=0)
    worker: Any = engine._workers[0]
    told: list[Told] = worker.submit(TellingWorker.told).wait_for_result(timeout_s=60)
    stop(engine)
    return batch, told


def turns_of(rollout: Rollout) -> list[slice]:
    """The place in the response of each turn: nothing is masked here, so each has a span of its own."""
    ends = accumulate(span.length for span in rollout.spans)
    places = [slice(end - span.length, end) for span, end in zip(rollout.spans, ends, strict=True)]
    return [place for span, place in zip(rollout.spans, places, strict=True) if span.origin == "policy"]


def refuse_changes(rollouts: Sequence[Rollout], told: Sequence[Told]) -> None:
    """Each turn that came out of vLLM is in one rollout, once: its ids, its log-probs, and the tokens that vLLM had read."""
    left: dict[tuple[int, ...], list[Told]] = {}
    for turn in told:
        left.setdefault(turn.read + turn.wrote, []).append(turn)
    for rollout in rollouts:
        for place in turns_of(rollout):
            turn = left[rollout.prompt_ids + rollout.response_ids[: place.stop]].pop()
            assert turn.wrote == rollout.response_ids[place]
            assert turn.logprobs == rollout.behaviour_logprobs[place]
    assert not any(left.values())


def gap_by_turn(rollouts: Sequence[Rollout], said: Sequence[Sequence[float]]) -> dict[int, float]:
    """Turn -> largest difference between the engine's log-prob of a sampled token and what others said: of each rollout the log-probs
    of all tokens after the first."""
    worst: dict[int, float] = {}
    for rollout, logprobs in zip(rollouts, said, strict=True):
        response = logprobs[len(rollout.prompt_ids) - 1 :]
        for turn, place in enumerate(turns_of(rollout)):
            pairs = zip(response[place], rollout.behaviour_logprobs[place], strict=True)
            worst[turn] = max(worst.get(turn, 0.0), *(abs(other - engine) for other, engine in pairs))
    return worst


def trainer_logprobs(config: PipelineConfig, vocab_size: int, whole: Sequence[tuple[int, ...]]) -> list[list[float]]:
    """Ask a rank of the trainer, several sequences packed into one row."""
    trainer = start_trainer(config, vocab_size)
    said = [line for first in range(0, len(whole), 10) for line in trainer.logprobs(whole[first : first + 10])]
    stop(trainer)
    return said


@pytest.mark.parametrize(
    ("make", "changed"),
    [(build_tokenizer, 0), pytest.param(smollm2_tokenizer, 100, marks=pytest.mark.slow)],
    ids=["quickstart", "smollm2"],
)
def test_two_hundred_random_episodes_are_trained_as_they_were_sampled(
    make: Callable[[], Any],
    changed: int,
    tmp_path: Path,
    make_model_dir: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`changed`: episodes that encoding their text again would change, at least."""
    tokenizer = make()
    monkeypatch.setattr(vllm.VLLMRolloutEngine, "WORKER", TellingWorker)
    student = student_of(tmp_path / "student", tokenizer, make_model_dir)
    config = pipeline(student)
    batch, told = play(student, tokenizer, config)
    rollouts, stats = batch.rollouts, batch.episodes["left"]

    assert stats.episodes == EPISODES == len(rollouts) + len(batch.quarantined) and len(batch.quarantined) < 10
    assert set(stats.stop_reasons) == {"done", "observation", "context"} and stats.stop_reasons["done"] > 100
    assert {len(turns_of(rollout)) for rollout in rollouts} >= set(range(2, 9))
    assert len({rollout.response_ids for rollout in rollouts}) > 0.9 * EPISODES, "each sample of a prompt is another"
    ended = sum(turn.wrote[-1] == tokenizer.eos_token_id for turn in told)
    assert 0.2 < ended / len(told) < 0.99, "turns that ended and turns that were cut"

    refuse_changes(rollouts, told)
    assert sum(sum(r.loss_mask) for r in rollouts) == sum(len(turn.wrote) for turn in told) == stats.audit.sampled
    whole = [rollout.prompt_ids + rollout.response_ids for rollout in rollouts]
    again = [tuple(encode_text(tokenizer, tokenizer.decode(ids))) for ids in whole]
    assert sum(one != other for one, other in zip(whole, again, strict=True)) >= changed

    for said in (plain_logprobs(student, whole), trainer_logprobs(config, len(tokenizer), whole)):
        gaps = gap_by_turn(rollouts, said)
        assert set(gaps) == set(range(8)) and max(gaps.values()) < TOLERANCE, gaps
