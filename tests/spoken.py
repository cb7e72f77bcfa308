"""An episode through the real runner, in which the policy says what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from opd.records.environments import Tool, ToolCall
from opd.records.episodes import EpisodeResult
from opd.records.types import Prompt, SampledTurn
from opd.rollouts.episodes.runner import Dialogues, run_episodes
from opd.rollouts.episodes.spec import EpisodeOptions, EpisodeRequest
from opd.rollouts.episodes.tools import check_calls
from opd.rollouts.episodes.trace import EpisodeKey
from opd.tool_formats.hermes import Hermes


def tagged_calls(text: str, tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
    """The calls of a turn in Hermes' form, each checked against its tool."""
    return check_calls(Hermes().read(text, tools).calls, tools)


class Speaker:
    """Says one text after the other, as so many turns that end with an end token."""

    def __init__(self, tokenizer: Any, said: Sequence[str]) -> None:
        self.tokenizer, self.said = tokenizer, list(said)

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, seed: int) -> SampledTurn:
        ids = self.tokenizer(self.said.pop(0), add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id]
        return SampledTurn(token_ids=tuple(ids), logprobs=(-1.0,) * len(ids), stop_reason="stop", policy_version=0)


def spoken(tokenizer: Any, place: str, task: Mapping[str, Any], said: Sequence[str], **options: Any) -> EpisodeResult:
    """Play an episode of the environment at `place` with these turns; `options` are its constructor's."""
    request = EpisodeRequest(
        prompt=Prompt(id="d/0", domain="d", token_ids=(1,), text=task["prompt"], metadata=task["metadata"]),
        sample=EpisodeKey(sample_id="s", group="s", step=1, domain="d"),
        options=EpisodeOptions(
            environment=place,
            options=options,
            max_turns=len(said),
            max_turn_tokens=200,
            step_timeout_s=20.0,
            max_broken=0.0,
        ),
        seed=0,
    )
    dialogues = Dialogues(tokenizer, [tokenizer.eos_token_id])
    (found,) = asyncio.run(run_episodes([request], Speaker(tokenizer, said), dialogues, 20000, 0))
    return found
