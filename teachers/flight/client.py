"""The pool of a merge whose teachers are served elsewhere: it asks an `opd teachers serve` over Arrow Flight."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from pyarrow import flight

from opd import cluster
from opd.errors import RunError
from opd.models.heads import HeadSource, head_key, head_tensor
from opd.models.logit_rule import LogitRule
from opd.payloads import answer_class
from opd.records.types import LayoutProof, Rollout
from opd.stream.part_files import PartsDirectory
from opd.stream.rollouts import SCHEMA as ROLLOUTS
from opd.stream.schema import VERSION as STREAM_VERSION
from opd.stream.schema import StreamError, read_part_record
from opd.stream.targets import TargetStream, TeacherRequest, make_part
from teachers.flight.access import read_root_certs, read_token
from teachers.flight.protocol import (
    SLICES,
    Hello,
    ProtocolError,
    ScoreReply,
    ScoreRequest,
    ServedTeacher,
    encode_batches,
    parse_record,
)
from teachers.pool import Routes, expected_rows, refuse_unknown_domains

RETRY_WAITS_S = (1.0, 4.0)
"""Pauses between attempts, if the server cannot be reached or the connection breaks."""
CHANNEL_OPTIONS = [("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 1000)]
"""Without these options gRPC would wait up to two minutes before it tries to connect again."""
HEAD_DTYPES = {"float32": "float32", "bfloat16": "int16"}
"""Type of a head -> type of the array that travels. numpy has no bfloat16, so int16 holds its bits."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightSpec:
    """The address of the served teachers, and what this side expects of them."""

    address: str
    """Address of the server: `grpc+tls://HOST:PORT`, or `grpc://HOST:PORT` on this machine."""
    tls_root_certs: Path | None = None
    """PEM file with the certificates to trust; None without TLS."""
    token_file: Path | None = None
    """File with the server's token; None: OPD_TEACHERS_TOKEN."""
    payload: str
    """Kind of data sent per response token."""
    dtype: str
    """Type of the hidden states and heads that are sent."""
    top_k: int = 0
    """Tokens of a `top_k` payload."""
    vocab_size: int
    """Ids that the tokenizer knows."""
    max_quarantined: float
    """Share of a step's responses that may be left out before the run stops."""
    start_timeout_s: float
    """Deadline for the server's first answers."""
    timeout_s: float
    """Deadline of a step's answer."""


class FlightPool:
    """Implements `opd.interfaces.TeacherPool` with an `opd teachers serve`, and checks whatever it can of the answers."""

    def __init__(self, spec: FlightSpec, routes: Routes) -> None:
        """It connects at the first call. Raises: ConfigError if the token or the certificates cannot be used."""
        self._spec = spec
        self._routes = routes
        token = read_token(spec.token_file)
        self._headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        self._client = flight.FlightClient(
            spec.address, tls_root_certs=read_root_certs(spec.tls_root_certs), generic_options=CHANNEL_OPTIONS
        )
        self._identity = ""
        self._served_teachers: dict[tuple[str, str], ServedTeacher] = {}
        self.layouts: dict[str, LayoutProof] = {}
        """Empty: the server proves the layouts of its teachers itself."""
        self._sends_heads = answer_class(spec.payload).SENDS_HEADS
        self._heads: dict[str, HeadSource] = {}

    def wait_ready(self) -> None:
        """Compare what is served with the pipeline, then fetch each distinct head.

        Raises: RunError if the server cannot be reached, refuses the token, or serves something else.
        """
        timeout_s = self._spec.start_timeout_s
        hello = self._call_with_retry("hello", timeout_s, self._request_hello)
        self._refuse_mismatch(hello)
        self._identity = hello.compute_identity()
        self._served_teachers = {(d, t.name): t for d in self._routes for t in hello.domains[d]}
        for key in sorted({t.head for t in self._served_teachers.values()}):
            if key not in hello.heads:
                raise ProtocolError(f"{self}: no logit rule for head {key}")
            if self._sends_heads and key not in self._heads:
                rule = hello.heads[key].to_logit_rule()
                head_V_D = self._call_with_retry("head", timeout_s, partial(self._request_head, key, rule))
                self._heads[key] = HeadSource(
                    key=key, rule=rule, handle=cluster.StoredValue(cluster.put_object(head_V_D))
                )

    def score(self, rollouts: Sequence[Rollout], directory: PartsDirectory | None = None) -> TargetStream:
        """Have every rollout scored by the teachers of its domain; the server is asked when the first part is taken.

        The parts come to this process, so that it writes none into `directory`: the log does.

        Taking parts raises: RunError for an answer that is not exactly what was asked for, or if the server refuses or
        cannot be reached. Raises: RunError for a domain without a teacher.
        """
        refuse_unknown_domains(rollouts, self._routes)
        domains = {r.domain for r in rollouts}
        keys = {a.teacher.name: self._served_teachers[d, a.teacher.name].head for d in domains for a in self._routes[d]}
        return TargetStream(
            (make_part(raw, str(self)) for raw in self._iterate_parts(rollouts)),
            TeacherRequest(
                rollouts=rollouts,
                teachers=expected_rows(domains, self._routes, keys if self._sends_heads else {}),
                kind=(self._spec.dtype, self._spec.payload),
                max_quarantined=self._spec.max_quarantined,
                sender=str(self),
            ),
            heads={key: self._heads[key] for key in sorted(set(keys.values()) & set(self._heads))},
        )

    def heads(self) -> Mapping[str, HeadSource]:
        """Return content hash -> head, once the pool is ready."""
        return self._heads

    def __str__(self) -> str:
        return f"teachers at {self._spec.address}"

    # Requests to the server

    def _request_hello(self, options: Any) -> Hello:
        results = list(self._client.do_action(flight.Action("hello", b""), options))
        if len(results) != 1:
            raise ProtocolError(f"{len(results)} answers to hello, wanted one: is it an `opd teachers serve`?")
        return parse_record(Hello, results[0].body.to_pybytes())

    def _request_head(self, key: str, rule: LogitRule, options: Any) -> np.ndarray:
        reader = self._client.do_get(flight.Ticket(key.encode()), options)
        meta = {k.decode(): v.decode() for k, v in (reader.schema.metadata or {}).items()}
        pieces = [_read_slice(chunk.data) for chunk in reader]
        head_dtype = HEAD_DTYPES[self._spec.dtype]
        shape = [int(n) for n in meta.get("opd.shape", "").split("x") if n.isdigit()]
        raw = np.concatenate([np.zeros(0, np.uint8), *pieces])
        if (
            meta.get("opd.dtype") != head_dtype
            or len(shape) != 2
            or raw.nbytes != np.prod(shape) * np.dtype(head_dtype).itemsize
        ):
            raise ProtocolError(f"head {key} came as {meta} with {raw.nbytes} bytes, wanted {head_dtype} of that shape")
        head_V_D = raw.view(head_dtype).reshape(shape)
        received_key = head_key(head_tensor(head_V_D), rule)
        if received_key != key:
            raise ProtocolError(f"the head that came for {key} hashes to {received_key}")
        return head_V_D

    def _iterate_parts(self, rollouts: Sequence[Rollout]) -> Iterator[np.ndarray]:
        """Yield the bytes of the parts as they come.

        After a broken connection the whole request is sent again. Parts that came before are recognised by their numbers
        and skipped. Their bytes would not do, because an engine's second scores may differ in the last bits.
        """
        received: set[tuple[int, int]] = set()
        for attempt in self._iterate_attempts("score", self._spec.timeout_s):
            received_before = frozenset(received)
            with attempt as options:
                for raw in self._exchange_rollouts(rollouts, options):
                    part_id = self._read_part_id(raw)
                    if part_id not in received_before:
                        received.add(part_id)
                        yield raw
                return

    def _read_part_id(self, raw: np.ndarray) -> tuple[int, int]:
        """Return the number of the worker that made a part, and the part's number at this worker. Raises: StreamError."""
        try:
            record = read_part_record(raw.data)
        except StreamError as error:
            raise StreamError(f"{self}: {error}") from None
        return record.worker, record.number

    def _exchange_rollouts(self, rollouts: Sequence[Rollout], options: Any) -> Iterator[np.ndarray]:
        """Send the rollouts and yield the bytes of each part. Raises: ProtocolError if the answer is cut or incomplete."""
        request = ScoreRequest(served=self._identity, rollouts=len(rollouts)).model_dump_json().encode()
        writer, reader = self._client.do_exchange(flight.FlightDescriptor.for_command(request), options)
        with writer:
            writer.begin(ROLLOUTS)
            for batch in encode_batches(rollouts):
                writer.write_batch(batch)
            writer.done_writing()
            sizes: list[int] = []
            pieces: list[np.ndarray] = []
            reply: ScoreReply | None = None
            for chunk in reader:
                if chunk.data is None:
                    reply = parse_record(ScoreReply, chunk.app_metadata.to_pybytes())
                    continue
                pieces.append(_read_slice(chunk.data))
                if chunk.app_metadata is not None:  # PART_ENDS: this was the last slice of a part
                    raw, pieces = np.concatenate(pieces), []
                    sizes.append(raw.nbytes)
                    yield raw
        if reply is None:
            raise ProtocolError("the answer ended without its last record: it was cut")
        if pieces or tuple(sizes) != reply.sizes:
            raise ProtocolError(f"parts of {sizes} bytes arrived, {list(reply.sizes)} were sent")

    def _call_with_retry(self, operation: str, timeout_s: float, request: Callable[[Any], T]) -> T:
        """Send a request with one answer, again if the connection breaks. Raises: as `_iterate_attempts`."""
        for attempt in self._iterate_attempts(operation, timeout_s):
            with attempt as options:
                return request(options)
        raise AssertionError("the last attempt returns or raises")

    def _iterate_attempts(self, operation: str, timeout_s: float) -> Iterator[AbstractContextManager[Any]]:
        """Yield a context manager for each attempt; the caller makes the call within and leaves the loop on success.

        The context gives the call options. If the server cannot be reached it swallows the error and pauses; the last one
        raises it. All attempts share the deadline. Raises: RunError.
        """
        deadline = time.monotonic() + timeout_s
        for number, wait_s in enumerate((*RETRY_WAITS_S, None), start=1):
            yield self._try_call(f"`{operation}`", number, timeout_s, deadline, wait_s)

    @contextmanager
    def _try_call(
        self, operation: str, number: int, timeout_s: float, deadline: float, wait_s: float | None
    ) -> Iterator[Any]:
        left_s = max(0.001, deadline - time.monotonic())
        try:
            yield flight.FlightCallOptions(timeout=left_s, headers=self._headers)
        except flight.FlightTimedOutError:
            raise RunError(
                f"{self}: {operation} took longer than {timeout_s:.0f} s (cluster.phase_timeout_s / start_timeout_s)"
            ) from None
        except flight.FlightUnauthenticatedError as error:
            raise RunError(
                f"{self}: {_extract_message(error)}; give the server's by teachers.token_file or OPD_TEACHERS_TOKEN"
            ) from None
        except (flight.FlightUnavailableError, flight.FlightCancelledError) as error:
            if wait_s is None or time.monotonic() + wait_s > deadline:
                attempts = f"{number} attempt{'s' if number > 1 else ''}"
                raise RunError(f"{self}: no answer to {operation} in {attempts}: {_extract_message(error)}") from None
            time.sleep(wait_s)
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            raise RunError(f"{self}: {operation} failed: {_extract_message(error)}") from None
        except ProtocolError as error:
            raise ProtocolError(f"{self}: {error}") from None

    # Checks

    def _refuse_mismatch(self, hello: Hello) -> None:
        """Refuse a server that serves something else than the pipeline wants. Raises: RunError with the values of both sides."""
        local = {
            "stream version": STREAM_VERSION,
            "payload": self._spec.payload,
            "dtype": self._spec.dtype,
            "objective.k": self._spec.top_k,
            "vocabulary": self._spec.vocab_size,
        }
        remote = dict(
            zip(local, (hello.stream, hello.payload, hello.dtype, hello.top_k, hello.vocab_size), strict=True)
        )
        for domain, part in self._routes.items():
            local[f"domain {domain}"] = sorted(
                (a.teacher.name, float(np.float32(a.weight)), a.teacher.digest) for a in part
            )
            remote[f"domain {domain}"] = sorted(
                (t.name, float(np.float32(t.weight)), t.digest) for t in hello.domains.get(domain, ())
            )
        for field, local_value in local.items():
            if remote[field] != local_value:
                raise RunError(
                    f"{self}: {field}: they have {_format_value(remote[field])}, this pipeline {_format_value(local_value)}"
                )


def _read_slice(batch: pa.RecordBatch) -> np.ndarray:
    """Return the bytes of a slice. Raises: ProtocolError for a batch of another shape."""
    if not batch.schema.equals(SLICES) or batch.num_rows != 1 or any(c.null_count for c in batch.columns):
        raise ProtocolError(f"a batch of {batch.num_rows} rows with columns {batch.schema.names}, wanted one slice")
    raw: Any = batch.column("bytes")[0].as_buffer()
    return np.frombuffer(raw, np.uint8)


def _extract_message(error: Any) -> str:
    """Return the server's own message, without gRPC's additions."""
    extra = getattr(error, "extra_info", None)
    return (
        extra.decode(errors="replace") if extra else str(error).partition(". Detail:")[0].partition(". gRPC client")[0]
    )


def _format_value(value: object) -> str:
    """Format a value for an error, with digests shortened to 12 digits."""
    if isinstance(value, list):
        return ", ".join(f"{name} ({weight:.3g}, {digest[:12]})" for name, weight, digest in value) or "no teacher"
    return str(value)
