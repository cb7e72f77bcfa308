"""A plan as tables for people. The command prints them, and docs/results/plans.json holds those of the shipped plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipelines.plan.plan import MergePlan

PREFIXES = ("", "k", "M", "G", "T", "P", "E")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedTable:
    """One table."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def plan_tables(plan: MergePlan) -> Iterator[PrintedTable]:
    """Yield the tables of a plan: inputs, memory, what fits, bytes and seconds of a step, and how busy each role is."""
    yield PrintedTable(title=f"{plan.pipeline} on {plan.cluster}", columns=("merge", ""), rows=_inputs_table(plan))
    yield PrintedTable(
        title="memory of one worker, on each of its devices",
        columns=("role", "part", "GiB"),
        rows=[
            *((row.role, row.part, format_gib(row.nbytes)) for row in plan.memory),
            *((role, "at its fullest, with its process", format_gib(nbytes)) for role, nbytes in plan.fullest.items()),
        ],
    )
    yield PrintedTable(
        title="does it fit?",
        columns=("at its fullest", "GiB needed", "GiB there", "fits"),
        rows=[
            (row.what, format_gib(row.needed), format_gib(row.there), "yes" if row.fits else "no") for row in plan.room
        ],
    )
    yield PrintedTable(
        title="bytes of one step",
        columns=("what", "link", "bytes"),
        rows=[(row.what, row.link, format_short(row.nbytes) + "B") for row in plan.traffic],
    )
    yield PrintedTable(
        title="seconds of one step, slowest worker",
        columns=("phase", "FLOPs", "seconds", "products", "memory", "links", "overhead", "limited by"),
        rows=[
            (
                row.name,
                format_short(row.flops),
                *(f"{value:.3g}" for value in (row.seconds, row.compute, row.memory, row.link, row.overhead)),
                row.limit,
            )
            for row in plan.phases
        ],
    )
    yield PrintedTable(
        title="how busy",
        columns=("role", "workers", "devices of each", "busy"),
        rows=[(row.name, str(row.workers), f"{row.devices:g}", f"{row.busy:.0%}") for row in plan.roles],
    )


def _inputs_table(plan: MergePlan) -> list[tuple[str, str]]:
    rows = [
        ("parameters of the student", format_short(plan.parameters)),
        ("of these a token is multiplied with", format_short(plan.active)),
        ("experts", str(plan.experts)),
        ("steps of so many responses", f"{plan.steps:,} of {plan.samples:,}"),
        ("tokens of a prompt, of a response (mean)", f"{plan.prompt:,}, {plan.response:,.0f}"),
        ("sequences in an engine's step (mean)", f"{plan.sequences:.3g}"),
        ("seconds of a step", f"{plan.step_s:.3g}"),
        ("hours of all steps", f"{plan.hours:.3g}"),
    ]
    if plan.devices:
        rows.append((f"GPU-hours of {plan.devices:g} GPUs", f"{plan.device_hours:,.0f}"))
    rows.append(("disk for the target log, at most", format_short(plan.log) + "B"))
    return [*rows, ("what limits", plan.limit), ("fits", "yes" if plan.fits else "no")]


def format_gib(nbytes: float) -> str:
    """Return the number of GiB in three digits, or whole from 1000 on."""
    value = nbytes / 2**30
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def format_short(value: float) -> str:
    """Return a number in three digits with the prefix of its power of 1000, for a unit to follow: `7.62 G`."""
    power = 0
    while value >= 999.5 and power < len(PREFIXES) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {PREFIXES[power]}"
