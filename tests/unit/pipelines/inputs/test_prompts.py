"""Questions and training prompts: split by what a prompt says, and refused where they meet."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from experts.registry import Registry
from opd.config import load_pipeline
from opd.errors import ConfigError, PromptError
from opd.prompts import is_held_out
from pipelines.inputs.prompts import load_exams
from pipelines.inputs.read import load_tokenizer, read_inputs


def add(file: Path, *prompts: object) -> None:
    with file.open("a") as opened:
        opened.writelines(json.dumps({"prompt": prompt, "answer": "x"}) + "\n" for prompt in prompts)


def refusal(world: Any, kind: type[Exception] = PromptError) -> str:
    with pytest.raises(kind) as error:
        read_inputs(load_pipeline(world.write()))
    return str(error.value)


def texts(world: Any, prompts: Any) -> list[str]:
    inputs = read_inputs(load_pipeline(world.write()))
    return [inputs.tokenizer.decode(p.token_ids) for p in prompts(inputs)]


# Leaks


def test_questions_that_are_trained_on_are_counted_and_refused(world: Any) -> None:
    add(world.root / "upper.jsonl", "upp CCC=", "upp AAA=", "upp AAA=")
    message = refusal(world)
    assert message.startswith("domains.upper.eval\n")
    assert "2 of the 6 questions of upper are training prompts of upper" in message
    assert "question upper/0 is training prompt upper/7" in message


def test_what_another_domain_trains_on_is_no_question_either(world: Any) -> None:
    add(world.root / "reverse.jsonl", "upp BBB=")
    add(world.root / "upper.jsonl", "rev FFF=", "upp BBB=")
    message = refusal(world)
    assert "1 of the 6 questions of reverse are training prompts of upper; " in message
    assert "1 of the 6 questions of upper are training prompts of reverse; " in message
    assert "1 of the 6 questions of upper are training prompts of upper (" in message


def test_prompts_are_the_same_if_their_tokens_are(world: Any) -> None:
    add(world.root / "upper.jsonl", [{"role": "user", "content": "upp AAA"}])  # the chat template adds `=`
    assert "1 of the 6 questions" in refusal(world)


def test_only_the_questions_that_are_asked_matter(world: Any) -> None:
    add(world.root / "upper.jsonl", "upp FFF=")
    world.data["evaluate"] = {"samples": 5}
    assert len(read_inputs(load_pipeline(world.write())).exams["upper"].prompts) == 5


def test_messages_without_a_role_are_refused_as_such_and_not_as_a_leak(world: Any) -> None:
    for name in ("upper.jsonl", "upper-eval.jsonl"):
        (world.root / name).write_text("")
        add(world.root / name, [{"from": "human", "value": f"upp {name}"}])
    message = refusal(world)
    assert "upper.jsonl:1\n  found:  column `prompt`, message 1: the keys `from`, `value`" in message


def test_prompts_without_text_are_no_leak(world: Any) -> None:
    for name in ("upper.jsonl", "upper-eval.jsonl"):
        add(world.root / name, " ")
    assert read_inputs(load_pipeline(world.write())).warnings == (
        "upper.jsonl: 1 of 7 prompts have no text and are left out: upper/6",
        "1 of the 7 questions of upper have no text; they count as wrong",
    )


def test_questions_without_room_for_an_answer_are_told(world: Any) -> None:
    add(world.root / "upper-eval.jsonl", "a" * 31, "a" * 32, "a" * 99)
    assert read_inputs(load_pipeline(world.write())).warnings == (
        "2 of the 9 questions of upper leave no room for an answer in rollout.max_model_len = 32; they count as wrong",
    )


# Holdout


@pytest.fixture
def held_out(world: Any) -> Any:
    """The world with one file of 60 prompts for domain upper, a quarter of it held out."""
    (world.root / "upper.jsonl").write_text("")
    add(world.root / "upper.jsonl", *(f"upp {i:03d}=" for i in range(60)))
    world.data["domains"]["upper"]["eval"] = {"holdout": 0.25}
    return world


def both(world: Any) -> tuple[list[str], list[str]]:
    return (
        texts(world, lambda inputs: inputs.exams["upper"].prompts),
        texts(world, lambda inputs: inputs.prompts["upper"]),
    )


def test_a_file_is_split_into_questions_and_training_prompts(held_out: Any) -> None:
    questions, trained = both(held_out)
    assert sorted(questions + trained) == [f"upp {i:03d}=" for i in range(60)]
    assert 6 <= len(questions) <= 24


def test_a_prompt_stays_on_its_side_when_the_file_grows_or_is_reordered(held_out: Any) -> None:
    questions, trained = both(held_out)
    file = held_out.root / "upper.jsonl"
    lines = file.read_text().splitlines()
    random.Random(0).shuffle(lines)
    file.write_text("\n".join(lines) + "\n")
    add(file, *(f"upp x{i}=" for i in range(40)))
    more, others = both(held_out)
    assert set(questions) < set(more) and set(trained) < set(others)


def test_a_larger_share_holds_back_what_a_smaller_one_does() -> None:
    prompts = [f"p{i}" for i in range(2000)]
    sides = {share: {p for p in prompts if is_held_out(p, share)} for share in (0.05, 0.1, 0.5, 0.9)}
    assert sides[0.05] < sides[0.1] < sides[0.5] < sides[0.9]
    assert all(abs(len(side) / 2000 - share) < 0.04 for share, side in sides.items())


def test_sides_are_the_same_in_every_release() -> None:
    # A resumed run must not train on what was a question before.
    assert [is_held_out(p, 0.5) for p in ("a", "b", "c", "d", [{"role": "user", "content": "ü"}])] == [
        False,
        True,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(("share", "side"), [(1e-9, "the exam"), (1 - 1e-9, "training")])
def test_a_side_without_prompts_is_refused(held_out: Any, share: float, side: str) -> None:
    held_out.data["domains"]["upper"]["eval"]["holdout"] = share
    assert f"60 prompts, of which eval.holdout {share:g} leaves none for {side}" in refusal(held_out)


def test_a_share_of_the_prompts_that_an_expert_was_registered_with(held_out: Any) -> None:
    root = held_out.root
    registry = Registry(root / "registry")
    registry.add("rev", root / "rev", "reverse", root / "reverse.jsonl")
    registry.add("up", root / "up", "upper", root / "upper.jsonl")
    before = both(held_out)
    held_out.data["experts"] = {"use": ["rev", "up"]}
    del held_out.data["domains"]["upper"]["prompts"]
    assert both(held_out) == before
    config = load_pipeline(held_out.write())
    (exam,) = load_exams(config, load_tokenizer(config.student.model), ["upper"]).values()
    assert len(exam.prompts) == len(before[0]), "`opd evaluate` looks into the registry too"

    held_out.data["experts"] = {n: {"model": n, "domain": d} for n, d in (("rev", "reverse"), ("up", "upper"))}
    assert ": domains.upper\n  found:  no `prompts`" in refusal(held_out, ConfigError)
    held_out.data["experts"] = {"use": ["rev", "other"]}
    registry.add("other", root / "up", "upper")
    assert refusal(held_out, ConfigError).startswith("domains.upper.prompts\n  found:  nothing, and no expert")


# Verifiers


def test_rows_that_the_verifier_cannot_judge_are_refused(world: Any) -> None:
    world.data["domains"]["upper"]["eval"]["verifier"] = {"kind": "numeric", "tolerance": 0.5}
    message = refusal(world)
    assert message.startswith("upper-eval.jsonl: prompt upper/0\n  found:  answer 'AAA', no number (so have 6 of 6")
    assert "`numeric`" in message


def test_a_function_that_is_not_there_is_refused(world: Any) -> None:
    world.data["domains"]["upper"]["eval"]["verifier"] = {"kind": "python", "function": "no_such_module:judge"}
    assert "no module `no_such_module`" in refusal(world, ConfigError)
