"""A terminal that remembers what is on it: as much of one as rich's live displays and plain text need."""

from __future__ import annotations

import re

from rich.cells import cell_len

_SEQUENCE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])")


class Terminal:
    """Lines that scroll away are kept above those on the screen. Text that goes beyond the width wraps, and is counted."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.lines: list[str] = [""]
        """All lines, those that scrolled away first."""
        self.styles: set[str] = set()
        """Every number that set a colour or a style."""
        self.wrapped = 0
        self.cursor_shown = True
        self._row = self._column = 0

    @property
    def screen(self) -> list[str]:
        """Return the last lines: what is seen."""
        return [line.rstrip() for line in self.lines[-self.height :]]

    @property
    def above(self) -> list[str]:
        return [line.rstrip() for line in self.lines[: -self.height]]

    def feed(self, text: str) -> None:
        """Show what a program wrote."""
        place = 0
        while place < len(text):
            sequence = _SEQUENCE.match(text, place)
            if sequence:
                self._obey(sequence[1], sequence[2])
                place = sequence.end()
                continue
            self._put(text[place])
            place += 1

    def _put(self, character: str) -> None:
        assert character != "\x1b", "a sequence that this terminal does not know"
        if character == "\n":
            self._row += 1
            if self._row == len(self.lines):
                self.lines.append("")
        elif character == "\r":
            self._column = 0
        else:
            if self._column + cell_len(character) > self.width:
                self.wrapped += 1
                self._column = 0
                self._put("\n")
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
            self._column += 1

    def _obey(self, given: str, letter: str) -> None:
        if letter == "m":
            self.styles.update(given.split(";"))
        elif letter == "A":
            up = self._row - int(given or 1)
            assert up >= len(self.lines) - self.height, "the cursor cannot go above the screen"
            self._row = up
        elif letter == "K":
            kept = "" if given == "2" else self.lines[self._row][: self._column]
            self.lines[self._row] = kept
        elif given == "?25":
            self.cursor_shown = letter == "h"
        else:
            raise AssertionError(f"a sequence that this terminal does not know: {given}{letter}")
