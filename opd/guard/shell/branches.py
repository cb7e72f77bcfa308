"""The states that a shell may be in, since nobody knows before a script runs which of its commands succeed.

In `cd /; grep -q x notes && cd /workspace; cat tests/x` the last command reads one of two files, for the second `cd` runs only if
`grep` succeeds. So the walker goes through the last command twice, once for each state that the shell may be in by then. Of states
that are alike one is kept, and never more than `MAX_STATES`.

The session that a walker works on is one of these states, and its `other_states` are the rest. To go through a command in all of
them, a function here lists them (`list_states`), lets the session be one of them at a time (`enter_state`), and in the end puts what
came of them back into the session (`settle_states`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from opd.guard.session import FILE_FIELDS, GuardSession

T = TypeVar("T")
MAX_STATES = 4
"""The most states that are kept. If there are more, those are kept that differ most from each other."""

Output = str | None
"""Text that commands print; None if that is not known."""


@dataclass(frozen=True, slots=True)
class StateStep:
    """One pipeline of a list such as `a && b || c`."""

    when: str
    """The operator in front of it, `&&` or `||`; empty if it runs whatever happened before."""
    act: Callable[[], tuple[bool | None, Output]]
    """Goes through the pipeline. Returns whether it succeeds, None if nobody knows, and what it prints."""


def run_in_each_state(
    session: GuardSession, states: Sequence[GuardSession], act: Callable[[], object]
) -> list[GuardSession]:
    """Run `act` once in each of these states. Return the states that the session may be in afterwards, which the caller then hands to
    `settle_states`."""
    after: list[GuardSession] = []
    for state in states:
        enter_state(session, state)
        act()
        after += list_states(session)
    return distinct_states(after)


def run_in_every_state(session: GuardSession, act: Callable[[], object]) -> None:
    """Run `act` once in every state that the session may be in, and settle the session. If `act` raises, the states that it was not
    run in stay as they were."""
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


def enter_state(session: GuardSession, state: GuardSession) -> None:
    """Let the session be in a copy of this state, and in no other."""
    session.take_over(state.copy())
    session.other_states = []


def list_states(session: GuardSession) -> list[GuardSession]:
    """Return copies of all states that a session may be in, each without `other_states`."""
    current = session.copy()
    alternatives, current.other_states = current.other_states, []
    return [current, *alternatives]


def settle_states(session: GuardSession, states: Iterable[GuardSession]) -> None:
    """Let the session be in one of these states: the first becomes its own, the rest its `other_states`."""
    current, *alternatives = distinct_states(states)
    session.take_over(current)
    session.other_states = alternatives


def distinct_states(states: Iterable[GuardSession]) -> list[GuardSession]:
    """Return one state for each group of similar ones (`GuardSession.is_similar`), at most `MAX_STATES`."""
    distinct: list[GuardSession] = []
    for state in states:
        similar = next((other for other in distinct if other.is_similar(state)), None)
        if similar is None:
            distinct.append(state)
        else:
            similar.take_files(state)
        if len(distinct) > 2 * MAX_STATES:  # now and then, since each new one is compared with all of them
            distinct = _choose_most_different(distinct)
    return distinct if len(distinct) <= MAX_STATES else _choose_most_different(distinct)


def _choose_most_different(states: Sequence[GuardSession]) -> list[GuardSession]:
    """Return `MAX_STATES` of the states. The first is always among them. Each further one is the one with the largest weight of
    entries that the chosen ones do not have."""
    entries = [state.state_entries() for state in states]
    indices, covered = [0], set(entries[0])
    while len(indices) < MAX_STATES:
        candidates = [index for index in range(len(states)) if index not in indices]
        best = max(candidates, key=lambda index: sum(map(_entry_weight, entries[index] - covered)))
        indices.append(best)
        covered |= entries[best]
    return [states[index] for index in indices]


def _entry_weight(entry: tuple[str, ...]) -> int:
    """Return how much it counts that two states differ in this entry of `GuardSession.state_entries`. An entry with a path counts
    eight times as much as another one, because the rules are about paths."""
    return 8 if any("/" in part for part in entry[1:]) else 1


def run_in_subprocess(session: GuardSession, act: Callable[[], T]) -> T:
    """Run `act` as a process of its own would run: afterwards the shell is as it was before, and only changes to files remain. The
    variables that `act` read are noted too, and the result of `act` is returned."""
    snapshot, used = session.copy(), session.read_variables
    try:
        return act()
    finally:
        used = [*used, *session.read_variables]
        _take_over_files(session, snapshot)
        session.read_variables = used


def _take_over_files(session: GuardSession, snapshot: GuardSession) -> None:
    """Set the session back to `snapshot`, but for its files: of these it keeps what each of its present states says."""
    snapshot.other_states = []
    states: list[GuardSession] = []
    for present in list_states(session) if session.other_states else [session]:
        state = snapshot.copy() if states else snapshot  # the first one needs no copy
        for name in FILE_FIELDS:
            setattr(state, name, getattr(present, name))
        states.append(state)
    settle_states(session, states)


def run_list(session: GuardSession, steps: Sequence[StateStep]) -> Output:
    """Go through a list such as `a && b || c`, each step in the states in which it may run. Return what the list prints.

    `good` are the states in which the list may have succeeded so far, `bad` those in which it may have failed.
    """
    if len(steps) == 1 and not session.other_states:  # most lists; without copies of the session
        return steps[0].act()[1]
    printed: list[Output] = []
    good = bad = list_states(session)
    for step in steps:
        # `&&` runs the step if all before it succeeded. If there is no such state, we go through it in the states of a failure all the
        # same, so that no command of a script is missed.
        runs = {"&&": good or bad, "||": bad or good}.get(step.when, good)
        worked, failed, output = _walk_step(session, runs, step)
        printed.append(output)
        if step.when == "||":  # where the list had succeeded, the step is left out, and the list still succeeds
            good, bad = distinct_states([*good, *worked]), failed
        else:
            good, bad = worked, distinct_states([*bad, *failed]) if step.when else failed
    settle_states(session, [*good, *bad])
    return join_outputs(printed)


def _walk_step(
    session: GuardSession, runs: Sequence[GuardSession], step: StateStep
) -> tuple[list[GuardSession], list[GuardSession], Output]:
    """Go through a step in each of the states `runs`. Return the states after a success, those after a failure, and what the step
    prints. If nobody knows whether it succeeds, its states are among both."""
    worked: list[GuardSession] = []
    failed: list[GuardSession] = []
    printed: list[Output] = []
    for state in runs:
        enter_state(session, state)
        success, output = step.act()
        after = list_states(session)
        worked += [] if success is False else after
        failed += [] if success else after
        printed += [] if output in printed else [output]
    return distinct_states(worked), distinct_states(failed), join_outputs(printed, "\n")


def join_outputs(printed: Sequence[Output], by: str = "") -> Output:
    """Return the outputs joined by `by`; None if one of them is not known. Outputs of commands that run one after the other are joined
    by nothing, those of which only one is printed by a line end, so that each begins a line."""
    texts = [text for text in printed if text is not None]
    return by.join(texts) if len(texts) == len(printed) else None
