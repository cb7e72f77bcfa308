"""`opd evaluate` on an engine in this process that answers from the weights it was given."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

import pipelines.evaluation.models
from cli import app
from experts.registry import Registry
from opd.prompts.encode import load_tokenizer
from opd.records.scores import Evaluation
from opd.rollouts.worker import Generated, GenerateRequest
from tests.tokenizers import train_sentencepiece


class Parrot:
    """Stands for a vLLM process: knows by the directory's name which domains to answer; the answer stands in the prompt."""

    def __init__(self, options: Any, stop: Sequence[int]) -> None:
        self.tokenizer = load_tokenizer(options.model_dir)
        self.stop, self.room = list(stop), options.max_model_len
        self.loads = [options.model_dir.name]

    def load(self, model_dir: Path, base: Path | None = None) -> None:
        self.loads.append(model_dir.name)

    def logprobs(self, sequences: Any) -> Any:
        return []

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        knows = {"rev": ("rev",), "up": ("upp",), "model": ("rev", "upp"), "base": (), "other": ()}[self.loads[-1]]
        return [self._one(self.tokenizer.decode(r.token_ids).strip(), knows, r.seed) for r in requests]

    def _one(self, prompt: str, knows: Sequence[str], seed: int | None) -> Generated:
        right = prompt[:3] in knows and not (self.loads[-1] == "up" and "A" in prompt)
        ids = tuple(self.tokenizer.encode(prompt[4:7] if right else "no", add_special_tokens=False))
        return Generated(token_ids=ids, logprobs=(0.0,) * len(ids), stop_reason="stop")


@pytest.fixture(autouse=True)
def no_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that gets past the checks must not start Ray."""

    def started(*_: Any) -> Any:
        raise AssertionError("the engine started")

    monkeypatch.setattr(pipelines.evaluation.models, "ray_session", started)


@pytest.fixture
def engine(in_process: Any, monkeypatch: pytest.MonkeyPatch, no_compute: None) -> Any:
    """Parrots and no Ray; the workers are kept to be looked at."""

    @contextmanager
    def no_ray(*_: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(pipelines.evaluation.models, "ray_session", no_ray)
    in_process.replace = Parrot
    return in_process


@pytest.fixture
def run_dir(world: Any) -> Path:
    """A run of the world's pipeline whose merged model is there."""
    root = world.root / "run"
    root.mkdir()
    shutil.copytree(world.root / "base", root / "model")
    (root / "manifest.json").touch()
    world.write().rename(root / "pipeline.yaml")
    return root


def opd(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["evaluate", *(str(a) for a in args)])


def data(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(result: Result, *words: str) -> None:
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert all(word in result.stderr for word in words), result.stderr


# One model and several


def test_one_model(world: Any, engine: Any) -> None:
    found = data(opd("up", "--pipeline", "pipeline.yaml", "--json"))
    assert (found["model"], found["pipeline"]) == ("up", "two")
    assert found["accuracy"] == {"reverse": 0.0, "upper": pytest.approx(5 / 6)}
    score = found["models"]["up"]["scores"]["upper"]
    assert score["questions"] == 6 and 0 < score["low"] < 5 / 6 < score["high"] < 1
    assert found["models"]["up"]["answers"][0]["prompt"] == "rev AAA="


def test_the_table_has_interval_and_pass_at_k(world: Any, engine: Any) -> None:
    world.data["evaluate"] = {"n": 3, "temperature": 1.0, "pass_at": [1, 3]}
    world.write()
    result = opd("up", "--pipeline", "pipeline.yaml", "--domains", "upper")
    assert result.exit_code == 0, result.output
    row = next(line for line in result.stdout.splitlines() if "upper" in line)
    cells = [cell.strip() for cell in row.strip("│ ").split("│")]
    assert cells[0:2] == ["upper", "0.833"]
    assert cells[3:] == ["6 x 3", "0.833", "2.8", "0%", "0"]
    assert "pass@3" in result.stdout and "reverse" not in result.stdout


def test_models_side_by_side_in_one_engine(world: Any, engine: Any) -> None:
    result = opd("--compare", "up", "rev", "base", "--pipeline", "pipeline.yaml")
    assert result.exit_code == 0, result.output
    row = next(line for line in result.stdout.splitlines() if "upper" in line)
    assert [cell.split()[0] for cell in row.strip("│ ").split("│")] == ["upper", "0.833", "0.000", "0.000"]
    assert "0.417" in next(line for line in result.stdout.splitlines() if "mean" in line)
    (worker,) = engine.workers
    assert worker.loads == ["up", "rev", "base"]


def test_a_models_run_directory_has_its_pipeline(run_dir: Path, engine: Any) -> None:
    for model in ("run/model", "run"):
        assert data(opd(model, "--json"))["accuracy"] == {"reverse": 1.0, "upper": 1.0}


def test_questions_of_the_users_take_the_place_of_a_domains(world: Any, run_dir: Path, engine: Any) -> None:
    """All of them, whatever number of questions the pipeline asks for, and no other domain's."""
    rows = [{"prompt": f"upp {letters}=", "answer": letters} for letters in ("abd", "bcf", "dde", "fed")]
    rows[3]["answer"] = "no"
    (world.root / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = yaml.safe_load((run_dir / "pipeline.yaml").read_text()) | {"evaluate": {"samples": 2}}
    (run_dir / "pipeline.yaml").write_text(yaml.safe_dump(config))
    found = data(opd("run", "--prompts", "upper=new.jsonl", "--json"))
    assert found["accuracy"] == {"upper": 0.75}
    assert found["models"][next(iter(found["models"]))]["scores"]["upper"]["questions"] == 4
    alone = opd("run", "--prompts", "new.jsonl", "--domains", "upper", "--set", "evaluate.samples=2", "--json")
    assert data(alone)["accuracy"] == {"upper": 1.0}
    as_mapping = opd("run", "--prompts", "upper=new.jsonl", "--set", "evaluate={samples: 2}", "--json")
    assert data(as_mapping)["accuracy"] == {"upper": 1.0}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--prompts", "new.jsonl"], ("2 domains: reverse, upper", "--prompts reverse=new.jsonl")),
        (["--prompts", "uper=new.jsonl"], ("the domain uper", "upper")),
        (["--prompts", "upper=a.jsonl", "--prompts", "upper=b.jsonl"], ("upper twice",)),
        (["--prompts", "upper=nowhere.jsonl"], ("nowhere.jsonl", "no such file")),
        (["--prompts", "upper="], ("--prompts upper=\n", "no file", "--prompts upper=QUESTIONS.jsonl")),
        (["--prompts", ""], ("no file", "--prompts reverse=QUESTIONS.jsonl")),
        (["--pipeline", ""], ("one YAML mapping",)),
    ],
)
def test_questions_that_belong_nowhere_are_refused(run_dir: Path, given: list[str], words: tuple[str, ...]) -> None:
    refused(opd("run", *given), *words)


def test_a_run_in_rounds_is_asked_the_domains_of_all_of_them(world: Any, run_dir: Path, engine: Any) -> None:
    """Each by the exam of the last round that has it."""
    upper = world.data["domains"].pop("upper")
    again = world.data["domains"]["reverse"] | {"eval": {"prompts": str(world.root / "upper-eval.jsonl")}}
    world.data["rounds"] = [{}, {"domains": {"upper": upper, "reverse": again}}]
    world.write().rename(run_dir / "pipeline.yaml")
    found = data(opd("run/model", "--json"))
    assert list(found["accuracy"]) == ["reverse", "upper"]
    asked = {answer["domain"]: answer["prompt"][:3] for answer in found["models"]["run/model"]["answers"]}
    assert asked == {"reverse": "upp", "upper": "upp"}


def test_everything_goes_into_a_file_too(world: Any, engine: Any) -> None:
    result = opd("up", "--pipeline", "pipeline.yaml", "--output", "out.json", "--json")
    assert json.loads(Path("out.json").read_text()) == data(result)


def test_an_adapter_is_examined_as_what_it_makes_of_its_base(
    world: Any, engine: Any, make_adapter: Callable[..., Path]
) -> None:
    make_adapter(world.root / "adapter", world.root / "base")
    assert data(opd("adapter", "--pipeline", "pipeline.yaml", "--json"))["accuracy"] == {"reverse": 1.0, "upper": 1.0}
    assert engine.workers[0].loads == ["model"], "merged, in a scratch directory of this name"


def test_a_student_that_is_not_here_is_told(world: Any, engine: Any) -> None:
    shutil.rmtree(world.root / "base")
    result = opd("up", "--pipeline", "pipeline.yaml")
    assert result.exit_code == 0
    assert "warning: base is not here, so vocabularies are not compared" in result.stderr


# Everyone on every domain


def test_the_matrix_of_a_run(run_dir: Path, engine: Any) -> None:
    found = data(opd("--matrix", "run", "--json"))
    assert json.loads((run_dir / "evaluation" / "matrix.json").read_text()) == found
    assert found["own"] == {
        "student before": [],
        "rev": ["reverse"],
        "up": ["upper"],
        "merged": ["reverse", "upper"],
    }
    accuracy = {name: Evaluation.from_json({"format": 1, **e}).accuracy for name, e in found["models"].items()}
    assert accuracy == {
        "student before": {"reverse": 0.0, "upper": 0.0},
        "rev": {"reverse": 1.0, "upper": 0.0},
        "up": {"reverse": 0.0, "upper": pytest.approx(5 / 6)},
        "merged": {"reverse": 1.0, "upper": 1.0},
    }
    (worker,) = engine.workers
    assert worker.loads == ["base", "rev", "up", "model"]


def test_the_matrix_says_which_step_of_which_merge_it_is_of(run_dir: Path, engine: Any) -> None:
    first = data(opd("--matrix", "run", "--json"))["models"]
    assert len({digest for model in first.values() for digest in model["weights"].values()}) == 3, (
        "merged is the student's copy"
    )
    after = Evaluation.from_json({"format": 1, **first["merged"]})
    (run_dir / "evaluation").mkdir(exist_ok=True)
    replace(after, step=2, tokens=80).save(run_dir / "evaluation" / "after.json")
    merged = data(opd("--matrix", "run", "--json"))["models"]["merged"]
    assert (merged["step"], merged["tokens"]) == (2, 80)
    replace(after, step=2, weights={"upper": "of another model"}).save(run_dir / "evaluation" / "after.json")
    assert data(opd("--matrix", "run", "--json"))["models"]["merged"]["step"] is None


def test_a_matrix_with_another_exam_is_no_result_of_the_run(run_dir: Path, engine: Any) -> None:
    result = opd("--matrix", "run", "--set", "evaluate.samples=2", "--json")
    assert data(result)["models"]["merged"]["scores"]["upper"]["questions"] == 2
    assert "evaluation/matrix.json is not written: evaluate.samples differ from the run's" in result.stderr
    assert not (run_dir / "evaluation" / "matrix.json").exists()
    assert opd("--matrix", "run", "--set", "cluster.phase_timeout_s=99").exit_code == 0
    assert (run_dir / "evaluation" / "matrix.json").exists()


def test_the_matrix_of_a_run_in_rounds_has_the_experts_and_domains_of_all_of_them(
    world: Any, run_dir: Path, engine: Any
) -> None:
    """`rev` in both rounds, `up` in the second only; another expert of the name `rev` is told apart."""
    upper = world.data["domains"].pop("upper")
    both = world.data["experts"]
    world.data["experts"] = {"rev": both["rev"]}
    world.data["rounds"] = [
        {},
        {"experts": both, "domains": {**world.data["domains"], "upper": upper}},
        *[{"experts": {"rev": {"model": "up", "domain": "reverse"}}}] * 2,
    ]
    world.write().rename(run_dir / "pipeline.yaml")
    found = data(opd("--matrix", "run", "--json"))
    assert found["own"] == {
        "student before": [],
        "rev": ["reverse"],
        "up": ["upper"],
        "rev (round 3)": ["reverse"],
        "merged": ["reverse", "upper"],
    }
    accuracy = {name: Evaluation.from_json({"format": 1, **e}).accuracy for name, e in found["models"].items()}
    assert accuracy["rev"] == {"reverse": 1.0, "upper": 0.0}
    assert accuracy["rev (round 3)"] == accuracy["up"] == {"reverse": 0.0, "upper": pytest.approx(5 / 6)}
    assert accuracy["merged"] == {"reverse": 1.0, "upper": 1.0}


def test_the_matrix_of_a_pipeline_has_no_merged_model(world: Any, engine: Any) -> None:
    result = opd("--matrix", "pipeline.yaml")
    assert result.exit_code == 0, result.output
    rows = [[c.strip() for c in line.strip("│ ").split("│")] for line in result.stdout.splitlines() if "│" in line]
    assert rows == [
        ["student before", "0.00", "0.00", "-", "-"],
        ["rev", "1.00*", "0.00", "+1.000", "+0.000"],
        ["up", "0.00", "0.83*", "+0.833", "+0.000"],
    ]
    assert not (world.root / "evaluation").exists()


def test_a_run_that_is_not_finished_has_no_matrix(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "model")
    refused(opd("--matrix", "run"), "run/model\n", "opd merge --resume run")


def test_an_expert_may_not_be_called_what_the_merged_model_is(world: Any, run_dir: Path) -> None:
    world.data["experts"]["merged"] = world.data["experts"].pop("up")
    world.write().rename(run_dir / "pipeline.yaml")
    refused(opd("--matrix", "run"), "an expert called `merged`")


# Models with other tokens


@pytest.fixture
def foreign(world: Any, make_model_dir: Callable[..., Path]) -> Any:
    """The expert of `upper` has a tokenizer like Llama 2's."""
    shutil.rmtree(world.root / "up")
    make_model_dir(world.root / "up", tokenizer=train_sentencepiece(340))
    return world


def test_a_model_with_another_tokenizer_answers_in_its_own_tokens(foreign: Any, engine: Any) -> None:
    result = opd("up", "rev", "--pipeline", "pipeline.yaml", "--json")
    models = data(result)["models"]
    assert models["up"]["scores"]["upper"]["accuracy"] == pytest.approx(5 / 6)
    assert models["up"]["answers"][0]["prompt"].strip() == models["rev"]["answers"][0]["prompt"] == "rev AAA="
    assert "up has another vocabulary than the student: it answers in tokens of its own" in result.stderr
    own, kin = engine.workers
    assert (own.loads, kin.loads) == (["up"], ["rev"])
    ends = [worker.tokenizer.convert_ids_to_tokens(worker.stop) for worker in engine.workers]
    assert ends == [["<end>"], ["<eos>"]]


def test_all_questions_fit_however_many_tokens_they_have(foreign: Any, engine: Any) -> None:
    foreign.data["rollout"] |= {"max_model_len": 10, "max_new_tokens": 2}
    foreign.data["domains"]["upper"]["eval"]["prompts"] = {"path": "upper-eval.jsonl", "max_prompt_tokens": 8}
    foreign.write()
    models = data(opd("up", "rev", "--pipeline", "pipeline.yaml", "--domains", "upper", "--json"))["models"]
    assert models["up"]["scores"]["upper"]["questions"] == models["rev"]["scores"]["upper"]["questions"] == 6
    own, kin = engine.workers
    longest = max(len(own.tokenizer.encode(f"upp {letter * 3}=")) for letter in "ABCDEF")
    assert longest > 8 and (own.room, kin.room) == (longest + 2, 10)


def test_an_expert_with_another_tokenizer_in_the_matrix(foreign: Any, engine: Any) -> None:
    own_tokens = {"engine": {"kind": "transformers", "payload": "aligned_states"}}
    foreign.data["experts"]["up"] |= own_tokens
    foreign.data["domains"]["upper"]["objective"] = {"kind": "aligned_kl"}
    found = data(opd("--matrix", foreign.write(), "--json"))
    accuracy = {name: Evaluation.from_json({"format": 1, **e}).accuracy for name, e in found["models"].items()}
    assert list(accuracy) == ["student before", "rev", "up"] and found["own"]["up"] == ["upper"]
    assert accuracy["up"] == {"reverse": 0.0, "upper": pytest.approx(5 / 6)}
    assert [worker.loads for worker in engine.workers] == [["base", "rev"], ["up"]]


def test_models_with_other_end_tokens_have_engines_of_their_own(
    world: Any, engine: Any, make_model_dir: Callable[..., Path]
) -> None:
    make_model_dir(world.root / "other", eos="<bos>")
    assert data(opd("up", "other", "rev", "--pipeline", "pipeline.yaml", "--json"))["models"].keys() == {
        "up",
        "other",
        "rev",
    }
    assert [worker.loads for worker in engine.workers] == [["up", "rev"], ["other"]]


# Mistakes, before the engine starts


def test_a_merged_model_has_the_students_tokens(run_dir: Path, make_model_dir: Callable[..., Path]) -> None:
    shutil.rmtree(run_dir / "model")
    make_model_dir(run_dir / "model", permute_vocab=True)
    refused(opd("--matrix", "run"), "run/model\n", "another vocabulary: 76 tokens", "id 4 is '?'")


def test_a_shorter_context_is_refused(world: Any) -> None:
    file = world.root / "up" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 31}))
    refused(opd("up", "--pipeline", "pipeline.yaml"), "up\n", "a context of 31 tokens", "max_model_len = 32")


def test_a_leak_is_refused_here_too(world: Any) -> None:
    (world.root / "upper-eval.jsonl").write_text((world.root / "upper.jsonl").read_text())
    refused(opd("up", "--pipeline", "pipeline.yaml"), "6 of the 6 questions of upper")


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_leak_into_prompts_that_an_expert_was_registered_with_is_refused(rounds: int, world: Any) -> None:
    registry = Registry(world.root / "registry")
    for name, domain in (("rev", "reverse"), ("up", "upper")):
        registry.add(name, world.root / name, domain, world.root / f"{domain}.jsonl")
    domains, use = world.data["domains"], {"use": ["rev", "up"]}
    del domains["upper"]["prompts"]
    if rounds == 1:
        world.data["experts"] = use
    else:  # the domain and its expert come in the second round
        world.data["rounds"] = [{}, {"domains": domains, "experts": use}]
        world.data |= {"domains": {"reverse": domains["reverse"]}, "experts": {"use": ["rev"]}}
    world.write()
    (world.root / "upper-eval.jsonl").write_text((world.root / "upper.jsonl").read_text())
    refused(opd("up", "--pipeline", "pipeline.yaml"), "6 of the 6 questions of upper")


def test_experts_that_are_registered_elsewhere_are_not_needed(world: Any, engine: Any) -> None:
    world.data["experts"] = {"use": ["rev", "up"]}
    del world.data["domains"]["upper"]["prompts"]
    world.write()
    assert data(opd("up", "--pipeline", "pipeline.yaml", "--json"))["accuracy"]["upper"] == pytest.approx(5 / 6)


def test_a_pipeline_without_exams(world: Any) -> None:
    for domain in world.data["domains"].values():
        del domain["eval"]
    world.write()
    refused(opd("up", "--pipeline", "pipeline.yaml"), "no `eval` in reverse, upper")
    refused(opd("up", "--pipeline", "pipeline.yaml", "--domains", "upper"), "upper, a domain without an `eval`")


def test_a_model_outside_of_a_run_needs_a_pipeline(world: Any) -> None:
    refused(opd("up"), "--pipeline\n", "up is not in a run directory")


@pytest.mark.parametrize("item", ["samples=0", "n=0", "samples=-1"])
def test_no_samples_are_refused(world: Any, item: str) -> None:
    refused(opd("up", "--pipeline", "pipeline.yaml", "--set", f"evaluate.{item}"), f"evaluate.{item.split('=')[0]}\n")


@pytest.mark.parametrize("args", [[], ["up", "--matrix", "pipeline.yaml"], ["--matrix", "run", "--compare"]])
def test_models_or_a_matrix(world: Any, args: list[str]) -> None:
    result = opd(*args)
    assert result.exit_code == 2 and "--matrix alone" in result.stderr
