"""A plan as tables: title, columns, rows. The command prints them, and docs/results/plans.json holds those of the shipped plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipelines.plan.plan import Plan

UNITS = ("", "k", "M", "G", "T", "P", "E")


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """One table."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def tables(plan: Plan) -> Iterator[Printed]:
    """What is asked for, memory, bytes, seconds, and how busy the roles are."""
    yield Printed(title=f"{plan.pipeline} on {plan.cluster}", columns=("merge", ""), rows=_asked(plan))
    yield Printed(
        title="memory of one worker, on each of its devices",
        columns=("role", "part", "GiB"),
        rows=[
            *((one.role, one.part, gib(one.nbytes)) for one in plan.memory),
            *((role, "at its fullest, with its process", gib(nbytes)) for role, nbytes in plan.fullest.items()),
        ],
    )
    yield Printed(
        title="does it fit?",
        columns=("at its fullest", "GiB needed", "GiB there", "fits"),
        rows=[(one.what, gib(one.needed), gib(one.there), "yes" if one.fits else "no") for one in plan.room],
    )
    yield Printed(
        title="bytes of one step",
        columns=("what", "link", "bytes"),
        rows=[(one.what, one.link, short(one.nbytes) + "B") for one in plan.traffic],
    )
    yield Printed(
        title="seconds of one step, slowest worker",
        columns=("phase", "FLOPs", "seconds", "products", "memory", "links", "overhead", "limited by"),
        rows=[
            (
                one.name,
                short(one.flops),
                *(f"{value:.3g}" for value in (one.seconds, one.compute, one.memory, one.link, one.overhead)),
                one.limit,
            )
            for one in plan.phases
        ],
    )
    yield Printed(
        title="how busy",
        columns=("role", "workers", "devices of each", "busy"),
        rows=[(one.name, str(one.workers), f"{one.devices:g}", f"{one.busy:.0%}") for one in plan.roles],
    )


def _asked(plan: Plan) -> list[tuple[str, str]]:
    rows = [
        ("parameters of the student", short(plan.parameters)),
        ("of these a token is multiplied with", short(plan.active)),
        ("experts", str(plan.experts)),
        ("steps of so many responses", f"{plan.steps:,} of {plan.samples:,}"),
        ("tokens of a prompt, of a response (mean)", f"{plan.prompt:,}, {plan.response:,.0f}"),
        ("sequences in an engine's step (mean)", f"{plan.sequences:.3g}"),
        ("seconds of a step", f"{plan.step_s:.3g}"),
        ("hours of all steps", f"{plan.hours:.3g}"),
    ]
    if plan.devices:
        rows.append((f"GPU-hours of {plan.devices:g} GPUs", f"{plan.device_hours:,.0f}"))
    return [*rows, ("what limits", plan.limit), ("fits", "yes" if plan.fits else "no")]


def gib(nbytes: float) -> str:
    """GiB with as many digits as matter."""
    value = nbytes / 2**30
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def short(value: float) -> str:
    """Three digits and a prefix of a thousand."""
    power = 0
    while value >= 999.5 and power < len(UNITS) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {UNITS[power]}"
