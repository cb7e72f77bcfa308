"""Globs over paths, as rules write them and as the shell does."""

from __future__ import annotations

import pytest

from opd.guard.paths import PathGlobs
from opd.guard.shell.fields import TO_MARKS


@pytest.mark.parametrize(
    "glob, path, fits",
    [
        ("/vault/a,b", "/vault/a,b", True),
        ("/vault/a,b", "/vault/a", False),
        ("/vault/**,b", "/vault", False),
        ("/vault/{a,b,c{d,e}}", "/vault/b", True),
        ("/vault/{a,b,c{d,e}}", "/vault/ce", True),
        ("/{vault/**,b}", "/vault", True),
        ("/{vault/**,b}", "/b", True),
    ],
)
def test_a_comma_separates_alternatives_within_braces_only(glob: str, path: str, fits: bool) -> None:
    assert PathGlobs([glob]).matches_path(path, "/work") == fits


@pytest.mark.parametrize(
    "pattern, fits",
    [
        ("/vaul[!!]/key", True),
        ("/vaul[!^]/key", True),
        ("/vaul[^a]/key", True),
        ("/vaul[!s-u]/key", False),
        ("/vaul[s-u]/key", True),
        ("/vaul[!t]/key", False),
    ],
)
def test_only_the_first_mark_negates_a_set_of_the_shell(pattern: str, fits: bool) -> None:
    globs = PathGlobs(["/vault/key"], ["/vault/key"])
    assert globs.matches_path(pattern.translate(TO_MARKS), "/work") == fits
