"""Rows as `docs/models.md`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEADER = """\
# Families of models

Which architectures a merge is right for, tried on tiny random models (two to three layers, width 64, heads of 32) by

    python -m tests.models --output docs/results/models.json --table docs/models.md

The experts of each student are its own weights disturbed (`whole`) and a LoRA adapter made by PEFT (`adapter`). `opd merge` runs six
steps on the real engines, then once more from the checkpoint of step 3. The result is compared with plain transformers, one sequence
at a time. A tiny model says that an architecture's parts fit together, nothing of how well a large one learns. More figures:
[results/models.json](results/models.json). A family that works also has the checkpoint's log-probs in transformers (within {export:.0e} nats), and
weights and losses after going back to step 3 are those without an interruption, bit for bit.

| Column | Meaning |
| --- | --- |
| layout | how sequences share a forward pass (trainer, and scorer if that differs): `packed` (told apart by position ids), `packed_indexed` (also by indices and lengths), `padded` (one a row) |
| together | largest relative difference of hidden states between sequences laid out like that and each alone; at most {packing:.0e} |
| probe | largest gap between engine and trainer after a weight push, nats a token on average |
| export | largest difference of a token's log-prob between the trainer's last checkpoint and a new engine on `model/` (vLLM, or `rollout.engine: transformers` where the note says so), nats; at most {float32:.0e}, {bfloat16:g} where the engine computes in bfloat16 |
| LoRA | the adapter teaches its domain, and is scored as PEFT computes it (nats, at most {scorer:.0e}); or why it is refused, and then `whole` teaches both |
"""


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """The whole page."""
    from tests.models.row import ENGINE_NATS, EXPORT_NATS, PACKING, SCORER_NATS

    head = HEADER.format(packing=PACKING, scorer=SCORER_NATS, export=EXPORT_NATS, **ENGINE_NATS)
    works = [row for row in rows if row["state"] == "works"]
    refused = [row for row in rows if row["state"] == "refused"]
    broken = [row for row in rows if row["state"] in ("FAILED", "deadline")]
    parts = [
        head,
        f"{len(works)} of {len(rows)} families work, {len(refused)} are refused before the first worker starts.",
    ]
    parts[-1] += f" **{len(broken)} fail.**\n" if broken else "\n"
    parts.append(works_table([*works, *(row for row in broken if row["losses"])]))
    if refused:
        parts.append("## Refused\n\nExit code 2, and no worker was started.\n\n" + said_table(refused))
    if broken:
        parts.append("## What fails\n\n" + said_table(broken))
    parts.append(_versions(rows))
    return "\n".join(parts)


COLUMNS = ("family", "layout", "together", "probe", "export", "LoRA")


def works_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each family whose merge ran."""
    lines = [f"| {' | '.join(COLUMNS)} |", "| --- | --- |" + " ---: |" * 3 + " --- |"]
    return "\n".join([*lines, *(f"| {' | '.join(cells(row))} |" for row in rows)]) + "\n"


def cells(row: Mapping[str, Any]) -> list[str]:
    """In the order of `COLUMNS`."""
    note = f"{row['note']}; engine in {row['engine_dtype']}" if row["engine_dtype"] != "float32" else row["note"]
    if row.get("engine") == "transformers":
        note += "; engine: transformers"
    others = sorted(set(row["teacher_layouts"].values()) - {row["trainer_layout"]})
    gaps = row["scorer_gaps"]
    adapter = number(gaps.get("adapter")) if row["adapter"] == "scored" else f"refused: {escaped(row['adapter'])}"
    return [
        f"**{row['family']}** ({note})" if note else f"**{row['family']}**",
        f"{row['trainer_layout']} ({', '.join(others)})" if others else str(row["trainer_layout"]),
        number(row["trainer_packing"]),
        number(row["probe_gap"]),
        number(row["export_vllm"]),
        adapter,
    ]


def said_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Families and their sentences."""
    lines = ["| family | what is said |", "| --- | --- |"]
    return (
        "\n".join([*lines, *(f"| **{row['family']}** | {'<br>'.join(map(escaped, row['said']))} |" for row in rows)])
        + "\n"
    )


def number(value: float | None) -> str:
    """Two digits of what was measured."""
    return "not measured" if value is None else "0" if value == 0 else f"{value:.1e}"


def escaped(text: str) -> str:
    """Return what others wrote as a cell of a table; of a refusal its place and finding, not what is wanted."""
    return text.partition(" wanted: ")[0].replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _versions(rows: Sequence[Mapping[str, Any]]) -> str:
    """Those that all rows were made with; rows made with others are named."""
    by_versions: dict[str, list[str]] = {}
    for row in rows:
        text = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        by_versions.setdefault(text, []).append(row["family"])
    if len(by_versions) == 1:
        return f"Versions: {next(iter(by_versions))}.\n"
    return "\n".join(f"Versions of {', '.join(names)}: {text}.\n" for text, names in by_versions.items())
