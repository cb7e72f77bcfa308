"""The live state of a merge, and the file by which other processes read it: `RUN_DIR/.live.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

FINISHED, STOPPED, PAUSED, FAILED = "finished", "stopped", "paused", "failed"
ENDS = (FINISHED, STOPPED, PAUSED, FAILED)
"""The ends that a merge writes into its state. A killed merge writes none."""
MAX_NOTES = 20
"""The most sentences that the state has; the newest stay."""
TEXT_KEYS = ("host", "began", "doing", "ended", "why")
"""Fields of `LiveState` that are texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveState:
    """The live state of one `opd merge`, with its last sentences."""

    pid: int = 0
    """Id of the merge's process on the machine `host`."""
    host: str = ""
    began: str = ""
    """Time of its start, ISO 8601."""
    doing: str = ""
    """Present work of the merge, such as `rollout`; empty if that is not known."""
    notes: tuple[str, ...] = ()
    """The last sentences for the user, `MAX_NOTES` at most, the newest last."""
    ended: str = ""
    """One of `ENDS`; empty while the merge is at work, and for good if it was killed."""
    why: str = ""
    """The reason if it ended early."""

    def with_note(self, line: str) -> LiveState:
        """Return the state with one more sentence."""
        return replace(self, notes=(*self.notes, line)[-MAX_NOTES:])

    def write(self, path: Path, scratch: Path) -> None:
        """Write the file under the name `scratch` and rename it to `path`, so that no reader sees half of it. Raises: OSError.

        It is not flushed to the disk, because it need not survive a power cut.
        """
        scratch.write_text(json.dumps(asdict(self)), encoding="utf-8")
        scratch.replace(path)


def read_live_state(path: Path) -> LiveState | None:
    """Read the live state that a merge wrote; None if there is no such file, or if another release wrote it in another form."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return _parse_live_state(data)


def _parse_live_state(data: Any) -> LiveState | None:
    if not isinstance(data, dict) or not isinstance(data.get("notes"), list):
        return None
    texts = {key: data.get(key) for key in TEXT_KEYS}
    pid = data.get("pid")
    if not isinstance(pid, int) or not all(isinstance(text, str) for text in (*texts.values(), *data["notes"])):
        return None
    return LiveState(pid=pid, notes=tuple(data["notes"]), **texts)  # type: ignore[arg-type]
