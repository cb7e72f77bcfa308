"""Compound commands: in which states of the shell each body runs, and in which it is left afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from opd.guard.facts import Streams
from opd.guard.session import GuardSession
from opd.guard.shell.branches import (
    Output,
    distinct_states,
    join_outputs,
    list_states,
    run_in_each_state,
    run_in_subprocess,
    settle_states,
)
from opd.guard.shell.fields import UNKNOWN, is_fully_known
from opd.guard.shell.nodes import CompoundCommand, For, Literal, Script, Simple

Walk = Callable[[Script, Streams], Output]
"""Goes through a script with these streams. Returns what the script prints."""
MAX_ROUNDS = 16
"""The most rounds of a loop: words of a `for`, or lines that a `while read` reads, for which its body is gone through."""
FIRST_LINES = 3
"""The first lines of a `while read`, which count whatever stands in them; later ones count only if they may be paths."""


def walk_group(session: GuardSession, node: CompoundCommand, streams: Streams, walk: Walk) -> Output:
    """Go through a compound command, and settle the session in the states that it may end in. Return what the command prints. The
    outputs of branches, of which only one is printed, are joined by line ends. What a loop prints counts as not known."""
    if node.kind == "subshell":
        return run_in_subprocess(session, partial(walk, node.bodies[0], streams))
    if node.kind == "braces":
        return join_outputs([walk(body, streams) for body in node.bodies])
    printed: list[Output] = []

    def run(body: Script) -> None:
        printed.append(walk(body, streams))

    bodies = [partial(run, body) for body in node.bodies]
    if node.kind == "if":
        settle_states(session, _walk_if(session, bodies))
    elif node.kind == "case":
        settle_states(session, _walk_case(session, bodies))
    elif lines := _lines_of_while_read(node, streams):
        walk_lines = partial(_walk_lines, walk, node.bodies, streams, lines)
        settle_states(session, run_in_each_state(session, list_states(session), walk_lines))
    else:
        settle_states(session, _walk_loop(session, *bodies))
    return join_outputs(list(dict.fromkeys(printed)), "\n") if node.kind != "loop" else None


def _walk_if(session: GuardSession, bodies: Sequence[Callable[[], object]]) -> list[GuardSession]:
    """Go through the branches of an `if`, each after its own test and the tests before it. Return the states after any of them.

    `bodies` are test, branch, test, branch, and so on. If their number is odd, the last one is the `else`.
    """
    states, ended = list_states(session), list[GuardSession]()
    for index in range(0, len(bodies) - 1, 2):
        states = run_in_each_state(session, states, bodies[index])
        ended += run_in_each_state(session, states, bodies[index + 1])
    return [*ended, *(run_in_each_state(session, states, bodies[-1]) if len(bodies) % 2 else states)]


def _walk_case(session: GuardSession, bodies: Sequence[Callable[[], object]]) -> list[GuardSession]:
    """Go through the branches of a `case`, each from the state after the subject, for only one of them runs. Return the states after
    any of them. The first body is the subject."""
    states = run_in_each_state(session, list_states(session), bodies[0])
    return [state for body in bodies[1:] for state in run_in_each_state(session, states, body)] or states


def _walk_loop(session: GuardSession, test: Callable[[], object], body: Callable[[], object]) -> list[GuardSession]:
    """Go through a loop: test, body, test, body, test. Return the states after each test, for the loop may end there. Two rounds are
    enough to see what one round does to the next."""
    tested = left = run_in_each_state(session, list_states(session), test)
    for _ in range(2):
        after = run_in_each_state(session, tested, body)
        if all(any(known.is_similar(state) for known in left) for state in after):
            break  # one more round would show nothing new
        tested = run_in_each_state(session, after, test)
        left = distinct_states([*left, *tested])
    return left


def _lines_of_while_read(node: CompoundCommand, streams: Streams) -> list[str]:
    """Return the lines that a `while read ...` gets: the first few, and of the others those that may be paths. Return none if the loop
    does not begin with `read`, or if its standard input is not known."""
    test = node.bodies[0]
    command = test[0].pipelines[0].commands[0] if test else None
    if not isinstance(command, Simple) or not command.words or command.words[0] != (Literal("read"),):
        return []
    if streams.stdin is None or not is_fully_known(streams.stdin):
        return []
    lines = streams.stdin.removesuffix("\n").split("\n")
    return [line for n, line in enumerate(lines) if n < FIRST_LINES or "/" in line or "." in line][:MAX_ROUNDS]


def _walk_lines(walk: Walk, bodies: Sequence[Script], streams: Streams, lines: Sequence[str]) -> None:
    """Go through a `while read` loop with one round for each line, which the test gets as its standard input."""
    for line in lines:
        walk(bodies[0], replace(streams, stdin=line + "\n"))
        walk(bodies[1], streams)


def walk_for_loop(session: GuardSession, node: For, values: Sequence[str], walk: Callable[[Script], Output]) -> Output:
    """Go through the body of a `for` once for each of its words `values`. Return what it prints, if that is known. If no word is known,
    the loop may also have no round at all."""
    printed: list[Output] = []

    def walk_round(value: str) -> None:
        session.variables[node.name] = value
        printed.append(walk(node.body))

    states = initial_states = list_states(session)
    for value in values[:MAX_ROUNDS] or [UNKNOWN]:
        states = run_in_each_state(session, states, partial(walk_round, value))
    settle_states(session, states if any(map(is_fully_known, values)) else [*states, *initial_states])
    return join_outputs(printed)
