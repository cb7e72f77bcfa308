"""The table of families says what was measured, and nothing wrong passes for right."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.models import row as rows
from tests.models.families import FAMILIES, build_config
from tests.models.row import Row, judge, merge, run
from tests.models.table import render

ROOT = Path(__file__).parents[2]
FOUND = {
    "trainer_layout": "packed",
    "trainer_packing": 3e-7,
    "teacher_layouts": {"whole": "packed", "adapter": "packed"},
    "scorer_gaps": {"whole": 1e-6, "adapter": 1e-6},
    "probe_gap": 2e-7,
    "losses": (0.5, 0.2),
    "export_transformers": 0.0,
    "export_vllm": 1e-6,
    "resumed_alike": True,
    "adapter": "scored",
}


def row(**changed: object) -> Row:
    return Row(family="Llama", note="", **FOUND | changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"trainer_packing": 2e-3}, "packed against alone, trainer: 2.0e-03, wanted at most 1e-05"),
        ({"export_transformers": 0.08}, "export in transformers: 8.0e-02"),
        ({"export_vllm": float("nan")}, "export in the engine: nan"),
        ({"scorer_gaps": {"whole": 1e-6, "adapter": 0.3}}, "scorer of adapter: 3.0e-01"),
        ({"losses": (0.5, 0.5)}, "the loss does not fall"),
        ({"resumed_alike": False}, "the resume ends with other weights"),
    ],
)
def test_what_is_wrong_fails_the_row(changed: dict[str, object], said: str) -> None:
    right, wrong = row(), row(**changed)
    judge(right)
    judge(wrong)
    assert (right.state, right.said) == ("works", [])
    assert wrong.state == "FAILED" and len(wrong.said) == 1 and wrong.said[0].startswith(said)


def test_a_command_is_ended_at_its_deadline_and_workers_are_seen(tmp_path: Path) -> None:
    slow = run(["-c", "import time; time.sleep(60)"], tmp_path, deadline_s=1.0)
    assert slow.code is None and not slow.started_workers
    script = "import subprocess, time; subprocess.Popen(['bash', '-c', 'exec -a raylet sleep 2']); time.sleep(1.5)"
    worked = run(["-c", f"{script}; raise SystemExit('error: no')"], tmp_path)
    assert (worked.code, worked.last_words, worked.started_workers) == (1, "error: no", True)


def test_a_refusal_after_the_workers_started_is_a_defect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "whole").mkdir()
    for started, state in ((False, "refused"), (True, "FAILED")):
        ended = rows.Ended(code=2, out="", errors="error: student\n  found:  x\n", started_workers=started)
        monkeypatch.setattr(rows, "run", lambda *_, ended=ended: ended)
        found = Row(family="Llama", note="")
        models = {name: tmp_path / name for name in ("student", "whole", "adapter")}
        assert merge(found, FAMILIES["Llama"], models, tmp_path, lambda line: None) == ()
        assert found.state == state and "student found:  x" in found.said[0]


@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_family_has_a_config_of_its_class_that_a_tiny_tokenizer_fits(name: str) -> None:
    config = build_config(FAMILIES[name])
    assert config.model_type == FAMILIES[name].settings["model_type"]
    assert config.vocab_size == (FAMILIES[name].rows or 76) and config.eos_token_id == 2


def test_the_page_is_made_of_the_rows_and_says_everything() -> None:
    refused = Row(family="Qwen3.5", note="", state="refused", said=["student: a | b"])
    text = render([asdict(r) | {"versions": {"torch": "2.13.0"}} for r in (row(), refused)])
    assert "1 of 2 families work, 1 are refused" in text
    assert "| **Llama** | packed | 3.0e-07 | 2.0e-07 | 1.0e-06 | 1.0e-06 |" in text
    assert "| **Qwen3.5** | student: a \\| b |" in text and "torch 2.13.0" in text


def test_the_committed_page_is_that_of_the_committed_rows() -> None:
    file = ROOT / "docs" / "results" / "models.json"
    if not file.exists():
        pytest.skip("docs/results/models.json is not there yet")
    assert (ROOT / "docs" / "models.md").read_text() == render(json.loads(file.read_text())["rows"])


@pytest.mark.parametrize(("said", "alike"), [(f"resumed from step {rows.RESUME_FROM}, engine and", True), ("", False)])
def test_a_resume_that_did_nothing_is_a_defect(
    said: str, alike: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "run" / "model"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"loss": 0.5}\n{"loss": 0.2}\n')

    def resumed(args: object, place: Path) -> rows.Ended:
        assert not model.exists()
        if said:
            model.mkdir()
            (model / "model.safetensors").write_bytes(b"weights")
        return rows.Ended(code=0, out="", errors=said, started_workers=True)

    monkeypatch.setattr(rows, "run", resumed)
    found = row(resumed_alike=None)
    rows.resume(found, tmp_path, lambda _: None)
    assert found.resumed_alike is alike
