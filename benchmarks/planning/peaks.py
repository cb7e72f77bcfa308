"""Most memory that each role's workers have during a merge. Linux only; looks on from outside, and seldom."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.merging.memory import anonymous, family, title

ROLES = {
    "ray::TrainerRank": "trainer rank",
    "ray::VLLMWorker": "rollout engine",
    "ray::TeacherWorker": "scoring worker",
}
"""Title of a Ray actor -> the role, as the plan names it."""
LOOK_S, WHO_S = 0.25, 2.0
"""Seconds between two looks at the workers' memory, and at who they are."""


@contextmanager
def peaks(pid: int) -> Iterator[dict[str, int]]:
    """Within, role -> most bytes that one of its workers has had: its own memory, and models that it has mapped."""
    found: dict[str, int] = {}
    done = threading.Event()
    thread = threading.Thread(target=_look_on, args=(pid, found, done), daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join(timeout=10)


def _look_on(pid: int, found: dict[str, int], done: threading.Event) -> None:
    roles: dict[int, str] = {}
    mapped: dict[int, int] = {}
    for look in range(1 << 40):
        if look % round(WHO_S / LOOK_S) == 0:
            roles = {one: ROLES[name] for one in family(pid) if (name := title(one)) in ROLES}
            mapped = {one: mapped_models(one) for one, role in roles.items() if role == "scoring worker"}
        for one, nbytes in anonymous(list(roles)).items():
            found[roles[one]] = max(found.get(roles[one], 0), nbytes + mapped.get(one, 0))
        if done.wait(LOOK_S):
            return


def mapped_models(pid: int) -> int:
    """Bytes in memory of the weight files that a process has mapped."""
    total, counts = 0, False
    with contextlib.suppress(OSError):  # it may end meanwhile
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if not line[0].isupper():
                counts = line.endswith(".safetensors")
            elif counts and line.startswith("Rss:"):
                total += 1024 * int(line.split()[1])
    return total
