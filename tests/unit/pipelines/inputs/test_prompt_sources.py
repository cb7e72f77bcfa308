"""A merge from CSV, Parquet or a saved data set: the same inputs, the same exams, bound to what was in the files."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from opd.config import load_pipeline
from opd.errors import PromptError, RunDirError
from opd.prompts import MixedPrompts
from pipelines.inputs.read import Inputs, read_inputs
from pipelines.merging.changes import accept_changes, refuse_changed_inputs, run_identity
from pipelines.merging.manifest import make_manifest


def convert(source: Path, kind: str) -> str:
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    target = source.with_suffix(f".{kind}")
    if kind == "csv":
        with target.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        import datasets

        table = datasets.Dataset.from_list(rows)
        table.to_parquet(target) if kind == "parquet" else table.save_to_disk(target)
    return target.name


def inputs_of(world: Any) -> Inputs:
    return read_inputs(load_pipeline(world.write()))


def taken(inputs: Inputs) -> list[Any]:
    mixed = MixedPrompts(inputs.prompts, {"reverse": 3, "upper": 2}, 0)
    return [mixed.take(step) for step in range(1, 9)] + [inputs.exams["upper"].prompts, inputs.warnings]


@pytest.mark.parametrize("kind", ["csv", "parquet", "saved"])
@pytest.mark.parametrize("holdout", [False, True])
def test_a_merge_takes_the_same_prompts_from_every_format(kind: str, holdout: bool, world: Any) -> None:
    if holdout:
        world.data["domains"]["upper"]["eval"] = {"holdout": 0.4}
    want = taken(inputs_of(world))
    world.data["domains"]["upper"]["prompts"] = convert(world.root / "upper.jsonl", kind)
    if not holdout:
        world.data["domains"]["upper"]["eval"] = {"prompts": convert(world.root / "upper-eval.jsonl", kind)}
    assert taken(inputs_of(world)) == want


def test_questions_that_are_trained_on_are_found_across_formats(world: Any) -> None:
    world.data["domains"]["upper"]["eval"] = {"prompts": convert(world.root / "upper.jsonl", "parquet")}
    with pytest.raises(
        PromptError, match=r"6 of the 6 questions of upper are training prompts of upper.*question upper/0"
    ):
        inputs_of(world)


def test_over_long_prompts_are_left_out_and_told(world: Any) -> None:
    with (world.root / "upper.jsonl").open("a") as file:
        file.writelines(json.dumps({"prompt": "a" * n}) + "\n" for n in (20, 21, 30))
    world.data["domains"]["upper"]["prompts"] = {"path": "upper.jsonl", "max_prompt_tokens": 20}
    world.data["domains"]["upper"]["eval"] = {"prompts": {"path": "upper-eval.jsonl", "max_prompt_tokens": 7}}
    with pytest.raises(
        PromptError, match=r"upper-eval\.jsonl\n  found:  no prompt of 7 tokens or fewer; the shortest has 8"
    ):
        inputs_of(world)
    world.data["domains"]["upper"]["eval"]["prompts"]["max_prompt_tokens"] = 8
    inputs = inputs_of(world)
    assert [p.id for p in inputs.prompts["upper"]] == [f"upper/{i}" for i in range(7)]
    assert inputs.warnings == (
        "upper.jsonl: 2 of 9 prompts of upper have more than max_prompt_tokens = 20 tokens and are left out: upper/7, upper/8",
    )


def test_no_prompt_is_made_before_it_is_asked_for(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from opd.prompts import rows, table
    from opd.records.types import Prompt

    made: list[str] = []
    monkeypatch.setenv("HF_DATASETS_CACHE", str(world.root / "cache"))
    monkeypatch.setattr(rows, "IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(table, "Prompt", lambda **fields: (made.append(fields["id"]), Prompt(**fields))[1])
    with (world.root / "upper.jsonl").open("a") as file:
        file.writelines(json.dumps({"prompt": f"upp {i:04d}="}) + "\n" for i in range(5000))
    inputs = inputs_of(world)
    assert len(inputs.prompts["upper"]) == 5006
    assert len(made) == 12, "the questions of the two exams"
    MixedPrompts(inputs.prompts, {"reverse": 3, "upper": 2}, 0).take(1)
    assert len(made) == 17


def test_a_resume_is_bound_to_the_rows_and_not_to_their_place(world: Any) -> None:
    world.data["domains"]["upper"]["prompts"] = {"path": convert(world.root / "upper.jsonl", "saved"), "limit": 5}
    config = load_pipeline(world.write())
    recorded = make_manifest(config, read_inputs(config))
    json.dumps(recorded)

    (world.root / "upper.saved").rename(world.root / "elsewhere")
    world.data["domains"]["upper"]["prompts"]["path"] = "elsewhere"
    config = load_pipeline(world.write())
    found = make_manifest(config, read_inputs(config))
    assert len(accept_changes(recorded["config"], found["config"], Path("manifest.json"))) == 1
    refuse_changed_inputs(recorded, found, Path("manifest.json"))
    assert run_identity(found) == run_identity(recorded)

    world.data["domains"]["upper"]["prompts"]["limit"] = 4
    config = load_pipeline(world.write())
    with pytest.raises(RunDirError, match=r"domains\.upper\.prompts\.limit"):
        accept_changes(recorded["config"], make_manifest(config, read_inputs(config))["config"], Path("manifest.json"))

    world.data["domains"]["upper"]["prompts"]["limit"] = 5
    row = next((world.root / "elsewhere").glob("*.arrow"))
    row.write_bytes(row.read_bytes().replace(b"upp aaa=", b"upp aab="))
    config = load_pipeline(world.write())
    with pytest.raises(RunDirError, match="prompts changed since the run began: upper"):
        refuse_changed_inputs(recorded, make_manifest(config, read_inputs(config)), Path("manifest.json"))


def test_a_path_alone_is_recorded_as_it_always_was(world: Any) -> None:
    from opd.files import blake3_file

    config = load_pipeline(world.write())
    recorded = make_manifest(config, read_inputs(config))
    assert recorded["config"]["domains"]["upper"]["prompts"] == str(world.root / "upper.jsonl")
    files = [world.root / name for name in ("upper.jsonl", "upper-eval.jsonl")]
    assert recorded["prompts"]["upper"] == {str(file): blake3_file(file) for file in files}


def test_a_hub_name_stays_a_name(world: Any, monkeypatch: Any) -> None:
    from types import SimpleNamespace

    import datasets

    file = world.root / convert(world.root / "upper.jsonl", "parquet")
    name = "hf://datasets/owner/name@main/p.parquet"
    builder = SimpleNamespace(name="parquet", config=SimpleNamespace(data_files={"train": [name]}))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *a, **k: builder)
    monkeypatch.setattr(datasets, "DownloadManager", lambda: SimpleNamespace(download=lambda names: [str(file)]))
    world.data["domains"]["upper"]["prompts"] = {"path": "owner/name"}
    config = load_pipeline(world.write())
    recorded = make_manifest(config, read_inputs(config))
    assert recorded["config"]["domains"]["upper"]["prompts"]["path"] == "owner/name"
    assert "owner/name" in recorded["prompts"]["upper"]
