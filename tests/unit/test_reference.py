"""The generated reference: a table in Markdown has a row a line, whatever a description's line breaks are."""

from __future__ import annotations

from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_a_row_of_a_table_ends_where_it_began(page: Path) -> None:
    broken = [line for line in page.read_text().splitlines() if line.startswith("| `") and not line.endswith("|")]
    assert broken == []
