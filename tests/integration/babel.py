"""An environment that says anything at all, and a rollout worker that tells what vLLM itself read and wrote."""

from __future__ import annotations

import random
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

from opd.records.environments import Action, Outcome
from opd.records.episodes import EpisodeResult
from opd.rollouts.worker import VLLMWorker

ALPHABETS = (
    string.ascii_letters + string.digits + " .,:=+-",
    " \n\t\r",
    "äßñçøœĳŉ",
    "дом мир ひらがな 漢字 한글 नमस्ते ภาษา שלום سلام",
    "🙂👩‍👩‍👧🏳️‍🌈🇩🇪\ufe0f",
    "e\u0301a\u0308\u0323\u200b\u200d\u2060\ufeff\u202e\u2066\u00a0\u3000",
    "\U00010348\U0001f9ff\ufffd\ue000\U0010fffd",
)
"""Parts of observations: most of it is text that no model ever saw, but text."""
PIECES = (
    "<|im_end|>", "<|im_start|>assistant\n", "<|endoftext|>", "<eos>", "<unk>", "<|im_", "end|>",
    "{{ messages }}", "<tool_call>", "</tool_call>", " the maze", "\n\n\n", "0123456789" * 3,
)  # fmt: skip
"""Look-alikes of a special token, a template or a call, which are none."""
CONTROL = "\x00\x07\x08\x1b\x7f\x85\ud83d"
"""Characters that no policy may read: one ends the episode."""


class Babel:
    """Two to eight turns of random observations, which depend on the task's seed and on what the policy said."""

    tools = ()

    def reset(self, metadata: Mapping[str, Any], seed: int) -> str:
        self.seed, self.turns = seed, 0
        self.length = random.Random(seed).randint(2, 8)
        return text(random.Random(f"{seed}/first"))

    def step(self, action: Action) -> Outcome:
        self.turns += 1
        rng = random.Random(f"{self.seed}/{self.turns}/{action.text!a}")
        seen = text(rng) + (rng.choice(CONTROL) if rng.random() < 0.02 else "")
        return Outcome(observation=seen, reward=rng.random(), done=self.turns == self.length)

    def close(self) -> None:
        pass


def text(rng: random.Random) -> str:
    """Nothing, a few characters or some hundred, of one alphabet or of all of them."""
    count = rng.choice((0, 1, 2, 5, 10, 20, 40, rng.randint(100, 300)))
    alphabets = ALPHABETS if rng.random() < 0.5 else (rng.choice(ALPHABETS),)
    parts = [rng.choice(rng.choice(alphabets)) for _ in range(count)]
    for _ in range(rng.choice((0, 0, 1, 2))):
        parts.insert(rng.randint(0, len(parts)), rng.choice(PIECES))
    return "".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A turn as vLLM gave it back."""

    read: tuple[int, ...]
    """The tokens before it."""
    wrote: tuple[int, ...]
    logprobs: tuple[float, ...]


class TellingWorker(VLLMWorker):
    """A rollout worker that keeps every turn that comes out of vLLM, before anything of ours has seen it."""

    def episodes(self, *args: Any) -> list[EpisodeResult]:
        engine = self._llm.llm_engine
        step = engine.step
        self._told: list[Told] = []

        def telling() -> Any:
            outputs = step()
            self._told += [told(output) for output in outputs if output.finished]
            return outputs

        with mock.patch.object(engine, "step", telling):
            return super().episodes(*args)

    def told(self) -> list[Told]:
        """Of the last episodes."""
        return self._told


def told(output: Any) -> Told:
    (written,) = output.outputs
    logprobs = [step[token].logprob for token, step in zip(written.token_ids, written.logprobs, strict=True)]
    return Told(
        read=tuple(output.prompt_token_ids), wrote=tuple(written.token_ids), logprobs=tuple(map(float, logprobs))
    )
