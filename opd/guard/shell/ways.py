"""The states that a shell may be in: nobody knows before a script runs which of its commands succeed.

`cd /; grep -q x notes && cd /workspace; cat tests/x` reads one of two files. So what comes behind a command that may be left out
is gone through once for each state. States that are alike count once, and of many a few are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from opd.guard.session import FILE_FIELDS, GuardSession

T = TypeVar("T")
MAX_STATES = 4
"""States that are kept. Of more, those are chosen that differ most from each other."""

Output = str | None
"""Output of commands; None if it is not known."""


@dataclass(frozen=True, slots=True)
class StateStep:
    """One pipeline of a list."""

    when: str
    """`&&` or `||` in front of it, or nothing: it always runs."""
    act: Callable[[], tuple[bool | None, Output]]
    """Goes through it; whether it succeeds, and what it prints, None for either if that is not known."""


def run_in_each_state(
    session: GuardSession, ways: Sequence[GuardSession], act: Callable[[], object]
) -> list[GuardSession]:
    """Run `act` in each of these states, and return the states afterwards. The caller settles the session in them."""
    after: list[GuardSession] = []
    for way in ways:
        enter_state(session, way)
        act()
        after += list_states(session)
    return distinct_states(after)


def run_in_every_state(session: GuardSession, act: Callable[[], object]) -> None:
    """Run `act` in every state that the session may be in. If it raises, the states that are left stay as they are."""
    if not session.other_states:
        act()
        return
    after, waiting = list[GuardSession](), list_states(session)
    try:
        while waiting:
            enter_state(session, waiting.pop(0))
            try:
                act()
            finally:
                after += list_states(session)
    finally:
        settle_states(session, [*after, *waiting])


def enter_state(session: GuardSession, way: GuardSession) -> None:
    """Let the session be in this state alone."""
    session.take_over(way.copy())
    session.other_states = []


def list_states(session: GuardSession) -> list[GuardSession]:
    """Return all states that a session may be in, as sessions of their own."""
    current = session.copy()
    alternatives, current.other_states = current.other_states, []
    return [current, *alternatives]


def settle_states(session: GuardSession, ways: Iterable[GuardSession]) -> None:
    """Let the session be in one of these states."""
    current, *alternatives = distinct_states(ways)
    session.take_over(current)
    session.other_states = alternatives


def distinct_states(ways: Iterable[GuardSession]) -> list[GuardSession]:
    """Return one state for each group of similar ones, `MAX_STATES` at most."""
    distinct: list[GuardSession] = []
    for way in ways:
        twin = next((state for state in distinct if state.is_similar(way)), None)
        if twin is None:
            distinct.append(way)
        else:
            twin.take_files(way)
        if len(distinct) > 2 * MAX_STATES:
            distinct = _choose_most_different(distinct)
    return distinct if len(distinct) <= MAX_STATES else _choose_most_different(distinct)


def _choose_most_different(ways: Sequence[GuardSession]) -> list[GuardSession]:
    """Return `MAX_STATES` states: the first, and then each time the one with most that the chosen ones do not have."""
    entries = [way.state_entries() for way in ways]
    indices, covered = [0], set(entries[0])
    while len(indices) < MAX_STATES:
        candidates = [index for index in range(len(ways)) if index not in indices]
        best = max(candidates, key=lambda index: sum(map(_entry_weight, entries[index] - covered)))
        indices.append(best)
        covered |= entries[best]
    return [ways[index] for index in indices]


def _entry_weight(entry: tuple[str, ...]) -> int:
    """Return the weight of an entry of a state. A path weighs more than a number: it is what the rules are about."""
    return 8 if any("/" in part for part in entry[1:]) else 1


def run_in_subprocess(session: GuardSession, act: Callable[[], T]) -> T:
    """Run `act` as a process of its own: afterwards the shell is as it was, and only files have changed."""
    snapshot, used = session.copy(), session.read_variables
    try:
        return act()
    finally:
        used = [*used, *session.read_variables]
        _take_over_files(session, snapshot)
        session.read_variables = used


def _take_over_files(session: GuardSession, snapshot: GuardSession) -> None:
    """Take over the files of each state that the session may be in, and all else from `snapshot`."""
    snapshot.other_states = []
    ways: list[GuardSession] = []
    for state in list_states(session) if session.other_states else [session]:
        way = snapshot.copy() if ways else snapshot
        for name in FILE_FIELDS:
            setattr(way, name, getattr(state, name))
        ways.append(way)
    settle_states(session, ways)


def run_list(session: GuardSession, steps: Sequence[StateStep]) -> Output:
    """Go through a list such as `a && b || c`, each step in the states in which it may run. Return what it prints."""
    if len(steps) == 1 and not session.other_states:
        return steps[0].act()[1]
    printed: list[Output] = []
    good = bad = list_states(session)
    for step in steps:
        # Where no state fits, the step is gone through in the others: no command may be missed.
        runs = {"&&": good or bad, "||": bad or good}.get(step.when, good)
        worked, failed, output = _walk_step(session, runs, step)
        printed.append(output)
        if step.when == "||":
            good, bad = distinct_states([*good, *worked]), failed
        else:
            good, bad = worked, distinct_states([*bad, *failed]) if step.when else failed
    settle_states(session, [*good, *bad])
    return join_outputs(printed)


def _walk_step(
    session: GuardSession, runs: Sequence[GuardSession], step: StateStep
) -> tuple[list[GuardSession], list[GuardSession], Output]:
    """Return the states in which a step may have succeeded, those in which it may have failed, and what it may have printed."""
    worked: list[GuardSession] = []
    failed: list[GuardSession] = []
    printed: list[Output] = []
    for way in runs:
        enter_state(session, way)
        success, output = step.act()
        after = list_states(session)
        worked += [] if success is False else after
        failed += [] if success else after
        printed += [] if output in printed else [output]
    return distinct_states(worked), distinct_states(failed), join_outputs(printed, "\n")


def join_outputs(printed: Sequence[Output], by: str = "") -> Output:
    """Join the outputs of several commands, or, with a line end, what one of them prints."""
    texts = [text for text in printed if text is not None]
    return by.join(texts) if len(texts) == len(printed) else None
