"""New weights that come in buckets: every worker gets all of them in order, and one that dies gets them anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opd import cluster
from opd.errors import RunError
from opd.models.buckets import Bucket, WeightStream
from opd.rollouts import worker
from opd.rollouts.vllm import VLLMRolloutEngine
from opd.rollouts.worker import EngineOptions, Generated, GenerateRequest, VLLMWorker
from tests.unit.conftest import Answered
from tests.unit.opd.rollouts.test_vllm import PROMPTS, FakeWorker, engine

STUDENT = Path("/student")


class Receiving(FakeWorker):
    """Notes what comes; dies when it is asked for what a test names, with all that it held."""

    dies_in = ""
    dead = False

    def __init__(self, options: Any, stop: Sequence[int]) -> None:
        super().__init__(options, stop)
        self.said: list[Any] = []

    def begin_stream(self, model_dir: Path, *, whole: bool) -> None:
        self._may_die("begin_stream")
        self.said.append((model_dir, whole))

    def take_bucket(self, bucket: Any) -> None:
        self._may_die("take_bucket")
        self.said.append(bucket)

    def finish_stream(self) -> None:
        self._may_die("finish_stream")
        if self.said and self.said[-1] != "held":
            self.said.append("held")

    def memory_ids(self) -> list[str]:
        return [""]

    def join_channel(self, meeting: str, routes: Sequence[str]) -> str:
        self._may_die("join_channel")
        self.said.append((meeting, routes))
        return ""

    def receive_directly(self, model_dir: Path, push: str) -> str:
        self._may_die("receive_directly")
        self.said.append((model_dir, push))
        return ""

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        self._may_die("generate")
        return super().generate(requests)

    def _may_die(self, method: str) -> None:
        if method == self.dies_in or self.dead:
            self.dead = True
            raise cluster.WorkerDied(f"died in {method}", self)  # type: ignore[arg-type]


class Sender:
    """Streams of three buckets; notes when each was taken."""

    def __init__(self, *, before: Callable[[int], None] = lambda i: None) -> None:
        self.begun = 0
        self._before = before

    def __call__(self) -> WeightStream:
        self.begun += 1
        return WeightStream(model_dir=STUDENT, whole=True, buckets=self._buckets())

    def _buckets(self) -> Iterator[str]:
        for i in range(3):
            self._before(i)
            yield f"bucket {i}"


class FakeSource(Sender):
    """A trainer whose ranks do all that they are told, unless a test names what fails."""

    def __init__(self, *, fails: str = "") -> None:
        super().__init__()
        self._fails = fails
        self.joined: list[Any] = []
        self.given_up = 0
        self.stream = self

    def is_joined(self, engines: Sequence[Any]) -> bool:
        return bool(engines) and self.joined == list(engines)

    def open_channel(self, engines: Sequence[Any], memory_ids: Sequence[Sequence[str]]) -> tuple[str, list[list[str]]]:
        self.joined = list(engines)
        return "here", [[f"route {index}"] for index in range(len(memory_ids))]

    def join(self) -> list[Answered]:
        return [Answered("no way" if self._fails == "join" else "")]

    def plan(self) -> tuple[Path, str]:
        return STUDENT, "push"

    def send(self) -> list[Answered]:
        return [Answered("late" if self._fails == "send" else "")]

    def give_up(self) -> None:
        self.given_up += 1
        self.joined = []


ALL = [(STUDENT, True), "bucket 0", "bucket 1", "bucket 2", "held"]


@pytest.fixture
def mortal(in_process: Any) -> tuple[VLLMRolloutEngine, list[Any]]:
    made = engine(in_process)
    in_process.workers.clear()
    in_process.replace = Receiving
    made._workers = [made._spawn(0), made._spawn(1)]
    return made, in_process.workers


def test_every_worker_has_a_bucket_before_the_next_is_asked_for(mortal: Any) -> None:
    made, workers = mortal
    seen: list[list[int]] = []
    send = Sender(before=lambda i: seen.append([len(one.said) for one in workers]))
    made.receive(send)
    assert seen == [[1, 1], [2, 2], [3, 3]]
    assert [one.said for one in workers] == [ALL, ALL] and send.begun == 1


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("method", ["begin_stream", "take_bucket", "finish_stream"])
def test_a_worker_that_dies_under_way_gets_all_anew_and_the_others_are_not_disturbed(
    method: str, index: int, mortal: Any
) -> None:
    made, workers = mortal
    workers[index].dies_in = method
    send = Sender()
    made.receive(send)
    assert len(workers) == 3 and workers[2].said == ALL
    assert workers[1 - index].said == ALL and send.begun == 2
    assert made.generate(PROMPTS, step=1, policy_version=0).restarted == (f"rollout worker {index}",)


@pytest.mark.parametrize("method", ["begin_stream", "take_bucket", "finish_stream"])
def test_when_all_workers_die_under_way_each_gets_all_anew(method: str, mortal: Any) -> None:
    made, workers = mortal
    for one in workers:
        one.dies_in = method
    send = Sender()
    made.receive(send)
    assert len(workers) == 4 and [one.said for one in workers[2:]] == [ALL, ALL] and send.begun == 3


def test_a_worker_that_dies_later_gets_the_last_push(mortal: Any) -> None:
    made, workers = mortal
    made.load(Path("expert"))
    made.receive(Sender())
    last = Sender()
    made.receive(last)
    workers[0].dies_in = "generate"
    made.generate(PROMPTS, step=1, policy_version=0)
    assert workers[2].said == ALL and last.begun == 2


def test_after_files_were_loaded_a_worker_gets_files_again(mortal: Any) -> None:
    made, workers = mortal
    send = Sender()
    made.receive(send)
    made.load(Path("expert"))
    workers[0].dies_in = "generate"
    made.generate(PROMPTS, step=1, policy_version=0)
    assert workers[2].said == [] and workers[2].model_dir == Path("expert").absolute() and send.begun == 1


def test_a_worker_that_dies_again_while_it_is_brought_back_ends_the_attempt(mortal: Any, in_process: Any) -> None:
    made, workers = mortal

    class Frail(Receiving):
        dies_in = "take_bucket"

    workers[0].dies_in = "take_bucket"
    in_process.replace = Frail
    with pytest.raises(cluster.WorkerDied):
        made.receive(Sender())


def test_the_death_of_a_trainer_rank_is_no_workers(mortal: Any) -> None:
    made, workers = mortal

    def dies(i: int) -> None:
        if i == 1:
            raise cluster.WorkerDied("trainer rank 0: the worker died")

    with pytest.raises(cluster.WorkerDied, match="trainer rank 0"):
        made.receive(Sender(before=dies))
    assert len(workers) == 2


# Directly from the trainer's ranks


def test_engines_join_once_and_take_every_push_directly(mortal: Any) -> None:
    made, workers = mortal
    source = FakeSource()
    assert [made.receive_directly(source) for _ in range(2)] == ["", ""]
    for index, one in enumerate(workers):
        assert one.said == [("here", [f"route {index}"]), *[(STUDENT, "push"), "held"] * 2]
    assert (source.begun, source.given_up) == (0, 0)


@pytest.mark.parametrize("method", ["join_channel", "receive_directly"])
def test_when_an_engine_dies_in_a_direct_push_all_take_the_stream(method: str, mortal: Any) -> None:
    made, workers = mortal
    workers[1].dies_in = method
    source = FakeSource()
    assert made.receive_directly(source) == f"died in {method}"
    assert workers[0].said[-len(ALL) :] == ALL == workers[2].said and source.given_up == 1
    assert made.generate(PROMPTS, step=1, policy_version=0).restarted == ("rollout worker 1",)
    assert made.receive_directly(source) == "" and source.joined == made._workers, "the next one goes directly"


def test_a_direct_push_that_is_late_is_repeated_as_a_stream(mortal: Any) -> None:
    made, workers = mortal
    assert made.receive_directly(FakeSource(fails="send")) == "late"
    assert all(one.said[-len(ALL) :] == ALL for one in workers) and len(workers) == 2


def test_engines_that_find_no_way_to_the_trainer_end_the_run(mortal: Any) -> None:
    made, _ = mortal
    with pytest.raises(RunError, match=r"no direct way to each other: no way; set sync\.kind to network$"):
        made.receive_directly(FakeSource(fails="join"))


def test_a_worker_that_dies_after_a_direct_push_takes_its_stream(mortal: Any) -> None:
    made, workers = mortal
    source = FakeSource()
    made.receive_directly(source)
    workers[0].dies_in = "generate"
    made.generate(PROMPTS, step=1, policy_version=0)
    assert workers[2].said == ALL and source.begun == 1 and not source.is_joined(made._workers)


# Inside the worker

OPTIONS = EngineOptions(
    model_dir=STUDENT, dtype="float32", max_model_len=64, max_num_seqs=8, gpu_memory_utilization=0.4, vocab_size=76
)
NOTHING = Bucket((), np.empty(0, np.uint8))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record what was done to the engine; a directory's name is its shape."""
    done: list[str] = []

    class Swap:
        def __init__(self, llm: Any, base: Path | None) -> None:
            self.base = base
            done.append("all" if base is None else "some")

        def take_bucket(self, bucket: Bucket) -> None:
            done.append(f"take {len(list(bucket.tensors()))}")

        def finish_swap(self) -> None:
            done.append("finish")

    def start(options: EngineOptions) -> object:
        done.append(f"start {options.model_dir.name}")
        return object()

    def shape(model_dir: Path) -> dict[str, Any]:
        return {"model_type": model_dir.parent.name or "llama", "size": model_dir.name in ("large",)}

    monkeypatch.setattr(worker, "StreamedSwap", Swap)
    monkeypatch.setattr(worker, "start_engine", start)
    monkeypatch.setattr(worker, "read_model_shape", shape)
    monkeypatch.setattr(worker, "stop_engine", lambda llm: None)
    monkeypatch.setattr(worker, "cut_vocabulary", lambda llm, size: done.append("cut"))
    monkeypatch.setattr(worker, "swap_weights", lambda llm, path, whole=True: done.append(f"swap {path.name}"))
    return done


def pushed(one: VLLMWorker, *, whole: bool) -> None:
    one.begin_stream(STUDENT, whole=whole)
    one.take_bucket(NOTHING)
    one.finish_stream()


def test_all_weights_go_into_an_engine_of_that_shape_without_a_file(said: list[str]) -> None:
    one = VLLMWorker(OPTIONS, (2,))
    pushed(one, whole=True)
    one.finish_stream()
    assert said == ["start student", "all", "take 0", "finish", "cut"], "the second finish does nothing"
    one.load(Path("/large"))
    said.clear()
    pushed(one, whole=True)
    assert said == ["start student", "all", "take 0", "finish", "cut"], (
        "another architecture's engine is replaced first"
    )


def test_some_weights_go_over_those_that_they_were_made_from(said: list[str]) -> None:
    one = VLLMWorker(OPTIONS, (2,))
    pushed(one, whole=False)
    pushed(one, whole=False)
    assert said[1:] == ["some", "take 0", "finish"] * 2, "the engine holds the rest"
    said.clear()
    pushed(one, whole=True)
    pushed(one, whole=False)
    assert said[4:] == ["swap student", "cut", "some", "take 0", "finish"], "the rest had been replaced"


def test_a_stream_that_was_broken_off_leaves_nothing_to_rest_on(said: list[str]) -> None:
    one = VLLMWorker(OPTIONS, (2,))
    one.begin_stream(STUDENT, whole=False)
    assert one._base is None


def test_a_stream_after_one_that_broke_off_finishes_that_first(said: list[str]) -> None:
    """vLLM would take a layer for complete when it has one of its weights twice."""
    one = VLLMWorker(OPTIONS, (2,))
    one.begin_stream(STUDENT, whole=True)
    one.take_bucket(NOTHING)
    pushed(one, whole=True)
    assert said[1:] == ["all", "take 0", "finish", "all", "take 0", "finish", "cut"]


def test_a_family_that_reloads_from_files_alone_is_refused(said: list[str]) -> None:
    one = VLLMWorker(OPTIONS, (2,))
    family = Path("/gpt_oss/student")
    with pytest.raises(RunError, match=r"^gpt_oss takes new weights from files alone: set sync.kind to shared_memory$"):
        one.begin_stream(family, whole=True)
    one.begin_stream(family, whole=False)
    assert said[-1] == "some", "its attention can be streamed"
