"""Pages are written for a code host; on the site their links lead to its pages, and nothing is loaded from elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.commands_page import command_reference
from docs.site_hooks import INSIDE, LOADED, links_of_site, on_page_content

ROOT = Path(__file__).parents[3]


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose own tags say nothing about its pages."""


Loader.add_multi_constructor("", lambda loader, suffix, node: None)


def pages_of(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for one in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        yield from pages_of(one)


def test_every_page_has_one_place_in_the_navigation() -> None:
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
    written = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    assert sorted(pages_of(config["nav"])) == sorted(written | set(INSIDE)), (
        "give a new page a line under `nav` in mkdocs.yml"
    )


@pytest.mark.parametrize(
    ("page", "written", "on_the_site"),
    [
        ("check.md", "[a](gpu.md#memory)", "[a](gpu.md#memory)"),
        ("check.md", "[a](#the-probe)", "[a](#the-probe)"),
        ("check.md", "[a](https://arrow.apache.org/)", "[a](https://arrow.apache.org/)"),
        ("check.md", "[a](../benchmarks/README.md#losspy)", "[a](benchmarks.md#losspy)"),
        ("results/quickstart.md", "[a](../objectives.md)", "[a](../objectives.md)"),
        ("results/quickstart.md", "[a](../../README.md#results)", "[a](../index.md#results)"),
        ("index.md", "[a](docs/results/quickstart.md)", "[a](results/quickstart.md)"),
        ("index.md", "![a](docs/pictures/method.svg)", "![a](pictures/method.svg)"),
        ("benchmarks.md", "[a](../docs/gpu.md)", "[a](gpu.md)"),
        ("check.md", "[the loop](../opd/loop.py)", "the loop (`opd/loop.py`)"),
        ("index.md", "[opd/loop.py](opd/loop.py)", "opd/loop.py"),
        ("index.md", "```\n[a](docs/gpu.md)\n```\n", "```\n[a](docs/gpu.md)\n```\n"),
    ],
)
def test_links(page: str, written: str, on_the_site: str) -> None:
    assert links_of_site(written, page, "") == on_the_site


def test_source_files_are_linked_where_a_code_host_is_known() -> None:
    found = links_of_site("[loop](../opd/loop.py)", "check.md", "https://example.org/opd/")
    assert found == "[loop](https://example.org/opd/blob/main/opd/loop.py)"


def test_a_source_file_that_is_not_there_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        links_of_site("[a](../opd/gone.py)", "check.md", "")
    assert "docs/check.md links to ../opd/gone.py" in caplog.text


def test_a_bar_in_a_cell_loses_its_backslash() -> None:
    html = "<td><code>RUN_DIR\\|PIPELINE</code></td><p>a \\| b</p>"
    found = on_page_content(html, page=None, config=None, files=None)  # type: ignore[arg-type]
    assert found == "<td><code>RUN_DIR|PIPELINE</code></td><p>a \\| b</p>"


@pytest.mark.parametrize(
    ("html", "loads"),
    [
        ('<script src="https://unpkg.com/mermaid"></script>', True),
        ('<link rel="stylesheet" href="//fonts.example/x.css">', True),
        ('<img alt="a" src="http://example.org/a.png">', True),
        ('<a href="https://example.org">a</a>', False),
        ('<link rel="next" href="https://example.org/b.html">', False),
        ('<script src="assets/bundle.js"></script>', False),
    ],
)
def test_what_a_browser_would_load_from_elsewhere(html: str, loads: bool) -> None:
    assert bool(LOADED.search(html)) is loads


def test_the_command_reference_has_names_types_and_defaults() -> None:
    text = command_reference()
    section = text[text.index("## `opd check`") :].partition("\n## ")[0]
    assert "    opd check PIPELINE [OPTIONS]" in section
    assert "| `--samples N` | Held-out prompts per domain. Default: `32`. |" in section
    assert "| `--fix-up` |" in section and "`--set KEY" not in section, "the head of the page explains --set"
    assert "\n### `opd experts add`" in text
    assert "opd experts add NAME --model PATH --domain TEXT [OPTIONS]" in text
    assert "[`opd experts train`](#opd-experts-train)" in text
