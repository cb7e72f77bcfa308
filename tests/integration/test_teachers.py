"""Teachers of several architectures on two scoring workers, some of which are killed while they score."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

from opd import cluster
from opd.config import PipelineConfig
from opd.config.sections import ClusterConfig
from opd.errors import RunError
from opd.models.heads import head_tensor
from opd.records.types import Rollout, Teacher, WeightedTeacher
from opd.settings.yaml_files import validate_section
from opd.stream.schema import TargetRow, read_stream
from opd.stream.targets import TargetStream
from pipelines.specs import pool_spec
from teachers.pool import Pool
from tests.conftest import read_rows
from tests.rows import make_rollout

Make = Callable[..., Path]
ROOT = Path(__file__).parents[2]
STEPS = 8
SHARES = {
    "left-domain": {"left": 0.75, "right": 0.25},
    "right-domain": {"right": 1.0},
    "far-domain": {"right": 1.0},
    "beyond-domain": {"left": 1.5, "start student": -0.5},
}
"""Domain -> teacher -> weight, as the pipeline below means it."""


def write_qwen2(path: Path, tokenizer: Any) -> Path:
    """A Qwen2 wider than the student, untied, with biases in its attention."""
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "bos", "eos")}
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=128, num_hidden_layers=1, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.1, **ids,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = Qwen2ForCausalLM(config)
        for layer in model.model.layers:  # initialised to 0, which would not show that they are read
            torch.nn.init.normal_(layer.self_attn.k_proj.bias)
            torch.nn.init.normal_(layer.self_attn.v_proj.bias)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


# Killing


def scoring(root: int) -> dict[int, bool]:
    """Pids of the scoring workers that descend from process `root` -> whether they are scoring now."""
    found = {}
    for process in psutil.Process(root).children(recursive=True):
        title = read_title(process.pid)
        if title.startswith("ray::TeacherWorker"):
            found[process.pid] = title.endswith(".next_part")
    return found


def read_title(pid: int) -> str:
    """Ray puts the method that an actor is in into its process title."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().strip("\0 ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def kill_scoring(pids: Sequence[int], going_on: Callable[[], bool]) -> int | None:
    """SIGKILL the first of these workers that is seen in `next_part`; its pid, or None if `going_on` ended before."""
    while going_on():
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)  # before the look: a part takes less time than a look on a busy machine
            if read_title(pid).endswith(".next_part"):
                os.kill(pid, signal.SIGKILL)
                return pid
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.001)
    return None


# The merge


@dataclass(frozen=True)
class Finished:
    """A merge that ended."""

    root: Path
    errors: str
    """Its text on stderr."""

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.root / "metrics.jsonl").read_text().splitlines()]


def merge(file: Path, run: Path, meanwhile: Callable[[subprocess.Popen[str]], None]) -> Finished:
    """`opd merge` to its end, with something happening beside it."""
    errors = run.with_name(f"{run.name}.stderr")
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "cli", "merge", str(file), "--run-dir", str(run)],
            cwd=file.parent,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            text=True,
        )
        try:
            meanwhile(process)
            process.wait(timeout=200)
        finally:
            process.kill()
    assert process.returncode == 0, errors.read_text()
    return Finished(run, errors.read_text())


@pytest.fixture(scope="module")
def file(
    tmp_path_factory: pytest.TempPathFactory,
    make_pipeline: Callable[..., dict[str, Any]],
    make_model_dir: Make,
    tiny_tokenizer: Any,
) -> Path:
    """A pipeline of four domains: one has two teachers, two share one, and the last goes beyond its own."""
    root = tmp_path_factory.mktemp("teachers")
    data = make_pipeline(root, make_model_dir)
    data["experts"]["right"]["model"] = str(write_qwen2(root / "qwen2", tiny_tokenizer))
    data["domains"]["left-domain"] |= {"teachers": {"left": 3, "right": 1}, "eval": None}
    data["domains"]["right-domain"]["eval"] = None
    prompts = data["domains"]["left-domain"]["prompts"]
    data["domains"]["far-domain"] = {"prompts": prompts, "teachers": "right"}
    data["domains"] = {name: domain | {"extrapolate": 1.0} for name, domain in data["domains"].items()}
    data["domains"]["beyond-domain"] = {"prompts": prompts, "teachers": "left"}
    data["objective"] = {"extrapolate": 1.5}
    data["teachers"] = {"workers": 2}
    data["trainer"] |= {"steps": STEPS, "ranks": 1, "samples_per_step": 32}
    data["checkpoint"]["every"] = 100  # a checkpoint drops the target log of the steps before
    path = root / "pipeline.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.fixture(scope="module")
def undisturbed(file: Path) -> Finished:
    """A merge that nothing happened to; the log of its first step is beside it."""
    run = file.with_name("undisturbed")

    def copy_log(process: subprocess.Popen[str]) -> None:
        step, deadline = run / "targets" / "step-000001", time.monotonic() + 150
        while not step.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        shutil.copytree(step, run.with_name("first-step"))

    return merge(file, run, copy_log)


def logged(directory: Path) -> list[TargetRow]:
    return [row for part in sorted(directory.glob("worker-*.arrow")) for row in read_stream(part.read_bytes()).rows]


@torch.no_grad()
def plain_loss(rows: Mapping[str, TargetRow], student: Path, teachers: Mapping[str, Path]) -> dict[str, list[float]]:
    """Domain -> sum_k w_k KL(student || teacher_k) at every response token, by whole forward passes of each model; beyond its
    expert KL(student || expert^1.5 start^-0.5 / Z)."""
    from transformers import AutoModelForCausalLM

    models = {n: AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for n, p in teachers.items()}
    own = models["start student"] = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
    losses: dict[str, list[float]] = {domain: [] for domain in SHARES}
    for row in rows.values():
        ids, predicts = (
            torch.tensor([[*row.rollout.prompt_ids, *row.rollout.response_ids]]),
            slice(len(row.rollout.prompt_ids) - 1, -1),
        )
        logp_R_V = own(ids).logits[0, predicts].log_softmax(-1)  # in its first step the student is the start
        target_R_V = torch.zeros_like(logp_R_V)
        for name, weight in SHARES[row.rollout.domain].items():
            target_R_V += weight * models[name](ids).logits[0, predicts].log_softmax(-1)
        if row.rollout.domain == "beyond-domain":
            target_R_V = target_R_V.log_softmax(-1)
        losses[row.rollout.domain] += (logp_R_V.exp() * (logp_R_V - target_R_V)).sum(-1).tolist()
    return losses


def test_teachers_of_two_architectures_a_domain_that_has_both_and_one_beyond_its_own(
    undisturbed: Finished, file: Path
) -> None:
    """The first step's loss is what plain forward passes of the student and its teachers give."""
    data = yaml.safe_load(file.read_text())
    assert "domains.left-domain.teachers: weights add up to 4, taken as left 0.75, right 0.25" in undisturbed.errors
    assert [r["step"] for r in undisturbed.records] == list(range(1, STEPS + 1))
    assert (undisturbed.root / "model" / "model.safetensors").exists()

    rows = logged(file.with_name("first-step"))
    samples = {row.rollout.sample_id: row for row in rows}
    assert len(samples) == 32
    for sample in samples.values():
        scored_by = {row.teacher: row.weight for row in rows if row.rollout.sample_id == sample.rollout.sample_id}
        assert scored_by == SHARES[sample.rollout.domain]
    assert {row.teacher: row.answer.hidden_size for row in rows} == {"left": 64, "right": 96, "start student": 64}

    experts = {name: Path(expert["model"]) for name, expert in data["experts"].items()}
    losses = plain_loss(samples, Path(data["student"]["model"]), experts)
    first = undisturbed.records[0]
    every = [loss for part in losses.values() for loss in part]
    assert first["loss"] == pytest.approx(sum(every) / len(every), rel=1e-3)
    assert first["loss"] > 0.1
    for domain, part in losses.items():
        assert first["domains"][domain]["tokens"] == len(part) > 0
        assert first["domains"][domain]["loss"] == pytest.approx(sum(part) / len(part), rel=1e-3)


@pytest.mark.slow  # a second merge; below, a worker of the pool alone is killed
def test_a_merge_whose_scoring_worker_is_killed_ends_with_the_same_weights(undisturbed: Finished, file: Path) -> None:
    killed: list[int | None] = []

    def kill_one(process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + 150

        def going_on() -> bool:
            return process.poll() is None and time.monotonic() < deadline

        pids: list[int] = []
        while going_on() and len(pids) < 2:  # looked up now, because scoring takes less time than a look-up
            pids = list(scoring(process.pid))
            time.sleep(0.1)
        killed.append(kill_scoring(pids, going_on))

    # Trained while teachers score, where the undisturbed merge has them take turns: also no difference.
    overlapping = file.with_name("overlapping.yaml")
    overlapping.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"schedule": {"overlap": True}}))
    disturbed = merge(overlapping, file.with_name("disturbed"), kill_one)
    assert killed[0] is not None, "no worker was seen while it scored"
    (restarted,) = [r["restarted"] for r in disturbed.records if "restarted" in r]
    assert len(restarted) == 1 and restarted[0] in ("teacher worker 0", "teacher worker 1")
    assert not any("restarted" in r for r in undisturbed.records)
    for mine, other in zip(disturbed.records, undisturbed.records, strict=True):
        assert (mine["step"], mine["loss"], mine["domains"]) == (other["step"], other["loss"], other["domains"])
    ours, theirs = (load_file(run.root / "model" / "model.safetensors") for run in (disturbed, undisturbed))
    assert set(ours) == set(theirs)
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


# The pool alone


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    with cluster.ray_session(ClusterConfig(), 4):
        yield


@pytest.fixture
def pool(ray: None, tmp_path: Path, make_model_dir: Make, tiny_tokenizer: Any) -> Iterator[Pool]:
    """Two workers; domain d0 has both teachers, d1 the second."""
    config = validate_section(
        PipelineConfig,
        {
            "name": "test",
            "student": {"model": tmp_path},
            "experts": {"left": {"model": tmp_path, "domain": "d0"}},
            "domains": {"d0": {}, "d1": {}},
            "teachers": {"workers": 2},
            "trainer": {"steps": 1, "samples_per_step": 2},
            "cluster": {"phase_timeout_s": 100},
        },
        "test",
    )
    left = Teacher(name="left", model_dir=make_model_dir(tmp_path / "left", seed=1))
    right = Teacher(name="right", model_dir=write_qwen2(tmp_path / "right", tiny_tokenizer))
    routes = {
        "d0": (WeightedTeacher(teacher=left, weight=0.75), WeightedTeacher(teacher=right, weight=0.25)),
        "d1": (WeightedTeacher(teacher=right, weight=1.0),),
    }
    made = Pool(pool_spec(config, len(tiny_tokenizer)), routes)
    made.wait_ready()
    yield made
    made.stop()


def rollouts(num: int) -> list[Rollout]:
    """Long enough that a worker is busy for a while; tokens are made up."""
    rng = torch.Generator().manual_seed(0)
    made = []
    for i in range(num):
        ids = torch.randint(4, 70, (80 + i % 7,), generator=rng).tolist()
        response = tuple(ids[20:])
        made.append(
            make_rollout(
                sample_id=f"000001/d{i % 2}/{i}", step=1, domain=f"d{i % 2}", policy_version=0,
                prompt_ids=tuple(ids[:20]), response_ids=response, behaviour_logprobs=(-1.0,) * len(response),
            )
        )  # fmt: skip
    return made


def contents(targets: TargetStream) -> list[tuple[Any, ...]]:
    """Every row and every byte of its payload, in an order that does not depend on the workers."""
    rows = read_rows(targets)
    assert len(rows) == targets.rows
    return sorted(
        (r.rollout.sample_id, r.teacher, r.weight, r.answer.head, *r.rollout.response_ids, bytes(r.answer.hidden))
        for r in rows
    )


def score_and_kill(pool: Pool, rows: Sequence[Rollout], kill: Callable[[Callable[[], bool]], None]) -> TargetStream:
    """All targets of `pool.score` while another thread kills; `kill` is told how to ask whether scoring goes on."""
    done = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        killing = thread.submit(kill, lambda: not done.is_set())
        try:
            targets = pool.score(rows)
            targets.wait_for_parts()
            return targets
        finally:
            done.set()
            killing.result()


def test_workers_killed_while_they_score_lose_no_row(pool: Pool) -> None:
    """One, both in one step, and one that has nothing to do: the rows are those of a pool that nothing happened to."""
    rows = rollouts(300)
    untouched = pool.score(rows)
    wanted = contents(untouched)
    assert untouched.restarted == [] and len(wanted) == 450
    heads = {key: head_tensor(head.handle.fetch()) for key, head in untouched.heads.items()}
    assert len(heads) == 2

    def kill(num: int) -> Callable[[Callable[[], bool]], None]:
        def in_thread(going_on: Callable[[], bool]) -> None:
            pids = list(scoring(os.getpid()))
            assert len(pids) == 2
            for _ in range(num):
                pids.remove(kill_scoring(pids, going_on))  # type: ignore[arg-type]

        return in_thread

    both = {"teacher worker 0", "teacher worker 1"}
    for num in (1, 2):
        targets = score_and_kill(pool, rows, kill(num))
        assert len(targets.restarted) == len(set(targets.restarted)) == num and set(targets.restarted) <= both
        assert contents(targets) == wanted
        assert targets.quarantined == {}
        for key, head in targets.heads.items():
            assert torch.equal(head_tensor(head.handle.fetch()), heads[key])

    idle = next(iter(scoring(os.getpid())))
    os.kill(idle, signal.SIGKILL)
    targets = pool.score(rows)
    assert contents(targets) == wanted
    assert len(targets.restarted) == 1
    again = pool.score(rows)
    again.wait_for_parts()
    assert again.restarted == [], "the last step's are forgotten"


@pytest.mark.slow  # two restarts
def test_a_worker_that_is_killed_twice_in_a_step_ends_the_run(pool: Pool) -> None:
    def kill_twice(going_on: Callable[[], bool]) -> None:
        before = list(scoring(os.getpid()))
        kill_scoring(before, going_on)
        while going_on():
            new = [pid for pid in scoring(os.getpid()) if pid not in before]
            if new:
                kill_scoring(new, going_on)
                return

    with pytest.raises(RunError, match=r"teacher worker [01]: the worker died during `next_part`"):
        score_and_kill(pool, rollouts(300), kill_twice)
