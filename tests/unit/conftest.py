"""What several unit tests share: Ray's process boundary as plain calls, and a merge's inputs on disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from opd import cluster


@dataclass
class InProcess:
    """Stands where Ray stands: workers are plain objects and a call is a call."""

    workers: list[Any] = field(default_factory=list)
    replace: Callable[..., Any] | None = None
    """Makes a worker instead of the class that the product asks for."""

    def spawn(self, cls: type, *args: Any, name: str, env: dict[str, str], gpus: float = 0) -> Any:
        worker = (self.replace or cls)(*args)
        self.workers.append(worker)
        return worker

    def submit(self, actors: Sequence[Any], method: str, argument_lists: Sequence[Sequence[Any]]) -> list[Any]:
        return [getattr(a, method)(*args) for a, args in zip(actors, argument_lists, strict=True)]

    def call(self, actors: Sequence[Any], method: str, argument_lists: Any, *, timeout_s: float) -> list[Any]:
        return self.submit(actors, method, argument_lists)

    def wait(self, actors: Sequence[Any], refs: Sequence[Any], method: str, *, timeout_s: float) -> list[Any]:
        return list(refs)

    def fetch(self, refs: Any) -> Any:
        return refs

    def put(self, value: Any) -> Any:
        return value


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> InProcess:
    """Workers run in this process until the test ends."""
    fake = InProcess()
    for name in ("spawn", "submit", "call", "wait", "fetch", "put"):
        monkeypatch.setattr(cluster, name, getattr(fake, name))
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


@pytest.fixture
def world(tmp_path: Path, tiny_model_dir: Path, expert_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> World:
    """The current directory of the test; `opd merge pipeline.yaml` would work in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPD_REGISTRY", raising=False)
    shutil.copytree(tiny_model_dir, tmp_path / "base")
    for name, path in expert_dirs.items():
        shutil.copytree(path, tmp_path / name)
    for domain in ("reverse", "upper"):
        lines = [json.dumps({"prompt": f"{domain[:3]} {c * 3}=", "answer": c * 3}) for c in "abcdef"]
        (tmp_path / f"{domain}.jsonl").write_text("\n".join(lines) + "\n")
    data = {
        "name": "two",
        "student": {"model": "base"},
        "experts": {"rev": {"model": "rev", "domain": "reverse"}, "up": {"model": "up", "domain": "upper"}},
        "domains": {d: {"prompts": f"{d}.jsonl", "eval": {"prompts": f"{d}.jsonl"}} for d in ("reverse", "upper")},
        "rollout": {"max_model_len": 32, "max_new_tokens": 8},
        "trainer": {"steps": 2, "samples_per_step": 4},
    }
    made = World(tmp_path, data)
    made.write()
    return made
