"""A pool behind an Arrow Flight server, so that other processes and other clusters can use it."""

from __future__ import annotations

import hmac
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
from blake3 import blake3
from pyarrow import flight

from opd import __version__, cluster
from opd.errors import OpdError, RunError
from opd.records.types import Rollout
from opd.stream.rollouts import check_schema, decode_rollouts
from teachers.flight.access import ListenAddress
from teachers.flight.protocol import (
    PART_ENDS,
    SLICES,
    Hello,
    ProtocolError,
    ScoreReply,
    ScoreRequest,
    ServedTeacher,
    WireRule,
    parse_record,
    split_slices,
)
from teachers.pool import Pool, Routes
from teachers.scorers import ScorerOptions

CLIENT_PARTS_AHEAD = 2
"""Scored parts that may wait for a slow client before scoring pauses."""
MAX_MESSAGE = 1000
"""Most characters of an error that are sent: errors travel in a header, and gRPC limits headers to 8 KiB."""


class TokenCheck(flight.ServerMiddlewareFactory):
    """Refuses every call that lacks the right header `authorization: Bearer TOKEN`."""

    def __init__(self, token: str) -> None:
        self._digest = blake3(f"Bearer {token}".encode()).digest()

    def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> None:
        credentials = headers.get("authorization", [""])
        # Digests are compared, so that the time that this takes reveals neither the token's length nor a prefix.
        if len(credentials) != 1 or not hmac.compare_digest(blake3(credentials[0].encode()).digest(), self._digest):
            raise flight.FlightUnauthenticatedError("wrong or missing token")


class PoolServer(flight.FlightServerBase):
    """Serves as soon as it is constructed. Each call has a thread of its own; steps are scored one after the other."""

    def __init__(
        self,
        pool: Pool,
        hello: Hello,
        endpoint: ListenAddress,
        *,
        timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        """`timeout_s`: longest wait for another client's step. `say` gets the server's own output.

        Raises: RunError if the server cannot listen at the address.
        """
        self._pool = pool
        self._hello = hello
        self._identity = hello.compute_identity()
        self._turn_lock = threading.Lock()
        self._timeout_s = timeout_s
        self._log = say
        tls = endpoint.tls
        try:
            super().__init__(
                endpoint.url(endpoint.address.port),
                tls_certificates=[(tls.cert, tls.key)] if tls else None,
                middleware={"token": TokenCheck(endpoint.token)} if endpoint.token else None,
            )
        except (pa.ArrowException, OSError) as error:
            raise RunError(f"cannot serve at {endpoint.address}: {error}") from None

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        """Answer the action `hello`: describe what is served. Any other action is refused."""
        with self._report_errors(context, action.type):
            if action.type != "hello":
                raise ProtocolError(f"no action {action.type!r}, only hello")
            return [self._hello.model_dump_json().encode()]

    def do_get(self, context: Any, ticket: Any) -> Any:
        """Return the matrix of the head whose hash is the ticket, as a stream of slices."""
        with self._report_errors(context, "head"):
            key = ticket.ticket.decode(errors="replace")
            if key not in self._hello.heads:
                raise ProtocolError(f"no head {key[:64]!r}")
            head_V_D = self._read_head(key, context)
        # numpy has no bfloat16, so the array of such a head has the type int16 with the same bits.
        meta = {"opd.dtype": str(head_V_D.dtype), "opd.shape": "x".join(map(str, head_V_D.shape))}
        schema = SLICES.with_metadata(meta)
        return flight.GeneratorStream(schema, split_slices(np.ascontiguousarray(head_V_D).data.cast("B")))

    def _read_head(self, key: str, context: Any) -> np.ndarray:
        try:
            return self._pool.read_head(key)
        except cluster.WorkerDied:
            with self._hold_turn(context):  # a step may restart workers too, and both must not do it at once
                return self._pool.read_head_with_restart(key)

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Read a step's rollouts from the client and write its scored rows, part by part as they come."""
        with self._report_errors(context, "score"):
            request = parse_record(ScoreRequest, descriptor.command)
            if request.served != self._identity:
                raise RunError(
                    "these are not the teachers that you began with: the server was started anew with others"
                )
            check_schema(reader.schema)
            rollouts = decode_rollouts(
                (chunk.data for chunk in reader if chunk.data is not None), self._hello.vocab_size
            )
            if len(rollouts) != request.rollouts:
                raise ProtocolError(f"{len(rollouts)} rollouts arrived, {request.rollouts} were announced")
            sizes = self._send_parts(rollouts, context, writer)
        writer.write_metadata(ScoreReply(sizes=tuple(sizes)).model_dump_json().encode())

    def _send_parts(self, rollouts: Sequence[Rollout], context: Any, writer: Any) -> list[int]:
        """Send parts as they are scored, but no faster than the client takes them. Returns their sizes in bytes.

        The scoring runs in another thread, which holds the server's turn. This thread may block as long as the client
        reads nothing; the other one then gives the turn up.
        """
        parts: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        free_slots, client_left = threading.Semaphore(CLIENT_PARTS_AHEAD), threading.Event()
        sizes: list[int] = []
        with ThreadPoolExecutor(1, "score") as thread:
            scoring = thread.submit(self._score_parts, rollouts, context, parts, free_slots, client_left)
            scoring.add_done_callback(lambda _: parts.put(None))
            try:
                writer.begin(SLICES)
                while (raw := parts.get()) is not None:
                    *first_slices, last = split_slices(raw)
                    for batch in first_slices:
                        writer.write_batch(batch)
                    writer.write_with_metadata(last, PART_ENDS)
                    sizes.append(len(raw))
                    free_slots.release()
            finally:
                client_left.set()
                free_slots.release()
        scoring.result()
        return sizes

    def _score_parts(
        self,
        rollouts: Sequence[Rollout],
        context: Any,
        parts: queue.SimpleQueue[memoryview | None],
        free_slots: threading.Semaphore,
        client_left: threading.Event,
    ) -> None:
        """Hold the server's turn and score part by part, each when a slot is free. Stop if the client leaves.

        Raises: FlightTimedOutError if the client takes nothing for half of the deadline.
        """
        with self._hold_turn(context):
            targets = self._pool.score(rollouts)
            while (part := targets.take_part()) is not None and not client_left.is_set():
                # Half of the time, because others wait `_timeout_s` for a turn.
                if not free_slots.acquire(timeout=self._timeout_s / 2):
                    self._log(f"score for {context.peer()}: the client took nothing for {self._timeout_s / 2:.0f} s")
                    raise flight.FlightTimedOutError("you took nothing for too long: the server's turn went to others")
                parts.put(memoryview(cluster.fetch_object(part.handle)).cast("B"))

    @contextmanager
    def _hold_turn(self, context: Any) -> Iterator[None]:
        """Wait until no other client's step is scored, and keep others waiting. Raises: RunError after `timeout_s`."""
        if not self._turn_lock.acquire(timeout=self._timeout_s):
            raise RunError(f"others' steps took longer than {self._timeout_s:.0f} s (cluster.phase_timeout_s)")
        try:
            if context.is_cancelled():  # the client left while it waited for its turn; its step would only delay others
                raise flight.FlightCancelledError("the client left")
            yield
        finally:
            self._turn_lock.release()

    @contextmanager
    def _report_errors(self, context: Any, operation: str) -> Iterator[None]:
        """Send an error that we worded ourselves to the client as it is, and show it in the server's output."""
        try:
            yield
        except (OpdError, RunError) as error:
            self._log(f"{operation} for {context.peer()}: {error}")
            message = str(error)[:MAX_MESSAGE]
            raise flight.FlightServerError(message, message.encode()) from None


def make_hello(options: ScorerOptions, routes: Routes, pool: Pool) -> Hello:
    """Describe what `pool` serves. It is ready, and was made with these options and routes."""
    heads = {a.teacher.name: pool.head_of(a.teacher) for part in routes.values() for a in part}
    return Hello(
        release=__version__,
        payload=options.payload,
        dtype=options.dtype,
        top_k=options.top_k,
        vocab_size=options.vocab_size,
        domains={
            domain: tuple(
                ServedTeacher(
                    name=a.teacher.name, weight=a.weight, digest=a.teacher.digest, head=heads[a.teacher.name].key
                )
                for a in part
            )
            for domain, part in sorted(routes.items())
        },
        heads={
            h.key: WireRule(scale=h.rule.scale, softcap=h.rule.softcap)
            for h in sorted(heads.values(), key=lambda h: h.key)
        },
    )
