"""The cluster spec of `opd plan`: machines, rates, what of a rate is reached and why, overheads, and where roles run.

A device is a GPU, or on machines without GPUs all cores of one machine together.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ByteSize, Field, model_validator
from pydantic_core import PydanticCustomError

from opd.errors import ConfigError
from opd.settings.strict import DType, Strict
from opd.settings.yaml_files import load_yaml, validate_section
from pipelines.catalog import PLANS
from pipelines.sizing.machine import MachineFacts

DEFAULT = "two-cores"
"""The shipped spec with which a merge is planned if nobody names one; a measured spec has its overheads."""


class MachineSpec(Strict):
    cores: int = Field(..., ge=1)
    memory: ByteSize = Field(..., gt=0)
    """Memory of the host."""
    gpus: int = Field(0, ge=0)
    gpu_memory: ByteSize = Field(0, validate_default=True, ge=0)
    """Memory of one GPU."""

    @model_validator(mode="after")
    def _gpus_have_memory(self) -> MachineSpec:
        if bool(self.gpus) != bool(self.gpu_memory):
            raise PydanticCustomError(
                "gpus", "both machine.gpus and machine.gpu_memory, or neither", {"found": "one of the two"}
            )
        return self


class RatesSpec(Strict):
    """Rates of one device."""

    float32: float = Field(..., gt=0)
    """Matrix product, FLOP/s."""
    bfloat16: float = Field(..., gt=0)
    memory: float = Field(..., gt=0)
    """Bytes a second that a copy reads and writes, together."""
    fresh: float | None = Field(None, gt=0)
    """Bytes a second that are written to memory which the system has just given; None: as fast as a copy. Virtual machines can take
    ten times as long."""
    calls: float | None = Field(None, gt=0)
    """Small operations that one core of the host begins in a second, one after the other. Overheads are stated at
    `overheads.calls` and take as much longer as this is less."""

    def flops(self, dtype: DType) -> float:
        """Return the FLOP/s of a matrix product in that type."""
        return self.float32 if dtype == "float32" else self.bfloat16


class LinksSpec(Strict):
    """Bytes a second, in one direction, of one device."""

    inside: float = Field(..., gt=0)
    """To another device of the same machine."""
    between: float = Field(..., gt=0)
    """To another machine. A collective of a whole machine uses those of all its devices at a time."""
    load: float = Field(..., gt=0)
    """From the host's memory, and to it, by one process."""
    log: float | None = Field(None, gt=0)
    """To the target log: the rows that a scoring worker hashes and writes; None: not counted."""
    disk: float = Field(..., gt=0)
    """From storage, of one machine: where a machine's memory does not hold the teachers that it scores with."""


class ShareSpec(Strict):
    share: float = Field(..., ge=0, le=1)
    why: str = Field(..., min_length=1)
    """Origin of the number."""


class FactorsSpec(Strict):
    """Shares of the rates that work of a kind reaches."""

    forward: ShareSpec
    """Matrix products of a forward pass over whole rows: prompts in an engine, scoring."""
    backward: ShareSpec
    """Matrix products of a forward and backward pass, and of the loss."""
    decode: ShareSpec
    """Matrix products of an engine's step, with one token of each sequence."""
    memory: ShareSpec
    """Bytes that a step of an engine, an optimiser or a copy reads and writes."""
    link: ShareSpec
    """Bytes over any link."""
    hidden: ShareSpec
    """Share of the trainer's communication that its compute hides."""


class SecondsSpec(Strict):
    s: float = Field(0, ge=0)
    tensor: float = Field(0, ge=0)
    """More seconds for each tensor of the model that the event is about."""
    why: str = Field(..., min_length=1)
    """Origin of the numbers."""

    def seconds(self, tensors: int) -> float:
        """Return the seconds of an event that is about a model of `tensors` tensors."""
        return self.s + self.tensor * tensors

    def times(self, factor: float) -> SecondsSpec:
        """Return the same with all seconds multiplied by a factor."""
        return SecondsSpec(s=factor * self.s, tensor=factor * self.tensor, why=self.why)


class OverheadsSpec(Strict):
    """Seconds of one event, beside its work."""

    calls: float | None = Field(None, gt=0)
    """`rates.calls` of the machine on which these were found; None: they are stated for the machine of the spec."""
    phase: SecondsSpec
    """A phase's call to its workers, and their answer."""
    engine_step: SecondsSpec
    """A step of an engine: scheduling, sampling, every layer's calls."""
    request: SecondsSpec
    """A response that an engine begins and ends."""
    token: SecondsSpec
    """A token that an engine samples."""
    stream: SecondsSpec
    """A scoring worker's rows of a step: their stream opened, written, and read to its end."""
    teacher: SecondsSpec
    """A teacher's turn in a scoring worker: it takes its place and passes its first row."""
    scored_row: SecondsSpec
    """A target row: made, sent, written to the log, read by a rank."""
    scored_token: SecondsSpec
    """A token of a row that a teacher reads, prompt and padding too: all that is no matrix product, and its target."""
    micro_batch: SecondsSpec
    """A micro-batch of a rank: every layer's calls and sharding hooks, forward and backward."""
    loss_chunk: SecondsSpec = SecondsSpec(why="not counted: a CPU's products take longer than their calls")
    """A chunk of the loss: its kernels begin one after the other. It counts as far as the chunk's products are shorter."""
    trained_row: SecondsSpec
    """A row that a rank lays out and trains."""
    trained_token: SecondsSpec
    """A token of a row that a rank trains, prompt and padding too: all that is no matrix product."""
    message: SecondsSpec
    """A collective of two workers or more."""
    push: SecondsSpec
    """New weights: each tensor gathered, written, read, put in its place."""
    step: SecondsSpec
    """A step of the optimiser and a record of it."""

    def scale_to(self, calls: float | None) -> OverheadsSpec:
        """Return the overheads of a machine that begins `calls` small operations a second; as they are if either rate is unknown."""
        if self.calls is None or calls is None:
            return self
        changed = {
            name: seconds.times(self.calls / calls) for name, seconds in self if isinstance(seconds, SecondsSpec)
        }
        return self.model_copy(update=changed | {"calls": calls})


class RoleSpec(Strict):
    workers: int = Field(..., ge=1)
    """Engines, or scoring workers."""
    devices: int = Field(1, ge=1)
    """Devices of each, among which its model is divided."""


class PlacementSpec(Strict):
    shared: bool = False
    """Roles take turns on the same devices, as shares of GPUs (`cluster.*_gpus` below 1) have it; else each has its own."""
    rollout: RoleSpec
    teachers: RoleSpec
    ranks: int = Field(..., ge=1)
    """Trainer ranks, one on each device."""


class LengthsSpec(Strict):
    """Lengths of what is trained, in tokens: lognormal responses, cut at `rollout.max_new_tokens`."""

    prompt: int | None = Field(None, ge=1)
    """Tokens of a prompt; default: what `rollout.max_model_len` leaves beside the longest response."""
    response: float | None = Field(None, ge=1)
    """Median; default: `rollout.max_new_tokens`."""
    tail: float = Field(1.0, ge=1)
    """Length of one response of a hundred, over the median."""
    seed: int = Field(0, ge=0)


class ClusterSpec(Strict):
    """A cluster as `opd plan` sees it."""

    name: str
    machines: int = Field(1, ge=1)
    machine: MachineSpec
    rates: RatesSpec
    links: LinksSpec
    factors: FactorsSpec
    overheads: OverheadsSpec
    placement: PlacementSpec | None = None
    """Default: the pipeline's own numbers of workers, and `cluster.*_gpus`."""
    lengths: LengthsSpec = LengthsSpec()

    def with_own_overheads(self) -> ClusterSpec:
        """Return the spec with overheads that are scaled to the speed of its own machines."""
        return self.model_copy(update={"overheads": self.overheads.scale_to(self.rates.calls)})

    @property
    def devices(self) -> int:
        """Number of GPUs, or of machines if they have none."""
        return self.machines * max(1, self.machine.gpus)

    @property
    def hardware(self) -> MachineFacts:
        """All machines of the cluster, counted as one."""
        gpus = (int(self.machine.gpu_memory),) * (self.machines * self.machine.gpus)
        return MachineFacts(
            cores=self.machines * self.machine.cores, memory=self.machines * self.machine.memory, gpus=gpus
        )


def shipped_specs() -> dict[str, Path]:
    """Return the file of every cluster spec that comes with the package, by its name."""
    return {file.stem: file for file in sorted((PLANS / "clusters").glob("*.yaml"))}


def load_spec(name_or_path: str) -> ClusterSpec:
    """Read a shipped spec by its name, or a file. Raises: ConfigError."""
    path = shipped_specs().get(name_or_path, Path(name_or_path))
    if not path.is_file():
        raise ConfigError.at(
            path,
            found="no such file",
            wanted=f"a cluster spec, or one of: {', '.join(shipped_specs())}",
            fix="`opd plan PIPELINE --measure FILE` writes one of this machine",
        )
    return validate_section(ClusterSpec, load_yaml(path), path)


def with_lengths(spec: ClusterSpec, prompt: int | None, response: float | None, tail: float | None) -> ClusterSpec:
    """Return the spec with those of these lengths that are not None; the others stay as they are."""
    lengths = {"prompt": prompt, "response": response, "tail": tail}
    changed = {name: value for name, value in lengths.items() if value is not None}
    return spec.model_copy(update={"lengths": spec.lengths.model_copy(update=changed)})
