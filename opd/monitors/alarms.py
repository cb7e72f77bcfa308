"""The file about monitors that acted after a step, `RUN_DIR/monitors/step-NNNNNN.json`: their alarms, readings and samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opd.files import atomic_write_text
from opd.interfaces import Decoder
from opd.monitors import SIGNALS
from opd.monitors.signals import WHOLE_STEP, Signal
from opd.records.json_fields import make_record
from opd.records.step import AlarmRecord
from opd.records.types import Rollout
from opd.settings.user_objects import import_object

FORMAT = 1
"""Version of the file; a file of another one is refused."""
SAMPLES = 4
"""Responses that are kept for each alarm of a domain."""
SAMPLES_OF_STEP = 12
"""Responses that are kept for an alarm of the whole step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmSample:
    """A response of the step in which an alarm began, kept as an example."""

    signal: str
    """The signal of the alarm."""
    domain: str
    sample_id: str
    prompt: str
    """Decoded prompt; special tokens are left in, as in the response."""
    response: str
    tokens: int
    truncated: bool
    number: float | None = None
    """Strength of the signal in this response (`Signal.shown_by`); None if the signal cannot be seen in one response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarms:
    """The alarms that began in a step."""

    step: int
    alarms: tuple[AlarmRecord, ...]
    samples: tuple[AlarmSample, ...]
    readings: Mapping[str, Mapping[str, float]]
    """Signal -> domain -> reading. It has every signal, to show what else was unusual in this step."""

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises: OSError."""
        atomic_write_text(path, json.dumps({"format": FORMAT, **asdict(self)}, indent=1))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Alarms:
        """Return the record of a file that `save` wrote. Raises: KeyError, TypeError or AssertionError for anything else."""
        assert data["format"] == FORMAT, f"monitors file of format {data['format']}"
        return make_record(cls, data)


def load_signal(alarm: AlarmRecord) -> Signal:
    """Return the signal that raised the alarm."""
    signal: Signal = import_object(SIGNALS[alarm.signal])
    return signal


def format_alarm(alarm: AlarmRecord) -> str:
    """Return the alarm as a sentence for the user, without advice."""
    whom = f"domain {alarm.domain}" if alarm.domain else "all domains"
    key = f"monitors.{alarm.signal}.{alarm.action}"
    return f"{alarm.signal}: {whom}: {load_signal(alarm).says.format(value=alarm.value)} ({key} is {alarm.limit:g})"


def select_samples(alarm: AlarmRecord, rollouts: Sequence[Rollout], tokenizer: Decoder) -> list[AlarmSample]:
    """Return the responses of the alarm's domain that show it best.

    Some signals cannot be seen in a single response. For these it returns the first responses of each domain, because a
    person who is asked to look wants to see some; for a mere warning it returns none, since they would be ordinary ones.
    """
    shown_by = load_signal(alarm).shown_by
    if shown_by is None and alarm.action == "warn":
        return []
    responses = [r for r in rollouts if alarm.domain in (WHOLE_STEP, r.domain)]
    if shown_by is not None:
        responses = sorted(responses, key=shown_by, reverse=True)
    if alarm.domain == WHOLE_STEP:
        responses = _interleave_domains(responses)
    return [
        AlarmSample(
            signal=alarm.signal,
            domain=rollout.domain,
            sample_id=rollout.sample_id,
            prompt=tokenizer.decode(rollout.prompt_ids, skip_special_tokens=False),
            response=tokenizer.decode(rollout.response_ids, skip_special_tokens=False),
            tokens=len(rollout.response_ids),
            truncated=rollout.truncated,
            number=None if shown_by is None else shown_by(rollout),
        )
        for rollout in responses[: SAMPLES if alarm.domain else SAMPLES_OF_STEP]
    ]


def _interleave_domains(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the first rollout of each domain, then the second of each, and so on."""
    counts: dict[str, int] = {}
    ranks = []
    for rollout in rollouts:
        ranks.append(counts.get(rollout.domain, 0))
        counts[rollout.domain] = ranks[-1] + 1
    return [rollout for _, rollout in sorted(zip(ranks, rollouts, strict=True), key=lambda pair: pair[0])]
