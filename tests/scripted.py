"""Episodes of a scripted policy: the runner plays it as it plays a model, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from opd.environments.sandbox.box import Box, SandboxLimits
from opd.errors import ConfigError
from opd.records.episodes import EpisodeResult
from opd.records.types import Prompt, SampledTurn
from opd.rollouts.episodes.runner import Dialogues, run_episodes
from opd.rollouts.episodes.spec import EpisodeOptions, EpisodeRequest
from opd.rollouts.episodes.trace import EpisodeKey
from tests.chatml import WITH_TOOLS, chat_tokenizer

TOKENIZER = chat_tokenizer(WITH_TOOLS)
Policy = Callable[[list[str]], str]
"""The results that it read so far -> its next turn."""


def refused() -> str:
    """Say why there can be no sandbox here; empty if there can be."""
    try:
        Box(SandboxLimits()).close()
    except ConfigError as error:
        return str(error)
    return ""


REFUSED = refused()
NEEDS_SANDBOX = pytest.mark.skipif(bool(REFUSED), reason=f"no sandbox on this machine: {REFUSED}")


def results(text: str) -> list[str]:
    """Return the results in a dialogue so far: a chat's tool messages; of plain text what follows each turn, the next turn included."""
    if "<|im_start|>" in text:
        return [part.partition("<|im_end|>")[0] for part in text.split("<|im_start|>tool\n")[1:]]
    return text.split("<|im_end|>")[1:]


class Speaker:
    """Hands the results in the dialogue so far to a policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, seed: int) -> SampledTurn:
        text = TOKENIZER.decode(list(token_ids))
        ids = (*TOKENIZER(self.policy(results(text)), add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id)
        return SampledTurn(token_ids=ids, logprobs=(-1.0,) * len(ids), stop_reason="stop", policy_version=0)


def played(policy: Policy, prompt: Prompt, options: EpisodeOptions) -> EpisodeResult:
    """One episode, which must not break."""
    sample = EpisodeKey(sample_id="s", group="s", step=1, domain=prompt.domain)
    request = EpisodeRequest(prompt=prompt, sample=sample, options=options, seed=0)
    dialogues = Dialogues(TOKENIZER, [TOKENIZER.eos_token_id])
    (found,) = asyncio.run(run_episodes([request], Speaker(policy), dialogues, 60000, 0))
    assert not found.error, found.error
    return found
