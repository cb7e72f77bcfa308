"""Does compaction carry what lies outside the window? A vault whose key is told once, long before the door.

    python -m benchmarks.compaction --json compaction.json

    vault= g kqzx= g 40172945= g 93018274= g ...  g door= qzx          P(right) without the key: 1 in 2,744
           └ the key ┘                    └─ window of 64 tokens ─┘

A solver plays episodes with compaction through the real runner; a new model of 0.1M parameters learns its turns and summaries in the
very tokens that a rollout has. Then it plays vaults with keys that it never saw, greedily, by the rollout worker's own vLLM
engine: with compaction, with a summary of one token (the key has three), and without compaction.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from opd.records.environments import Action, Outcome
from opd.records.episodes import EpisodeResult, EpisodeStats
from opd.records.types import Prompt, SampledTurn
from opd.rollouts.episodes.compaction import CompactionOptions
from opd.rollouts.episodes.spec import EpisodeOptions, EpisodeRequest
from opd.rollouts.episodes.trace import EpisodeKey

WINDOW = 64
STEPS = 10
"""Turns before the door: 112 tokens in all."""
LETTERS, KEY = "bcefhijnpqwxyz", 3
TOLD = re.compile(f"k([{LETTERS}]{{{KEY}}})=")
SUMMARY = CompactionOptions(
    compact_at=40, keep_last=1, prompt="sum=", resume="k{summary}=", max_tokens=KEY + 1, max_compactions=8
)
ARMS: Mapping[str, CompactionOptions | None] = {
    "with compaction": SUMMARY,
    "a summary of one token": replace(SUMMARY, max_tokens=1),
    "without compaction": None,
}


class Vault:
    """Tells its key after the first turn, then numbers, and asks for the key at the door."""

    tools = ()

    def reset(self, metadata: Mapping[str, Any], seed: int) -> str:
        self._key, self._rng, self._turns = metadata["key"], random.Random(seed), 0
        return ""

    def step(self, action: Action) -> Outcome:
        self._turns += 1
        if self._turns > STEPS:
            return Outcome(reward=float(action.text == self._key), done=True)
        if self._turns == STEPS:
            return Outcome(observation="door=")
        number = f"{self._rng.randrange(10**8):08d}"
        return Outcome(observation=f"k{self._key}=" if self._turns == 1 else f"{number}=")

    def close(self) -> None:
        pass


class Solver:
    """Plays as an expert does that reads the dialogue, and nothing else."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, seed: int) -> SampledTurn:
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        found = TOLD.search(text)
        said = found[1] if found and text.endswith((SUMMARY.prompt, "door=")) else "g"
        ids = (*self._tokenizer(said, add_special_tokens=False)["input_ids"], self._tokenizer.eos_token_id)
        return SampledTurn(token_ids=ids, logprobs=(0.0,) * len(ids), stop_reason="stop", policy_version=0)


@dataclass(frozen=True)
class Arm:
    """One way to play the held-out vaults."""

    name: str
    success: float
    summaries: float
    """Mean of an episode."""
    tokens: float
    """Mean that the policy wrote in an episode."""
    stop_reasons: dict[str, int]


def requests(keys: Sequence[str], compaction: CompactionOptions | None) -> list[EpisodeRequest]:
    options = EpisodeOptions(
        environment="benchmarks.compaction:Vault",
        max_turns=STEPS + 1,
        max_turn_tokens=KEY + 1,
        step_timeout_s=60.0,
        max_broken=0.0,
        compaction=compaction,
    )
    return [
        EpisodeRequest(
            prompt=Prompt(id=f"vault/{key}", domain="vault", token_ids=(1,), text="vault=", metadata={"key": key}),
            sample=EpisodeKey(sample_id=f"000001/vault/{key}", group=key, step=1, domain="vault"),
            options=options,
            seed=0,
        )
        for key in keys
    ]


def solved(tokenizer: Any, keys: Sequence[str]) -> list[dict[str, list[int]]]:
    """Every segment of the solver's episodes as ids and labels: what carries loss in a rollout is learned."""
    from opd.rollouts.episodes.runner import Dialogues, run_episodes

    dialogues = Dialogues(tokenizer, [tokenizer.eos_token_id])
    results: list[EpisodeResult] = []
    for start in range(0, len(keys), 100):  # each episode has a thread
        asked = requests(keys[start : start + 100], SUMMARY)
        results += asyncio.run(run_episodes(asked, Solver(tokenizer), dialogues, WINDOW, 0))
    assert {result.reward for result in results} == {1.0}
    rollouts = [rollout for result in results for rollout in result.rollouts]
    return [
        {
            "input_ids": [*r.prompt_ids, *r.response_ids],
            "labels": [-100] * len(r.prompt_ids)
            + [i if trained else -100 for i, trained in zip(r.response_ids, r.loss_mask, strict=True)],
        }
        for r in rollouts
    ]


def train(folder: Path, keys: Sequence[str], steps: int) -> Path:
    """A new model that has learned the solver's episodes, with its tokenizer."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    from experts.sft import fine_tune
    from experts.spec import TrainSettings
    from experts.suites.letters import build_tokenizer

    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "bos", "eos")}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=WINDOW,
        tie_word_embeddings=True,
        initializer_range=64**-0.5,
        **ids,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=False, **ids)
    settings = TrainSettings(
        max_steps=steps, learning_rate=3e-3, per_device_train_batch_size=32, warmup_steps=20, lr_scheduler_type="cosine"
    )
    examples: Any = solved(tokenizer, keys)
    fine_tune(model, examples, settings, seed=0, scratch=folder / "scratch", report=_say)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def _say(step: int, loss: float) -> None:
    print(f"training step {step}: loss {loss:.4f}", file=sys.stderr)


def play(model: Path, keys: Sequence[str]) -> list[Arm]:
    """Each arm on the same vaults, greedily."""
    from opd.rollouts.processes import ENGINE_ENV

    os.environ.update(ENGINE_ENV | {"VLLM_CPU_KVCACHE_SPACE": "1"})
    from transformers import AutoTokenizer

    from opd.rollouts.worker import EngineOptions, VLLMWorker

    tokenizer = AutoTokenizer.from_pretrained(model)
    options = EngineOptions(
        model_dir=model,
        dtype="float32",
        max_model_len=WINDOW,
        max_num_seqs=128,
        gpu_memory_utilization=0.3,
        vocab_size=len(tokenizer),
    )
    worker = VLLMWorker(options, [tokenizer.eos_token_id])
    return [_arm(name, worker.episodes(requests(keys, how), 0.0, 0)) for name, how in ARMS.items()]


def _arm(name: str, results: Sequence[EpisodeResult]) -> Arm:
    stats = EpisodeStats.from_results(results)
    return Arm(
        name=name,
        success=stats.reward_sum / stats.episodes,
        summaries=stats.audit.segments / stats.episodes - 1,
        tokens=stats.audit.sampled / stats.episodes,
        stop_reasons=dict(stats.stop_reasons),
    )


def measure(folder: Path, *, learned: int = 600, held_out: int = 200, steps: int = 700) -> list[Arm]:
    """Train a model in `folder`, and play keys that it never saw."""
    rng = random.Random(0)
    keys = ["".join(rng.choices(LETTERS, k=KEY)) for _ in range(4 * (learned + held_out))]
    keys = list(dict.fromkeys(keys))[: learned + held_out]
    return play(train(folder, keys[:learned], steps), keys[learned:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    facts, began = (
        machine(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)), "torch", "transformers"),
        time.time(),
    )
    with tempfile.TemporaryDirectory() as folder:
        arms = measure(Path(folder))
    print("| Held-out vaults | Right | Summaries | Tokens written | Ended |\n| --- | --- | --- | --- | --- |")
    for arm in arms:
        ended = ", ".join(f"{num} {reason}" for reason, num in arm.stop_reasons.items())
        print(f"| {arm.name} | {arm.success:.3f} | {arm.summaries:.2f} | {arm.tokens:.1f} | {ended} |")
    if given.json:
        found = {"machine": facts, "seconds": time.time() - began, "arms": [asdict(arm) for arm in arms]}
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
