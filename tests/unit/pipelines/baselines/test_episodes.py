"""Mixed SFT on whole episodes: the tokens and the mask of experts' training, counted by what is learned."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from experts.episodes.encode import EpisodeEncoder
from experts.episodes.play import PlaySettings, play_tasks
from experts.episodes.rows import has_episodes, read_episodes
from experts.sft import IGNORED, encode_lines
from opd.config import load_pipeline
from opd.config.prompts import FilterConfig, PromptsConfig
from opd.environments.maze import Maze
from opd.errors import PromptError
from opd.prompts import load_prompts
from opd.records.types import Prompt, Rollout
from pipelines.baselines.episodes import FileEpisode, cut_notice, read_file_episodes
from pipelines.baselines.imitation import Author, file_author, read_completions, train_off_policy
from pipelines.baselines.run import check_methods
from pipelines.inputs.read import Inputs, read_inputs

SAID = [
    {"role": "user", "content": "b3:"},
    {"role": "assistant", "content": "N", "weight": 0},
    {"role": "user", "content": "b2:"},
    {"role": "assistant", "content": "SS"},
]
"""Three tokens are learned, the end token included; five of the response are not."""


def tasks(num: int, seed: int = 0) -> list[dict[str, Any]]:
    return [dict(task) for task in Maze.tasks(num, seed=seed, size=4, mazes=0)]


def put(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def acting(world: Any) -> Any:
    """The first domain acts, and its file has an episode in each row; the second has completions."""
    put(world.root / "mazes.jsonl", [task | {"messages": SAID} for task in tasks(6)])
    put(world.root / "mazes-eval.jsonl", tasks(6, seed=1))
    put(
        world.root / "upper.jsonl",
        [{"prompt": f"upp {c * 3}=", "completion": c * 3, "answer": c * 3} for c in "abcdef"],
    )
    world.data["domains"]["reverse"] |= {
        "prompts": "mazes.jsonl",
        "environment": {"name": "maze", "max_turns": 7},
        "eval": {"prompts": "mazes-eval.jsonl"},
    }
    world.data["rollout"]["max_model_len"] = 256
    world.data["trainer"] = {"steps": 3, "samples_per_step": 6}
    return world


def opened(world: Any) -> tuple[Any, Inputs]:
    config = load_pipeline(world.write())
    return config, read_inputs(config)


def written(world: Any) -> list[Rollout]:
    """Return what the file of the first domain says to its prompts, in order."""
    config, inputs = opened(world)
    with file_author(config, read_completions(config, inputs)) as write:
        return write(list(inputs.prompts["reverse"]))


def test_tokens_and_mask_are_those_of_experts_training(acting: Any) -> None:
    file = put(acting.root / "mazes.jsonl", play_tasks("maze", tasks(6), PlaySettings(mistakes=0.4, max_turns=8)))
    assert '"weight": 0' in file.read_text(), "there is something to mask"
    found = written(acting)
    _, inputs = opened(acting)
    wanted = encode_lines(inputs.tokenizer, read_episodes(file), max_length=256)
    assert len(found) == len(wanted) == 6
    for rollout, example in zip(found, wanted, strict=True):
        assert [*rollout.prompt_ids, *rollout.response_ids] == example["input_ids"]
        learned = [label != IGNORED for label in example["labels"]]
        assert [*[False] * len(rollout.prompt_ids), *rollout.loss_mask] == learned
        assert rollout.num_trained == sum(learned)
        assert rollout.stop_reason == "done"


def test_only_turns_of_weight_1_are_learned(acting: Any) -> None:
    _, inputs = opened(acting)
    first = written(acting)[0]
    assert inputs.tokenizer.decode(first.prompt_ids).endswith("=b3:")
    assert inputs.tokenizer.decode(first.response_ids) == "N<eos>b2:SS<eos>"
    assert [(span.origin, span.length) for span in first.spans] == [("environment", 5), ("policy", 3)]
    assert inputs.tokenizer.decode(first.trained_ids) == "SS<eos>"


def test_what_the_student_is_trained_on(acting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of files in one training, by a budget of tokens that are learned."""
    config, inputs = opened(acting)
    seen: list[Any] = []
    monkeypatch.setattr("experts.sft.train_on_text", lambda model, examples, *_, **__: seen.extend(examples))
    asked: list[list[Prompt]] = []

    @contextmanager
    def author() -> Iterator[Author]:
        with file_author(config, read_completions(config, inputs)) as write:
            yield lambda prompts: asked.append(list(prompts)) or write(prompts)  # type: ignore[func-returns-value]

    tokens = train_off_policy(config, inputs, author(), {"reverse": 36.0, "upper": 24.0}, tmp_path / "out", print)
    assert Counter(p.domain for p in asked[-1]) == {"reverse": 3 * 4, "upper": 3 * 2}, "of 3 and of 4 learned tokens"
    assert tokens == 36 + 24 == sum(label != IGNORED for example in seen for label in example["labels"])
    known = encode_lines(inputs.tokenizer, read_episodes(acting.root / "mazes.jsonl"), max_length=256)
    mine = [example for example, prompt in zip(seen, asked[-1], strict=True) if prompt.domain == "reverse"]
    assert len(mine) == 12 and all(example in known for example in mine)


def test_a_file_of_completions_is_read_as_ever(acting: Any) -> None:
    config, inputs = opened(acting)
    completions = read_completions(config, inputs)
    want = (*inputs.tokenizer.encode("ccc", add_special_tokens=False), inputs.tokenizer.eos_token_id)
    assert completions["upper/2"] == want
    assert isinstance(completions["reverse/2"], FileEpisode) and len(completions) == 12


def test_rows_with_a_completion_are_no_episodes(acting: Any) -> None:
    put(acting.root / "mazes.jsonl", [task | {"messages": SAID, "completion": "uu"} for task in tasks(6)])
    _, inputs = opened(acting)
    assert {inputs.tokenizer.decode(r.response_ids) for r in written(acting)} == {"uu<eos>"}


def test_the_check_of_methods_takes_episodes_and_refuses_rows_with_nothing_to_learn(acting: Any) -> None:
    config, inputs = opened(acting)
    assert len(check_methods(config, inputs, ["mixed_sft"])) == 12
    put(acting.root / "mazes.jsonl", tasks(6))
    with pytest.raises(PromptError, match=r"mazes\.jsonl: prompt reverse/0\n  found:  no completion") as caught:
        check_methods(*opened(acting), ["mixed_sft"])
    assert "or a whole episode in `messages`" in str(caught.value)


def test_a_broken_row_is_named_by_its_line(acting: Any) -> None:
    rows = [task | {"messages": SAID} for task in tasks(6)]
    del rows[3]["messages"]
    put(acting.root / "mazes.jsonl", rows)
    with pytest.raises(PromptError, match=r"mazes\.jsonl:4\n  found:  no list `messages`"):
        written(acting)


def test_an_episode_is_cut_where_the_context_ends(acting: Any) -> None:
    whole = written(acting)
    room = max(len(r.prompt_ids) for r in whole) + 7
    acting.data["rollout"]["max_model_len"] = room
    cut = written(acting)
    for before, after in zip(whole, cut, strict=True):
        assert after.prompt_ids == before.prompt_ids
        left = room - len(after.prompt_ids)
        assert (after.response_ids, after.loss_mask) == (before.response_ids[:left], before.loss_mask[:left])
    longest = [r for r in cut if len(r.prompt_ids) == room - 7]
    assert longest and all(r.num_trained == 2 and r.stop_reason == "context" for r in longest)
    config, inputs = opened(acting)
    known = read_completions(config, inputs).values()
    assert cut_notice(known, room) == (
        f"{len(longest)} of 6 episodes are longer than rollout.max_model_len = {room} and are cut there"
    )
    assert cut_notice(known, 256) == ""


def test_an_episode_whose_learned_turns_do_not_fit_is_refused(acting: Any) -> None:
    room = min(len(r.prompt_ids) for r in written(acting)) + 5
    acting.data["rollout"]["max_model_len"] = room
    with pytest.raises(PromptError, match=rf"mazes\.jsonl:1\n  found:  an episode whose .* {room + 1}th\n"):
        written(acting)


def test_a_prompt_without_room_needs_no_episode(acting: Any) -> None:
    """The merge leaves it out, and so does the training."""
    rows = [task | {"messages": SAID} for task in tasks(6)]
    rows[0]["prompt"] = "a" * 300
    put(acting.root / "mazes.jsonl", rows)
    config, inputs = opened(acting)
    assert sorted(name for name in read_completions(config, inputs) if name.startswith("reverse")) == [
        f"reverse/{i}" for i in range(1, 6)
    ]


def test_rows_are_found_under_other_names_behind_a_filter_and_shuffled(tmp_path: Path, tiny_tokenizer: Any) -> None:
    letters = "abcdef"
    other = {"task": "none", "kind": "plain"}
    rows = [{"task": f"go {c}=", "kind": "game", "messages": SAID} for c in letters]
    source = PromptsConfig(
        path=put(tmp_path / "p.jsonl", [other, *rows]),
        columns={"prompt": "task"},
        filter=FilterConfig(column="kind", equals="game"),
        shuffle_seed=3,
        limit=4,
    )
    assert has_episodes(source)
    prompts = load_prompts(source, "games", tiny_tokenizer)
    found = read_file_episodes(source, prompts, EpisodeEncoder(tiny_tokenizer), 64)
    assert set(found) == {p.id for p in prompts} and len(found) == 4
    for prompt in prompts:
        assert tiny_tokenizer.decode(found[prompt.id].prompt_ids) == f"{prompt.text}b3:"
        assert prompt.text == f"go {letters[int(prompt.id.split('/')[1]) - 1]}="
