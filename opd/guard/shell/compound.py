"""Compound commands: in which states of the shell each body runs, and in which it is left afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from opd.guard.facts import Streams
from opd.guard.session import GuardSession
from opd.guard.shell.fields import UNKNOWN, is_fully_known
from opd.guard.shell.nodes import CompoundCommand, For, Literal, Script, Simple
from opd.guard.shell.ways import (
    Output,
    distinct_states,
    join_outputs,
    list_states,
    run_in_each_state,
    run_in_subprocess,
    settle_states,
)

Walk = Callable[[Script, Streams], Output]
MAX_ROUNDS = 16
"""Words of a `for` loop, or lines that a `while read` reads, that the body is gone through for."""
FIRST_LINES = 3


def walk_group(session: GuardSession, node: CompoundCommand, streams: Streams, walk: Walk) -> Output:
    """Go through the bodies of a group. Return what it prints; of branches, the output of each on lines of its own."""
    if node.kind == "subshell":
        return run_in_subprocess(session, partial(walk, node.bodies[0], streams))
    if node.kind == "braces":
        return join_outputs([walk(body, streams) for body in node.bodies])
    printed: list[Output] = []

    def run(body: Script) -> None:
        output = walk(body, streams)
        printed.append(output)

    bodies = [partial(run, body) for body in node.bodies]
    if node.kind == "if":
        settle_states(session, _walk_if(session, bodies))
    elif node.kind == "case":
        settle_states(session, _walk_case(session, bodies))
    elif lines := _lines_of_while_read(node, streams):
        settle_states(
            session,
            run_in_each_state(session, list_states(session), partial(_walk_lines, walk, node.bodies, streams, lines)),
        )
    else:
        settle_states(session, _walk_loop(session, *bodies))
    return join_outputs(list(dict.fromkeys(printed)), "\n") if node.kind != "loop" else None


def _walk_if(session: GuardSession, bodies: Sequence[Callable[[], object]]) -> list[GuardSession]:
    """Go through the branches of an `if`, each after its own test and those before it. The last of an odd number is the `else`."""
    ways, ended = list_states(session), list[GuardSession]()
    for index in range(0, len(bodies) - 1, 2):
        ways = run_in_each_state(session, ways, bodies[index])
        ended += run_in_each_state(session, ways, bodies[index + 1])
    return [*ended, *(run_in_each_state(session, ways, bodies[-1]) if len(bodies) % 2 else ways)]


def _walk_case(session: GuardSession, bodies: Sequence[Callable[[], object]]) -> list[GuardSession]:
    """Go through the branches of a `case`, of which one runs. The first body is the subject."""
    ways = run_in_each_state(session, list_states(session), bodies[0])
    return [way for body in bodies[1:] for way in run_in_each_state(session, ways, body)] or ways


def _walk_loop(session: GuardSession, test: Callable[[], object], body: Callable[[], object]) -> list[GuardSession]:
    """Go through a loop: test, body, test, body, test; it may end after each test. Two rounds show what one does to the next."""
    ways = states = run_in_each_state(session, list_states(session), test)
    for _ in range(2):
        after = run_in_each_state(session, ways, body)
        if all(any(state.is_similar(way) for state in states) for way in after):
            break
        ways = run_in_each_state(session, after, test)
        states = distinct_states([*states, *ways])
    return states


def _lines_of_while_read(node: CompoundCommand, streams: Streams) -> list[str]:
    """Return the lines that a `while read ...` gets, if they are known: the first few, and of the others those that may be
    paths."""
    test = node.bodies[0]
    command = test[0].pipelines[0].commands[0] if test else None
    if not isinstance(command, Simple) or not command.words or command.words[0] != (Literal("read"),):
        return []
    if streams.stdin is None or not is_fully_known(streams.stdin):
        return []
    lines = streams.stdin.removesuffix("\n").split("\n")
    return [line for n, line in enumerate(lines) if n < FIRST_LINES or "/" in line or "." in line][:MAX_ROUNDS]


def _walk_lines(walk: Walk, bodies: Sequence[Script], streams: Streams, lines: Sequence[str]) -> None:
    for line in lines:
        walk(bodies[0], replace(streams, stdin=line + "\n"))
        walk(bodies[1], streams)


def walk_for(session: GuardSession, node: For, values: Sequence[str], walk: Callable[[Script], Output]) -> Output:
    """Go through the body of a `for` for each of its words. Return what it prints, if that is known."""
    printed: list[Output] = []

    def walk_round(value: str) -> None:
        session.variables[node.name] = value
        output = walk(node.body)
        printed.append(output)

    ways = initial_states = list_states(session)
    for value in values[:MAX_ROUNDS] or [UNKNOWN]:
        ways = run_in_each_state(session, ways, partial(walk_round, value))
    settle_states(session, ways if any(map(is_fully_known, values)) else [*ways, *initial_states])
    return join_outputs(printed)
