"""Things that several unit tests share: Ray's process boundary as plain calls, and a merge's inputs on disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from opd import cluster
from opd.cluster import session
from opd.config.sections import ClusterConfig
from opd.servers import requests
from tests.writer import Writer, serve_writer


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    """A server that writes text; a request that failed is sent again without a pause."""
    monkeypatch.setattr(requests, "BACKOFF_S", 0.01)
    with serve_writer() as state:
        yield state


@pytest.fixture(autouse=True)
def _no_ray(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit test that reaches the real Ray fails, rather than passing or failing by what was imported before it."""
    connect = session._connect_to_ray

    def refuse(config: ClusterConfig, *more: Any) -> None:
        assert config.address != session.LOCAL, "fake the part that starts Ray, or move the test to tests/integration"
        connect(config, *more)

    if "/opd/cluster/" not in str(request.path):
        monkeypatch.setattr(session, "_connect_to_ray", refuse)


@dataclass
class InProcess:
    """Stands where Ray stands: workers are plain objects and a call is a call."""

    workers: list[Any] = field(default_factory=list)
    """The objects."""
    replace: Callable[..., Any] | None = None
    """Makes a worker's object instead of the class that the product asks for."""
    killed: list[Any] = field(default_factory=list)

    def spawn_worker(self, cls: type, *args: Any, name: str, env: dict[str, str], gpus: float = 0) -> InProcessWorker:
        made = (self.replace or cls)(*args)
        self.workers.append(made)
        return InProcessWorker(made, self.killed)

    def wait_for_all(self, pending: Sequence[Answered], *, timeout_s: float) -> list[Any]:
        return [one.wait_for_result(timeout_s=timeout_s) for one in pending]

    def wait_first(self, pending: Sequence[Answered], *, timeout_s: float, since: float | None = None) -> int:
        pending[0].wait_for_result(timeout_s=timeout_s)
        return 0

    def fetch_object(self, handle: Any) -> Any:
        return handle

    def put_object(self, value: Any) -> Any:
        return value


@dataclass(eq=False)
class InProcessWorker:
    """Stands for `opd.cluster.Worker`."""

    object: Any
    killed: list[Any] = field(default_factory=list)

    def submit(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Answered:
        try:
            return Answered(getattr(self.object, method.__name__)(*args, **kwargs), self)
        except cluster.WorkerDied as death:  # whoever waits for the answer gets it
            if death.worker is self.object:  # which knows no handle to itself
                death.worker = self  # type: ignore[assignment]
            return Answered(death, self)

    def submit_pair(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Answered, Any]:
        answered = self.submit(method, *args, **kwargs).handle
        return (
            (Answered(answered), None)
            if isinstance(answered, cluster.WorkerDied)
            else (
                Answered(answered[0]),
                answered[1],
            )
        )

    def on_demand(self, timeout_s: float, method: Callable[..., Any], *args: Any) -> Later:
        return Later(self.object, method.__name__, args)

    def node_address(self, *, timeout_s: float) -> str:
        return str(self.object.node_address())

    def node_id(self) -> Answered:
        return Answered(getattr(self.object, "node", "node 0"))

    def kill(self) -> None:
        self.killed.append(self.object)


@dataclass(eq=False)
class Answered:
    """Stands for `opd.cluster.Pending`: the answer, or the death of who should give it."""

    handle: Any
    worker: Any = None

    def wait_for_result(self, *, timeout_s: float) -> Any:
        if isinstance(self.handle, cluster.WorkerDied):
            raise self.handle
        return self.handle


@dataclass
class Later:
    """Stands for `opd.cluster.Remote`."""

    object: Any
    method: str
    args: tuple[Any, ...]

    def fetch(self) -> Any:
        return getattr(self.object, self.method)(*self.args)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> InProcess:
    """Workers run in this process until the test ends."""
    fake = InProcess()
    for name in ("spawn_worker", "wait_for_all", "wait_first", "fetch_object", "put_object"):
        monkeypatch.setattr(cluster, name, getattr(fake, name))
    monkeypatch.setattr("opd.cluster.objects.fetch_object", fake.fetch_object)
    # Workers are threads of one process here, and torch's setting is the process's: one's attention would be under another's.
    monkeypatch.setattr("opd.models.linear_kernels.is_onednn_faster", lambda: False)
    return fake


@dataclass
class World:
    """A directory with a student, two experts, prompts and a pipeline: all right until a test spoils it."""

    root: Path
    data: dict[str, Any]

    def write(self) -> Path:
        """Put the pipeline on disk."""
        path = self.root / "pipeline.yaml"
        path.write_text(yaml.safe_dump(self.data, sort_keys=False))
        return path


@pytest.fixture(scope="session")
def expert_dirs(make_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two experts with other weights than the student's: read them, never write to them."""
    root = tmp_path_factory.mktemp("experts")
    return {name: make_model_dir(root / name, seed=seed) for seed, name in enumerate(("rev", "up"), start=1)}


PEFT_CONFIG = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None, "bias": "none",
    "corda_config": None, "ensure_weight_tying": False, "eva_config": None, "exclude_modules": None,
    "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "kasa_config": None,
    "layer_replication": None, "layers_pattern": None, "layers_to_transform": None, "loftq_config": {},
    "lora_bias": False, "lora_dropout": 0.05, "lora_ga_config": None, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA", "peft_version": "0.21.2",
    "qalora_group_size": 16, "rank_pattern": {}, "revision": None, "target_parameters": None, "task_type": "CAUSAL_LM",
    "trainable_token_indices": None, "use_dora": False, "use_qalora": False, "use_rslora": False,
}  # fmt: skip
"""adapter_config.json as PEFT writes it."""


def build_adapter(
    path: Path,
    base: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    targets: Sequence[str] = ("q_proj", "down_proj"),
    **config: Any,
) -> Path:
    """Write a PEFT LoRA adapter with random weights of `seed` on the base's `targets`; returns `path`.

    Both halves are random, wide enough to change what the model says. `config` goes into adapter_config.json.
    """
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(tuple(targets)):
            outputs, inputs = weight.shape
            prefix = f"base_model.model.{module}"
            tensors[f"{prefix}.lora_A.weight"] = 0.2 * torch.randn(rank, inputs, generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = 0.2 * torch.randn(outputs, rank, generator=generator)
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    named = {"base_model_name_or_path": str(base), "target_modules": list(targets), "r": rank, "lora_alpha": 2 * rank}
    (path / "adapter_config.json").write_text(json.dumps(PEFT_CONFIG | named | config, indent=2, sort_keys=True))
    return path


def merge_plainly(base: Path, adapter: Path, out: Path, scaling: float = 2.0) -> Path:
    """The reference: transformers' own model with W + scaling * B @ A in float32, saved as a full model."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in [n for n in tensors if ".lora_A." in n]:
        module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
        module.weight.data += scaling * tensors[name.replace("lora_A", "lora_B")].float() @ tensors[name].float()
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(base).save_pretrained(out)
    return out


@pytest.fixture(scope="session")
def make_adapter() -> Callable[..., Path]:
    """`build_adapter`: make_adapter(path, base, *, seed, rank, targets, **config); the scaling is 2 by default."""
    return build_adapter


@pytest.fixture(scope="session")
def merged_plainly() -> Callable[..., Path]:
    """`merge_plainly`: merged_plainly(base, adapter, out, scaling)."""
    return merge_plainly


@pytest.fixture
def world(tmp_path: Path, tiny_model_dir: Path, expert_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> World:
    """The current directory of the test; `opd merge pipeline.yaml` would work in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPD_REGISTRY", raising=False)
    shutil.copytree(tiny_model_dir, tmp_path / "base")
    for name, path in expert_dirs.items():
        shutil.copytree(path, tmp_path / name)
    for domain in ("reverse", "upper"):
        for file, letters in ((f"{domain}.jsonl", "abcdef"), (f"{domain}-eval.jsonl", "ABCDEF")):
            lines = [json.dumps({"prompt": f"{domain[:3]} {c * 3}=", "answer": c * 3}) for c in letters]
            (tmp_path / file).write_text("\n".join(lines) + "\n")
    data = {
        "name": "two",
        "student": {"model": "base"},
        "experts": {"rev": {"model": "rev", "domain": "reverse"}, "up": {"model": "up", "domain": "upper"}},
        "domains": {d: {"prompts": f"{d}.jsonl", "eval": {"prompts": f"{d}-eval.jsonl"}} for d in ("reverse", "upper")},
        "rollout": {"max_model_len": 32, "max_new_tokens": 8},
        "trainer": {"steps": 2, "samples_per_step": 4},
    }
    made = World(tmp_path, data)
    made.write()
    return made
