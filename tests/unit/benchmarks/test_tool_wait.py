"""The benchmark of slow tools without an engine: its episodes, and its medians."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from benchmarks.tool_wait import AT_ONCE, LENGTHS, SLEEPS, TOLD, Case, Time, summary
from experts.suites.letters import build_tokenizer
from opd.records.types import SampledTurn
from opd.rollouts.episodes.runner import Dialogues, run_episodes

CASE = Case(
    episodes=3, turns=4, turn_tokens=8, prompt_tokens=20, sleep_s=0.001, dtype="float32", vocab_size=512
)  # fmt: skip


class Longest:
    """Writes as long as it may."""

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, seed: int) -> SampledTurn:
        return SampledTurn(
            token_ids=(500,) * max_tokens, logprobs=(-1.0,) * max_tokens, stop_reason="length", policy_version=0
        )


@pytest.mark.parametrize("lengths", LENGTHS)
def test_both_ways_play_the_same_episodes_to_their_end(lengths: str) -> None:
    asked = {way: CASE.requests(lengths, way, 0) for way in (AT_ONCE, SLEEPS)}
    assert [r.options.options["sleep_s"] for r in (asked[AT_ONCE][0], asked[SLEEPS][0])] == [0.0, 0.001]  # type: ignore[union-attr]
    assert [(r.prompt, r.sample) for r in asked[AT_ONCE]] == [(r.prompt, r.sample) for r in asked[SLEEPS]]
    assert CASE.requests(lengths, SLEEPS, 1)[0].prompt.text != asked[SLEEPS][0].prompt.text, "nothing is cached"
    dialogues = Dialogues(build_tokenizer(), [])
    played = asyncio.run(run_episodes(asked[SLEEPS], Longest(), dialogues, CASE.context, 0))
    assert [(found.stop_reason, found.audit.turns) for found in played] == [("done", 4)] * 3
    assert played[0].text.count(TOLD) == 3 and played[0].audit.sampled == 4 * CASE.most(lengths)
    longest = max(len(r.prompt_ids) + len(r.response_ids) for found in played for r in found.rollouts)
    assert longest <= CASE.context and len(CASE.ends("varied")) == 512 // 8 and not CASE.ends("even")


def test_ratios_are_within_a_round() -> None:
    walls = {AT_ONCE: (1.0, 10.0, 2.0), SLEEPS: (2.0, 12.5, 2.5)}
    times = [
        Time("even", way, 100, walls[way][number], walls[way][number] / 2, 1.0)
        for number in range(3)
        for way in (AT_ONCE, SLEEPS)
    ]
    found = summary(times)["even"]
    assert found["ratio"] == pytest.approx(0.8), "of 0.5, 0.8 and 0.8"
    assert found[SLEEPS]["tokens_per_s"] == 40.0 and found[AT_ONCE]["engine_idle"] == 0.5
