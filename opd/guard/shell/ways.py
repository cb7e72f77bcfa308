"""The states that a shell may be in: nobody knows before a script runs which of its commands succeed.

`cd /; grep -q x notes && cd /workspace; cat tests/x` reads one of two files. So what comes behind a command that may be left out
is gone through once for each state. States that are the same count once, and of many a few are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from opd.guard.session import FILES, Session

T = TypeVar("T")

MAX_WAYS = 4
"""States that are kept. Of more than that, those in other directories come first, because most paths are relative."""

Output = str | None
"""What commands print; None if it is not known."""


@dataclass(frozen=True, slots=True)
class Step:
    """One pipeline of a list."""

    when: str
    """`&&` or `||` in front of it, or nothing: it always runs."""
    act: Callable[[], tuple[bool | None, Output]]
    """Goes through it; whether it succeeds, and what it prints, None for either if that is not known."""


def in_each(session: Session, ways: Sequence[Session], act: Callable[[], object]) -> list[Session]:
    """Do this in each of these states; the states afterwards, one of which has to be settled in."""
    after: list[Session] = []
    for way in ways:
        enter(session, way)
        act()
        after += states(session)
    return distinct(after)


def enter(session: Session, way: Session) -> None:
    """Let the session be in this state alone."""
    session.become(way.copy())
    session.others = []


def every(session: Session, act: Callable[[], object]) -> None:
    """Do this in every state that the session may be in."""
    if session.others:
        settle(session, in_each(session, states(session), act))
    else:
        act()


def states(session: Session) -> list[Session]:
    """All states that a session may be in, as sessions of their own."""
    here = session.copy()
    others, here.others = here.others, []
    return [here, *others]


def settle(session: Session, ways: Iterable[Session]) -> None:
    """Let the session be in one of these states."""
    first, *others = distinct(ways)
    session.become(first)
    session.others = others


def distinct(ways: Iterable[Session]) -> list[Session]:
    """The states without repetitions, at most `MAX_WAYS`."""
    kept: list[Session] = []
    for way in ways:
        if not any(way.same(one) for one in kept):
            kept.append(way)
    if len(kept) > MAX_WAYS:
        seen: set[str] = set()
        elsewhere = [way for way in kept if way.cwd not in seen and not seen.add(way.cwd)]  # type: ignore[func-returns-value]
        kept = [*elsewhere, *(way for way in kept if way not in elsewhere)][:MAX_WAYS]
    return kept


def apart(session: Session, act: Callable[[], T]) -> T:
    """Do this in a subshell: afterwards the shell is where it was, and only files have changed."""
    kept, used = session.copy(), session.read_variables
    try:
        return act()
    finally:
        for name in FILES:
            setattr(kept, name, getattr(session, name))
        kept.read_variables = [*used, *session.read_variables]
        session.become(kept)


def in_turn(session: Session, steps: Sequence[Step]) -> Output:
    """Go through a list such as `a && b || c`, each step in the states in which it may run; what it prints."""
    if len(steps) == 1 and not session.others:
        return steps[0].act()[1]
    printed: list[Output] = []
    good = bad = states(session)
    for step in steps:
        runs = {"&&": good or bad, "||": bad or good}.get(step.when, good)
        worked, failed, said = _step(session, runs, step)
        printed += said
        if step.when == "||":
            good, bad = distinct([*good, *worked]), failed
        else:
            good, bad = worked, distinct([*bad, *failed]) if step.when else failed
    settle(session, [*good, *bad])
    return joined(printed)


def _step(session: Session, runs: Sequence[Session], step: Step) -> tuple[list[Session], list[Session], list[Output]]:
    """The states in which a step may have succeeded, those in which it may have failed, and what it printed."""
    worked: list[Session] = []
    failed: list[Session] = []
    printed: list[Output] = []
    for way in runs:
        enter(session, way)
        success, said = step.act()
        after = states(session)
        worked += [] if success is False else after
        failed += [] if success else after
        printed += [] if said in printed else [said]
    return distinct(worked), distinct(failed), printed


def joined(printed: Sequence[Output]) -> Output:
    """What several commands print together."""
    texts = [text for text in printed if text is not None]
    return "".join(texts) if len(texts) == len(printed) else None
