"""Numbers that tell like turns of an episode apart, so that each is sampled with a seed of its own."""

from __future__ import annotations

from collections import Counter


class Draws:
    """The turns of one session, counted by their number in a conversation: parallel conversations have the same numbers.

    A request that comes again, because its client did not wait for the turn, gets the draw that it had, and so the same seed. No
    other request gets that draw: two equal requests with one seed would be sampled alike.
    """

    def __init__(self) -> None:
        self._drawn: Counter[int] = Counter()
        """Number of a turn -> turns that were asked for."""
        self._lost: dict[tuple[int, str], list[int]] = {}
        """Number of a turn and identity of its request -> draws that nobody waited for."""

    def draw_for_turn(self, number: int, identity: str) -> int:
        """Return the number of a turn's draw, from 1 on."""
        lost = self._lost.get((number, identity))
        if lost:
            return lost.pop(0)
        self._drawn[number] += 1
        return self._drawn[number]

    def give_up_draw(self, number: int, identity: str, draw: int) -> None:
        """Put back the draw of a turn that nobody waits for any more: the same request gets it if it comes again."""
        self._lost.setdefault((number, identity), []).append(draw)
