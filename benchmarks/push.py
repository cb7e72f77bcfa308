"""New weights on their way to rollout engines, through shared memory, over the network and directly by gloo: seconds, bytes, memory.

    python -m benchmarks.push --json push.json
    python -m benchmarks.push --quick

A real trainer and a real vLLM engine hold one model with random weights, each on a machine of its own as Ray sees it: two
nodes on this machine, with an object store each, so that buckets cross loopback as they would cross a network. In each round
every way pushes the same weights once; ratios are taken within a round, figures are medians over rounds. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import machine

SIZES = {
    "default": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "vocab_size": 10240},
    "quick": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512},
}
"""30 million parameters with an output head of its own, and a tiny model."""
WAYS = ("shared_memory", "network", "direct")
MIB = 2**20
SAMPLE_S = 0.002
"""Pause between two looks at a process's memory."""


@dataclass(frozen=True)
class Push:
    """One push, its proof apart."""

    seconds: float
    cpu_s: float
    """CPU time of rank and engine together."""
    loopback_bytes: int
    """Sent on the loopback interface meanwhile."""
    rank_bytes: int
    """Most memory of its own that the rank had, less what it had before; and the engine."""
    engine_bytes: int


@contextmanager
def two_machines() -> Iterator[str]:
    """A Ray cluster of two nodes on this machine, each with room for one worker. Gives its address."""
    with machines(2) as cluster:
        yield cluster.address


@contextmanager
def machines(count: int) -> Iterator[Any]:
    """Ray's own `Cluster` of so many such nodes."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # stay on loopback
    from ray.cluster_utils import Cluster

    on_sigterm = signal.getsignal(signal.SIGTERM)  # which Ray takes
    room = {"num_cpus": 1, "object_store_memory": 512 * MIB, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args=room | {"include_dashboard": False})
    try:
        for _ in range(count - 1):
            cluster.add_node(**room)
        yield cluster
    finally:
        cluster.shutdown()
        signal.signal(signal.SIGTERM, on_sigterm)


def make_model(path: Path, size: str, seed: int = 0) -> int:
    """A Llama with random weights. Returns its parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    heads = SIZES[size]["hidden_size"] // 32
    shape = SIZES[size] | {"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": 128}
    model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False, pad_token_id=0))
    model.save_pretrained(path)
    return int(model.num_parameters())


def pipeline(model_dir: Path, dtype: str, address: str) -> Any:
    from opd.config import PipelineConfig
    from opd.settings.yaml_files import validate_section

    return validate_section(
        PipelineConfig,
        {
            "name": "push",
            "student": {"model": model_dir},
            "experts": {"expert": {"model": model_dir, "domain": "d"}},
            "domains": {"d": {}},
            "rollout": {"max_new_tokens": 8, "max_model_len": 64, "dtype": dtype},
            "trainer": {"steps": 1, "samples_per_step": 1, "ranks": 1, "dtype": dtype},
            "cluster": {"address": address},
        },
        "push",
    )


def make_sync(way: str, trainer: Any, engine: Any, **settings: Any) -> Any:
    """A way to push whose proof allows what bfloat16 needs."""
    from opd.sync import SYNCS, SyncSpec

    probe = [list(range(3, 40)), list(range(50, 90))]
    known: dict[str, Any] = {"tolerance": 0.15, "nbytes": 0, "tell": print}
    return SYNCS[way](SyncSpec(trainer=trainer, engine=engine, probe=probe, **known | settings))


def push_once(trainer: Any, engine: Any, way: str, version: int) -> tuple[float, float]:
    """Push once. Returns its seconds without the proof, and the gap that the proof finds, nats."""
    sync = make_sync(way, trainer, engine)
    began = time.perf_counter()
    sync.send_weights(version)
    return time.perf_counter() - began, sync.measure_gap()


class Bench:
    """Both ends, and every way between them."""

    def __init__(self, config: Any, vocab_size: int, bucket: int, other: Path) -> None:
        """`other`: weights that the engine holds before each push."""
        from opd.rollouts.vllm import VLLMRolloutEngine
        from opd.train.deepspeed import DeepSpeedTrainer
        from pipelines.specs import rollout_spec, trainer_spec

        trainer = DeepSpeedTrainer(trainer_spec(config, vocab_size))
        trainer.wait_ready()  # it takes the room of the first node, so the engine goes to the other one
        nobody: Any = None  # nothing is decoded
        engine = VLLMRolloutEngine(rollout_spec(config, config.student.model, vocab_size, (2,)), nobody)
        engine.wait_ready()
        self._engine, self._other = engine, other
        self._workers = {"rank": trainer._ranks[0], "engine": engine._workers[0]}
        self._syncs = {way: make_sync(way, trainer, engine, bucket=bucket) for way in WAYS}

    def push(self, way: str, version: int) -> Push:
        """Push once to an engine with other weights, and prove it. Raises: SystemExit if the engine does not hold the trainer's then."""
        self._engine.load(self._other)
        far = self._syncs[way].measure_gap()
        processes = {name: psutil.Process(int(worker.pulse.pid)) for name, worker in self._workers.items()}
        before = {name: own_bytes(process) for name, process in processes.items()}
        cpu, sent = sum(map(cpu_s, processes.values())), loopback_bytes()
        with peaks(processes) as most:
            began = time.perf_counter()
            self._syncs[way].send_weights(version)
            seconds = time.perf_counter() - began
        cpu, sent = sum(map(cpu_s, processes.values())) - cpu, loopback_bytes() - sent
        gap = self._syncs[way].measure_gap()
        if not gap < far / 10:
            raise SystemExit(f"{way}: engine and trainer differ by {gap} nats a token, and by {far} before the push")
        extra = {name: max(0, most[name] - held) for name, held in before.items()}
        return Push(seconds, cpu, sent, extra["rank"], extra["engine"])


def own_bytes(process: psutil.Process) -> int:
    """Memory of a process that is no file's and no other process's."""
    (line,) = [x for x in Path(f"/proc/{process.pid}/status").read_text().splitlines() if x.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def loopback_bytes() -> int:
    return int(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)


@contextmanager
def peaks(processes: dict[str, psutil.Process]) -> Iterator[dict[str, int]]:
    """Name -> largest `own_bytes` within, as often as a thread looked."""
    most, done = dict.fromkeys(processes, 0), threading.Event()

    def look() -> None:
        while not done.wait(SAMPLE_S):
            for name, process in processes.items():
                most[name] = max(most[name], own_bytes(process))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def measure(size: str, dtype: str, bucket: int, rounds: int) -> dict[str, Any]:
    """All rounds of one model."""
    from opd import cluster

    work = Path(tempfile.mkdtemp(prefix="push-"))
    try:
        parameters = make_model(work / "model", size)
        make_model(work / "other", size, seed=1)
        with two_machines() as address:
            config = pipeline(work / "model", dtype, address)
            with cluster.ray_session(config.cluster, 2):
                bench = Bench(config, SIZES[size]["vocab_size"], bucket, work / "other")
                pushes: dict[str, list[Push]] = {way: [] for way in WAYS}
                for number in range(-1, rounds):  # the first one warms up
                    for way in WAYS:
                        done = bench.push(way, len(WAYS) * (number + 1) + WAYS.index(way) + 1)
                        if number >= 0:
                            pushes[way].append(done)
                            print(f"round {number}, {way}: {done.seconds:.3f} s", file=sys.stderr)
    finally:
        shutil.rmtree(work)
    known = {"parameters": parameters, "dtype": dtype, "bucket": bucket}
    return known | {"pushes": {way: [asdict(one) for one in each] for way, each in pushes.items()}}


def medians(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Way -> each figure's median over rounds, and the ratio of seconds to shared memory's of the same round."""
    shown = {}
    base = [one["seconds"] for one in found["pushes"]["shared_memory"]]
    for way, each in found["pushes"].items():
        shown[way] = {key: statistics.median(one[key] for one in each) for key in each[0]}
        shown[way]["ratio"] = statistics.median(one["seconds"] / b for one, b in zip(each, base, strict=True))
        shown[way]["bytes_per_parameter"] = shown[way]["loopback_bytes"] / found["parameters"]
    return shown


COLUMNS: dict[str, Callable[[dict[str, float]], str]] = {
    "seconds": lambda row: f"{row['seconds']:.3f}",
    "ratio": lambda row: f"{row['ratio']:.2f}",
    "CPU s": lambda row: f"{row['cpu_s']:.2f}",
    "loopback bytes a parameter": lambda row: f"{row['bytes_per_parameter']:.2f}",
    "rank's extra MiB": lambda row: f"{row['rank_bytes'] / MIB:.0f}",
    "engine's extra MiB": lambda row: f"{row['engine_bytes'] / MIB:.0f}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model and two rounds: does everything run?")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--bucket-mib", type=float, default=64.0)
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    size, rounds = ("quick", 2) if args.quick else ("default", args.rounds)
    facts = machine(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)), "ray", "torch", "psutil")
    found = measure(size, args.dtype, int(args.bucket_mib * MIB), rounds)
    found |= {"machine": facts | {"load_after": os.getloadavg()}, "medians": medians(found)}
    print(f"{found['parameters']:,} parameters, {args.dtype}, buckets of {args.bucket_mib:g} MiB, {rounds} rounds")
    print("| way |", " | ".join(COLUMNS), "|")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for way, row in found["medians"].items():
        print(f"| {way} |", " | ".join(show(row) for show in COLUMNS.values()), "|")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
