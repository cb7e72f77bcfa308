"""`opd teachers serve`: serve the teachers of a pipeline to merges on other machines."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opd.cluster import ray_session
from opd.config import PipelineConfig
from opd.config.payloads import OWN_TOKENS
from opd.config.teachers import FlightTeachers, TextTeachers, TrainerTeachers
from opd.errors import ConfigError
from opd.machine.signals import raise_interrupt
from pipelines.inputs.read import read_teachers, refuse_without_experts
from pipelines.inputs.teacher_prompts import name_prompt
from pipelines.placement import place_teachers
from pipelines.specs import pool_spec
from pipelines.teacher_groups import divide_by_engine
from teachers.flight.access import ListenAddress
from teachers.flight.server import PoolServer, make_hello
from teachers.pool import Pool

STOPPING = (signal.SIGINT, signal.SIGTERM)


def serve_teachers(
    config: PipelineConfig, door: ListenAddress, say: Callable[[str], None], warn: Callable[[str], None]
) -> None:
    """Serve until Ctrl-C or SIGTERM, which end a step that is being scored. `say` gets the address once it answers.

    Raises: OpdError before anything starts; RunError if a teacher does not load, or if the server cannot listen there.
    """
    engine = config.engines[0]
    if isinstance(engine, FlightTeachers | TextTeachers | TrainerTeachers):
        raise ConfigError.at(
            "teachers.engine",
            found=engine.engine,
            wanted="an engine that scores here, in workers of its own",
            fix="serve the pipeline with --set teachers={}, or one without teachers.address",
        )
    if len(config.engines) > 1 or config.own_objectives:
        raise ConfigError.at(
            "experts",
            found="experts with engines, or domains with objectives, of their own",
            wanted="teachers of one engine: a server answers with one payload",
            fix="serve the experts of each engine from a pipeline of their own",
        )
    refuse_without_experts(config, "`opd teachers serve`")
    if engine.payload == OWN_TOKENS:
        raise ConfigError.at(
            "teachers.payload",
            found=OWN_TOKENS,
            wanted="experts that read the student's tokens: a server has neither its tokenizer nor the rows",
            fix="start the engine in the merge",
        )
    for name in config.teacher_prompts:
        raise ConfigError.at(
            name_prompt(config, name),
            found="a prompt of its own",
            wanted="experts that read what the student reads: a server gets no rows, of which the prompt is made",
            fix="remove it, or start the engine in the merge",
        )
    _refuse_taken(door)
    teaching = read_teachers(config)
    for warning in teaching.warnings:
        warn(f"warning: {warning}")
    (group,) = divide_by_engine(config, teaching.scoring)
    config, spec = group.config, pool_spec(group.config, teaching.student.vocab_size)
    with ray_session(config.cluster, config.teachers.scoring_workers), _treat_sigterm_as_interrupt():
        place_teachers(config)
        pool = Pool(spec, teaching.scoring)
        pool.wait_ready()
        hello = make_hello(spec.scorer, teaching.scoring, pool)
        server = PoolServer(pool, hello, door, timeout_s=config.cluster.phase_timeout_s, say=warn)
        say(f"{config.name}: {', '.join(teaching.routes)} served at {door.url(server.port)}")
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            warn("stopping; once more ends at once")
        finally:
            for number in STOPPING:
                signal.signal(number, signal.SIG_DFL)
            pool.stop()  # first, so that nothing waits for the step that is being scored
            server.shutdown()


def _refuse_taken(door: ListenAddress) -> None:
    """Refuse a port that is in use: gRPC would share it with another server of ours, and each would get some requests."""
    address = door.address
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            raise ConfigError.at(
                "--listen",
                found=f"{address}: {error.strerror}",
                wanted="an address of this machine with a free port",
                fix="stop what listens there, or choose another port; port 0 takes a free one",
            ) from None


@contextmanager
def _treat_sigterm_as_interrupt() -> Iterator[None]:
    """Make a context in which SIGTERM does what Ctrl-C does. Enter it after Ray has started, because Ray replaces the handler."""
    handlers = {number: signal.signal(number, raise_interrupt) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
