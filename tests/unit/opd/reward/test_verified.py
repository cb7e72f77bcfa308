"""Responses get their rewards from the verifiers of the exams, whatever these do."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from opd.records.types import Prompt, Rollout, RolloutBatch
from opd.reward.verified import VerifiedRewards
from opd.verifiers.exact import ExactMatch
from opd.verifiers.regex import Regex
from tests.chatml import chat_tokenizer
from tests.rows import make_rollout
from tests.steps import Letters

PROMPTS = [
    Prompt(id="a/0", domain="a", token_ids=(1,), answer="bc"),
    Prompt(id="a/7", domain="a", token_ids=(1,), answer="x"),
    Prompt(id="b/0", domain="b", token_ids=(1,), answer="b"),
]


def rollout(prompt: str, *response: int, repeat: int = 1, **more: Any) -> Rollout:
    group = f"000003/{prompt}"
    return make_rollout(
        sample_id=group + (f"#{repeat}" if repeat > 1 else ""), group=group, step=3, domain=prompt[0], prompt_ids=(1,),
        response_ids=response, **more,
    )  # fmt: skip


@dataclass
class Odd:
    """Does what it is told to, once it has counted the call."""

    act: Any
    calls: int = 0
    unfit: str = ""

    def __call__(self, text: str, answer: str, metadata: Mapping[str, Any]) -> float:
        self.calls += 1
        return float(self.act(text))

    def problem(self, answer: str, metadata: Mapping[str, Any]) -> str:
        return self.unfit


def judged(verifier: Any, *rollouts: Rollout, timeout_s: float = 5.0) -> tuple[list[Any], list[tuple[str, str]]]:
    batch = RolloutBatch(rollouts=rollouts, quarantined=())
    found, failures = VerifiedRewards({"a": verifier}, Letters(), (), timeout_s).add_rewards(batch, PROMPTS)
    assert [r.sample_id for r in found.rollouts] == [r.sample_id for r in rollouts]
    return [r.reward for r in found.rollouts], [(one.domain, one.error) for one in failures]


def test_tags_that_are_special_tokens_reach_the_verifier() -> None:
    tokenizer = chat_tokenizer(None, ("<answer>", "</answer>"))
    written = rollout("a/0", *tokenizer("cb<answer>bc</answer><|im_end|>")["input_ids"])
    assert len(written.response_ids) == 7, "its tags are one token each"
    verified = VerifiedRewards({"a": Regex("<answer>(.*)</answer>")}, tokenizer, [tokenizer.eos_token_id], 5.0)
    found, failures = verified.add_rewards(RolloutBatch(rollouts=(written,), quarantined=()), PROMPTS)
    assert (found.rollouts[0].reward, failures) == (1.0, [])


def test_each_response_is_judged_by_its_own_prompts_answer() -> None:
    rollouts = [rollout("a/0", 1, 2), rollout("a/0", 1, repeat=2), rollout("a/7", 23), rollout("b/0", 1)]
    assert judged(ExactMatch(), *rollouts) == ([1.0, 0.0, 1.0, None], [])
    assert judged(ExactMatch()) == ([], [])


def test_domains_without_a_verifier_keep_what_their_environment_gave() -> None:
    assert judged(ExactMatch(), rollout("b/0", 1, reward=0.25))[0] == [0.25]


def raise_(error: BaseException) -> float:
    raise error


@pytest.mark.parametrize(
    ("verifier", "told"),
    [
        (Odd(lambda text: raise_(ValueError("no\nsense"))), "ValueError: no sense"),
        (Odd(lambda text: raise_(TimeoutError("its own"))), "TimeoutError: its own"),
        (Odd(lambda text: raise_(SystemExit("gone"))), "SystemExit: gone"),
        (Odd(lambda text: "much"), "could not convert string to float"),
        (Odd(lambda text: 1.0, unfit="no `answer`"), "a/0: no `answer`"),
    ],
    ids=["raises", "raises what looks like a deadline", "exits", "gives no number", "row that it must not judge"],
)
def test_a_verifier_that_fails_gives_nothing_and_is_counted(verifier: Any, told: str) -> None:
    rewards, failures = judged(verifier, rollout("a/0", 1), rollout("b/0", 1))
    assert rewards == [0.0, None]
    ((domain, error),) = failures
    assert domain == "a" and told in error and "\n" not in error
    assert verifier.calls == (0 if verifier.unfit else 1)


def test_a_verifier_that_hangs_does_not_hold_up_those_after_it() -> None:
    ended = threading.Event()

    def hang(text: str) -> float:
        if text == "b":
            ended.wait(30)
        return 1.0

    began = time.monotonic()
    rewards, failures = judged(
        Odd(hang), rollout("a/0", 2), rollout("a/7", 1), rollout("a/0", 2, repeat=2), timeout_s=0.2
    )
    assert time.monotonic() - began < 10
    assert rewards == [1.0, 0.0, 1.0]
    assert failures == [("a", "not back after 0.2 s (objective.reward.timeout_s)")]
    ended.set()
