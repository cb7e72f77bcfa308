"""New weights on their way from trainer to engines, and the probe that proves them. docs/plan.md writes the formulas out.

shared_memory   rank 0 ─write→ its machine's memory ─read→ engines                            one machine
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
"""Bytes that cross a network for each byte of new weights: `python -m benchmarks.push`, float32."""
WRITTEN, STORED, TAKEN, PASSED, LOADED = 1, 2, 1, 1, 3
"""Copies: rank 0 writes a file; it fills a bucket and puts it into the object store; an engine takes a tensor out of its bucket;
a machine puts a bucket into its object store once more, for the next one; vLLM's reload fills a layer, packs it, and puts it in the place of the old one."""
REPLACED = 1
"""Copies of a reload that go to memory which was there before; all others go to memory that has just been given."""

RANKS = 1 / 3
"""Share of a small push's time that the ranks work: of the quickstart's 97 ms an engine's load took 70."""


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
        return self.config.sync.kind == "network"

    @property
    def nbytes(self) -> int:
        return self.pushed * DTYPE_BYTES[self.config.trainer.dtype]

    @property
    def sent(self) -> float:
        """Bytes that machines send, or rank 0's process: each machine with an engine gets them once through the object store, from
        rank 0's or from another one; through shared memory each engine reads them."""
        if not self.over_network:
            return float(self.nbytes * self.config.rollout.workers)
        return WIRE * self.nbytes * max(1, self._away)

    @property
    def _away(self) -> int:
        """Machines with engines that are not rank 0's: it shares one where roles share devices, or the machine is the only one."""
        machines = self.hardware.rollout.machines
        return machines - 1 if self.hardware.shared or self.spec.machines == 1 else machines

    @property
    def _buckets(self) -> int:
        """Number of buckets: none has less room than the largest tensor takes."""
        head = self.shape.head if self.pushed == self.shape.parameters else 0  # adapters leave it as it is
        largest = max(head, *(part.inputs * part.outputs for part in self.shape.parts))
        return ceil(self.nbytes / max(BUCKET_BYTES, largest * DTYPE_BYTES[self.config.trainer.dtype]))

    def push_seconds(self, prompt: int, gathered: float) -> Seconds:
        """A push whose weights the ranks gather in so many seconds, and its proof; prompts of so many tokens are its probe."""
        # Ranks gather and prove, engines read and prove, on cores that they may have to share.
        slowdown = RANKS * self.hardware.trainer.slowdown + (1 - RANKS) * self.hardware.rollout.slowdown
        overhead = self.spec.overheads.phase.s + slowdown * self.spec.overheads.push.for_tensors(self.shape.tensors)
        out, into = self._send_seconds(), self._receive_seconds()
        link = gathered + out.link + into.link
        if self.over_network and (self.spec.machine.gpus or self._away):
            # The ranks gather the next bucket while the engines take one.
            link -= min(gathered + out.link, into.link) * (1 - 1 / self._buckets)
        if self.over_network and self._away > 1:
            # All machines take one at the same time; the last bucket passes them one after the other.
            late = into.times((self._away - 1) / self._buckets)
            link, into = link + late.link, into + late
        memory = out.memory + into.memory
        return Seconds(compute=self._probe_seconds(prompt), memory=memory, link=link, overhead=overhead)

    def _send_seconds(self) -> Seconds:
        """Until weights that are gathered have left rank 0."""
        if not self.over_network:
            return self._in_host(self.hardware.trainer, WRITTEN, 1.0)
        # A bucket is filled by the way from the GPU.
        return self._in_host(self.hardware.trainer, STORED - 1 if self.spec.machine.gpus else STORED, 1.0)

    def _receive_seconds(self) -> Seconds:
        """From there into every engine; all of them read at the same time."""
        engine = self.hardware.rollout
        nbytes = 2 * LOADED * self.nbytes
        if not self.spec.machine.gpus:  # vLLM's CPU build multiplies with packed weights, and the head is packed apart
            nbytes += 2 * self.shape.head * DTYPE_BYTES[self.config.rollout.dtype]
        rate = self.spec.links.between * self.spec.factors.link.share
        wire = WIRE * self.nbytes * min(1, self._away) / rate if self.over_network else 0.0
        seconds = self._in_host(engine, TAKEN if self.over_network else 0, max(1.0, engine.devices))
        # With GPUs nobody waits for the copy that is passed on: it is made while the engine takes its own, which is no shorter.
        if self.over_network and self._away > 1 and not self.spec.machine.gpus:
            seconds += self._in_host(engine, PASSED, 1.0)
        loaded = engine.copy_seconds(nbytes) + engine.first_touch_seconds((LOADED - REPLACED) * self.nbytes)
        return seconds + Seconds(memory=loaded, link=wire)

    def _in_host(self, worker: WorkerHardware, copies: int, devices: float) -> Seconds:
        """Copies in the host's memory by one process; with GPUs, also the way between host and so many GPUs, each with its part."""
        if not self.spec.machine.gpus:
            return Seconds(
                memory=worker.copy_seconds(2 * copies * self.nbytes) + worker.first_touch_seconds(copies * self.nbytes)
            )
        rate = self.spec.links.load * self.spec.factors.link.share
        return Seconds(link=(copies + 1 / devices) * self.nbytes / rate)

    def _probe_seconds(self, prompt: int) -> float:
        """Seconds for the beginnings of a few prompts in the trainer, then in the engines."""
        config, probe_tokens = self.config, self.config.sync.probe_tokens
        sequence_tokens = max(2, min(prompt, config.rollout.max_model_len - 1, probe_tokens // PROBE_SEQUENCES + 1))
        tokens = sequence_tokens * max(PROBE_SEQUENCES, ceil(probe_tokens / (sequence_tokens - 1)))
        flops = self.shape.forward(tokens, sequence_tokens / 2) + 2 * tokens * self.shape.head
        share = self.spec.factors.forward.share
        engine_seconds = self.hardware.rollout.matmul_seconds(flops, config.rollout.dtype, share)
        trainer_seconds = self.hardware.trainer.matmul_seconds(flops, config.trainer.dtype, share)
        return engine_seconds + trainer_seconds


def refuse_apart(config: PipelineConfig, spec: ClusterSpec, hardware: Hardware) -> None:
    """Raises: ConfigError, as `opd merge` does when it places its workers, if engines and rank 0 are to share a memory and cannot
    be on one machine."""
    if config.sync.kind != "shared_memory" or spec.machines == 1:
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
