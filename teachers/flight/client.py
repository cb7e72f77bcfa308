"""The pool as a trainer sees it when its teachers are served elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from pyarrow import flight

from opd import cluster
from opd.config import PipelineConfig
from opd.errors import RunError
from opd.interfaces import TargetSet
from opd.losses.chunked import LogitRule
from opd.stream.heads import head_key, head_tensor
from opd.stream.schema import VERSION as STREAM_VERSION
from opd.stream.schema import StreamError, TargetRow, read_stream
from opd.types import Rollout
from teachers.flight.access import read_roots, read_token
from teachers.flight.protocol import (
    ROLLOUTS,
    SLICES,
    Hello,
    ProtocolError,
    Reply,
    Request,
    ServedTeacher,
    parse,
    rollout_batches,
)
from teachers.pool import Routes, refuse_many_broken, refuse_unknown_domains, rows_wanted, scorer_options

RETRY_WAITS_S = (1.0, 4.0)
"""Pauses between the attempts when the server cannot be reached or the connection breaks."""
CHANNEL_OPTIONS = [("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 1000)]
"""gRPC refuses to try again for up to two minutes otherwise, whoever asks."""
HEAD_DTYPES = {"float32": "float32", "bfloat16": "int16"}
"""Of the arrays that travel; numpy has no bfloat16."""

T = TypeVar("T")


class FlightPool:
    """Implements `opd.interfaces.TeacherPool`: asks an `opd teachers serve` and believes nothing it can check."""

    def __init__(self, config: PipelineConfig, routes: Routes, vocab_size: int) -> None:
        """`vocab_size` is the tokenizer's. Connects at the first call. Raises: ConfigError for token or certificates."""
        self._address = config.teachers.address
        self._routes = routes
        self._options = scorer_options(config, vocab_size)
        self._timeout_s = config.cluster.phase_timeout_s
        self._start_timeout_s = config.cluster.start_timeout_s
        self._max_quarantined = config.teachers.max_quarantined
        token = read_token(config.teachers.token_file)
        self._headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        self._client = flight.FlightClient(
            self._address, tls_root_certs=read_roots(config.teachers), generic_options=CHANNEL_OPTIONS
        )
        self._identity = ""
        self._served: dict[tuple[str, str], ServedTeacher] = {}
        self._heads: dict[str, Any] = {}
        self._head_rules: dict[str, LogitRule] = {}

    def wait_ready(self) -> None:
        """Compare what is served with the pipeline, then fetch each distinct head.

        Raises: RunError if the server cannot be reached, refuses the token, or serves something else.
        """
        hello = self._ask("hello", self._start_timeout_s, self._hello)
        self._refuse_other(hello)
        self._identity = hello.identity()
        self._served = {(d, t.name): t for d in self._routes for t in hello.domains[d]}
        for key in sorted({t.head for t in self._served.values()}):
            if key not in hello.heads:
                raise ProtocolError(f"{self}: no logit rule for head {key}")
            self._head_rules[key] = hello.heads[key].rule()
            if self._options.payload == "hidden_states" and key not in self._heads:
                head_V_D = self._ask("head", self._start_timeout_s, partial(self._head, key))
                self._heads[key] = cluster.put(head_V_D)

    def score(self, rollouts: Sequence[Rollout]) -> TargetSet:
        """Every rollout scored by the teachers of its domain.

        Raises: RunError for a domain without a teacher, an answer that is not exactly what was asked, a server that
        refuses or stays away, or more than `teachers.max_quarantined` responses that could not be scored.
        """
        refuse_unknown_domains(rollouts, self._routes)
        streams, reply = self._ask("score", self._timeout_s, partial(self._score, rollouts))
        self._check(rollouts, streams, reply)
        refuse_many_broken(reply.quarantined, len(rollouts), self._max_quarantined)
        keys = sorted({self._served[r.domain, a.teacher.name].head for r in rollouts for a in self._routes[r.domain]})
        return TargetSet(
            streams=tuple(cluster.put(stream) for stream in streams),
            heads={key: self._heads[key] for key in keys if key in self._heads},
            head_rules={key: self._head_rules[key] for key in keys if key in self._heads},
            quarantined=reply.quarantined,
            rows=reply.rows,
        )

    def __str__(self) -> str:
        return f"teachers at {self._address}"

    # The three questions

    def _hello(self, options: Any) -> Hello:
        (result,) = self._client.do_action(flight.Action("hello", b""), options)
        return parse(Hello, result.body.to_pybytes())

    def _head(self, key: str, options: Any) -> np.ndarray:
        reader = self._client.do_get(flight.Ticket(key.encode()), options)
        meta = {k.decode(): v.decode() for k, v in (reader.schema.metadata or {}).items()}
        pieces = [_piece(chunk.data)[1] for chunk in reader]
        wanted = HEAD_DTYPES[self._options.dtype]
        shape = [int(n) for n in meta.get("opd.shape", "").split("x") if n.isdigit()]
        raw = np.concatenate([np.zeros(0, np.uint8), *pieces])
        if (
            meta.get("opd.dtype") != wanted
            or len(shape) != 2
            or raw.nbytes != np.prod(shape) * np.dtype(wanted).itemsize
        ):
            raise ProtocolError(f"head {key} came as {meta} with {raw.nbytes} bytes, wanted {wanted} of that shape")
        head_V_D = raw.view(wanted).reshape(shape)
        found = head_key(head_tensor(head_V_D), self._head_rules[key])
        if found != key:
            raise ProtocolError(f"the head that came for {key} hashes to {found}")
        return head_V_D

    def _score(self, rollouts: Sequence[Rollout], options: Any) -> tuple[list[np.ndarray], Reply]:
        request = Request(served=self._identity, rollouts=len(rollouts)).model_dump_json().encode()
        writer, reader = self._client.do_exchange(flight.FlightDescriptor.for_command(request), options)
        with writer:
            writer.begin(ROLLOUTS)
            for batch in rollout_batches(rollouts):
                writer.write_batch(batch)
            writer.done_writing()
            pieces: dict[int, list[np.ndarray]] = {}
            reply: Reply | None = None
            for chunk in reader:
                if chunk.data is None:
                    reply = parse(Reply, chunk.app_metadata.to_pybytes())
                else:
                    stream, piece = _piece(chunk.data)
                    pieces.setdefault(stream, []).append(piece)
        if reply is None:
            raise ProtocolError("the answer ended without its last record: it was cut")
        streams = [np.concatenate([np.zeros(0, np.uint8), *pieces.pop(i, [])]) for i in range(len(reply.sizes))]
        if pieces or tuple(s.nbytes for s in streams) != reply.sizes:
            raise ProtocolError(
                f"streams of {[s.nbytes for s in streams]} bytes arrived, {list(reply.sizes)} were sent"
            )
        return streams, reply

    def _ask(self, what: str, timeout_s: float, question: Callable[[Any], T]) -> T:
        """One question, asked again if the server cannot be reached; all attempts share the deadline."""
        deadline = time.monotonic() + timeout_s
        for wait_s in (*RETRY_WAITS_S, None):
            left_s = max(0.001, deadline - time.monotonic())
            try:
                return question(flight.FlightCallOptions(timeout=left_s, headers=self._headers))
            except flight.FlightTimedOutError:
                raise RunError(
                    f"{self}: `{what}` took longer than {timeout_s:.0f} s (cluster.phase_timeout_s / start_timeout_s)"
                ) from None
            except flight.FlightUnauthenticatedError as error:
                raise RunError(
                    f"{self}: {_words(error)}; give the server's by teachers.token_file or OPD_TEACHERS_TOKEN"
                ) from None
            except (flight.FlightUnavailableError, flight.FlightCancelledError) as error:
                if wait_s is None or time.monotonic() + wait_s > deadline:
                    raise RunError(
                        f"{self}: no answer to `{what}` in {len(RETRY_WAITS_S) + 1} attempts: {_words(error)}"
                    ) from None
                time.sleep(wait_s)
            except (flight.FlightError, pa.ArrowException, OSError) as error:
                raise RunError(f"{self}: `{what}` failed: {_words(error)}") from None
            except ProtocolError as error:
                raise ProtocolError(f"{self}: {error}") from None
        raise AssertionError("the last attempt returns or raises")

    # What is checked

    def _refuse_other(self, hello: Hello) -> None:
        """Raises: RunError naming what both sides have."""
        ours = {
            "stream version": STREAM_VERSION,
            "payload": self._options.payload,
            "dtype": self._options.dtype,
            "objective.k": self._options.top_k,
            "vocabulary": self._options.vocab_size,
        }
        theirs = dict(zip(ours, (hello.stream, hello.payload, hello.dtype, hello.top_k, hello.vocab_size), strict=True))
        for domain, part in self._routes.items():
            ours[f"domain {domain}"] = sorted(
                (a.teacher.name, float(np.float32(a.weight)), a.teacher.digest) for a in part
            )
            theirs[f"domain {domain}"] = sorted(
                (t.name, float(np.float32(t.weight)), t.digest) for t in hello.domains.get(domain, ())
            )
        for what, own in ours.items():
            if theirs[what] != own:
                raise RunError(f"{self}: {what}: they have {_shown(theirs[what])}, this pipeline {_shown(own)}")

    def _check(self, rollouts: Sequence[Rollout], streams: Sequence[np.ndarray], reply: Reply) -> None:
        """Each rollout once from each of its teachers, as it was sent. Raises: RunError, StreamError."""
        sent = {r.sample_id: r for r in rollouts}
        strange = sorted(set(reply.quarantined) - set(sent))
        if strange:
            raise ProtocolError(f"{self}: {strange[0]} is quarantined, but was not sent")
        wanted = {
            (r.sample_id, a.teacher.name): float(np.float32(a.weight)) for r in rollouts for a in self._routes[r.domain]
        }
        for raw in streams:
            try:
                stream = read_stream(pa.py_buffer(raw), self._options.vocab_size)
            except StreamError as error:
                raise StreamError(f"{self}: {error}") from None
            if (stream.dtype, stream.payload) != (self._options.dtype, self._options.payload):
                raise ProtocolError(f"{self}: a stream of {stream.payload} in {stream.dtype} arrived")
            for row in stream.rows:
                weight = wanted.pop((row.sample_id, row.teacher), None)
                rollout = sent.get(row.sample_id)
                if weight is None or rollout is None:
                    raise ProtocolError(
                        f"{self}: row {row.sample_id} of teacher {row.teacher}: not asked for, or twice"
                    )
                head = self._served[rollout.domain, row.teacher].head if stream.payload == "hidden_states" else ""
                if row.weight != weight or row.head != head:
                    raise ProtocolError(f"{self}: row {row.sample_id} of teacher {row.teacher}: another weight or head")
                if not _same(row, rollout):
                    raise ProtocolError(f"{self}: row {row.sample_id} of teacher {row.teacher}: not the rollout sent")
        # Of a quarantined response, a second teacher's row may be there all the same.
        missing = sorted(sample_id for sample_id, _ in wanted if sample_id not in reply.quarantined)
        if missing:
            raise ProtocolError(f"{self}: {len(missing)} rows are missing, first {missing[0]}")
        rows = rows_wanted(rollouts, self._routes, reply.quarantined)
        if reply.rows != rows:
            raise ProtocolError(f"{self}: they count {reply.rows} rows, wanted {rows}")


def _piece(batch: pa.RecordBatch) -> tuple[int, np.ndarray]:
    """Stream number and bytes of a slice."""
    if not batch.schema.equals(SLICES) or batch.num_rows != 1 or any(c.null_count for c in batch.columns):
        raise ProtocolError(f"a batch of {batch.num_rows} rows with columns {batch.schema.names}, wanted one slice")
    raw: Any = batch.column("bytes")[0].as_buffer()
    return batch.column("stream")[0].as_py(), np.frombuffer(raw, np.uint8)


def _same(row: TargetRow, rollout: Rollout) -> bool:
    return (
        (row.step, row.domain, row.policy_version) == (rollout.step, rollout.domain, rollout.policy_version)
        and tuple(row.prompt_ids) == rollout.prompt_ids
        and tuple(row.response_ids) == rollout.response_ids
        and tuple(row.loss_mask) == rollout.loss_mask
        and np.array_equal(
            np.array(row.behaviour_logprobs, np.float32), np.array(rollout.behaviour_logprobs, np.float32)
        )
    )


def _words(error: Any) -> str:
    """What the server said, without gRPC's additions."""
    extra = getattr(error, "extra_info", None)
    return (
        extra.decode(errors="replace") if extra else str(error).partition(". Detail:")[0].partition(". gRPC client")[0]
    )


def _shown(value: object) -> str:
    """Digests shortened: they are compared, not read."""
    if isinstance(value, list):
        return ", ".join(f"{name} ({weight:.3g}, {digest[:12]})" for name, weight, digest in value) or "no teacher"
    return str(value)
