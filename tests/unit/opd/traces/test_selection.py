"""Episodes that are shown: few of each domain, and the same ones in every replay."""

from __future__ import annotations

from typing import Any

from opd.records.types import Rollout
from opd.traces.selection import choose_episodes, group_episodes, watched_samples
from tests.rows import make_rollout


def segment(name: str, domain: str = "maze", tokens: int = 2, **more: Any) -> Rollout:
    known = {"episode": name, "stop_reason": "done", "step": 3, "prompt_ids": (1,)}
    return make_rollout(
        sample_id=more.pop("sample_id", name), domain=domain, response_ids=(5,) * tokens, **known | more
    )


STEP = [
    segment("a", reward=0.5),
    segment("b", reward=1.0),
    segment("b", sample_id="b+1", tokens=3, reward=1.0, parent="b", origin="summary"),
    segment("c", reward=0.0),
    segment("d", reward=1.0),
    segment("x", "cave"),
    segment("y", "cave", tokens=9),
    segment("alone", "sums", stop_reason="stop"),
    segment("cut", "sums", stop_reason="length"),
]


def test_the_best_the_worst_the_longest_and_the_first_of_each_domain() -> None:
    assert choose_episodes(group_episodes(STEP)) == {
        "b": ("best", "longest"),
        "c": ("worst",),
        "a": ("first",),
        "y": ("longest",),
        "x": ("first",),
    }


def test_every_segment_of_a_chosen_episode_is_watched_and_no_answer_of_one_turn() -> None:
    assert watched_samples(STEP) == {"a", "b", "b+1", "c", "x", "y"}
    assert watched_samples(STEP[-2:]) == watched_samples([]) == frozenset()


def test_where_all_are_alike_one_is_shown() -> None:
    assert choose_episodes(group_episodes([segment(name, reward=1.0) for name in "abc"])) == {
        "a": ("best", "longest", "first")
    }


def test_a_segment_that_another_domains_expert_scores_belongs_to_its_episode() -> None:
    helped = [segment("a"), segment("a", "maps", sample_id="a+1", origin="sub_agent", parent="a")]
    assert choose_episodes(group_episodes(helped)) == {"a": ("longest", "first")} and watched_samples(helped) == {
        "a",
        "a+1",
    }
