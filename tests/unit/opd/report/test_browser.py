"""report.html in a real browser without a network: opened from disk, looked at, clicked on."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from opd.report import write_report
from tests.unit.opd.report.conftest import HOSTILE
from tests.unit.opd.report.test_agents import FAMILY, add_agents, episode, saw, segment, wrote

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine (Debian: apt-get install chromium)")

PLOTS = 17


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # The sandbox needs rights that a container does not give; the page is our own.
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """open_page(file, scheme, width): a page whose every complaint and request fails the test at its end."""
    heard: list[str] = []
    contexts = []

    def opened(file: Path, scheme: str = "light", width: int = 1280) -> Any:
        context = browser.new_context(offline=True, color_scheme=scheme, viewport={"width": width, "height": 900})
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: heard.append(f"console: {message.text}"))
        tab.on("pageerror", lambda error: heard.append(f"error: {error}"))
        tab.on("dialog", lambda dialog: heard.append(f"dialog: {dialog.message}"))
        tab.on("request", lambda request: request.url == file.as_uri() or heard.append(f"request: {request.url}"))
        tab.goto(file.as_uri())
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert heard == []


def share_drawn(png: bytes) -> float:
    """Share of pixels that differ from the most frequent colour."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    colours = image.getcolors(image.width * image.height)
    assert colours is not None
    return 1 - max(count for count, _ in colours) / (image.width * image.height)


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_every_plot_is_seen(whole_page: Path, open_page: Callable[..., Any], scheme: str, width: int) -> None:
    tab = open_page(whole_page, scheme, width)
    plots = tab.locator("figure svg")
    assert plots.count() == PLOTS
    for index in range(PLOTS):
        box = plots.nth(index).bounding_box()
        assert box["width"] > 250 and box["height"] > 90, (index, box)
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
        assert 0.01 < share_drawn(plots.nth(index).screenshot()) < 0.9, index
    assert tab.evaluate("document.documentElement.scrollWidth") <= width, "no sideways scrolling of the whole page"
    ground = Image.open(io.BytesIO(tab.screenshot())).convert("L").getpixel((2, 2))
    assert ground > 200 if scheme == "light" else ground < 60


def test_lines_are_told_from_the_ground_in_both_schemes(whole_page: Path, open_page: Callable[..., Any]) -> None:
    colours = {}
    for scheme in ("light", "dark"):
        tab = open_page(whole_page, scheme)
        line = tab.locator("#plot-loss [data-domain='0'] path").first
        colours[scheme] = line.evaluate("line => getComputedStyle(line).stroke")
    assert colours["light"] != colours["dark"]
    assert all(value.startswith("rgb(") for value in colours.values())


def test_a_click_on_a_heading_sorts(whole_page: Path, open_page: Callable[..., Any]) -> None:
    tab = open_page(whole_page)
    names = tab.locator("#domains table").first.locator("tbody td:first-child")
    assert names.all_text_contents() == ["letters", "sums", "known"]
    tab.locator("#domains th button", has_text="student before").first.click()
    assert names.all_text_contents() == ["letters", "sums", "known"], "0.2, 0.5, 0.9"
    tab.locator("#domains th button", has_text="student before").first.click()
    assert names.all_text_contents() == ["known", "sums", "letters"]
    tab.locator("#domains th button", has_text="against the student").first.click()
    assert names.all_text_contents() == ["known", "sums", "letters"], "-5, +50, +65 points"
    tab.locator("#domains th button", has_text="domain").first.click()
    assert names.all_text_contents() == ["known", "letters", "sums"]
    tab.locator("#baselines th button", has_text="tokens trained on").click()
    tokens = tab.locator("#baselines tbody tr td:nth-child(4)").all_text_contents()
    assert tokens == ["–", "96", "128"], "as numbers, not as text"


def test_a_domains_name_brings_out_its_line(whole_page: Path, open_page: Callable[..., Any]) -> None:
    tab = open_page(whole_page)
    tab.locator("[data-highlight='1']").click()
    tab.mouse.move(0, 0)
    faded = tab.evaluate("[...document.querySelectorAll('.faded')].map(line => line.dataset.domain)")
    assert set(faded) == {"0", "2"} and len(faded) == 12, "in six plots"
    tab.locator("[data-highlight='1']").click()
    tab.mouse.move(0, 0)
    assert tab.locator(".faded").count() == 0


def test_untrusted_text_does_nothing(spoil: Callable[[], Path], open_page: Callable[..., Any]) -> None:
    run_dir = spoil()
    write_report(run_dir)
    tab = open_page(run_dir / "report.html")
    assert "merge report" in tab.title() and "owned" not in tab.title()
    assert tab.locator("#samples .text", has_text="<script>document.title='owned'</script>").count() == 6


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_an_episode_is_read_turn_by_turn(scheme: str, width: int, run_dir: Path, open_page: Callable[..., Any]) -> None:
    write_report(add_agents(run_dir, FAMILY))
    tab = open_page(run_dir / "report.html", scheme, width)
    episodes = tab.locator("details.episode")
    assert episodes.count() == 2 and episodes.nth(0).get_attribute("open") is not None
    assert (
        tab.locator(".piece.policy").nth(0).is_visible() and not episodes.nth(1).locator(".piece").nth(0).is_visible()
    )
    episodes.nth(1).locator("summary").click()
    assert episodes.nth(1).locator(".piece", has_text="began").is_visible()
    low, high = (tab.locator(f".piece .loss{level}").first for level in (0, 5))
    colours = [token.evaluate("token => getComputedStyle(token).backgroundColor") for token in (low, high)]
    assert colours[0] != colours[1], "a token's loss is its colour"
    assert high.get_attribute("title") == "2.5"
    masked = tab.locator(".piece.masked .no-loss").first
    assert "dotted" in masked.evaluate("token => getComputedStyle(token).textDecorationStyle")
    boxes = [tab.locator(".piece.policy .text").nth(index).bounding_box() for index in range(3)]
    assert all(box["width"] > 100 and box["x"] + box["width"] <= width for box in boxes)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert share_drawn(tab.locator("#plot-agents-loss svg").screenshot()) > 0.01


def test_untrusted_episodes_do_nothing(run_dir: Path, open_page: Callable[..., Any]) -> None:
    hostile = HOSTILE.replace("\ud800", "")
    write_report(add_agents(run_dir, episode(segment(wrote(hostile), saw(hostile), prompt=hostile))))
    tab = open_page(run_dir / "report.html")
    assert "merge report" in tab.title() and "owned" not in tab.title()
    assert tab.locator("#traces .text", has_text="<script>document.title='owned'</script>").count() == 3
