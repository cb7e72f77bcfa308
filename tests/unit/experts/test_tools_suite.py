"""The suite `tools`: chat episodes with tools that a rollout of SmolLM2 has to the token, and that its pipeline has room for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from experts.episodes.encode import EpisodeEncoder
from experts.episodes.rows import read_episode, read_episodes
from experts.rl.spec import load_training
from experts.spec import ExpertsSpec, find_spec
from experts.suites import write_suite
from experts.suites.tools import DOMAINS, make_rows
from opd.config import load_pipeline
from opd.environments import ENVIRONMENTS, find_environment
from opd.prompts import read_prompt_lines
from opd.records.environments import Action
from pipelines.catalog import find_pipeline
from tests.chatml import CHATML, WITH_TOOLS, bpe_tokenizer, chat_tokenizer, smollm2_tokenizer
from tests.spoken import spoken, tagged_calls

TOOLS = list(DOMAINS)


def said(row: Mapping[str, Any]) -> list[str]:
    return [turn["content"] for turn in row["messages"] if turn["role"] == "assistant"]


def test_the_suite_keeps_exams_apart(tmp_path: Path) -> None:
    written = write_suite("tools", tmp_path, train=120, eval=30, seed=0)
    assert list(written) == TOOLS
    for domain, paths in written.items():
        train, held_out = (read_prompt_lines(paths[kind]) for kind in ("train", "eval"))
        assert (len(train), len(held_out)) == (120, 30)
        asked = {str(line.prompt) for line in held_out}
        assert len(asked) == 30 and not asked & {str(line.prompt) for line in train}
        for row in read_episodes(paths["train"]):
            assert row.tools == find_environment(domain, "here").tools
            assert row.asks and not isinstance(row.prompt, str)


def test_questions_that_are_used_up_come_again_with_other_mistakes() -> None:
    rows = make_rows("lookup", 1300, 0)
    asked = [json.dumps(row["prompt"]) for row in rows]
    assert len(set(asked)) == 1000 and not set(asked[:100]) & set(asked[100:])
    again = [row["messages"] for row, text in zip(rows, asked, strict=True) if text == asked[150]]
    assert len(again) > 1


@pytest.mark.parametrize("domain", TOOLS)
def test_every_turn_of_weight_1_is_the_solvers_and_mistakes_are_in_the_episodes(domain: str) -> None:
    wrong = total = won = 0
    for row in make_rows(domain, 60, 3):
        made = find_environment(domain, "here")()
        made.reset(row["metadata"], 0)
        turns = [turn for turn in row["messages"] if turn["role"] == "assistant"]
        for turn in turns:
            assert (turn["content"] == made.solve().text) == (turn["weight"] == 1)
            outcome = made.step(Action(text=turn["content"], calls=tagged_calls(turn["content"], made.tools)))
            wrong, total = wrong + (turn["weight"] == 0), total + 1
        assert 1 <= len(turns) <= DOMAINS[domain].max_turns
        won += outcome.reward == 1
    assert 0.1 < wrong / total < 0.3 and won > 50


@pytest.mark.parametrize(
    "make",
    [
        lambda: chat_tokenizer(CHATML),
        lambda: chat_tokenizer(WITH_TOOLS),
        bpe_tokenizer,
        pytest.param(smollm2_tokenizer, marks=pytest.mark.slow),
    ],
    ids=["tools in the system message", "tools in the template", "bpe", "smollm2"],
)
@pytest.mark.parametrize("domain", TOOLS)
def test_a_rollout_of_the_same_turns_has_the_same_tokens(domain: str, make: Callable[[], Any]) -> None:
    tokenizer = make()
    encoder = EpisodeEncoder(tokenizer)
    for row in make_rows(domain, 12, 0):
        ids, learned = encoder.encode(read_episode(json.loads(json.dumps(row))))
        found = spoken(tokenizer, ENVIRONMENTS[domain], row, said(row))
        (rollout,) = found.rollouts
        assert ids == [*rollout.prompt_ids, *rollout.response_ids]
        sampled = [False] * len(rollout.prompt_ids) + list(rollout.loss_mask)
        assert any(learned) and all(mine <= theirs for mine, theirs in zip(learned, sampled, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("domain", TOOLS)
def test_the_pipeline_has_room_for_every_episode_of_smollm2(domain: str) -> None:
    tokenizer = smollm2_tokenizer()
    config, spec = load_pipeline(find_pipeline("smollm2-tools")), load_training(find_spec("smollm2-tools-experts"))
    assert isinstance(spec, ExpertsSpec)
    encoder = EpisodeEncoder(tokenizer)
    for row in make_rows(domain, 200, 0):
        prompt, after, _ = encoder.encode_prompt_and_rest(read_episode(row))
        assert len(prompt) <= 300
        assert len(prompt + after) <= min(config.rollout.max_model_len, spec.train.max_length)
        longest = max(len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1 for text in said(row))
        assert longest <= config.rollout.max_new_tokens
