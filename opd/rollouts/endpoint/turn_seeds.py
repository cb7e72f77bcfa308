"""Numbers that tell apart the turns of an episode that have the same number, so that each is sampled with a seed of its own."""

from __future__ import annotations

from collections import Counter


class Draws:
    """The draws of one session. In parallel conversations turns have the same numbers, so the turns of each number are counted.

    A client may give up a request before its turn is there and send it again: then the request gets the draw that it had, and so the
    same seed. No other request gets that draw, since two equal requests with one seed would be sampled alike.
    """

    def __init__(self) -> None:
        self._drawn: Counter[int] = Counter()
        """Number of a turn -> how many turns of that number were asked for."""
        self._lost: dict[tuple[int, str], list[int]] = {}
        """Number of a turn and identity of its request -> draws of turns that nobody waited for."""

    def draw_for_turn(self, number: int, identity: str) -> int:
        """Return the number of a turn's draw, from 1 on."""
        draws = self._lost.get((number, identity))
        if draws:
            return draws.pop(0)
        self._drawn[number] += 1
        return self._drawn[number]

    def give_up_draw(self, number: int, identity: str, draw: int) -> None:
        """Put back the draw of a turn that nobody waits for any more: the same request gets it if it comes again."""
        self._lost.setdefault((number, identity), []).append(draw)
