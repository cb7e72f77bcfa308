"""Seconds and bytes of a push: new weights go from trainer to engines, and a probe proves them. docs/plan.md writes the formulas out.

shared_memory   rank 0 ─write→ its machine's memory ─read→ engines                            one machine
direct          ranks ─gather→ buffer ─link→ engines                                          any machines, at once
network         ranks ─gather→ bucket ─copy→ object store ─link→ object store ─copy→ engines   any machines, in line
                                                             └─copy─link→ object store ─copy→ engines
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from opd.config import PipelineConfig
from opd.errors import ConfigError
from opd.models.buckets import BUCKET_BYTES
from opd.settings.strict import DTYPE_BYTES
from opd.sync.proof import PROBE_SEQUENCES
from pipelines.plan.cost import Hardware, Seconds, WorkerHardware
from pipelines.plan.spec import ClusterSpec
from pipelines.sizing.shape import Shape

WIRE = 4.01 / 4
"""Bytes that cross a network for each byte of new weights, measured by `python -m benchmarks.push` in float32."""
WRITTEN, STORED, TAKEN, PASSED, LOADED = 1, 2, 1, 1, 3
"""Numbers of copies. Rank 0 writes a file (1), or fills a bucket and puts it into the object store (2). An engine takes a tensor out of its
bucket (1). A machine puts a bucket into its object store once more, for the next machine (1). vLLM's reload fills a layer, packs it, and
puts it in the place of the old one (3)."""
REPLACED = 1
"""Copies of a reload that go to memory which the process had before; all others go to memory that it has only just got."""

RANK_SHARE = 1 / 3
"""Share of a small push's time in which the ranks work, and not the engines: of the quickstart's 97 ms an engine's load took 70."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """One push to all engines."""

    config: PipelineConfig
    spec: ClusterSpec
    shape: Shape
    hardware: Hardware
    pushed: int
    """Numbers that are pushed."""

    @property
    def over_network(self) -> bool:
        return self.config.push_kind == "network"

    @property
    def is_direct(self) -> bool:
        return self.config.push_kind == "direct"

    @property
    def nbytes(self) -> int:
        return self.pushed * DTYPE_BYTES[self.config.trainer.dtype]

    @property
    def sent(self) -> float:
        """Bytes that are sent in one push. Through the object store each machine with an engine gets them once, from rank 0's machine or
        from another one; otherwise each engine does."""
        if not self.over_network:
            return float(self.nbytes * self.config.rollout.workers)
        return WIRE * self.nbytes * max(1, self._other_machines)

    @property
    def _other_machines(self) -> int:
        """Number of machines with engines but without rank 0, which is taken to be on one of theirs if the roles share devices, or if
        there is only one machine."""
        machines = self.hardware.rollout.machines
        return machines - 1 if self.hardware.shared or self.spec.machines == 1 else machines

    @property
    def _buckets(self) -> int:
        """Number of buckets. Each has room for the largest tensor, even if that is more than `BUCKET_BYTES`."""
        head = self.shape.head if self.pushed == self.shape.parameters else 0  # adapters leave it as it is
        largest = max(head, *(part.inputs * part.outputs for part in self.shape.parts))
        return ceil(self.nbytes / max(BUCKET_BYTES, largest * DTYPE_BYTES[self.config.trainer.dtype]))

    def push_seconds(self, prompt: int, gathered: float) -> Seconds:
        """Return the time of a push and its proof. `prompt`: tokens of the prompts from which the probe is made; `gathered`: seconds in which
        the ranks gather the weights."""
        # Ranks gather and prove, engines read and prove, on cores that they may have to share.
        slowdown = RANK_SHARE * self.hardware.trainer.slowdown + (1 - RANK_SHARE) * self.hardware.rollout.slowdown
        overhead = self.spec.overheads.phase.s + slowdown * self.spec.overheads.push.seconds(self.shape.tensors)
        out, into = self._send_seconds(), self._receive_seconds()
        link = gathered + out.link + into.link
        if self.is_direct or (self.over_network and (self.spec.machine.gpus or self._other_machines)):
            # The ranks gather the next bucket while the engines take one, so only the longer of the two takes time, but for one bucket.
            link -= min(gathered + out.link, into.link) * (1 - 1 / self._buckets)
        if self.over_network and self._other_machines > 1:
            # All machines take buckets at the same time, but the last bucket passes them one after the other.
            late = into.times((self._other_machines - 1) / self._buckets)
            link, into = link + late.link, into + late
        memory = out.memory + into.memory
        return Seconds(compute=self._probe_seconds(prompt), memory=memory, link=link, overhead=overhead)

    def _send_seconds(self) -> Seconds:
        """Return the time until gathered weights have left rank 0."""
        if self.is_direct:
            return Seconds(memory=self.hardware.trainer.copy_seconds(2 * self.nbytes))  # into the buffer
        if not self.over_network:
            return self._in_host(self.hardware.trainer, WRITTEN, 1.0)
        # With GPUs the way from the GPU fills the bucket, which saves a copy.
        return self._in_host(self.hardware.trainer, STORED - 1 if self.spec.machine.gpus else STORED, 1.0)

    def _receive_seconds(self) -> Seconds:
        """Return the time in which the weights come from rank 0 into the engines, which all read at the same time."""
        engine = self.hardware.rollout
        nbytes = 2 * LOADED * self.nbytes
        if not self.spec.machine.gpus:  # vLLM's CPU build multiplies with packed weights, and the head is packed apart
            nbytes += 2 * self.shape.head * DTYPE_BYTES[self.config.rollout.dtype]
        if self.is_direct:
            links = self.spec.links
            rate = (links.between if self._other_machines else links.inside) * self.spec.factors.link.share
            return Seconds(memory=engine.copy_seconds(nbytes), link=self.nbytes / rate)
        rate = self.spec.links.between * self.spec.factors.link.share
        wire = WIRE * self.nbytes * min(1, self._other_machines) / rate if self.over_network else 0.0
        seconds = self._in_host(engine, TAKEN if self.over_network else 0, max(1.0, engine.devices))
        # With GPUs no time is counted for the copy that is passed on: it is made while the engine takes its own, which is no shorter.
        if self.over_network and self._other_machines > 1 and not self.spec.machine.gpus:
            seconds += self._in_host(engine, PASSED, 1.0)
        loaded = engine.copy_seconds(nbytes) + engine.first_touch_seconds((LOADED - REPLACED) * self.nbytes)
        return seconds + Seconds(memory=loaded, link=wire)

    def _in_host(self, worker: WorkerHardware, copies: int, devices: float) -> Seconds:
        """Return the time of `copies` copies of all weights in the host's memory by one process; with GPUs, also of the way between host
        and `devices` GPUs, each of which gets its part."""
        if not self.spec.machine.gpus:
            return Seconds(
                memory=worker.copy_seconds(2 * copies * self.nbytes) + worker.first_touch_seconds(copies * self.nbytes)
            )
        rate = self.spec.links.load * self.spec.factors.link.share
        return Seconds(link=(copies + 1 / devices) * self.nbytes / rate)

    def _probe_seconds(self, prompt: int) -> float:
        """Return the seconds in which the trainer, and then the engines, compute the beginnings of a few prompts."""
        config, probe_tokens = self.config, self.config.sync.probe_tokens
        sequence_tokens = max(2, min(prompt, config.rollout.max_model_len - 1, probe_tokens // PROBE_SEQUENCES + 1))
        # The first token of a sequence has no log-prob, so each proves one token less than it has.
        tokens = sequence_tokens * max(PROBE_SEQUENCES, ceil(probe_tokens / (sequence_tokens - 1)))
        flops = self.shape.forward(tokens, sequence_tokens / 2) + 2 * tokens * self.shape.head
        share = self.spec.factors.forward.share
        engine_seconds = self.hardware.rollout.matmul_seconds(flops, config.rollout.dtype, share)
        trainer_seconds = self.hardware.trainer.matmul_seconds(flops, config.trainer.dtype, share)
        return engine_seconds + trainer_seconds


def refuse_apart(config: PipelineConfig, spec: ClusterSpec, hardware: Hardware) -> None:
    """Raises: ConfigError if engines and rank 0 are to share a memory but cannot be on one machine, as `opd merge` does when it
    places its workers."""
    if config.push_kind != "shared_memory" or spec.machines == 1:
        return
    engines = hardware.rollout.workers * hardware.rollout.devices
    together = engines if hardware.shared else engines + hardware.trainer.devices
    room = max(1, spec.machine.gpus)
    if hardware.rollout.machines == 1 and together <= room + 1e-9:
        return
    gpus = f", which have {together:g} GPUs, and {room} on a machine" if spec.machine.gpus else ""
    raise ConfigError.at(
        "sync.kind",
        found=f"shared_memory, with {hardware.rollout.workers} rollout engines and trainer rank 0 on several machines{gpus}",
        wanted="all of these on one machine, whose memory they share",
        fix="set sync.kind to network",
    )
