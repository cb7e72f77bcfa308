"""Nothing that others wrote reaches a terminal as a command to it."""

from __future__ import annotations

import pickle
import sys
import unicodedata

import pytest

from opd.errors import ConfigError
from opd.text import find_control_character, escape_control_characters, to_one_line, strip_control_characters


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, é 日本 ∑ 🙂", "plain, é 日本 ∑ 🙂"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("over\rwritten\x08\x7f\x00", "over\\rwritten\\x08\\x7f\\x00"),
        ("\x9b31m", "\\x9b31m"),  # the same as ESC [ in eight bits
        ("a\u202eb\u2066c\u200bd\u2028e", "a\\u202eb\\u2066c\\u200bd\\u2028e"),
        ("\ud800", "\\ud800"),
    ],
)
def test_signs_that_a_terminal_would_obey_are_spelt_out(text: str, shown: str) -> None:
    assert escape_control_characters(text) == shown
    assert escape_control_characters(shown) == shown
    shown.encode()


def test_one_line() -> None:
    assert to_one_line(" a\n\n b\x1b\tc ", 100) == "a b\\x1b c"
    assert to_one_line("abcdef", 3) == "abc"


def test_what_was_found_cannot_speak_for_us() -> None:
    error = ConfigError.at("p.yaml\n  fix: x", found="a\x1b[1m\n  fix:    run this", wanted="b", fix="c")
    assert str(error).splitlines() == [
        "p.yaml\\n  fix: x",
        "  found:  a\\x1b[1m",
        "            fix:    run this",
        "  wanted: b",
        "  fix:    c",
    ]
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_policy_reads_no_control_character_but_line_ends_and_tabs() -> None:
    for character in map(chr, range(sys.maxunicode + 1)):
        odd = unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\t\r"
        assert (find_control_character(f"a{character}") is not None) == odd
        assert strip_control_characters(f"a{character}b") == ("ab" if odd else f"a{character}b")
