"""report.html: whole, escaped, self-contained, and what it leaves out."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from opd.errors import RunDirError
from opd.records.scores import Evaluation
from opd.report import Gate, figures, write_report
from opd.report.drawing import format_thousands
from opd.report.page import LONGEST_TEXT, SAMPLES_PER_DOMAIN, format_duration, show_control_characters

PLOTS = [
    "accuracy", "headroom", "methods", "budget", "matrix", "accuracy-curve", "headroom-curve", "loss", "length",
    "truncated", "sample-share", "token-share", "entropy", "agreement", "positions", "phases", "speed",
]  # fmt: skip


class Page(HTMLParser):
    """A page as a browser reads it: elements with their attributes, and the text of each table cell."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("td", "th"):
            self.cells.append("")
            self._inside = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.cells[-1] += data

    def ids(self) -> list[str]:
        return [attrs["id"] or "" for _, attrs in self.elements if "id" in attrs]


def written(run_dir: Path, **options: Any) -> tuple[str, Page]:
    write_report(run_dir, **options)
    text = (run_dir / "report.html").read_text(encoding="utf-8")
    return text, Page(text)


@pytest.fixture
def whole(whole_page: Path) -> tuple[str, Page]:
    text = whole_page.read_text(encoding="utf-8")
    return text, Page(text)


def test_every_part_is_there(whole: tuple[str, Page]) -> None:
    text, page = whole
    assert [i.removeprefix("plot-") for i in page.ids() if i.startswith("plot-")] == PLOTS
    assert len(page.ids()) == len(set(page.ids())), "ids of several plots must not collide"
    for words in ("92.9 %", "20.0 %", "+65.0 points", "-5.0 points", "off-policy, 30 % of the tokens", "1 min 15 s"):
        assert words in text, words
    assert "opd merge three.yaml --set &#39;name=&lt;b&gt;&#39;" in text
    assert "1,234,567" in text and "ab" * 32 in text and "steps: 4" in text
    assert "expert $x_$ &lt;i&gt;\\x00" in text, "a label of a plot"
    assert len(text) < 1_000_000


def test_plots_name_the_pages_colours_and_nothing_outside(whole: tuple[str, Page]) -> None:
    text, page = whole
    style = text[text.index("<style>") : text.index("</style>")]
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    used = set(re.findall(r"var\(--(\w+)\)", text))
    assert {"merged", "expert", "before", "s0", "s2"} <= used
    for name in used:
        assert f"--{name}:" in light and f"--{name}:" in dark, name
    assert "#0a0b" not in text, "a colour that stands for another"
    names = ("http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink", "http://www.w3.org/1998/Math/MathML")
    assert set(re.findall(r"https?://[^\s\"'<)]+", text)) <= set(names)
    known = set(page.ids())
    for tag, attrs in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "form", "a"), tag
        assert "src" not in attrs
        link = attrs.get("xlink:href") or attrs.get("href")
        assert link is None or link.removeprefix("#") in known, link
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= known


def test_only_our_own_script_may_run(whole: tuple[str, Page]) -> None:
    text, page = whole
    (policy,) = [a["content"] for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy


def test_untrusted_text_stays_text(spoil: Callable[[], Path]) -> None:
    text, page = written(spoil())
    assert [tag for tag, _ in page.elements].count("script") == 1
    hostile = "<script>document.title='owned'</script>\\x00\\x1b[31m\\u202eabc\\ud800 & \"quoted\" {{ 7 * 7 }}"
    assert sum(hostile in cell for cell in page.cells) == 6 + 1, "two answers in three domains, and a method"
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]", text)


def test_what_cannot_be_seen_is_spelled_out() -> None:
    assert show_control_characters("a\tb\nc é 日 😀") == "a\tb\nc é 日 😀"
    assert show_control_characters("\r\x00\x85\u200b\u2066\ufeff") == "\\r\\x00\\x85\\u200b\\u2066\\ufeff"


@pytest.mark.usefixtures("no_plots")
def test_the_worst_answers_come_first(run_dir: Path) -> None:
    file = run_dir / "evaluation" / "after.json"
    data = json.loads(file.read_text())
    one = data["answers"][0]
    scores = [1.0, 0.5, 1.0, 0.0, 1.0, 0.0]
    data["answers"] = [
        {**one, "prompt_id": f"letters/{i}", "text": f"text-{i}", "score": score} for i, score in enumerate(scores)
    ]
    Evaluation.from_json(data).save(file)
    text, _ = written(run_dir)
    places = [text.find(f"text-{i}") for i in (3, 5, 1, 0)]
    assert places == sorted(places) and places[0] > 0 and SAMPLES_PER_DOMAIN == 4
    assert "text-2" not in text


@pytest.mark.usefixtures("no_plots")
def test_long_and_many_answers_do_not_blow_it_up(run_dir: Path) -> None:
    file = run_dir / "evaluation" / "after.json"
    data = json.loads(file.read_text())
    one = data["answers"][0]
    data["answers"] = [{**one, "prompt_id": f"letters/{i}", "text": "long " * 100_000} for i in range(50)]
    Evaluation.from_json(data).save(file)
    text, page = written(run_dir)
    assert sum("long long" in cell for cell in page.cells) == SAMPLES_PER_DOMAIN
    assert f"({500_000 - LONGEST_TEXT:,} more characters)" in text
    assert len(text) < 1_000_000


@pytest.mark.usefixtures("no_plots")
def test_answers_of_one_prompt_stand_side_by_side(run_dir: Path) -> None:
    for name in ("before", "expert"):
        file = run_dir / "evaluation" / f"{name}.json"
        data = json.loads(file.read_text())
        for answer in data["answers"]:
            answer["text"] = f"{name} on {answer['prompt_id']}"
        data["answers"].reverse()
        Evaluation.from_json(data).save(file)
    _, page = written(run_dir)
    at = next(i for i, cell in enumerate(page.cells) if "before on letters/1" in cell)
    assert [c.strip() for c in page.cells[at - 3 : at + 3]] == [
        "letters", "question 1", "right", "✗ before on letters/1", "✗ an answer", "✗ expert on letters/1",
    ]  # fmt: skip


@pytest.mark.usefixtures("no_plots")
def test_the_gate_stands_on_the_page_and_in_the_json(run_dir: Path) -> None:
    text, page = written(run_dir, gate=Gate(min_headroom=0.95, max_regression=0.06))
    assert "gate" in page.ids() and "Gate failed" in text
    assert "letters: headroom 0.929 &lt; 0.95" in text and "lost 0.05" not in text
    verdict = json.loads((run_dir / "report.json").read_text())["gate"]
    assert verdict["passed"] is False and len(verdict["failures"]) == 1
    text, _ = written(run_dir, gate=Gate(min_headroom=0.9))
    assert "Gate passed" in text
    text, page = written(run_dir)
    assert "gate" not in page.ids()


def test_written_again_it_is_the_same(run_dir: Path) -> None:
    first, _ = written(run_dir)
    kept = (run_dir / "report.json").read_text()
    second, _ = written(run_dir)
    assert second == first and (run_dir / "report.json").read_text() == kept


@pytest.mark.usefixtures("no_plots")
def test_elsewhere_leaves_the_run_directory_alone(run_dir: Path, tmp_path: Path) -> None:
    before = {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()}
    write_report(run_dir, tmp_path / "page.html")
    assert {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()} == before
    assert json.loads((tmp_path / "page.json").read_text())["name"] == "three"


def test_a_merge_that_goes_on_has_a_page_but_no_report_json(run_dir: Path) -> None:
    (run_dir / "report.json").unlink()
    (run_dir / "evaluation" / "after.json").unlink()
    (run_dir / "pipeline.yaml").write_text("name: three\ntrainer: {steps: 9}\n")
    text, page = written(run_dir)
    assert "not finished" in text and "4 of 9 steps" in text and "plot-loss" in page.ids()
    assert not (run_dir / "report.json").exists()
    with pytest.raises(RunDirError, match=r"not finished(?s:.*)--resume"):
        write_report(run_dir, gate=Gate(min_headroom=0.5))


def test_a_run_that_has_not_taken_a_step(run_dir: Path) -> None:
    for file in [*run_dir.rglob("*.json"), run_dir / "metrics.jsonl"]:
        file.unlink()
    text, page = written(run_dir)
    assert "0 of 4 steps" in text and [i for i in page.ids() if i.startswith("plot-")] == []


def test_an_old_run_with_nothing_but_a_report(run_dir: Path) -> None:
    kept = (run_dir / "report.json").read_text()
    for file in [p for p in run_dir.rglob("*") if p.is_file()]:
        file.unlink()
    (run_dir / "report.json").write_text(kept)
    text, page = written(run_dir)
    assert [i for i in page.ids() if i.startswith("plot-")] == ["plot-accuracy", "plot-headroom", "plot-phases"]
    assert "95 % interval" not in text


def test_the_mean_headroom_says_how_many_domains_it_is_over(run_dir: Path, no_plots: None) -> None:
    for file in (run_dir / "evaluation").iterdir():
        file.unlink()  # no intervals
    text, _ = written(run_dir)
    assert "over 2 domains" in text, "the expert of the third is no better than the student"


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ([7], ["end (step 7)"]),
        ([1, 2], ["start (step 1)", "end (step 2)"]),
        ([1, 2, 3], ["start (step 1)", "middle (step 2)", "end (step 3)"]),
    ],
)
def test_the_loss_by_position_says_which_step_it_is_of(step: list[int], words: list[str]) -> None:
    plot = figures.draw_positions(step, {"0": [0.5] * len(step), "1": [0.25] * len(step)})
    assert [word for _, word in plot.legend] == words


def test_many_domains(run_dir: Path) -> None:
    """More than there are colours: lines are told apart by their dashes, and no name is lost."""
    names = [f"domain-{i:02d}" for i in range(24)]
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record["domains"] = dict.fromkeys(names, record["domains"]["letters"])
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    _, page = written(run_dir)
    keys = [attrs["data-highlight"] for tag, attrs in page.elements if tag == "button" and "data-highlight" in attrs]
    lines = [attrs["data-domain"] for tag, attrs in page.elements if "data-domain" in attrs]
    assert len(keys) >= 24 and set(lines) == set(keys)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.25, "0.25"),
        (999, "999"),
        (999.7, "1k"),
        (12345, "12.3k"),
        (999_949, "1M"),
        (999_400, "999k"),
        (2.5e9, "2.5G"),
    ],
)
def test_large_numbers(value: float, text: str) -> None:
    assert format_thousands(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.4, "59.4 s"), (59.7, "1 min 0 s"), (312.7, "5 min 13 s"), (7300, "2 h 1 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_each_objective_has_losses_of_its_own(run_dir: Path) -> None:
    """Two domains with the pipeline's objective, one with another: their values cannot be compared."""
    pipeline = {"name": "three", "trainer": {"steps": 4}, "domains": dict.fromkeys(("letters", "sums"))}
    pipeline["domains"] |= {"known": {"objective": {"kind": "sampled"}}}  # type: ignore[operator]
    (run_dir / "pipeline.yaml").write_text(json.dumps(pipeline))
    write_report(run_dir)
    assert json.loads((run_dir / "report.json").read_text())["objectives"] == {
        "letters": "adaptive_kl", "sums": "adaptive_kl", "known": "sampled",
    }  # fmt: skip
    page = Page((run_dir / "report.html").read_text(encoding="utf-8"))
    assert {"plot-loss-adaptive_kl", "plot-loss-sampled"} <= set(page.ids()) and "plot-loss" not in page.ids()
