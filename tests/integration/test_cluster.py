"""`cluster.Remote` through real Ray: an answer that is made when another worker asks for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from opd import cluster
from opd.config import ClusterConfig
from opd.errors import RunError


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    with cluster.ray_session(ClusterConfig(), 2):
        yield


def start_owner() -> Any:
    class Owner:  # here, so that it travels by value: workers cannot import this file
        def __init__(self) -> None:
            self.calls = 0

        def numbers(self, size: int, first: int) -> np.ndarray:
            self.calls += 1
            return np.arange(first, first + size, dtype=np.float32)

        def asked(self) -> int:
            return self.calls

        def sleep(self, seconds: float) -> None:
            time.sleep(seconds)

        def refuse(self) -> None:
            raise RunError("teacher odd: it does not want to")

    return cluster.spawn(Owner, name="owner", env=cluster.worker_env(2))


def start_reader() -> Any:
    class Reader:
        def total(self, handles: dict[str, cluster.Remote]) -> dict[str, float]:
            return {key: float(cluster.fetch(handle).sum()) for key, handle in handles.items()}

    return cluster.spawn(Reader, name="reader", env=cluster.worker_env(2))


def ask(actor: Any, method: str, *args: Any) -> Any:
    (answer,) = cluster.call([actor], method, [args], timeout_s=60)
    return answer


def test_an_answer_is_made_when_it_is_fetched_and_by_whoever_fetches_it() -> None:
    owner, reader = start_owner(), start_reader()
    handles = {
        key: cluster.Remote(owner, "numbers", (100_000, first), 30.0) for key, first in (("zero", 0), ("one", 1))
    }
    assert ask(owner, "asked") == 0
    assert ask(reader, "total", handles) == {"zero": pytest.approx(4999950000.0), "one": pytest.approx(5000050000.0)}
    assert ask(owner, "asked") == 2
    np.testing.assert_array_equal(cluster.fetch(handles["one"]), np.arange(1, 100_001))
    assert ask(owner, "asked") == 3, "again for the next"
    cluster.kill([owner, reader])


def test_an_answer_that_does_not_come_is_an_error_of_the_run() -> None:
    owner, reader = start_owner(), start_reader()
    slow = cluster.Remote(owner, "sleep", (4.0,), 1.0)
    began = time.monotonic()
    with pytest.raises(RunError, match=r"^`sleep` of another worker took longer than 1 s$"):
        cluster.fetch(slow)
    assert time.monotonic() - began < 3.5
    with pytest.raises(RunError, match=r"^`sleep` of another worker took longer than 1 s$"):
        ask(reader, "total", {"slow": slow})
    refusing = cluster.Remote(owner, "refuse", (), 30.0)
    with pytest.raises(RunError, match=r"^teacher odd: it does not want to$"):
        cluster.fetch(refusing)
    with pytest.raises(RunError, match=r"^teacher odd: it does not want to$"):
        ask(reader, "total", {"refusing": refusing})

    cluster.kill([owner])
    numbers = cluster.Remote(owner, "numbers", (1, 0), 30.0)
    with pytest.raises(RunError, match=r"^the worker that was asked for `numbers` is dead"):
        cluster.fetch(numbers)
    with pytest.raises(RunError, match=r"^the worker that was asked for `numbers` is dead"):
        ask(reader, "total", {"numbers": numbers})
    cluster.kill([reader])
