"""Things a run is bound to beside weights and prompts: each file that changes a token or a number, and day and begin of the prompts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import cli
from experts.registry import Registry
from opd.config import load_pipeline, load_run_pipeline
from opd.config.prompts import CHAT_COLUMNS
from opd.errors import RunDirError, RunError
from opd.run.paths import RunPaths
from pipelines.inputs import template_date
from pipelines.inputs.read import read_inputs
from pipelines.merging import rounds
from pipelines.merging import run as merging
from pipelines.merging.extension import plan_extension
from pipelines.specs import rollout_spec
from tests.conftest import build_tokenizer, put_in_front

STUDENT_FILES = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
]
DATED = "{% for message in messages %}{{ message['content'] }}{% endfor %}{{ strftime_now('%d.%m.%Y') }}="


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge goes on until its workers would start."""

    def no_ray(*_: Any) -> None:
        raise RunError("it would start now")

    monkeypatch.setattr(merging, "ray_session", no_ray)


def begin(world: Any) -> Path:
    root: Path = world.root / "run"
    with pytest.raises(RunError, match="it would start now"):
        rounds.begin_rounds(load_pipeline(world.write()), root, print).carry_out()
    return root


def add_a_space(file: Path) -> None:
    """The smallest edit; JSON and templates stay valid."""
    file.write_text(file.read_text() + " ")


def manifest_of(root: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((root / "manifest.json").read_text())
    return data


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize("name", STUDENT_FILES)
def test_a_student_with_an_edited_file_is_refused(name: str, world: Any) -> None:
    file = world.root / "base" / name
    if not file.exists():
        file.write_text("{}" if file.suffix == ".json" else "")
    root = begin(world)
    with pytest.raises(RunError, match="it would start now"):
        merging.resume(root)
    add_a_space(file)
    result = CliRunner().invoke(cli.app, ["merge", "--resume", str(root)])
    assert result.exit_code == 2
    assert f"student changed since the run began: {name}\n" in result.stderr
    assert "put them back" in result.stderr


@pytest.mark.usefixtures("stopped")
def test_a_file_that_came_or_went_is_refused(world: Any) -> None:
    root = begin(world)
    (world.root / "base" / "added_tokens.json").write_text("{}")
    with pytest.raises(RunDirError, match=r"student changed since the run began: added_tokens.json"):
        merging.resume(root)
    (world.root / "base" / "added_tokens.json").unlink()
    (world.root / "base" / "generation_config.json").unlink()
    with pytest.raises(RunDirError, match=r"student changed since the run began: generation_config.json"):
        merging.resume(root)


@pytest.mark.usefixtures("stopped")
def test_an_experts_config_is_bound_and_what_nobody_reads_of_it_is_not(
    world: Any, make_adapter: Callable[..., Path]
) -> None:
    shutil.copytree(world.root / "up", world.root / "up-base")
    make_adapter(world.root / "adapter", world.root / "up-base")
    world.data["experts"]["up"] = {"model": "adapter", "base": "up-base", "domain": "upper"}
    root = begin(world)
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer_config.json"):
        add_a_space(world.root / "rev" / name)
    with pytest.raises(RunError, match="it would start now"):
        merging.resume(root)
    add_a_space(world.root / "rev" / "config.json")
    add_a_space(world.root / "up-base" / "config.json")
    with pytest.raises(
        RunDirError, match=r"experts changed since the run began: rev \(config.json\), up \(config.json"
    ):
        merging.resume(root)


@pytest.mark.usefixtures("stopped")
def test_an_expert_that_ends_otherwise_is_refused_by_its_end_tokens(world: Any) -> None:
    """Its exam stops at the student's end tokens, so its own must be the same, at each start."""
    root = begin(world)
    file = world.root / "rev" / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [2, 3]}))
    with pytest.raises(ValueError, match="eos_token_id"):
        merging.resume(root)


@pytest.mark.usefixtures("stopped")
def test_a_checkpoint_of_a_student_with_another_config_is_another_runs(world: Any) -> None:
    first = manifest_of(begin(world))["identity"]
    shutil.rmtree(world.root / "run")
    add_a_space(world.root / "base" / "config.json")
    second = manifest_of(begin(world))["identity"]
    assert first["student"] != second["student"] and first["experts"] == second["experts"]


@pytest.mark.usefixtures("stopped")
def test_a_run_of_the_release_before_goes_on_with_a_warning_and_is_bound_from_then_on(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = begin(world)
    old = manifest_of(root)
    old |= {"format": 2, "student": {"model.safetensors": old["student"]["model.safetensors"]}}
    for expert in old["experts"].values():
        del expert["config"]
    del old["config"]["student"]["template_date"]
    (root / "manifest.json").write_text(json.dumps(old))
    said: list[list[str]] = []
    monkeypatch.setattr(merging, "_run_session", lambda run, checkpoint, notices, signals: said.append(notices) or {})
    add_a_space(world.root / "base" / "config.json")
    merging.resume(root)
    (notice,) = said[0]
    assert "recorded hashes of weights only" in notice and "may not change from here" in notice
    new = manifest_of(root)
    assert new["format"] == 4 and new["identity"] == old["identity"], "its checkpoints stay its own"
    merging.resume(root)
    assert said[1] == []
    add_a_space(world.root / "base" / "config.json")
    with pytest.raises(RunDirError, match=r"student changed since the run began: config.json"):
        merging.resume(root)


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"domains": {"upper": {"weight": 3}}}, "how many prompts of each domain a step has"),
        ({"trainer": {"samples_per_step": 5}}, "how many prompts of each domain a step has"),
        ({"balance": "gap"}, "how many prompts of each domain a step has"),
        ({"trainer": {"lr_scheduler_type": "linear"}}, "how fast the learning rate falls to 0"),
        ({"trainer": {"lr_scheduler_type": "linear", "min_lr_ratio": 0.1}}, None),
        ({"rollout": {"temperature": 0.7}}, None),
        ({"rollout": {"temperature": 0.7}, "objective": {"reward": {}}}, "which tokens are too old to be trained"),
        (
            {"objective": {"reward": {"baseline": "critic"}}},
            "whether to train on the divergence while the critic learns alone",
        ),
    ],
    ids=str,
)
def test_a_run_that_was_begun_under_other_rules_says_so_once(
    changes: dict[str, Any], said: str | None, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.data["trainer"] |= {"samples_per_step": 4}
    for section, values in changes.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            merged = {**world.data[section][key], **value} if section == "domains" else value
            world.data.setdefault(section, {})[key] = merged
        if isinstance(values, str):
            world.data[section] = values
    root = begin(world)
    (root / "manifest.json").write_text(json.dumps(manifest_of(root) | {"format": 3}))
    notices: list[list[str]] = []
    monkeypatch.setattr(merging, "_run_session", lambda run, checkpoint, found, signals: notices.append(found) or {})
    merging.resume(root)
    merging.resume(root)
    assert notices[1] == []
    assert [said in notice for notice in notices[0]] == [True] if said else notices[0] == []


def test_other_rules_are_not_spoken_of_where_no_step_follows(
    world: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.data["domains"]["upper"]["weight"] = 3
    root: Path = request.getfixturevalue("interrupted")  # with the checkpoint of its last step
    (root / "manifest.json").write_text(json.dumps(manifest_of(root) | {"format": 3}))
    notices: list[list[str]] = []
    monkeypatch.setattr(merging, "_run_session", lambda run, checkpoint, found, signals: notices.append(found) or {})
    merging.resume(root)
    assert notices == [[]] and manifest_of(root)["format"] == 3
    merging.extend(root, plan_extension(RunPaths(root), 1)).carry_out()
    assert any("how many prompts of each domain" in notice for notice in notices[1])


@pytest.mark.usefixtures("stopped")
def test_rounds_are_bound_alike(world: Any) -> None:
    world.data["rounds"] = 2
    root = begin(world)
    with pytest.raises(RunError, match="it would start now"):
        rounds.reopen_rounds(root, None, None, "latest", print).carry_out()
    add_a_space(world.root / "base" / "tokenizer_config.json")
    with pytest.raises(RunDirError, match=r"student changed since the run began: tokenizer_config.json"):
        rounds.reopen_rounds(root, None, None, "latest", print).carry_out()


# The day of the prompts


class Calendar(date):
    """`date.today()` as a test wants it."""

    now = date(2026, 11, 20)

    @classmethod
    def today(cls) -> Any:
        return cls.now


@pytest.fixture
def calendar(world: Any, monkeypatch: pytest.MonkeyPatch) -> type[Calendar]:
    """The world with messages as prompts, and a template that writes the date, on 20 November 2026."""
    for file in world.root.glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("base", "rev", "up"):
        (world.root / name / "chat_template.jinja").write_text(DATED)
    Calendar.now = date(2026, 11, 20)
    monkeypatch.setattr(template_date, "date", Calendar)
    return Calendar


def tokens(found: Any) -> list[tuple[int, ...]]:
    training = [prompt.token_ids for prompts in found.prompts.values() for prompt in prompts]
    return training + [prompt.token_ids for exam in found.exams.values() for prompt in exam.prompts]


@pytest.mark.usefixtures("stopped")
def test_a_run_keeps_the_day_on_which_it_began(world: Any, calendar: type[Calendar]) -> None:
    first = read_inputs(load_pipeline(world.write()))
    assert first.tokenizer.decode(first.prompts["upper"][0].token_ids) == "upp aaa=20.11.2026="
    root = begin(world)
    assert yaml.safe_load((root / "pipeline.yaml").read_text())["student"]["template_date"] == "2026-11-20"
    calendar.now = date(2026, 11, 21)
    assert tokens(read_inputs(load_pipeline(root / "pipeline.yaml"))) == tokens(first), (
        "so does `opd evaluate` of the run"
    )
    assert tokens(read_inputs(load_pipeline(world.write()))) != tokens(first), "a new run has its own day"


@pytest.mark.usefixtures("stopped")
def test_a_resume_on_another_day_has_the_same_prompts(
    world: Any, calendar: type[Calendar], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = begin(world)
    calendar.now = date(2026, 11, 21)
    runs: list[Any] = []
    monkeypatch.setattr(merging, "_run_session", lambda run, checkpoint, notices, _: runs.append((run, notices)) or {})
    merging.resume(root)
    merging.resume(root, load_pipeline(world.write()))  # a file that says no day
    for run, notices in runs:
        assert run.inputs.template_date == date(2026, 11, 20) and notices == []
    with pytest.raises(RunDirError, match=r"student.template_date +2026-11-20 +2026-11-21"):
        merging.resume(root, overrides=["student.template_date=2026-11-21"])


@pytest.mark.usefixtures("stopped")
def test_every_round_has_the_day_of_the_first(world: Any, calendar: type[Calendar]) -> None:
    world.data["rounds"] = 2
    root = begin(world)
    calendar.now = date(2026, 11, 21)
    plan = json.loads((root / "rounds.json").read_text())["rounds"]
    assert [one["config"]["student"]["template_date"] for one in plan] == ["2026-11-20"] * 2
    with pytest.raises(RunError, match="it would start now"):
        rounds.reopen_rounds(root, None, None, "latest", print).carry_out()
    begun = yaml.safe_load((root / "round-1" / "pipeline.yaml").read_text())
    assert begun["student"]["template_date"] == "2026-11-20"


@pytest.mark.usefixtures("stopped")
def test_a_template_without_a_date_has_none(world: Any) -> None:
    root = begin(world)
    assert yaml.safe_load((root / "pipeline.yaml").read_text())["student"]["template_date"] is None


@pytest.mark.usefixtures("stopped")
def test_the_day_may_be_said(world: Any, calendar: type[Calendar]) -> None:
    world.data["student"]["template_date"] = "2024-07-26"
    found = read_inputs(load_pipeline(world.write()))
    assert found.tokenizer.decode(found.prompts["upper"][0].token_ids).endswith("=26.07.2024=")
    world.data["student"]["template_date"] = "yesterday"
    result = CliRunner().invoke(cli.app, ["merge", str(world.write())])
    assert result.exit_code == 2 and "student.template_date" in result.stderr


# What stands in front of plain prompts


@pytest.fixture
def beginning(world: Any) -> Any:
    """The world with a tokenizer that puts a begin token in front."""
    for name in ("base", "rev", "up"):
        put_in_front(build_tokenizer()).save_pretrained(world.root / name)
    return world


def as_an_older_release_wrote_it(root: Path) -> None:
    """Take the keys that it did not have out of all files of a run."""
    for file in root.rglob("pipeline.yaml"):
        data = yaml.safe_load(file.read_text())
        del data["student"]["add_special_tokens"], data["student"]["chat_template_kwargs"]
        file.write_text(yaml.safe_dump(data))
    for file in (*root.rglob("manifest.json"), *root.glob("rounds.json")):
        data = json.loads(file.read_text())
        for one in data.get("rounds", [data]):
            del one["config"]["student"]["add_special_tokens"], one["config"]["student"]["chat_template_kwargs"]
        file.write_text(json.dumps(data))


@pytest.mark.usefixtures("stopped")
def test_a_new_run_begins_prompts_as_the_tokenizer_does_and_says_so(beginning: Any) -> None:
    root = begin(beginning)
    assert yaml.safe_load((root / "pipeline.yaml").read_text())["student"]["add_special_tokens"] is True
    found = read_inputs(load_run_pipeline(root / "pipeline.yaml"))
    assert {ids[:1] for ids in tokens(found)} == {(1,)}
    assert found.tokenizer.decode(found.prompts["upper"][0].token_ids) == "<bos>upp aaa="


@pytest.mark.usefixtures("stopped")
def test_an_older_run_goes_on_without_a_begin_token(beginning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root = begin(beginning)
    as_an_older_release_wrote_it(root)
    runs: list[Any] = []
    monkeypatch.setattr(merging, "_run_session", lambda run, checkpoint, notices, _: runs.append((run, notices)) or {})
    merging.resume(root)
    merging.resume(root, load_pipeline(beginning.write()))  # a file that does not say it
    for run, notices in runs:
        assert {ids[:1] for ids in tokens(run.inputs)} == {(24,), (21,)} and notices == [], "as that release read them"
        assert not rollout_spec(run.config, Path("m"), 76, [2]).engine.add_special_tokens, "nor do episodes"
    with pytest.raises(RunDirError, match=r"student.add_special_tokens +False +True"):
        merging.resume(root, overrides=["student.add_special_tokens=true"])
    evaluated = load_run_pipeline(root / "pipeline.yaml", ["evaluate.samples=1"])
    assert not evaluated.student.puts_in_front, "nor does `opd evaluate` of the run"


@pytest.mark.usefixtures("stopped")
def test_older_rounds_go_on_without_a_begin_token(beginning: Any) -> None:
    beginning.data["rounds"] = 2
    root = begin(beginning)
    as_an_older_release_wrote_it(root)
    for config in (None, load_pipeline(beginning.write())):
        work = rounds.reopen_rounds(root, config, None, "latest", print)
        assert isinstance(work, rounds.Rounds)
        assert [one.student.add_special_tokens for one in work.configs] == [False, False]
        with pytest.raises(RunError, match="it would start now"):
            work.carry_out()
        begun = yaml.safe_load((root / "round-1" / "pipeline.yaml").read_text())
        assert begun["student"].get("add_special_tokens", False) is False


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize(
    "prompts", ["upper.jsonl", {"path": "upper.jsonl", "columns": {"answer": "solution"}}], ids=str
)
def test_an_older_run_goes_on_without_columns_that_it_passed_over(
    prompts: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    row = {"prompt": [{"role": "user", "content": "upp abc"}], "system": "be brief", "tools": [tool], "solution": "x"}
    (world.root / "upper.jsonl").write_text(json.dumps(row) + "\n")
    world.data["domains"]["upper"]["prompts"] = prompts
    root = begin(world)
    assert read_inputs(load_run_pipeline(root / "pipeline.yaml")).prompts["upper"][0].text[0]["role"] == "system"
    as_an_older_release_wrote_it(root)
    runs: list[Any] = []
    monkeypatch.setattr(merging, "_run_session", lambda run, checkpoint, notices, _: runs.append((run, notices)) or {})
    merging.resume(root)
    merging.resume(root, load_pipeline(world.write()))
    for run, notices in runs:
        assert run.inputs.prompts["upper"][0].text == row["prompt"] and notices == []
        assert any("columns that are not read: system, tools" in told for told in run.inputs.warnings)


@pytest.mark.usefixtures("stopped")
def test_older_rounds_with_domains_of_their_own_go_on_without_these_columns(world: Any) -> None:
    upper = world.data["domains"]["upper"]
    world.data["rounds"] = [{}, {"domains": {**world.data["domains"], "upper": {**upper, "weight": 2}}}]
    root = begin(world)
    as_an_older_release_wrote_it(root)
    for config in (None, load_pipeline(world.write())):
        work = rounds.reopen_rounds(root, config, None, "latest", print)
        assert isinstance(work, rounds.Rounds)
        found = [domain.prompts for one in work.configs for domain in one.domains.values()]
        assert [getattr(prompts, "columns", {}) for prompts in found] == [dict.fromkeys(CHAT_COLUMNS)] * 4


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize("column", ["system", "more"])
def test_an_older_run_on_registered_prompts_with_these_columns_is_refused(
    column: str, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (world.root / "upper.jsonl").read_text().splitlines()
    chats = ({**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in map(json.loads, rows))
    (world.root / "upper.jsonl").write_text("".join(json.dumps({**row, column: "be brief"}) + "\n" for row in chats))
    registry = Registry(world.root / "registry")
    for name, domain in (("rev", "reverse"), ("up", "upper")):
        registry.add(name, world.root / name, domain, prompts=world.root / f"{domain}.jsonl")
        del world.data["domains"][domain]["prompts"]
    world.data |= {"experts": {"use": "all"}, "registry": str(world.root / "registry")}
    root = begin(world)
    monkeypatch.setattr(merging, "_run_session", lambda *_: {})
    merging.resume(root)
    as_an_older_release_wrote_it(root)
    if column == "system":
        with pytest.raises(RunDirError, match="passed over: system"):
            merging.resume(root)
    else:
        merging.resume(root)


def test_a_pipeline_may_say_otherwise(beginning: Any) -> None:
    beginning.data["student"]["add_special_tokens"] = False
    found = read_inputs(load_pipeline(beginning.write()))
    assert found.tokenizer.decode(found.prompts["upper"][0].token_ids) == "upp aaa="
