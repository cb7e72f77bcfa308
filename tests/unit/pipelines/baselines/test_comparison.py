"""The table over seeds: intervals, ties, and what is computed again after an interruption."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from opd.config import PipelineConfig, load_pipeline
from opd.errors import PromptError, RunDirError
from opd.evaluation.baselines import BaselineResult
from opd.records.scores import DomainScore, Evaluation
from pipelines.baselines import comparison as comparing
from pipelines.baselines.comparison import SeedMean, mean_headroom, run_comparison
from pipelines.baselines.jobs import BaselineJob
from pipelines.baselines.run import compute_results


def scores(**accuracy: float) -> dict[str, DomainScore]:
    return {d: DomainScore(accuracy=a, stderr=0.0, low=a, high=a, questions=10) for d, a in accuracy.items()}


def test_an_interval_is_students_t() -> None:
    found = SeedMean.from_values([0.90, 0.92, 0.97])
    # By hand: mean 0.93, standard deviation sqrt(0.0013), t(2) 4.303.
    assert found.mean == pytest.approx(0.93)
    assert found.high - found.mean == pytest.approx(4.303 * 0.0013**0.5 / 3**0.5, rel=1e-3)
    assert found.mean - found.low == pytest.approx(found.high - found.mean)
    assert str(found) == "0.930 ± 0.090"
    assert str(SeedMean.from_values([0.25])) == f"{SeedMean.from_values([0.25])}" == "0.250"
    assert f"{SeedMean.from_values([900, 1100]):,.0f}" == "1,000 ± 1,271"


def test_the_mean_headroom_is_over_domains_with_a_better_expert() -> None:
    before = scores(a=0.2, b=0.5, c=0.5) | {"d": by_chance(0.50)}
    expert = scores(a=0.6, b=0.5) | {"d": by_chance(0.51)}
    assert mean_headroom(before, {"a": 0.3, "b": 0.9, "c": 0.9, "d": 0.9}, expert) == pytest.approx(0.25)
    assert mean_headroom(before, {"b": 0.9, "c": 0.9, "d": 0.9}, expert) is None


def by_chance(accuracy: float) -> DomainScore:
    return DomainScore(accuracy=accuracy, stderr=0.05, low=accuracy - 0.1, high=accuracy + 0.1, questions=100)


ACCURACY = {
    # method and share -> accuracy on `reverse` by seed; `upper` is 0.5 for all.
    ("opd", 1.0): (0.90, 0.92, 0.94),
    ("opd", 0.1): (0.60, 0.60, 0.60),
    ("off_policy", 1.0): (0.91, 0.92, 0.93),
    ("off_policy", 0.1): (0.80, 0.80, 0.80),
    ("mixed_sft", 1.0): (0.50, 0.51, 0.52),
    ("mixed_sft", 0.1): (0.50, 0.51, 0.52),
    ("ties", None): (0.30,),
    ("dare_ties", None): (0.10, 0.20, 0.90),
}


class FakeRuns:
    """Merges and baselines that are done at once; counts them."""

    def __init__(self) -> None:
        self.merges: list[str] = []
        self.computed: list[str] = []

    def start(self, config: PipelineConfig, root: Path) -> None:
        self.merges.append(f"start {root.name} seed {config.seed}")
        (root / "evaluation").mkdir(parents=True)
        recorded = config.model_dump(mode="json")
        recorded["student"]["add_special_tokens"] = config.student.puts_in_front  # as a run records it
        (root / "pipeline.yaml").write_text(json.dumps(recorded))
        (root / "metrics.jsonl").write_text('{"step": 1, "response_tokens": 100}\n')
        Evaluation(model="before", scores=scores(reverse=0.1, upper=0.5)).save(root / "evaluation" / "before.json")
        Evaluation(model="expert", scores=scores(reverse=0.9, upper=0.5)).save(root / "evaluation" / "expert.json")
        after = Evaluation(
            model="merged", scores=scores(reverse=0.8, upper=0.5), weights={"reverse": f"of {root.name}"}
        )
        after.save(root / "evaluation" / "after.json")
        (root / "report.json").write_text("{}")

    def resume(self, root: Path) -> None:
        self.merges.append(f"resume {root.name}")
        (root / "report.json").write_text("{}")

    def compute(self, jobs: Sequence[BaselineJob], tell: Any) -> list[BaselineResult]:
        self.computed += [f"{job.root.name}/{job.name}" for job in jobs]
        return [self._result(job) for job in jobs]

    def _result(self, job: BaselineJob) -> BaselineResult:
        accuracy = ACCURACY[job.method, job.share][job.config.seed]
        return BaselineResult(
            method=job.method,
            label="TIES 0.5" if job.method == "ties" else job.method,
            token_share=job.share,
            tokens=None if job.share is None else 1000 + job.config.seed,
            seed=job.config.seed,
            scores=scores(reverse=accuracy, upper=0.5),
            wall_s=1.0,
        )


@pytest.fixture
def with_completions(world: Any) -> None:
    """Add what `mixed_sft` needs."""
    for file in world.root.glob("*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(line | {"completion": line["answer"]}) + "\n" for line in lines))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    fake = FakeRuns()
    monkeypatch.setattr(comparing.merging, "start", fake.start)
    monkeypatch.setattr(comparing.merging, "resume", fake.resume)
    monkeypatch.setattr(comparing, "compute_results", fake.compute)
    return fake


METHODS = ["ties", "dare_ties", "off_policy", "mixed_sft", "opd"]


@pytest.mark.usefixtures("with_completions")
def test_a_table_with_verdicts_at_equal_shares(world: Any, runs: FakeRuns, tmp_path: Path) -> None:
    root = tmp_path / "compared"
    rows = run_comparison(load_pipeline(world.write()), root, [0, 1, 2], METHODS, [0.1, 1.0], lambda line: None)
    assert [(r.method, r.share, r.verdict) for r in rows] == [
        ("opd", 1.0, ""),
        ("opd", 0.1, ""),
        ("mixed_sft", 1.0, "worse"),
        ("mixed_sft", 0.1, "worse"),
        ("off_policy", 1.0, "tie"),
        ("off_policy", 0.1, "better"),
        ("dare_ties", None, "tie"),  # so wide that it says nothing
        ("ties", None, "worse"),
    ]
    by_key = {(r.method, r.share): r for r in rows}
    assert by_key["opd", 1.0].accuracy.mean == pytest.approx((0.92 + 0.5) / 2)
    assert by_key["opd", 0.1].tokens == 1001
    gained = by_key["off_policy", 0.1].headroom
    assert gained is not None
    assert gained.mean == pytest.approx(0.7 / 0.8), "the domain without headroom does not count"
    assert len(by_key["ties", None].accuracy.by_seed) == 1, "no seed has a part in it"
    assert "seed-1/ties" not in runs.computed
    assert {"seed-0/ties", "seed-2/dare_ties", "seed-2/opd-0.1"} <= set(runs.computed)


def test_seeds_after_the_first_may_have_no_baseline_at_all(
    world: Any, runs: FakeRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        comparing,
        "compute_results",
        lambda jobs, tell: runs.compute(jobs, tell) if jobs else compute_results(jobs, tell),
    )
    (row,) = run_comparison(load_pipeline(world.write()), tmp_path / "out", [0, 1], ["ties"], [1.0], lambda line: None)
    assert (row.accuracy.by_seed, row.verdict, runs.computed) == ((0.4,), "", ["seed-0/ties"])
    assert (tmp_path / "out" / "comparison.svg").exists()


@pytest.mark.usefixtures("with_completions")
def test_the_files(world: Any, runs: FakeRuns, tmp_path: Path) -> None:
    root = tmp_path / "compared"
    run_comparison(load_pipeline(world.write()), root, [0, 1], METHODS, [0.1, 1.0], lambda line: None)
    data = json.loads((root / "comparison.json").read_text())
    assert (data["format"], data["seeds"], data["before"]["mean"]) == (1, [0, 1], pytest.approx(0.3))
    assert len(data["rows"]) == 8
    assert data["merges"] == [
        {"seed": seed, "steps": 1, "tokens": 100, "weights": f"of seed-{seed}"} for seed in (0, 1)
    ]
    table = (root / "comparison.md").read_text().splitlines()
    assert table[0].startswith("| method | share |")
    assert [len(line.split("|")) for line in table[:10]] == [8] * 10
    assert "of the experts: 0.700" in table[-1]
    assert "<svg" in (root / "comparison.svg").read_text()


def test_the_picture_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(figure: Figure, target: Any, **_: Any) -> None:
        target.write(b"<sv") if hasattr(target, "write") else Path(target).write_bytes(b"<sv")
        raise OSError(28, "No space left on device")

    (tmp_path / "comparison.svg").write_text("the one before")
    monkeypatch.setattr(Figure, "savefig", full_disk)
    with pytest.raises(OSError, match="No space"):
        comparing.draw_comparison([], tmp_path / "comparison.svg")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("comparison.svg", "the one before")]


def test_an_interrupted_merge_goes_on_and_a_finished_one_is_left(world: Any, runs: FakeRuns, tmp_path: Path) -> None:
    root = tmp_path / "compared"
    config = load_pipeline(world.write())
    for seed in (0, 1):
        runs.start(config.model_copy(update={"seed": seed}), root / f"seed-{seed}")
    (root / "seed-1" / "report.json").unlink()
    runs.merges.clear()
    run_comparison(config, root, [0, 1, 2], ["opd"], [1.0], lambda line: None)
    assert runs.merges == ["resume seed-1", "start seed-2 seed 2"]


def test_one_seed_says_nothing_about_who_is_better(world: Any, runs: FakeRuns, tmp_path: Path) -> None:
    config = load_pipeline(world.write())
    rows = run_comparison(config, tmp_path / "out", [0], ["ties", "off_policy", "opd"], [0.1, 1.0], lambda line: None)
    assert {row.verdict for row in rows} == {""}


def test_results_of_another_merge_are_not_mixed_in(world: Any, runs: FakeRuns, tmp_path: Path) -> None:
    config = load_pipeline(world.write())
    run_comparison(config, tmp_path / "compared", [0], ["opd"], [1.0], lambda line: None)
    world.data["trainer"]["lr"] = 0.5
    with pytest.raises(RunDirError, match=r"seed-0\n  found:  a merge with other settings: trainer\n"):
        run_comparison(load_pipeline(world.write()), tmp_path / "compared", [0], ["opd"], [1.0], lambda line: None)


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("domains", {"eval": {"prompts": "upper-eval.jsonl", "verifier": "last_line"}}),
        ("domains", {"weight": 2.0}),
        ("balance", "gap"),
        ("student", {"lora": {"r": 2}}),
    ],
)
def test_a_setting_that_decides_a_number_is_not_changed_half_way(
    section: str, change: Any, world: Any, runs: FakeRuns, tmp_path: Path
) -> None:
    run_comparison(load_pipeline(world.write()), tmp_path / "compared", [0], ["opd"], [1.0], lambda line: None)
    if section == "domains":
        world.data["domains"]["upper"] |= change
    elif section == "student":
        world.data["student"] |= change
    else:
        world.data[section] = change
    with pytest.raises(RunDirError, match=rf"seed-0\n  found:  a merge with other settings: {section}\n"):
        run_comparison(load_pipeline(world.write()), tmp_path / "compared", [0], ["opd"], [1.0], lambda line: None)


def test_seeds_go_on_with_the_beginning_that_the_first_one_has(world: Any, runs: FakeRuns, tmp_path: Path) -> None:
    """A comparison that an earlier release began has no begin token in front of its prompts."""
    config = load_pipeline(world.write())
    run_comparison(config, tmp_path / "compared", [0], ["opd"], [1.0], lambda line: None)
    file = tmp_path / "compared" / "seed-0" / "pipeline.yaml"
    recorded = json.loads(file.read_text())
    del recorded["student"]["add_special_tokens"]
    file.write_text(json.dumps(recorded))
    run_comparison(config, tmp_path / "compared", [0, 1], ["opd"], [1.0], lambda line: None)
    begun = load_pipeline(tmp_path / "compared" / "seed-1" / "pipeline.yaml")
    assert runs.merges[1:] == ["start seed-1 seed 1"] and begun.student.add_special_tokens is False


@pytest.mark.parametrize(("formats", "said"), [((3, 4), ["seed-0"]), ((3, 3), []), ((4, 4), [])], ids=str)
def test_seeds_of_an_older_release_beside_others_are_named(
    formats: tuple[int, int], said: list[str], world: Any, runs: FakeRuns, tmp_path: Path
) -> None:
    world.data["domains"]["upper"]["weight"] = 3
    config, told = load_pipeline(world.write()), list[str]()
    run_comparison(config, tmp_path / "c", [0, 1], ["ties"], [1.0], told.append)
    assert not any("release" in line for line in told)
    for seed, number in enumerate(formats):
        root = tmp_path / "c" / f"seed-{seed}"
        recorded = json.loads((root / "pipeline.yaml").read_text())
        (root / "manifest.json").write_text(json.dumps({"format": number, "config": recorded}))
    told.clear()
    run_comparison(config, tmp_path / "c", [0, 1], ["ties"], [1.0], told.append)
    found = [line for line in told if "decided otherwise how many prompts of each domain" in line]
    assert [line.split(": ")[1] for line in found] == said


def test_a_task_file_of_the_harness_is_the_same_by_another_path(world: Any, runs: FakeRuns, tmp_path: Path) -> None:
    (world.root / "mine.yaml").touch()
    world.data["evaluate"] = {"lm_eval": [str(world.root / "mine.yaml")]}
    run_comparison(load_pipeline(world.write()), tmp_path / "compared", [0], ["opd"], [1.0], lambda line: None)
    world.data["evaluate"] = {"lm_eval": ["mine.yaml"]}  # a run directory has it as an absolute path
    run_comparison(load_pipeline(world.write()), tmp_path / "compared", [0], ["opd"], [1.0], lambda line: None)
    assert runs.merges == ["start seed-0 seed 0"]


def test_what_a_baseline_lacks_is_told_before_the_first_merge(world: Any, runs: FakeRuns, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="no completion"):
        run_comparison(
            load_pipeline(world.write()), tmp_path / "out", [0], ["opd", "mixed_sft"], [1.0], lambda line: None
        )
    assert runs.merges == []
    assert not (tmp_path / "out").exists()
