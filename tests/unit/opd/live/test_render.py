"""The renderer: what a view looks like at the usual sizes, and that it fits every other."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from textwrap import indent

import pytest
from rich.cells import cell_len

from opd.live.render import ScreenSize, render_view
from opd.live.shapes import STYLES, format_duration, render_curve, shorten_middle
from opd.live.view import View
from tests.unit.opd.live.made import SIZES, SNAPSHOTS, VIEWS, running, text_of
from tests.unit.sources import ROOT

HOSTILE = "\x1b]0;mine\x07[red]宽字符名字\u202e\nnext: rm -rf /"


def hostile() -> View:
    """A view in which every text and number is as bad as a file may have it."""
    domains = [
        replace(domain, name=HOSTILE + domain.name, loss=nan, headroom=nan, now=-inf) for domain in running().domains
    ]
    return replace(
        running(),
        name=HOSTILE * 9,
        root=HOSTILE * 9,
        doing=HOSTILE,
        why=HOSTILE,
        notes=(HOSTILE * 9,) * 20,
        hints=(HOSTILE * 9,),
        phases=((HOSTILE, 1e9),) * 9,
        losses=(nan, inf, 1.0),
        domains=tuple(domains),
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", VIEWS)
def test_how_it_looks(kind: str, size: str) -> None:
    """`python -m tests.unit.opd.live.made` writes the snapshots again."""
    assert text_of(VIEWS[kind], *SIZES[size]) == (SNAPSHOTS / f"{kind}-{size}.txt").read_text(encoding="utf-8")


def test_the_page_about_it_shows_the_same() -> None:
    page = (ROOT / "docs" / "watching.md").read_text(encoding="utf-8")
    assert indent((SNAPSHOTS / "running-80x24.txt").read_text(encoding="utf-8"), "    ") in page


@pytest.mark.parametrize("view", [*VIEWS.values(), hostile()], ids=[*VIEWS, "hostile"])
def test_it_fits_every_size(view: View) -> None:
    for width in (1, 2, 7, 13, 20, 39, 40, 80, 81, 133, 250):
        for height in (0, 1, 2, 3, 5, 8, 13, 23, 24, 49, 90):
            lines = render_view(view, ScreenSize(width=width, height=height))
            assert len(lines) <= height
            for line in lines:
                assert line.cell_len <= width and line.plain.isprintable(), (width, height, line.plain)


def test_at_the_usual_size_nothing_that_matters_is_missing() -> None:
    text = text_of(VIEWS["long-names"], 80, 23)
    for name in VIEWS["long-names"].domains:
        assert shorten_middle(name.name, 23) in text
    assert all(
        word in text for word in ("step 122 of 300", "left", "headroom", "rollout 0.9", "tokens/s", "memory", "warning")
    )


def test_colours_are_those_that_read_well_on_light_and_dark() -> None:
    used = {
        part
        for view in (*VIEWS.values(), hostile())
        for line in render_view(view, ScreenSize(width=160, height=49))
        for style in [str(line.style), *(str(span.style) for span in line.spans)]
        for part in style.split()
    }
    assert used <= set(STYLES) and len(used) == len(STYLES)


def test_a_terminal_without_unicode_gets_none() -> None:
    text = "\n".join(line.plain for line in render_view(running(), ScreenSize(width=80, height=23, unicode=False)))
    assert text.isascii() and "####" in text


def test_where_not_all_domains_fit_those_with_the_largest_loss_do() -> None:
    text = text_of(running(), 80, 14)
    assert "summaries" in text and "math " not in text and "domains with a smaller loss" in text


@pytest.mark.parametrize(
    ("text", "width", "found"),
    [
        ("short", 5, "short"),
        ("an-expert-of-math", 10, "an-exp…ath"),
        ("宽字符名字", 6, "宽字 …"),
        ("ab", 1, "…"),
        ("ab", 0, ""),
    ],
)
def test_a_name_loses_its_middle(text: str, width: int, found: str) -> None:
    assert shorten_middle(text, width) == found and cell_len(found) <= width


def test_durations_and_curves() -> None:
    assert [format_duration(s) for s in (0.4, 59, 61, 3600, 7265, 90000)] == [
        "0 s", "59 s", "1 min 01 s", "1 h 00 min", "2 h 01 min", "1 d 01 h",
    ]  # fmt: skip
    assert (
        render_curve([8.0, 7, 6, 5, 4, 3, 2, 1], 4) == "█▆▃▁"
        and render_curve([1.0, 1], 9) == "▁▁"
        and render_curve([], 9) == ""
    )


def test_memory_is_shown_as_far_as_it_fits() -> None:
    """With four digits of tokens a second all of it is a little too wide for 80 cells."""
    view = replace(
        running(), tokens_per_s=1014.0, memory=(("driver", 700 << 20), ("workers", 2 << 30), ("Ray", 1000 << 20))
    )
    wide = "1,014 tokens/s · gap 1.5e-06 · memory driver 700 MiB, workers 2.0 GiB, Ray 1000 MiB"
    for width, shown in ((100, wide), (80, wide.removesuffix(", Ray 1000 MiB")), (40, wide.partition(" · memory")[0])):
        assert shown in text_of(view, width, 30).splitlines()


def test_the_reason_of_a_failure_is_there_to_its_end() -> None:
    why = (
        "step 1: engine and trainer differ by 0.3100 nats a sampled token, sync.tolerance is 0.02, most in domain math"
    )
    lines = text_of(replace(VIEWS["failed"], why=why), 80, 23).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("step 1:"))
    assert " ".join(lines[at : at + 2]) == why
