"""The history of a run: `lineage` in `manifest.json`, a list of events, the oldest first.

    {"event": "branched", "run": ..., "step": 50, "changed": {"trainer.lr": [1e-05, 0.0001]}}
    {"event": "extended", "after_step": 20, "steps": [20, 40], "lr_scheduler_type": "constant", "command": "opd merge --extend ..."}

The list of a branch begins with the events of the run that it comes from, up to the step at which it branched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LINEAGE = "lineage"
"""The key in the manifest; a run that was neither branched nor extended has none."""
BRANCHED, EXTENDED = "branched", "extended"
_MOST_KEYS = 6
"""Most changed keys that a sentence names."""


def list_events_until(manifest: Mapping[str, Any], step: int) -> list[dict[str, Any]]:
    """Return the events that the weights after this step result from."""
    events = manifest.get(LINEAGE, ())
    return [e for e in events if (e["step"] <= step if e["event"] == BRANCHED else e["after_step"] < step)]


def format_events(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format one sentence for each event. Of a path only the last part is shown, since the reader may use another machine."""
    return [_format_branch(event) if event["event"] == BRANCHED else _format_extension(event) for event in events]


def list_commands(manifest: Mapping[str, Any]) -> list[str]:
    """Return the commands that made this run: the one that began it, and those that made it longer.

    For a branch, commands of the run that it comes from are left out.
    """
    events = manifest.get(LINEAGE, ())
    branch = max((index for index, event in enumerate(events) if event["event"] == BRANCHED), default=-1)
    return [command for command in (manifest.get("command"), *(e["command"] for e in events[branch + 1 :])) if command]


def _format_branch(event: Mapping[str, Any]) -> str:
    changed = [f"{key} {_format_value(old)} → {_format_value(new)}" for key, (old, new) in event["changed"].items()]
    remainder = f" and {len(changed) - _MOST_KEYS} more keys" if len(changed) > _MOST_KEYS else ""
    summary = f"changed: {', '.join(changed[:_MOST_KEYS])}{remainder}" if changed else "nothing changed"
    return f"branched from step {event['step']} of {Path(event['run']).name}, with weights and optimiser; {summary}"


def _format_extension(event: Mapping[str, Any]) -> str:
    old_steps, new_steps = event["steps"]
    kind = event["lr_scheduler_type"]
    rates = "" if kind == "constant" else f"; up to there the {kind} decay was that of {old_steps} steps"
    return f"extended after step {event['after_step']} from {old_steps} to {new_steps} steps{rates}"


def _format_value(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:60]} …"
