"""A two-domain merge small enough for seconds, through the real engines."""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.servers import serving


def bind_to_own_cores() -> None:
    """Give each of several test processes cores of its own: two that share them slow each other down many times over."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if count < 2 or not hasattr(os, "sched_setaffinity"):
        return
    every = sorted(os.sched_getaffinity(0))
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.sched_setaffinity(0, every[number::count] or every)


bind_to_own_cores()

LONGEST = (
    "engines", "merge", "lora", "divided_engine", "scorers", "teachers", "python_api", "reinforce", "reward", "models", "network",
    "moe", "cluster", "black_box", "baselines", "monitors", "padded",
)  # fmt: skip
"""The files that take most time, the longest first, so that the processes that share the tests end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.path.stem, len(LONGEST)))


WORDS = "abcdefghijklmnopqrstuvwxyz"


def write_prompts(path: Path, prefix: str, num: int, seed: int) -> Path:
    rng = random.Random(seed)
    words = ["".join(rng.choices(WORDS, k=rng.randint(3, 6))) for _ in range(num)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": f"{prefix} {w}=", "answer": w}) + "\n" for w in words))
    return path


def two_domain_pipeline(root: Path, make_model_dir: Callable[..., Path], *, tie: bool = True) -> dict[str, Any]:
    """A pipeline as plain data: a student, two experts of other random weights, two domains."""
    models = {
        name: make_model_dir(root / name, seed=seed, tie=tie) for seed, name in enumerate(("student", "left", "right"))
    }
    return {
        "name": "two",
        "student": {"model": str(models["student"])},
        "experts": {name: {"model": str(models[name]), "domain": f"{name}-domain"} for name in ("left", "right")},
        "domains": {
            f"{name}-domain": {
                "prompts": str(write_prompts(root / f"{name}.jsonl", name[:3], 40, 1)),
                "eval": {"prompts": str(write_prompts(root / f"{name}-eval.jsonl", name[:3], 8, 2))},
            }
            for name in ("left", "right")
        },
        "rollout": {"max_new_tokens": 8, "max_model_len": 64},
        "trainer": {"steps": 6, "samples_per_step": 24, "lr": 2.0e-3, "micro_batch_tokens": 256},
        "checkpoint": {"every": 2},
    }


@pytest.fixture(scope="session")
def make_pipeline() -> Callable[..., dict[str, Any]]:
    """`two_domain_pipeline`: make_pipeline(root, make_model_dir, *, tie)."""
    return two_domain_pipeline


@pytest.fixture
def pipeline(tmp_path: Path, make_model_dir: Callable[..., Path], request: pytest.FixtureRequest) -> dict[str, Any]:
    """`two_domain_pipeline`, with one trainer rank where every run pays for a second one that shows nothing more; slow tests
    keep the product's default of two."""
    data = two_domain_pipeline(tmp_path, make_model_dir)
    if request.node.get_closest_marker("slow") is None:
        data["trainer"]["ranks"] = 1
    return data


def write_pipeline(root: Path, data: dict[str, Any]) -> Path:
    path = root / "pipeline.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


SERVED_TOP_K = 8
"""Log-probs that the server of `served_model` gives at each position."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def served_model(
    tmp_path_factory: pytest.TempPathFactory, make_model_dir: Callable[..., Path]
) -> Iterator[tuple[Path, str]]:
    """A model, and the address of a `vllm serve` that serves it as `expert` to holders of the key `secret`."""
    from opd.rollouts.processes import ENGINE_ENV

    root = tmp_path_factory.mktemp("served")
    model, port = make_model_dir(root / "expert", seed=1), free_port()
    env = os.environ | ENGINE_ENV | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "VLLM_API_KEY": "secret",
    }  # fmt: skip
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(model), "--served-model-name", "expert", "--dtype", "float32", "--max-model-len", "64"),
        *("--enforce-eager", "--max-logprobs", str(SERVED_TOP_K), "--generation-config", "vllm"),
    ]
    with serving(command, env, root / "log") as server:
        deadline = time.monotonic() + 240
        while not _healthy(port):
            assert server.poll() is None, (root / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, (root / "log").read_text()[-3000:]
            time.sleep(0.5)
        yield model, f"http://127.0.0.1:{port}/v1"


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
