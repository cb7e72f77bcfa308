"""A plan beside the two merges that have run on a GPU: the table of benchmarks/README.md, and terms that no such merge shows."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from opd.config import load_pipeline
from pipelines.catalog import find_pipeline
from pipelines.plan.plan import MergePlan, make_plan
from pipelines.plan.spec import ClusterSpec, load_spec, with_lengths

DOCS = Path(__file__).parents[4] / "docs"
ONE_GPU = (
    "trainer.ranks=1",
    "sync.kind=shared_memory",
    "cluster.rollout_gpus=0.4",
    "cluster.teacher_gpus=0.2",
    "cluster.trainer_gpus=0.4",
)
MERGES: dict[str, tuple[tuple[str, ...], dict[str, float], tuple[int, float, float]]] = {
    "smollm2": (
        ("trainer.compile=false", "rollout.gpu_memory_utilization=0.1", "teachers.gpu_memory=5GiB"),
        {},
        (93, 7, 4),
    ),
    "quickstart": (("rollout.gpu_memory_utilization=0.2",), {"memory": 4.8e12}, (8, 7, 2)),
}
"""Pipeline -> its changes as docs/gpu.md has them, rates in which the GPU differs from an H100, and lengths that were seen: tokens of a
prompt, median and tail of responses."""
PHASES = {"write": "rollout", "score": "score", "train": "train", "push": "sync"}


def one_gpu(rates: dict[str, float], **overheads: Any) -> ClusterSpec:
    data = load_spec("8-gpus").model_dump(exclude={"placement"})
    data["machine"] |= {"cores": 16, "memory": 128 << 30, "gpus": 1}
    data["rates"] |= rates
    data["overheads"] |= overheads
    return ClusterSpec.model_validate(data)


@cache
def planned(name: str) -> MergePlan:
    changes, rates, lengths = MERGES[name]
    config = load_pipeline(find_pipeline(name), [*ONE_GPU, *changes])
    return make_plan(config, with_lengths(one_gpu(rates), *lengths))


def measured() -> dict[str, dict[str, float]]:
    """Busy seconds of each role, seconds of a push and of a step."""
    smollm2 = json.loads((DOCS / "results" / "h100.json").read_text())["smollm2, one merge alone"]
    h200 = json.loads((DOCS / "results" / "h200.json").read_text())
    merge, step = h200["quickstart"], h200["median_step_s"]
    busy = {role: share * step for role, share in merge["utilisation"].items()}
    return {
        "smollm2": {
            "write": smollm2["phase_s"]["rollout"],
            "score": smollm2["busy_s"]["teachers"],
            "train": smollm2["busy_s"]["trainer"],
            "push": smollm2["phase_s"]["sync"],
            "step": smollm2["step_s, median of the last 127"],
        },
        "quickstart": {
            "write": busy["rollout"],
            "score": busy["teachers"],
            "train": busy["trainer"],
            "push": merge["phase_s"]["sync"] / merge["steps"],
            "step": step,
        },
    }


def test_the_table_of_the_page_is_what_was_measured_and_what_is_planned() -> None:
    rows = iter(re.findall(r"^\| .*?\| (write|score|train|push|step) \| (.*?) \| (.*?) \| (.*?)% \|$", table(), re.M))
    for name, values in measured().items():
        plan = planned(name)
        seconds = {phase.name: phase.seconds for phase in plan.phases}
        for what, value in values.items():
            expected = plan.step_s if what == "step" else seconds[PHASES[what]]
            off = f"{round(100 * (expected / value - 1)):+d}"
            assert next(rows) == (what, f"{value:.3f}", f"{expected:.3f}", off), f"{name}: {what}"
    assert list(rows) == []


def table() -> str:
    return (DOCS.parent / "benchmarks" / "README.md").read_text(encoding="utf-8").partition("### On one GPU")[2]


def test_the_phases_agree_one_by_one_not_by_cancellation() -> None:
    for name, values in measured().items():
        seconds = {phase.name: phase.seconds for phase in planned(name).phases}
        for what, phase in PHASES.items():
            assert seconds[phase] == pytest.approx(values[what], rel=0.1), f"{name}: {what}"


def test_a_chunk_of_the_loss_takes_at_least_its_launches() -> None:
    """Short chunks of a small head wait for their kernels; long ones of a large head for their products."""

    def overhead(*changes: str, seconds: float) -> float:
        config = load_pipeline(find_pipeline("quickstart"), [*ONE_GPU, "rollout.gpu_memory_utilization=0.2", *changes])
        spec = with_lengths(one_gpu({}, loss_chunk={"s": seconds, "why": "test"}), 8, 24, 1)
        return next(phase for phase in make_plan(config, spec).phases if phase.name == "train").overhead

    # 200 responses of 24 tokens in chunks of 32
    launched = [overhead("objective.chunk=32", seconds=s) for s in (0.0, 1.0)]
    assert launched[1] - launched[0] == pytest.approx(150, rel=1e-3)
    assert overhead("objective.chunk=32", seconds=1e-12) == pytest.approx(launched[0])


def test_rows_are_written_to_the_log_by_their_scorers() -> None:
    config = load_pipeline(find_pipeline("merge-7b"))
    spec = load_spec("8-gpus")

    def link(log: float | None) -> float:
        links = spec.links.model_copy(update={"log": log})
        made = make_plan(config, spec.model_copy(update={"links": links}))
        return next(phase for phase in made.phases if phase.name == "score").link

    slower, faster, uncounted = link(1e9), link(2e9), link(None)
    a_step = make_plan(config, spec).response * config.trainer.samples_per_step * 2 * 3584
    for logged, rate in ((slower, 1e9), (faster, 2e9)):
        assert logged - uncounted == pytest.approx(a_step / 8 / rate, rel=0.1), "eight workers share them"
