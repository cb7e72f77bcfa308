"""Ray's own processes, whose end is the end of everything."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from opd.cluster import WorkerDied
from opd.cluster.daemons import refuse_dead_ray


def test_a_daemon_that_ended_is_the_end_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: dict[str, int | None] = {"gcs_server": None, "raylet": None, "reaper": -9}
    processes = {
        kind: [SimpleNamespace(process=SimpleNamespace(poll=lambda s=status: s, returncode=status))]
        for kind, status in statuses.items()
    }
    monkeypatch.setattr("ray._private.worker._global_node", SimpleNamespace(all_processes=processes))
    refuse_dead_ray()
    processes["raylet"][0].process = SimpleNamespace(poll=lambda: -9, returncode=-9)
    with pytest.raises(WorkerDied, match="Ray itself is gone: its raylet ended with status -9"):
        refuse_dead_ray()
    monkeypatch.setattr("ray._private.worker._global_node", None)
    refuse_dead_ray()
