"""Efforts of a whole pipeline: what student, teachers and exams read, what stays the same for all efforts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opd.config import load_pipeline
from opd.errors import ConfigError, OpdError, PromptError
from opd.records.types import Rollout
from pipelines.build import prompt_source
from pipelines.inputs.environments import episode_options
from pipelines.inputs.read import Inputs, read_inputs
from pipelines.inputs.show_prompts import show_prompts

LOW, MAX = "low ", "max "


@pytest.fixture
def tried(world: Any) -> Any:
    """Two efforts told by a text; one expert of `reverse` for both, and two of `upper`, of which one reads no tag."""
    world.data["efforts"] = {"low": {"text": LOW}, "max": {"text": MAX}}
    up = world.data["experts"].pop("up")
    world.data["experts"]["up-low"] = {**up, "effort": "low", "prompt": {"effort": False}}
    world.data["experts"]["up-max"] = {**up, "effort": "max"}
    world.data["trainer"]["samples_per_step"] = 8
    return world


def read(world: Any) -> Inputs:
    return read_inputs(load_pipeline(world.write()))


def texts(inputs: Inputs, domain: str) -> list[str]:
    return [inputs.tokenizer.decode(prompt.token_ids) for prompt in inputs.prompts[domain]]


def teacher_text(inputs: Inputs, domain: str, index: int) -> str | None:
    (assigned,) = inputs.scoring[domain]
    prompt = inputs.prompts[domain][index]
    rollout = Rollout.from_tokens(f"000003/{prompt.id}", prompt.token_ids, (1, 2), domain)
    return None if assigned.prompts is None else inputs.tokenizer.decode(assigned.prompts(rollout))


def test_the_student_reads_the_tag_and_a_teacher_need_not(tried: Any) -> None:
    inputs = read(tried)
    assert list(inputs.prompts) == ["reverse-low", "reverse-max", "upper-low", "upper-max"]
    assert texts(inputs, "upper-low")[1] == "low upp bbb=" and texts(inputs, "upper-max")[1] == "max upp bbb="
    assert inputs.prompts["upper-low"][1].text == "low upp bbb="
    assert {d: a[0].teacher.name for d, a in inputs.routes.items()} == {
        "reverse-low": "rev", "reverse-max": "rev", "upper-low": "up-low", "upper-max": "up-max",
    }  # fmt: skip
    assert teacher_text(inputs, "upper-low", 1) == "upp bbb="
    assert teacher_text(inputs, "upper-max", 1) is None, "it reads what the student reads"


def test_an_expert_without_the_tag_is_examined_without_it(tried: Any) -> None:
    inputs = read(tried)
    assert list(inputs.expert_exams) == ["upper-low"]
    own, asked = (exams["upper-low"].prompts[0] for exams in (inputs.expert_exams, inputs.exams))
    assert inputs.tokenizer.decode(own.token_ids) == "upp AAA=" and own.id == asked.id and own.answer == asked.answer
    assert inputs.tokenizer.decode(asked.token_ids) == "low upp AAA="


def test_a_teachers_own_prompt_has_the_tag_of_each_effort(tried: Any) -> None:
    (tried.root / "join.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    own = {"system": "Say: ", "template": "join.jinja", "max_model_len": 60}
    tried.data["experts"]["rev"]["prompt"] = own
    inputs = read(tried)
    assert teacher_text(inputs, "reverse-low", 0) == "Say: low rev aaa="
    assert teacher_text(inputs, "reverse-max", 0) == "Say: max rev aaa="
    tried.data["experts"]["rev"]["prompt"] = {**own, "effort": False}
    inputs = read(tried)
    assert {teacher_text(inputs, d, 0) for d in ("reverse-low", "reverse-max")} == {"Say: rev aaa="}
    shown = "\n".join(show_prompts(load_pipeline(tried.write()), "reverse-max", 1))
    assert "'max rev aaa='" in shown and "'Say: rev aaa='" in shown


def test_all_efforts_of_a_domain_get_the_same_prompts_in_a_step_and_hold_the_same_out(tried: Any) -> None:
    lines = [json.dumps({"prompt": f"upp {i:02}=", "answer": "x"}) for i in range(40)]
    (tried.root / "upper.jsonl").write_text("\n".join(lines) + "\n")
    tried.data["domains"]["upper"] = {"prompts": "upper.jsonl", "eval": {"holdout": 0.3}}
    tried.data["trainer"]["samples_per_step"] = 24
    config = load_pipeline(tried.write())
    inputs = read_inputs(config)
    low, most = ([p.id.split("/")[1] for p in inputs.exams[f"upper-{e}"].prompts] for e in ("low", "max"))
    assert low == most and len(low) > 3
    source = prompt_source(config, inputs, None)  # type: ignore[arg-type]
    for step in (1, 2, 9):
        taken: dict[str, list[str]] = {}
        for prompt in source.take(step):
            taken.setdefault(prompt.domain, []).append(prompt.id.split("/")[1])
        assert taken["upper-low"] == taken["upper-max"] and len(taken["upper-low"]) == 6
        assert taken["reverse-low"] == taken["reverse-max"]


def test_a_variable_of_the_chat_template_tells_the_effort_in_dialogues_and_episodes(tried: Any) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ reasoning_effort }}{{ eos_token if false }}="
    (tried.root / "base" / "chat_template.jinja").write_text(template)
    for domain in ("reverse", "upper"):
        for file in (f"{domain}.jsonl", f"{domain}-eval.jsonl"):
            rows = [json.loads(line) for line in (tried.root / file).read_text().splitlines()]
            chats = [{**row, "prompt": [{"role": "user", "content": row["prompt"][:-1]}]} for row in rows]
            (tried.root / file).write_text("".join(json.dumps(row) + "\n" for row in chats))
    tried.data["efforts"] = {"low": {}, "max": {}}
    inputs = read(tried)
    assert texts(inputs, "reverse-max")[0] == "rev aaamax=" and texts(inputs, "upper-low")[0] == "upp aaalow="
    assert teacher_text(inputs, "upper-low", 0) == "upp aaa="
    tried.data["domains"]["upper"]["environment"] = {"name": "number"}
    options: Any = episode_options(load_pipeline(tried.write()))
    assert {name: option.chat_template_kwargs for name, option in options.items()} == {
        f"upper-{effort}": {"reasoning_effort": effort} for effort in ("low", "max")
    }


def refusal(world: Any) -> str:
    with pytest.raises(OpdError) as error:
        read(world)
    assert isinstance(error.value, ConfigError | PromptError)
    return str(error.value)


def test_efforts_of_which_the_prompts_do_not_tell_are_refused(tried: Any) -> None:
    tried.data["efforts"] = {"low": {"text": "same "}, "max": {"text": "same "}}
    message = refusal(tried)
    assert "efforts.low, efforts.max" in message and "the same prompt for both, such as reverse-low/0" in message
    tried.data["efforts"] = {"low": {}, "max": {"text": "max "}}
    message = refusal(tried)
    assert "efforts.low.chat_template_kwargs.reasoning_effort" in message and "give `text` in its place" in message


def test_a_training_prompt_is_no_question_of_its_effort(tried: Any, tmp_path: Path) -> None:
    tried.data["domains"]["upper"]["eval"] = {"prompts": "upper.jsonl"}
    assert "questions of upper-low are training prompts of upper-low" in refusal(tried)
