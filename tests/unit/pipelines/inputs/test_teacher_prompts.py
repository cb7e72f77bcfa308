"""Teachers' own prompts of a whole pipeline: what each teacher reads, and what is refused before compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opd.config import load_pipeline
from opd.environments.number import GuessTheNumber
from opd.environments.sorting import Sorting
from opd.errors import ConfigError, OpdError, PromptError
from opd.live.interfaces import Display
from opd.records.types import Rollout
from opd.run.paths import RunPaths
from opd.train.deepspeed import read_teacher_prompts
from pipelines.inputs.read import Inputs, read_inputs
from pipelines.inputs.show_prompts import show_prompts
from pipelines.merging.exams import StartingExams
from pipelines.merging.manifest import make_manifest
from pipelines.specs import base_scoring, trainer_spec
from pipelines.teacher_groups import divide_by_engine
from tests.exams import Measuring
from tests.unit.pipelines.inputs.test_read import register

JOIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
SECRET = "the secret is "
ENVIRONMENTS = {"sorting": Sorting.tasks(6, seed=0), "number": GuessTheNumber.tasks(6, seed=0)}


@pytest.fixture
def told(world: Any) -> Any:
    """The expert of `reverse` reads a column `solution` in front of the prompt; the student does not."""
    lines = [json.dumps({"prompt": f"rev {c * 3}=", "answer": c * 3, "solution": f"{SECRET}{c * 4}"}) for c in "abcdef"]
    (world.root / "reverse.jsonl").write_text("\n".join(lines) + "\n")
    (world.root / "join.jinja").write_text(JOIN)
    world.data["experts"]["rev"]["prompt"] = {
        "system": "{{ row.solution }} ",
        "template": "join.jinja",
        "max_model_len": 48,
    }
    return world


def read(world: Any) -> Inputs:
    return read_inputs(load_pipeline(world.write()))


def sample(inputs: Inputs, domain: str, index: int) -> Rollout:
    prompt = inputs.prompts[domain][index]
    return Rollout.from_tokens(f"000003/{prompt.id}", prompt.token_ids, (1, 2), domain)


def teacher_text(inputs: Inputs, domain: str, index: int) -> str:
    (assigned,) = inputs.scoring[domain]
    assert assigned.prompts is not None
    text: str = inputs.tokenizer.decode(assigned.prompts(sample(inputs, domain, index)))
    return text


def test_a_column_that_the_student_never_sees(told: Any) -> None:
    inputs = read(told)
    assert teacher_text(inputs, "reverse", 1) == f"{SECRET}bbbb rev bbb="
    assert inputs.tokenizer.decode(inputs.prompts["reverse"][1].token_ids) == "rev bbb="
    assert inputs.scoring["upper"][0].prompts is None and inputs.routes["reverse"][0].prompts is None
    assert inputs.warnings == ()  # the column is not reported as one that nobody reads


@pytest.mark.parametrize(
    "more", [{"shuffle_seed": 3}, {"filter": {"column": "answer", "one_of": ["bbb", "ddd"]}}, {"limit": 2}]
)
def test_rows_are_found_by_their_number_whatever_is_read_of_the_file(told: Any, more: dict[str, Any]) -> None:
    told.data["domains"]["reverse"]["prompts"] = {"path": "reverse.jsonl", **more}
    inputs = read(told)
    for index, prompt in enumerate(inputs.prompts["reverse"]):
        letter = prompt.answer[0]
        assert teacher_text(inputs, "reverse", index) == f"{SECRET}{letter * 4} rev {letter * 3}="


def test_held_out_prompts_and_a_table_of_columns(told: Any) -> None:
    rows = [json.loads(line) for line in (told.root / "reverse.jsonl").read_text().splitlines()]
    lines = ["prompt,answer,solution", *(f"{r['prompt']},{r['answer']},{r['solution']}" for r in rows)]
    (told.root / "reverse.csv").write_text("\n".join(lines) + "\n")
    told.data["domains"]["reverse"] = {"prompts": "reverse.csv", "eval": {"holdout": 0.5}}
    inputs = read(told)
    letter = inputs.prompts["reverse"][0].answer[0]
    assert teacher_text(inputs, "reverse", 0) == f"{SECRET}{letter * 4} rev {letter * 3}="


def test_messages_come_before_the_rows_own_and_a_system_message_takes_its_place(told: Any) -> None:
    chat = [{"role": "system", "content": "S "}, {"role": "user", "content": "rev abc="}]
    (told.root / "reverse.jsonl").write_text(json.dumps({"prompt": chat, "answer": "a"}) + "\n")
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    for name in ("base", "rev", "up"):
        (told.root / name / "chat_template.jinja").write_text(template)
    shots = [{"role": "user", "content": "rev x="}, {"role": "assistant", "content": "x"}]
    told.data["rollout"]["max_model_len"] = 60
    told.data["experts"]["rev"]["prompt"] = {"messages": shots, "max_model_len": 200}
    shown = teacher_text(read(told), "reverse", 0)
    assert shown == "<system>S <user>rev x=<assistant>x<user>rev abc=<assistant>"
    told.data["experts"]["rev"]["prompt"]["system"] = "T "
    assert teacher_text(read(told), "reverse", 0) == "<system>T <user>rev x=<assistant>x<user>rev abc=<assistant>"


def refuse(world: Any, error: type[OpdError] = PromptError) -> str:
    with pytest.raises(error) as caught:
        read(world)
    return str(caught.value)


def test_a_column_that_a_row_lacks(told: Any) -> None:
    with (told.root / "reverse.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "rev x=", "answer": "x"}) + "\n")
    message = refuse(told)
    assert "experts.rev.prompt" in message and "prompt reverse/6" in message and "no column `solution`" in message


def test_a_message_that_is_empty_for_a_row(told: Any) -> None:
    told.data["experts"]["rev"]["prompt"]["system"] = "{% if row.solution != 'the secret is cccc' %}x{% endif %}"
    assert "prompt reverse/2" in (message := refuse(told)) and "empty for this row" in message


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{{ messages[-1].content }}", "leaves out, or changes, the message"),
        ("{% for m in messages %}{{ m.content|upper }}{% endfor %}", "leaves out"),
        ("{% for m in messages %}{{ m.content[:9] }}{% endfor %}", "leaves out, or changes, the message"),
        ("{{ messages[0].content }}{{ messages[1].content }}", "cuts or changes"),
        (
            "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content[1:] }}{% else %}{{ m.content }}{% endif %}{% endfor %}",
            "cuts or changes",
        ),
        (
            "{% for m in messages %}{% if m.role == 'assistant' %}A:{% endif %}{{ m.content }}{% endfor %}",
            "writes 'A:' between its prompt and an answer",
        ),
        ("{{ raise_exception('no') }}", "no"),
        ("{% for %}", ""),
    ],
)
def test_a_template_that_does_not_take_the_prompt_or_the_response(told: Any, template: str, fault: str) -> None:
    (told.root / "join.jinja").write_text(template)
    assert fault in refuse(told, OpdError)


def test_a_template_that_opens_thoughts_takes_a_response(told: Any) -> None:
    (told.root / "join.jinja").write_text(JOIN + "{% if add_generation_prompt %}<think>\n{% endif %}")
    assert teacher_text(read(told), "reverse", 0).startswith(f"{SECRET}aaaa rev aaa=")


def test_a_prompt_without_room_for_the_longest_response(told: Any) -> None:
    longest = len(f"{SECRET}aaaa rev aaa=") + 8
    told.data["experts"]["rev"]["prompt"]["max_model_len"] = longest
    read(told)
    told.data["experts"]["rev"]["prompt"]["max_model_len"] = longest - 1
    message = refuse(told)
    assert f"set experts.rev.prompt.max_model_len to {longest} or more" in message and "6 of 6" in message
    del told.data["experts"]["rev"]["prompt"]["max_model_len"]
    assert "rollout.max_model_len" in refuse(told)
    told.data["experts"]["rev"]["prompt"]["max_model_len"] = 1 << 20
    assert "the context of" in refuse(told, ConfigError)


def test_a_column_for_teachers_that_the_student_reads(told: Any) -> None:
    rows = [json.loads(line) for line in (told.root / "reverse.jsonl").read_text().splitlines()]
    for row in rows[:3]:
        row["prompt"] = row["solution"]
    file: Path = told.root / "reverse.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told.data["experts"]["rev"]["prompt"]["max_model_len"] = 64
    assert any("stands in the student's own prompt in 3 of 6 rows" in warning for warning in read(told).warnings)
    rows[3]["prompt"] = f"see: {rows[3]['solution']}"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "column `solution` stands in the student's own prompt in 4 of 6 rows" in refuse(told)


def test_what_a_prompt_of_an_experts_own_does_not_go_with(told: Any) -> None:
    told.data["experts"]["rev"]["prompt"]["template_kwargs"] = {"enable_thinking": True}
    assert "a variable that the chat template does not read" in refuse(told, ConfigError)
    del told.data["experts"]["rev"]["prompt"]["template_kwargs"]
    told.data["experts"]["rev"]["prompt"]["template"] = "missing.jinja"
    assert "correct the path" in refuse(told, ConfigError)
    del told.data["experts"]["rev"]["prompt"]["template"]
    assert "cuts or changes" in refuse(told)  # of plain text the student's template would make another ending
    for name in ("base", "rev", "up"):
        (told.root / name / "chat_template.jinja").unlink()
    assert "a student without a chat template" in refuse(told, ConfigError)


def test_a_prompt_is_shown_as_its_teacher_reads_it(told: Any) -> None:
    lines = list(show_prompts(load_pipeline(told.write()), "reverse", 2))
    assert f"  experts.rev.prompt: '{SECRET}bbbb rev bbb='" in lines
    assert "  text: 'rev bbb='" in lines and not any("not read: solution" in line for line in lines)
    told.data["experts"]["rev"]["prompt"]["system"] = "{{ row.hint }}"
    with pytest.raises(PromptError, match="no column `hint`"):
        list(show_prompts(load_pipeline(told.write()), "reverse", 2))


def test_the_manifest_has_the_templates_hash(told: Any) -> None:
    config = load_pipeline(told.write())
    manifests = []
    for text in (JOIN, JOIN + "{# more #}"):
        (told.root / "join.jinja").write_text(text)
        manifests.append(make_manifest(config, read(told)))
    assert manifests[0]["teacher_templates"].keys() == {"rev"}
    assert manifests[0]["teacher_templates"] != manifests[1]["teacher_templates"]


def test_the_student_is_its_own_teacher(told: Any) -> None:
    told.data["experts"]["rev"]["model"] = "student"
    inputs = read(told)
    (assigned,) = inputs.scoring["reverse"]
    assert (assigned.teacher.name, assigned.teacher.model_dir) == ("rev", Path("base").absolute())
    assert teacher_text(inputs, "reverse", 0) == f"{SECRET}aaaa rev aaa="
    manifest = make_manifest(load_pipeline(told.write()), inputs)
    assert manifest["experts"]["rev"]["weights"] == {} and manifest["config"]["experts"]["rev"]["model"] == "student"


@pytest.mark.parametrize("registered", [False, True])
def test_what_is_kept_has_the_start_student_for_a_teacher(world: Any, registered: bool) -> None:
    (world.root / "general.jsonl").write_text(json.dumps({"prompt": "abc"}) + "\n")
    world.data |= {"keep": {"prompts": "general.jsonl"}, "trainer": {"steps": 2, "samples_per_step": 6}}
    if registered:
        register(world)
    inputs = read(world)
    assert [p.id for p in inputs.prompts["kept"]] == ["kept/0"]
    (assigned,) = inputs.scoring["kept"]
    assert (assigned.teacher.name, assigned.weight) == ("kept", 1.0)
    assert assigned.teacher.model_dir.resolve() == (world.root / "base").resolve()
    manifest = make_manifest(load_pipeline(world.write()), inputs)
    assert manifest["experts"]["kept"]["domains"] == ["kept"] and manifest["prompts"].keys() == {
        "reverse",
        "upper",
        "kept",
    }


@pytest.mark.parametrize("registered", [False, True])
def test_the_student_keeps_two_games_beside_a_merged_domain(world: Any, registered: bool) -> None:
    rows = {name: "".join(json.dumps(row) + "\n" for row in ENVIRONMENTS[name]) for name in ENVIRONMENTS}
    for name, text in rows.items():
        (world.root / f"{name}.jsonl").write_text(text)
        world.data["domains"][name] = {"prompts": f"{name}.jsonl", "environment": {"name": name}, "teachers": "student"}
    world.data["rollout"]["max_model_len"] = 64
    if registered:
        register(world)
    inputs = read(world)
    assert {name: inputs.scoring[name][0].teacher.name for name in rows} == dict.fromkeys(rows, "student")
    assert inputs.scoring["sorting"][0].teacher.model_dir.resolve() == (world.root / "base").resolve()
    assert inputs.warnings == ()  # two domains, one teacher: nobody is under two names
    manifest = make_manifest(load_pipeline(world.write()), inputs)
    assert manifest["experts"]["student"]["domains"] == [*rows]


def test_the_student_taught_by_itself_under_two_names_is_no_mistake(world: Any) -> None:
    for expert in world.data["experts"].values():
        expert["model"] = "student"
    assert read(world).warnings == ()


def test_an_expert_of_the_registry_is_not_taken_for_the_student(world: Any) -> None:
    registry = register(world)
    registry.add("student", world.root / "up", "upper", world.root / "upper.jsonl")
    registry.remove("up")
    world.data["experts"] = {"use": "all"}
    world.data["domains"]["upper"]["teachers"] = "student"
    with pytest.raises(ConfigError, match=r"which is the student in domains\.upper\.teachers"):
        read(world)


@pytest.mark.parametrize("engine", ["trainer", "transformers"])
def test_with_lora_the_ranks_keep_by_the_base_that_they_hold(world: Any, make_adapter: Any, engine: str) -> None:
    (world.root / "general.jsonl").write_text(json.dumps({"prompt": "abc"}) + "\n")
    for seed, name in enumerate(("rev", "up")):
        make_adapter(world.root / f"{name}-lora", world.root / "base", seed=seed)
        world.data["experts"][name]["model"] = f"{name}-lora"
    world.data["student"]["lora"] = {"r": 4}
    world.data |= {
        "keep": {"prompts": "general.jsonl"},
        "teachers": {"engine": engine},
        "trainer": {"steps": 2, "samples_per_step": 6},
    }
    inputs = read(world)
    config = load_pipeline(world.write())
    groups = {group.config.teachers.engine: set(group.scoring) for group in divide_by_engine(config, inputs.scoring)}
    others = {"reverse", "upper"}
    assert groups == ({"trainer": {*others, "kept"}} if engine == "trainer" else {engine: others, "trainer": {"kept"}})
    scoring = base_scoring(config, inputs.scoring)
    assert scoring is not None
    kept = next(teacher for teacher in scoring.teachers if teacher.name == "kept")
    assert kept.adapter_dir is None and kept.weights == {"kept": 1.0}


def test_ranks_that_score_by_the_base_get_its_own_prompts(told: Any) -> None:
    told.data["experts"]["rev"]["model"] = told.data["experts"]["up"]["model"] = "student"
    told.data["student"]["lora"] = {"r": 4}
    inputs = read(told)
    spec = trainer_spec(load_pipeline(told.write()), inputs.student.vocab_size, inputs.scoring)
    assert {name: set(domains) for name, domains in spec.teacher_prompts.items()} == {"rev": {"reverse"}}
    sent = [sample(inputs, "reverse", 2), sample(inputs, "upper", 0)]
    read_by = read_teacher_prompts(spec.teacher_prompts, sent)
    assert read_by == {"rev": {sent[0].sample_id: inputs.scoring["reverse"][0].prompts(sent[0])}}  # type: ignore[misc]


def test_an_expert_with_a_prompt_of_its_own_takes_no_exam_with_the_students(told: Any) -> None:
    config, paths, said = load_pipeline(told.write()), RunPaths(told.root / "run"), list[str]()
    paths.root.mkdir()
    shown: Any = type("Shown", (Display,), {"say": lambda _, line: said.append(line)})()
    parts: Any = Measuring(paths, shown)
    before, expert = StartingExams(parts, config, read_inputs(config), paths, shown).measure_exams()
    assert set(before.scores) == {"reverse", "upper"} and set(expert.scores) == {"upper"}
    assert "expert rev reads a prompt of its own: it takes no exam on reverse" in said
