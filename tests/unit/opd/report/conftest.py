"""A run directory with everything that a report can show, small enough to write by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import yaml

from opd.records.scores import DomainScore, Evaluation, ScoredAnswer
from opd.report import page, write_report

BEFORE = {"letters": 0.2, "sums": 0.5, "known": 0.9}
EXPERT = {"letters": 0.9, "sums": 1.0, "known": 0.8}
AFTER = {"letters": 0.85, "sums": 1.0, "known": 0.85}
HOSTILE = "<script>document.title='owned'</script>\x00\x1b[31m\u202eabc\ud800 & \"quoted\" {{ 7 * 7 }}"
QUESTIONS = 100


def score(accuracy: float) -> DomainScore:
    """With Wilson's interval for `QUESTIONS` questions."""
    z, n = 1.96, QUESTIONS
    centre = (accuracy + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * sqrt(accuracy * (1 - accuracy) / n + z * z / (4 * n * n))
    return DomainScore(
        accuracy=accuracy,
        stderr=sqrt(accuracy * (1 - accuracy) / n),
        low=max(0.0, centre - half),
        high=min(1.0, centre + half),
        questions=n,
        mean_tokens=7.5,
        truncated=0.02,
    )


def evaluation(model: str, accuracy: Mapping[str, float], text: str = "an answer") -> Evaluation:
    answers = [
        ScoredAnswer(
            domain=d, prompt_id=f"{d}/{i}", prompt=f"question {i}", answer="right", text=text, score=float(i == 0)
        )
        for d in accuracy
        for i in range(2)
    ]
    return Evaluation(model=model, scores={d: score(a) for d, a in accuracy.items()}, answers=tuple(answers))


def record(step: int, **more: Any) -> dict[str, Any]:
    """Two tokens a response, so the mean lengths and shares can be told by heart."""
    domains = {
        d: {"loss": 1 / step, "student_entropy": 0.5, "teacher_entropy": 0.25, "argmax_agreement": 0.75,
            "tokens": 8, "samples": 4}
        for d in BEFORE
    }  # fmt: skip
    places = {"0": {"loss": 0.1, "tokens": 12}, "1": {"loss": 0.2, "tokens": 6}, "2-3": {"loss": 0.3, "tokens": 6}}
    sums = {"domains": domains, "positions": places, "response_tokens": 24, "truncated": 3}
    plain = {"step": step, "loss": 1 / step, **sums}
    times = {"phase_s": {"rollout": 0.5, "train": 1.5}, "probe_gap": 1e-6 * step, "quarantined": {}}
    return plain | times | more


def build_run(root: Path) -> Path:
    """A finished merge of four steps, with everything beside it."""
    (root / "evaluation").mkdir(parents=True)
    (root / "baselines").mkdir()
    records = [record(1), record(2, accuracy=BEFORE), record(3), record(4)]
    (root / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (root / "pipeline.yaml").write_text(yaml.safe_dump({"name": "three", "trainer": {"steps": 4}}))
    hashes = {"model.safetensors": "ab" * 32}
    experts = {d: {"domains": [d], "weights": hashes} for d in BEFORE}
    sizes = {"architecture": "LlamaForCausalLM", "parameters": 1234567}
    put(root / "manifest.json", {
        "format": 1, "versions": {"python": "3.11"}, "student": hashes, "experts": experts, "prompts": {},
        "command": "opd merge three.yaml --set 'name=<b>'",
        "models": {"student": sizes, "experts": dict.fromkeys(experts, sizes)},
    })  # fmt: skip
    put(root / "report.json", {
        "name": "three", "steps": 4, "domains": {
            d: {"before": BEFORE[d], "after": AFTER[d], "expert": EXPERT[d], "headroom": None} for d in BEFORE
        },
        "mean_headroom": None, "worst_headroom": None, "wall_s": 75.0, "phase_s": {"rollout": 2.0, "train": 6.0},
        "response_tokens": 96, "response_tokens_per_s": 12.0, "versions": {"python": "3.11"},
    })  # fmt: skip
    evaluation("student before", BEFORE).save(root / "evaluation" / "before.json")
    evaluation("expert", EXPERT).save(root / "evaluation" / "expert.json")
    evaluation("merged", AFTER).save(root / "evaluation" / "after.json")
    evaluation("step 2", {**BEFORE, "letters": 0.55}).save(root / "evaluation" / "step-000002.json")
    models = {name: as_json(evaluation(name, EXPERT)) for name in ("merged", "expert $x_$ <i>\x00")}
    put(root / "evaluation" / "matrix.json", {"format": 1, "models": models})
    for seed, gain in ((0, 0.45), (1, 0.55)):
        baseline(root, "off_policy", "off-policy", {**BEFORE, "letters": gain}, token_share=0.3, tokens=128, seed=seed)
    baseline(root, "ties", "TIES 0.5", {**BEFORE, "letters": 0.55}, token_share=None, tokens=None, seed=0)
    return root


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """`build_run`, to be changed by a test."""
    return build_run(tmp_path / "run")


@pytest.fixture(scope="session")
def whole_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """report.html of `build_run`: read it only. Plots take a second to draw."""
    root = build_run(tmp_path_factory.mktemp("whole") / "run")
    write_report(root)
    return root / "report.html"


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the rest of the page."""
    sections = ("gains", "learning", "time", "matrix", "baselines")
    monkeypatch.setattr(page, "_section_plots", lambda report, run: {key: [] for key in sections})


def put(file: Path, data: Any) -> None:
    file.write_text(json.dumps(data))


def as_json(found: Evaluation) -> dict[str, Any]:
    return asdict(found)


def baseline(root: Path, method: str, label: str, accuracy: Mapping[str, float], **more: Any) -> None:
    scores = {d: asdict(score(a)) for d, a in accuracy.items()}
    name = f"{method}-{more['token_share']}-{more['seed']}.json"
    beside = {"merge_steps": 4, "merge_tokens": 96}
    data = {"format": 1, "method": method, "strength": None, "label": label, "scores": scores, "wall_s": 1.0}
    data |= beside | more
    put(root / "baselines" / name, data)


@pytest.fixture
def spoil(run_dir: Path) -> Callable[[], Path]:
    """Puts hostile text wherever a user's or a model's text goes into the page."""

    def change() -> Path:
        evaluation("merged", AFTER, HOSTILE).save(run_dir / "evaluation" / "after.json")
        (run_dir / "pipeline.yaml").write_text(yaml.safe_dump({"name": HOSTILE.replace("\ud800", "")}))
        baseline(run_dir, "ties", HOSTILE, BEFORE, token_share=None, tokens=None, seed=3)
        return run_dir

    return change
