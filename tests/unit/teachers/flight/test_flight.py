"""Teachers behind a real Flight server give what the same teachers give here, or a clear error: nothing in between."""

from __future__ import annotations

import dataclasses
import random
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import flight
from safetensors.torch import load_file, save_file

from opd import cluster
from opd.config import PipelineConfig
from opd.errors import RunError
from opd.models.heads import HeadSource
from opd.records.types import Rollout, Teacher, WeightedTeacher
from opd.stream.rollouts import SCHEMA
from opd.stream.schema import PartRecord, TargetRow, read_stream, write_stream
from opd.stream.targets import StreamPart
from pipelines.specs import flight_spec, pool_spec, scorer_options
from teachers.flight import client as flight_client
from teachers.flight import protocol
from teachers.flight.access import ListenAddress, parse_endpoint
from teachers.flight.client import FlightPool
from teachers.flight.server import PoolServer, make_hello
from teachers.pool import Pool
from tests.rows import changed, make_rollout, make_stream_part
from tests.unit.teachers.test_pool import mortal

VOCABULARY = 76
TOKEN = "correct-horse"

Routes = dict[str, tuple[WeightedTeacher, ...]]


def rollout(i: int, domain: str = "reverse", response: int = 5) -> Rollout:
    rng = random.Random(i)
    return make_rollout(
        sample_id=f"000001/{domain}/{i}", step=1, domain=domain, policy_version=2,
        prompt_ids=tuple(rng.choices(range(76), k=4)), response_ids=tuple(rng.choices(range(76), k=response)),
        behaviour_logprobs=tuple(-rng.random() for _ in range(response)),
        loss_mask=[i < 2 for i in range(response)],
    )  # fmt: skip


ROLLOUTS = [rollout(i, domain, 3 + i) for i in range(4) for domain in ("upper", "reverse")]


@pytest.fixture(autouse=True)
def alone(in_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers without Ray, no token of the environment, messages small enough that there are many, short pauses."""
    monkeypatch.delenv("OPD_TEACHERS_TOKEN", raising=False)
    monkeypatch.setattr(protocol, "SLICE_BYTES", 1000)
    monkeypatch.setattr(protocol, "BATCH_TOKENS", 20)
    monkeypatch.setattr(flight_client, "RETRY_WAITS_S", (0.5, 0.6))  # above gRPC's own pause


@pytest.fixture
def routes(expert_dirs: dict[str, Path]) -> Routes:
    """`reverse` has one teacher, `upper` two."""
    rev, up = (Teacher(name=n, model_dir=expert_dirs[n], digest=f"digest of {n}") for n in ("rev", "up"))
    return {
        "reverse": (WeightedTeacher(teacher=rev, weight=1.0),),
        "upper": (WeightedTeacher(teacher=up, weight=0.7), WeightedTeacher(teacher=rev, weight=0.3)),
    }


def config(*, workers: int = 2, objective: dict[str, Any] | None = None, phase_s: float = 60, **teachers: Any) -> Any:
    return PipelineConfig.model_validate(
        {
            "name": "n",
            "student": {"model": "base"},
            "experts": {"e": {"model": "m", "domain": "d"}},
            "domains": {"d": {}},
            "trainer": {"steps": 1, "samples_per_step": 2},
            "objective": objective or {},
            "teachers": ({} if teachers.get("engine") == "flight" else {"workers": workers}) | teachers,
            "cluster": {"start_timeout_s": phase_s, "phase_timeout_s": phase_s},
        }
    )


def local_pool(routes: Routes, **changes: Any) -> Pool:
    pool = Pool(pool_spec(config(**changes), VOCABULARY), routes)
    pool.wait_ready()
    return pool


@dataclasses.dataclass
class Served:
    """A server in this process."""

    server: PoolServer
    url: str
    said: list[str]


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """serve(pool, routes, hello changes, tls, token, **pipeline changes); all stop at the end of the test."""
    running: list[PoolServer] = []

    def start(
        pool: Any,
        routes: Routes,
        *,
        hello: dict[str, Any] | None = None,
        door: ListenAddress | None = None,
        busy_s: float = 30,
        **changes: Any,
    ) -> Served:
        door, said = door or parse_endpoint("127.0.0.1:0", None, None, None), []
        told = make_hello(scorer_options(config(**changes), VOCABULARY), routes, pool).model_copy(update=hello or {})
        server = PoolServer(pool, told, door, timeout_s=busy_s, say=said.append)
        running.append(server)
        return Served(server, door.url(server.port), said)

    yield start
    for server in running:
        server.shutdown()


def remote(url: str, routes: Routes, *, ready: bool = True, **changes: Any) -> FlightPool:
    pool = FlightPool(flight_spec(config(engine="flight", address=url, **changes), VOCABULARY), routes)
    if ready:
        pool.wait_ready()
    return pool


@dataclasses.dataclass
class Scored:
    """A step's targets when all parts were taken."""

    parts: list[bytes]
    heads: dict[str, HeadSource]
    quarantined: dict[str, str]
    rows: int


def score(pool: Any, rollouts: list[Rollout] = ROLLOUTS) -> Scored:
    targets = pool.score(rollouts)
    parts = []
    while (part := targets.take_part()) is not None:
        parts.append(bytes(cluster.fetch_object(part.handle)))
    return Scored(parts, dict(targets.heads), dict(targets.quarantined), targets.rows)


def rows_of(scored: Scored) -> list[TargetRow]:
    return [row for part in scored.parts for row in read_stream(part).rows]


def sent(head: HeadSource) -> np.ndarray:
    assert head.handle is not None
    return head.handle.fetch()


def same_targets(found: Scored, wanted: Scored) -> None:
    assert found.parts == wanted.parts
    assert list(found.heads) == list(wanted.heads)
    for key, head in wanted.heads.items():
        found_V_D, head_V_D = sent(found.heads[key]), sent(head)
        assert found_V_D.dtype == head_V_D.dtype
        assert np.array_equal(found_V_D, head_V_D)
        assert (found.heads[key].key, found.heads[key].rule) == (key, head.rule)
    assert found.quarantined == wanted.quarantined
    assert found.rows == wanted.rows


# The same targets


PAYLOADS = {
    "states": {},
    "bfloat16 states": {"dtype": "bfloat16"},
    "log-probs": {"payload": "sampled_logprobs", "objective": {"kind": "sampled"}},
    "top-k": {"payload": "top_k", "objective": {"kind": "top_k", "k": 3}},
}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("kind", PAYLOADS)
def test_targets_are_those_of_the_local_pool_byte_for_byte(kind: str, workers: int, routes: Routes, serve: Any) -> None:
    changes = {"workers": workers, **PAYLOADS[kind]}
    wanted = score(local_pool(routes, **changes))
    pool = remote(serve(local_pool(routes, **changes), routes, **changes).url, routes, **changes)
    for _ in range(2):
        found = score(pool)
        same_targets(found, wanted)
    assert len(found.parts) == workers and len(rows_of(found)) == found.rows == 12
    assert len(found.heads) == (2 if "states" in kind else 0)


def test_a_domain_needs_its_heads_only_and_no_rollouts_need_none(routes: Routes, serve: Any) -> None:
    pool = remote(serve(local_pool(routes), routes).url, routes)
    for part in ([], ROLLOUTS[1::2], ROLLOUTS[::2]):
        same_targets(score(pool, part), score(local_pool(routes), part))


def test_a_pipeline_may_use_a_part_of_what_is_served(routes: Routes, serve: Any) -> None:
    served = serve(local_pool(routes), routes)
    pool = remote(served.url, {"reverse": routes["reverse"]})
    found = score(pool, ROLLOUTS[1::2])
    assert len(found.heads) == 1
    assert pool.heads() == found.heads
    with pytest.raises(RunError, match="no teacher for domain 'upper'; teachers serve reverse"):
        score(pool)


def test_a_head_is_fetched_once(routes: Routes, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []
    get = PoolServer.do_get
    monkeypatch.setattr(PoolServer, "do_get", lambda s, c, t: [asked.append(t.ticket), get(s, c, t)][1])
    pool = remote(serve(local_pool(routes), routes).url, routes)
    score(pool)
    pool.wait_ready()
    score(pool)
    assert len(asked) == len(set(asked)) == 2


def test_heads_are_there_although_the_worker_that_reads_them_died_between_steps(
    routes: Routes, serve: Any, in_process: Any
) -> None:
    workers = mortal(in_process, {})
    served = serve(local_pool(routes), routes)
    wanted = score(remote(served.url, routes))
    workers[0].dead = True
    same_targets(score(remote(served.url, routes)), wanted)
    assert len(workers) == 3, "one was started again"


def test_a_head_whose_worker_dies_again_is_refused(routes: Routes, serve: Any, in_process: Any) -> None:
    mortal(in_process, {0: "head", 2: "head"})
    served = serve(local_pool(routes), routes)
    with pytest.raises(RunError, match="`head` failed: died in head"):
        remote(served.url, routes)


def test_what_an_architecture_does_to_its_logits_comes_along(tmp_path: Path, serve: Any) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    made = Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, final_logit_softcapping=3.7,
    )  # fmt: skip
    Gemma2ForCausalLM(made).save_pretrained(tmp_path / "capped")
    routes = {"reverse": (WeightedTeacher(teacher=Teacher(name="c", model_dir=tmp_path / "capped"), weight=1.0),)}
    pool = remote(serve(local_pool(routes), routes).url, routes)
    (head,) = score(pool, ROLLOUTS[1::2]).heads.values()
    assert head.rule.softcap == 3.7


def damaged(teacher: Teacher, path: Path) -> Teacher:
    """A copy whose norm is not finite."""
    shutil.copytree(teacher.model_dir, path)
    state = load_file(path / "model.safetensors")
    state["model.norm.weight"][0] = torch.nan
    save_file(state, path / "model.safetensors", {"format": "pt"})
    return dataclasses.replace(teacher, model_dir=path, digest="damaged")


def test_responses_that_cannot_be_scored(routes: Routes, tmp_path: Path, serve: Any) -> None:
    routes |= {"upper": (WeightedTeacher(teacher=damaged(routes["upper"][0].teacher, tmp_path / "bad"), weight=1.0),)}
    served = serve(local_pool(routes, max_quarantined=0.5), routes)
    pool = remote(served.url, routes, max_quarantined=0.5)
    found = score(pool)
    same_targets(found, score(local_pool(routes, max_quarantined=0.5)))
    assert set(found.quarantined) == {r.sample_id for r in ROLLOUTS[::2]} and found.rows == 4
    # The trainer's own limit counts, and the server's.
    with pytest.raises(RunError, match=r"4 of 8 .* teachers\.max_quarantined is 0\.1"):
        score(remote(served.url, routes, max_quarantined=0.1))
    strict = serve(local_pool(routes, max_quarantined=0.1), routes)
    with pytest.raises(RunError, match=rf"{strict.url}: `score` failed: 4 of 8 .* teachers\.max_quarantined is 0\.1$"):
        score(remote(strict.url, routes, max_quarantined=1))
    assert "4 of 8" in strict.said[0]


def test_of_two_teachers_one_cannot_score(routes: Routes, tmp_path: Path, serve: Any) -> None:
    bad = damaged(routes["upper"][0].teacher, tmp_path / "bad")
    routes |= {"upper": (WeightedTeacher(teacher=bad, weight=0.7), routes["upper"][1])}
    wanted = score(local_pool(routes, max_quarantined=1))
    assert set(wanted.quarantined) == {r.sample_id for r in ROLLOUTS if r.domain == "upper"}
    served = serve(local_pool(routes, max_quarantined=1), routes)
    same_targets(score(remote(served.url, routes, max_quarantined=1)), wanted)


# TLS and token


@pytest.fixture
def door(certificate: tuple[Path, Path], tmp_path: Path) -> ListenAddress:
    """TLS and a token."""
    return parse_endpoint("127.0.0.1:0", *certificate, write_token(tmp_path, TOKEN))


def write_token(root: Path, token: str) -> Path:
    file = root / f"token-{token[:4]}"
    file.write_text(token + "\n")
    file.chmod(0o600)
    return file


def test_with_tls_and_token(routes: Routes, serve: Any, door: ListenAddress, certificate: Any, tmp_path: Path) -> None:
    served = serve(local_pool(routes), routes, door=door)
    assert served.url.startswith("grpc+tls://127.0.0.1:")
    pool = remote(served.url, routes, tls_root_certs=certificate[0], token_file=write_token(tmp_path, TOKEN))
    same_targets(score(pool), score(local_pool(routes)))


@pytest.mark.parametrize("given", [None, "wrong", TOKEN[:-1], TOKEN + "x", TOKEN.upper()])
def test_without_the_right_token_nothing_is_told(
    given: str | None, routes: Routes, serve: Any, door: ListenAddress, certificate: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(flight_client, "RETRY_WAITS_S", (1000.0, 1000.0))  # a refusal is final
    served = serve(local_pool(routes), routes, door=door)
    keys = {"tls_root_certs": certificate[0]} | ({"token_file": write_token(tmp_path, given)} if given else {})
    with pytest.raises(RunError, match=r"teachers at .*: wrong or missing token; .*teachers\.token_file or OPD_TEAC"):
        remote(served.url, routes, **keys)
    headers = [(b"authorization", f"Bearer {given}".encode())] if given else []
    raw = flight.FlightClient(served.url, tls_root_certs=certificate[0].read_bytes())
    options = flight.FlightCallOptions(timeout=10, headers=headers)
    command = flight.FlightDescriptor.for_command(b"{}")
    calls = {
        "do_action": lambda: list(raw.do_action(flight.Action("hello", b""), options)),
        "do_get": lambda: raw.do_get(flight.Ticket(b"x"), options).read_all(),
        "do_exchange": lambda: list(raw.do_exchange(command, options)[1]),
        "do_put": lambda: raw.do_put(command, SCHEMA, options)[0].close(),
        "list_flights": lambda: list(raw.list_flights(b"", options)),
        "list_actions": lambda: list(raw.list_actions(options)),
        "get_flight_info": lambda: raw.get_flight_info(command, options),
        "get_schema": lambda: raw.get_schema(command, options),
    }
    for name, call in calls.items():
        with pytest.raises((flight.FlightUnauthenticatedError, OSError), match="wrong or missing token"):
            call()
            pytest.fail(f"{name} was answered")


def test_the_token_of_the_environment(
    routes: Routes, serve: Any, door: ListenAddress, certificate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(local_pool(routes), routes, door=door)
    monkeypatch.setenv("OPD_TEACHERS_TOKEN", TOKEN)
    assert score(remote(served.url, routes, tls_root_certs=certificate[0])).rows == 12


def test_a_server_with_another_certificate_is_not_believed(
    routes: Routes, serve: Any, door: ListenAddress, tmp_path: Path
) -> None:
    from tests.conftest import build_certificate

    served = serve(local_pool(routes), routes, door=door)
    (tmp_path / "other").mkdir()
    other, _ = build_certificate(tmp_path / "other")
    with pytest.raises(
        RunError, match=r"teachers at .*: no answer to `hello` in 3 attempts: .*(?i:handshake|certificate)"
    ):
        remote(served.url, routes, tls_root_certs=other)


# Two sides that do not fit


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        ({"dtype": "bfloat16"}, {}, "dtype: they have bfloat16, this pipeline float32"),
        (PAYLOADS["log-probs"], {}, "payload: they have sampled_logprobs, this pipeline hidden_states"),
        (PAYLOADS["top-k"], {**PAYLOADS["top-k"], "objective": {"kind": "top_k", "k": 4}}, "objective.k: they have 3, this pipeline 4"),
        ({"hello": {"vocab_size": 75}}, {}, "vocabulary: they have 75, this pipeline 76"),
        ({"hello": {"stream": "9"}}, {}, "stream version: they have 9, this pipeline 6"),
        ({"hello": {"protocol": "9"}}, {}, "speaks protocol '9', this side '3'"),
        ({"hello": {"domains": {}}}, {}, r"domain reverse: they have no teacher, this pipeline rev \(1, digest of re"),
    ],
)  # fmt: skip
def test_another_pipeline_is_refused(
    theirs: dict[str, Any], ours: dict[str, Any], words: str, routes: Routes, serve: Any
) -> None:
    changes = {k: v for k, v in theirs.items() if k != "hello"}
    served = serve(local_pool(routes, **changes), routes, hello=theirs.get("hello"), **changes)
    with pytest.raises(RunError, match=f"teachers at {served.url}: {words}"):
        remote(served.url, routes, **ours)


@pytest.mark.parametrize("change", ["digest", "weight", "name", "fewer"])
def test_other_teachers_of_a_domain_are_refused(change: str, routes: Routes, serve: Any) -> None:
    first, second = routes["upper"]
    other = {
        "digest": (dataclasses.replace(first, teacher=dataclasses.replace(first.teacher, digest="other")), second),
        "weight": (dataclasses.replace(first, weight=0.6), dataclasses.replace(second, weight=0.4)),
        "name": (dataclasses.replace(first, teacher=dataclasses.replace(first.teacher, name="other")), second),
        "fewer": (dataclasses.replace(first, weight=1.0),),
    }[change]
    served = serve(local_pool(routes), routes)
    with pytest.raises(RunError, match=r"domain upper: they have rev .* up .*, this pipeline "):
        remote(served.url, routes | {"upper": other})
    swapped = routes | {"upper": (second, first)}
    assert score(remote(served.url, swapped)).rows == 12, "the order is no difference"


def test_a_server_that_came_back_with_other_teachers_is_refused(routes: Routes, serve: Any) -> None:
    pool = local_pool(routes)
    first = serve(pool, routes)
    scoring = remote(first.url, routes)
    address = parse_endpoint(first.url.removeprefix("grpc://"), None, None, None)
    first.server.shutdown()
    again = serve(pool, routes, door=address)
    assert score(scoring).rows == 12, "the same teachers are welcome"
    again.server.shutdown()
    last = serve(pool, routes, door=address, hello={"release": "9.9"})
    with pytest.raises(RunError, match="not the teachers that you began with"):
        score(scoring)
    assert "not the teachers" in last.said[0]


def test_rollouts_of_another_version_are_refused(routes: Routes, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scoring = remote(serve(local_pool(routes), routes).url, routes)
    newer = SCHEMA.with_metadata({"opd.rollouts": "9"})
    monkeypatch.setattr(flight_client, "ROLLOUTS", newer)
    encode = flight_client.encode_batches
    monkeypatch.setattr(
        flight_client, "encode_batches", lambda r: (b.replace_schema_metadata(newer.metadata) for b in encode(r))
    )
    with pytest.raises(RunError, match="rollouts of version 9, wanted 3"):
        score(scoring)


def test_a_rollout_that_a_teacher_must_not_read(routes: Routes, serve: Any) -> None:
    scoring = remote(serve(local_pool(routes), routes).url, routes)
    bad = dataclasses.replace(ROLLOUTS[1], prompt_ids=(VOCABULARY,))
    with pytest.raises(RunError, match=f"rollout {bad.sample_id}: token id 76, the tokenizer knows 0 to 75"):
        score(scoring, [ROLLOUTS[0], bad])
    assert score(scoring).rows == 12, "the server goes on"


# Answers that are not what was asked


class Answer:
    """Parts to send, whatever is in them."""

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts

    def take_part(self) -> StreamPart | None:
        return make_stream_part(self._parts.pop(0)) if self._parts else None


class Tampered:
    """A real pool whose answers are changed on the way out."""

    def __init__(
        self, pool: Pool, change: Callable[[list[TargetRow]], list[TargetRow]], parts: Any = None, **record: Any
    ) -> None:
        self._pool, self._change, self._parts, self._record = pool, change, parts, record
        self.heads, self.read_head, self.head_of = pool.heads, pool.read_head, pool.head_of

    def score(self, rollouts: Any) -> Any:
        rows = self._change(
            sorted(rows_of(score(self._pool, rollouts)), key=lambda r: (r.rollout.sample_id, r.teacher))
        )
        counts = dict(Counter(row.teacher for row in rows))
        record = PartRecord(**{"teachers": counts, **self._record})
        whole = np.frombuffer(write_stream(rows, "float32", part=record), np.uint8)
        return Answer([whole] if self._parts is None else list(self._parts))


def tamper(name: str) -> Callable[[list[TargetRow]], list[TargetRow]]:
    """Row 0 is reverse/0 by rev; row 4 and 5 are upper/0 by rev and by up."""

    def at(index: int, **changes: Any) -> Callable[[list[TargetRow]], list[TargetRow]]:
        return lambda rows: [changed(row, **changes) if i == index else row for i, row in enumerate(rows)]

    return {
        "nothing": lambda rows: rows,
        "a row less": lambda rows: rows[1:],
        "a teacher less": lambda rows: rows[:-1],
        "no row": lambda rows: [],
        "a row twice": lambda rows: [*rows, rows[0]],
        "a row for another": lambda rows: [*rows[1:], rows[1]],
        "another teacher": at(0, teacher="up"),
        "another teacher's states": lambda rows: [changed(rows[0], head=rows[5].answer.head), *rows[1:]],
        "another weight": at(4, weight=0.7),
        "another sample": at(0, sample_id="000001/reverse/99"),
        "another domain": at(0, domain="upper"),
        "another step": at(0, step=2),
        "another policy": at(0, policy_version=1),
        "another prompt": at(0, prompt_ids=(1, 2, 3)),
        "another response": at(0, response_ids=(1, 2, 3)),
        "another mask": at(0, loss_mask=(True, False, True)),
        "other log-probs": at(0, behaviour_logprobs=(-1.0, -1.0, -1.0)),
    }[name]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a row less", "1 rows are missing, first 000001/reverse/0"),
        ("a teacher less", "1 rows are missing, first 000001/upper/3"),
        ("no row", "12 rows are missing"),
        ("a row twice", "row 000001/reverse/0 of teacher rev: not asked for, or twice"),
        ("a row for another", "row 000001/reverse/1 of teacher rev: not asked for, or twice"),
        ("another teacher", "row 000001/reverse/0 of teacher up: not asked for"),
        ("another teacher's states", "another weight or head"),
        ("another weight", "row 000001/upper/0 of teacher rev: another weight or head"),
        ("another sample", "row 000001/reverse/99 of teacher rev: not asked for"),
        *(
            (f"another {x}", "not the rollout that was sent")
            for x in ("domain", "step", "policy", "prompt", "response", "mask")
        ),
        ("other log-probs", "not the rollout that was sent"),
    ],
)
def test_rows_that_were_not_asked_for_stop_the_run(name: str, words: str, routes: Routes, serve: Any) -> None:
    assert len(ROLLOUTS[1].response_ids) == 3
    served = serve(Tampered(local_pool(routes), tamper(name)), routes)
    with pytest.raises(RunError, match=f"teachers at {served.url}: .*{words}"):
        score(remote(served.url, routes))


def test_the_tampering_itself_changes_nothing(routes: Routes, serve: Any) -> None:
    served = serve(Tampered(local_pool(routes), tamper("nothing")), routes)
    assert score(remote(served.url, routes)).rows == 12


def raw_stream(dtype: str, **record: Any) -> np.ndarray:
    """A part without rows."""
    return np.frombuffer(write_stream([], dtype, part=PartRecord(**record)), np.uint8)


def newer_stream() -> np.ndarray:
    whole = pa.ipc.open_stream(write_stream([], "float32"))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, whole.schema.with_metadata({**whole.schema.metadata, b"opd.version": b"7"})):
        pass
    return np.frombuffer(sink.getvalue(), np.uint8)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"teachers": {"rev": 7, "up": 4}}, "worker 0 counts {'rev': 7, 'up': 4} rows, {'rev': 8, 'up': 4} came"),
        ({"teachers": None}, "worker 0 ends after 1 parts without its end record"),
        ({"number": 1}, "part 1 of worker 0 came after 0 of its parts"),
        ({"broken": {"000001/reverse/77": "why"}}, "000001/reverse/77 is said to be broken, but was not sent"),
        ({"parts": ()}, "12 rows are missing"),
        ({"parts": (newer_stream(),)}, "target stream: version 7, wanted 6"),
        ({"parts": (raw_stream("float32")[:-200],)}, "target stream: .*(cut|whole)"),
        ({"parts": (raw_stream("bfloat16"),)}, "hidden_states in bfloat16 came, wanted hidden_states in float32"),
        (
            {"parts": (raw_stream("float32", teachers={}), raw_stream("float32", number=1))},
            "part 1 of worker 0 came after 1",
        ),
    ],
)
def test_streams_that_are_not_right_stop_the_run(
    fields: dict[str, Any], words: str, routes: Routes, serve: Any
) -> None:
    served = serve(Tampered(local_pool(routes), tamper("nothing"), **fields), routes)
    with pytest.raises(RunError, match=f"teachers at {served.url}: .*{words}"):
        score(remote(served.url, routes))


@pytest.mark.parametrize("what", ["slice", "last record"])
def test_an_answer_without_its_end_stops_the_run(
    what: str, routes: Routes, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "slice":
        from teachers.flight import server

        cut = server.split_slices
        monkeypatch.setattr(server, "split_slices", lambda raw: list(cut(raw))[:-1])
        words = "not a whole Arrow stream"
    else:
        exchange = PoolServer.do_exchange

        class Silent:
            def __init__(self, writer: Any) -> None:
                self.begin, self.write_batch = writer.begin, writer.write_batch
                self.write_with_metadata = writer.write_with_metadata

            def write_metadata(self, raw: bytes) -> None:
                pass

        monkeypatch.setattr(PoolServer, "do_exchange", lambda s, c, d, r, w: exchange(s, c, d, r, Silent(w)))
        words = "ended without its last record"
    routes, payload = {"reverse": routes["reverse"]}, PAYLOADS["log-probs"]  # heads travel in slices too
    served = serve(local_pool(routes, **payload), routes, **payload)
    with pytest.raises(RunError, match=words):
        score(remote(served.url, routes, **payload), ROLLOUTS[1::2])


@pytest.mark.parametrize("what", ["a bit", "a row less", "another type"])
def test_a_head_that_is_not_the_one_of_its_hash_stops_the_run(
    what: str, routes: Routes, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = local_pool(routes)
    key = pool.head_of(routes["upper"][0].teacher).key
    heads = pool.heads()
    head_V_D = sent(heads[key])
    if what == "a bit":
        head_V_D = head_V_D.copy()
        head_V_D.view(np.uint8)[-1, -1] ^= 1
    spoilt = {"a bit": head_V_D, "a row less": head_V_D[:-1], "another type": head_V_D.view(np.int32)}[what]
    heads[key] = dataclasses.replace(heads[key], handle=cluster.StoredValue(spoilt))
    monkeypatch.setattr(pool, "heads", lambda: heads)
    served = serve(pool, routes)
    with pytest.raises(RunError, match=f"teachers at {served.url}: .*{key}.*(hashes to|wanted float32)"):
        remote(served.url, routes)


@pytest.mark.parametrize("answers", [[], [b"{}", b"{}"]])
def test_a_server_that_is_not_ours_is_named(answers: list[bytes], routes: Routes) -> None:
    class Foreign(flight.FlightServerBase):
        def do_action(self, context: Any, action: Any) -> list[bytes]:
            return answers

    server = Foreign("grpc://127.0.0.1:0")
    try:
        with pytest.raises(RunError, match=f"teachers at .*: {len(answers)} answers to hello, wanted one"):
            remote(f"grpc://127.0.0.1:{server.port}", routes)
    finally:
        server.shutdown()


# A connection that breaks


class Proxy:
    """A TCP line to the server that can be cut after so many bytes of the answer, or go silent."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"grpc://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self.cut_after: list[int | None] = []
        """For each further connection, bytes of answer until it is cut; None: never. Afterwards: never."""
        self.silent = threading.Event()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break what is connected."""
        for end in self._open:
            with suppress(OSError):  # the other end may have gone first
                end.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            try:
                far = socket.create_connection(("127.0.0.1", self._upstream))
            except OSError:  # the server stopped; the client is told by the line going dead
                near.close()
                continue
            self._open += [near, far]
            left = self.cut_after.pop(0) if self.cut_after else None
            threading.Thread(target=self._pump, args=(near, far, None), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, left), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, left: int | None) -> None:
        try:
            while data := source.recv(4096):
                if self.silent.is_set():
                    continue
                if left is not None and len(data) >= left:
                    sink.sendall(data[:left])
                    break
                left = None if left is None else left - len(data)
                sink.sendall(data)
            for end in (source, sink):
                end.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


@pytest.fixture
def proxied(routes: Routes, serve: Any) -> Iterator[tuple[Proxy, Served]]:
    served = serve(local_pool(routes), routes)
    proxy = Proxy(served.server.port)
    yield proxy, served
    proxy.close()


@pytest.mark.parametrize("after", [1, 2000, 9000])
def test_a_connection_that_breaks_is_tried_again(after: int, routes: Routes, proxied: tuple[Proxy, Served]) -> None:
    proxy, _ = proxied
    scoring = remote(proxy.url, routes)
    wanted = score(local_pool(routes))
    assert sum(map(len, wanted.parts)) > 12000
    proxy.cut_after = [after, None]
    before = proxy.connections
    proxy.cut()
    same_targets(score(scoring), wanted)
    assert proxy.connections >= before + 2


class Wavering:
    """A pool that breaks once after its first part, and whose log-probs differ in the last bits each time, as an engine's may."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.head_of = pool.head_of
        self.calls = 0

    def score(self, rollouts: Any) -> Any:
        self.calls += 1
        self._targets, self._taken = self._pool.score(rollouts), 0
        return self

    def take_part(self) -> Any:
        if self.calls == 1 and self._taken == 1:
            raise flight.FlightUnavailableError("the line is dead")
        part = self._targets.take_part()
        if part is None:
            return None
        self._taken += 1
        found = read_stream(bytes(cluster.fetch_object(part.handle)))
        rows = [dataclasses.replace(row, answer=self._nudged(row.answer)) for row in found.rows]
        raw = np.frombuffer(write_stream(rows, found.dtype, found.payload, found.part), dtype=np.uint8)
        return dataclasses.replace(part, handle=cluster.put_object(raw))

    def _nudged(self, answer: Any) -> Any:
        return dataclasses.replace(answer, teacher_logprobs=[x - 1e-5 * self.calls for x in answer.teacher_logprobs])


def test_what_came_before_a_break_is_left_out_although_the_second_scores_differ(routes: Routes, serve: Any) -> None:
    payload = PAYLOADS["log-probs"]
    pool = Wavering(local_pool(routes, **payload))
    found = score(remote(serve(pool, routes, **payload).url, routes, **payload))
    assert pool.calls == 2
    assert len(found.parts) == 2 and len(rows_of(found)) == found.rows == 12


def test_a_connection_that_breaks_in_the_middle_every_time(routes: Routes, proxied: tuple[Proxy, Served]) -> None:
    proxy, _ = proxied
    scoring = remote(proxy.url, routes)
    proxy.cut_after = [9000] * 50
    proxy.cut()
    with pytest.raises(RunError, match=rf"teachers at {proxy.url}: no answer to `score` in 3 attempts: \S"):
        score(scoring)


def test_a_server_that_is_gone_or_was_never_there(routes: Routes, serve: Any) -> None:
    served = serve(local_pool(routes), routes)
    scoring = remote(served.url, routes)
    served.server.shutdown()
    with pytest.raises(RunError, match=rf"teachers at {served.url}: no answer to `score` in 3 attempts: \S"):
        score(scoring)
    with pytest.raises(RunError, match="no answer to `hello` in 3 attempts"):
        remote(served.url, routes)


def test_a_server_that_goes_silent_meets_the_deadline(routes: Routes, proxied: tuple[Proxy, Served]) -> None:
    proxy, _ = proxied
    scoring = remote(proxy.url, routes, phase_s=3)
    proxy.silent.set()
    began = time.monotonic()
    with pytest.raises(RunError, match=rf"teachers at {proxy.url}: `score` took longer than 3 s"):
        score(scoring)
    assert 2 < time.monotonic() - began < 20


def test_retries_share_the_deadline(routes: Routes, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve(local_pool(routes), routes)
    scoring = remote(served.url, routes, phase_s=3)
    served.server.shutdown()
    monkeypatch.setattr(flight_client, "RETRY_WAITS_S", (0.1, 1000.0))
    began = time.monotonic()
    with pytest.raises(RunError, match="no answer to `score` in 2 attempts"):
        score(scoring)
    assert time.monotonic() - began < 20


# Several at once


class Slow:
    """A pool that takes its time and notices if it is asked twice at once."""

    def __init__(self, pool: Pool, seconds: float) -> None:
        self._pool, self._seconds = pool, seconds
        self.heads, self.read_head, self.head_of = pool.heads, pool.read_head, pool.head_of
        self.inside = self.most = self.calls = 0

    def score(self, rollouts: Any) -> Any:
        self.inside += 1
        self.calls += 1
        self.most = max(self.most, self.inside)
        time.sleep(self._seconds)
        targets = self._pool.score(rollouts)
        self.inside -= 1
        return targets


def test_steps_of_several_clients_are_scored_one_after_the_other(routes: Routes, serve: Any) -> None:
    slow = Slow(local_pool(routes), 0.3)
    served = serve(slow, routes)
    parts = [ROLLOUTS[:4], ROLLOUTS[4:], ROLLOUTS[1::2]]
    # Ready beforehand: a worker of Ray's does one thing after the other, these plain objects would give a head and score.
    clients = [remote(served.url, routes) for _ in parts]
    found: dict[int, Any] = {}

    def ask(i: int) -> None:
        found[i] = score(clients[i], parts[i])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for i, part in enumerate(parts):
        same_targets(found[i], score(local_pool(routes), part))
    assert (slow.most, slow.calls) == (1, 3)


def test_a_client_that_left_is_not_scored_and_a_busy_server_says_so(routes: Routes, serve: Any) -> None:
    slow = Slow(local_pool(routes), 4.0)
    served = serve(slow, routes, busy_s=1)
    patient, second = remote(served.url, routes), remote(served.url, routes)
    first = threading.Thread(target=score, args=(patient,))
    first.start()
    while not slow.inside:
        time.sleep(0.01)
    with pytest.raises(RunError, match=r"others' steps took longer than 1 s"):
        score(second)
    first.join(timeout=60)
    served = serve(slow, routes)
    hasty = remote(served.url, routes, phase_s=1)
    first = threading.Thread(target=score, args=(remote(served.url, routes),))
    first.start()
    while not slow.inside:
        time.sleep(0.01)
    with pytest.raises(RunError, match="`score` took longer than 1 s"):
        score(hasty)
    first.join(timeout=60)
    time.sleep(0.5)
    assert slow.calls == 2, "the one who left was not scored"


def test_a_taken_address_is_an_error(routes: Routes, serve: Any) -> None:
    with pytest.raises(RunError, match=r"cannot serve at 192\.0\.2\.1:1: \S"):
        serve(
            local_pool(routes),
            routes,
            door=ListenAddress(address=protocol_address("192.0.2.1", 1), tls=None, token=None),
        )


def protocol_address(host: str, port: int) -> Any:
    from opd.machine.address import Address

    return Address(host, port)


class Large:
    """A pool whose first step has more than a connection holds; the others are the real pool's."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.head_of, self.read_head = pool.head_of, pool.read_head
        self.calls = self.taken = 0

    def score(self, rollouts: Any) -> Any:
        self.calls += 1
        return self if self.calls == 1 else self._pool.score(rollouts)

    def take_part(self) -> Any:
        self.taken += 1
        raw = np.zeros(4 << 20, np.uint8)
        return make_stream_part(cluster.put_object(raw)) if self.taken < 100 else None


def test_a_client_that_stops_reading_loses_its_turn(
    routes: Routes, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "SLICE_BYTES", 1 << 20)
    wanted = score(local_pool(routes))
    pool = Large(local_pool(routes))
    served = serve(pool, routes, busy_s=6)
    stuck = remote(served.url, routes)
    reading = stuck._exchange_rollouts(ROLLOUTS, flight.FlightCallOptions(timeout=60))
    assert len(next(reading)) == 4 << 20
    same_targets(score(remote(served.url, routes)), wanted)
    assert pool.taken < 30, "no faster than the client takes them"
    assert any("the client took nothing for 3 s" in line for line in served.said)
    with pytest.raises(flight.FlightError, match="the server's turn went to others"):
        list(reading)
    same_targets(score(remote(served.url, routes)), wanted)
