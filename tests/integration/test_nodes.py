"""A Ray cluster of several nodes: workers land where a pipeline asks, and a node that dies costs nothing but time.

Each node is a machine of `tests.machines`: its own address, host name, processes, /tmp and /dev/shm. They share the disk, but for
directories that a node hides, which it can do without.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.conftest import two_domain_pipeline
from tests.machines import Machine, Machines, missing

ROOT = Path(__file__).parents[2]
RAY = Path(sys.executable).with_name("ray")
DEADLINE_S = 500
TITLES = {"ray::VLLMWorker": "rollout", "ray::TeacherWorker": "teacher", "ray::TrainerRank": "rank"}
"""Title of a worker's process -> what it is."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
]


@dataclass
class Nodes:
    """A cluster: the driver's node, one more for a trainer rank, one for the teachers, and a spare one for them; for engines that get
    their weights over the network one node and a spare one."""

    root: Path
    head: Machine
    ranks: Machine
    teachers: Machine
    spare: Machine
    engines: Machine
    spare_engines: Machine
    environment: dict[str, str]
    machines: Machines
    joined: set[str] = field(default_factory=set)
    """Names of the machines that have joined the head's cluster."""

    def opd(self, *args: object, on: Machine | None = None) -> subprocess.Popen[str]:
        """A command on the driver's node, or on another machine."""
        command = (on or self.head).command([sys.executable, "-m", "cli", *map(str, args)], self.root)
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def merge(self, run: str, *settings: str) -> subprocess.Popen[str]:
        sets = [f"--set={one}" for one in ("cluster.address=auto", *PLACED, *settings)]
        return self.opd("merge", "pipeline.yaml", "--run-dir", f"runs/{run}", *sets)

    def ray(self, machine: Machine, *args: str) -> None:
        """Start Ray on a machine."""
        common = [f"--node-ip-address={machine.address}", "--object-store-memory=100000000", "--disable-usage-stats"]
        command = machine.command([str(RAY), "start", *args, *common], self.root)
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def join(self, machine: Machine, labels: str) -> None:
        """Have a machine join the cluster, if it has not."""
        if machine.name not in self.joined:
            self.ray(machine, f"--address={self.head.address}:6379", "--num-cpus=2", f"--labels={labels}")
            self.joined.add(machine.name)

    def roles(self) -> set[tuple[str, str]]:
        """Name of a machine and a role that has a process there now."""
        found = set()
        for machine in (self.head, self.ranks, self.teachers, self.spare, self.engines, self.spare_engines):
            for title in machine.titles():
                found |= {(machine.name, role) for start, role in TITLES.items() if title.startswith(start)}
        return found


PLACED = (
    "cluster.placement.teachers.label_selector={pool: teachers}",
    "cluster.placement.trainer.strategy=strict_spread",
    'cluster.placement.trainer.label_selector={pool: "in(head, ranks)"}',
)
OVER_THE_NETWORK = ("sync.kind=network", "cluster.placement.rollout.label_selector={pool: engines}")
AHEAD = ("schedule.mode=one_step_off", "trainer.ranks=1")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, make_model_dir: Callable[..., Path]) -> Iterator[Nodes]:
    root = tmp_path_factory.mktemp("nodes")
    (root / "pipeline.yaml").write_text(yaml.safe_dump(two_domain_pipeline(root, make_model_dir)))
    (root / "runs").mkdir()
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    with Machines(root) as machines:
        # Teachers read neither the run directory nor the student; ranks get heads from teachers whose files they do not have.
        no_teacher = [root / "runs", root / "student"]
        no_trainer = [root / "runs"]  # an engine has no directory in common with a rank that a weight is written to
        made = Nodes(
            root=root,
            head=machines.start("head"),
            ranks=machines.start("ranks", hidden=[root / "left", root / "right"]),
            teachers=machines.start("teachers", hidden=no_teacher),
            spare=machines.start("spare", hidden=no_teacher),
            engines=machines.start("engines", hidden=no_trainer),
            spare_engines=machines.start("spare-engines", hidden=no_trainer),
            environment=environment,
            machines=machines,
        )
        made.ray(made.head, "--head", "--port=6379", "--num-cpus=3", "--include-dashboard=false", "--labels=pool=head")
        made.join(made.ranks, "pool=ranks")
        made.join(made.teachers, "pool=teachers")
        made.join(made.engines, "pool=engines")
        yield made


@pytest.fixture(scope="module")
def alone(nodes: Nodes) -> Path:
    """The run directory of the same merge on one machine."""
    return merged_alone(nodes, "alone")


def merged_alone(nodes: Nodes, run: str, *settings: str) -> Path:
    outside = nodes.machines.start(run)
    sets = [f"--set={one}" for one in settings]
    done = nodes.opd("merge", "pipeline.yaml", "--run-dir", f"runs/{run}", *sets, on=outside)
    _, errors = done.communicate(timeout=DEADLINE_S)
    assert done.returncode == 0, errors
    outside.die()
    return nodes.root / "runs" / run


def merged_here(nodes: Nodes, run: str, *settings: str) -> tuple[set[tuple[str, str]], str]:
    """Merge on the cluster to the end. Returns the roles that were seen, by machine, until a step was trained, and what was told."""
    seen: set[tuple[str, str]] = set()
    merge = nodes.merge(run, *settings)

    def trained() -> bool:
        seen.update(nodes.roles())
        return steps_of(nodes.root / "runs" / run) > 1

    wait_for(trained, merge)
    _, told = merge.communicate(timeout=DEADLINE_S)
    assert merge.returncode == 0, told
    return seen, told


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[Any]:
    """Return the results of each step's training, but for times."""
    return [(line["step"], line["loss"], line["grad_norm"]) for line in records(run)]


def weights(run: Path) -> bytes:
    return (run / "model/model.safetensors").read_bytes()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.2)


def steps_of(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def at_work(nodes: Nodes, role: str, places: tuple[Machine, Machine]) -> tuple[Machine, Machine]:
    """Of two machines the one that has a role's worker, and then the other."""
    names = {name for name, found in nodes.roles() if found == role}
    assert len(names & {place.name for place in places}) == 1, names
    return places if places[0].name in names else places[::-1]


def merged_past_a_death(
    nodes: Nodes, merge: subprocess.Popen[str], run: Path, role: str, places: tuple[Machine, Machine]
) -> str:
    """The node of a role's worker dies in the middle of a merge, which goes on to its end with one on the other node. Returns what was
    told."""
    wait_for(lambda: steps_of(run) > 1, merge)
    dying, left = at_work(nodes, role, places)
    dying.die()
    before = steps_of(run)
    seen: set[tuple[str, str]] = set()

    def gone_on() -> bool:
        seen.update(nodes.roles())
        return steps_of(run) == 6

    wait_for(gone_on, merge)
    _, told = merge.communicate(timeout=DEADLINE_S)
    assert merge.returncode == 0, told
    assert before < 6 and (left.name, role) in seen and (dying.name, role) not in nodes.roles()
    return told


def test_workers_land_where_they_are_asked_and_the_losses_are_those_of_one_machine(nodes: Nodes, alone: Path) -> None:
    run = nodes.root / "runs/spread"
    seen, told = merged_here(nodes, "spread")
    assert seen == {("head", "rollout"), ("head", "rank"), ("ranks", "rank"), ("teachers", "teacher")}
    assert f"on {nodes.teachers.address}: teacher worker 0" in told
    assert f"on {nodes.ranks.address}: trainer rank 1" in told
    assert losses(run) == losses(alone) and len(losses(run)) == 6
    assert weights(run) == weights(alone), "bit for bit"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            ["cluster.placement.teachers.label_selector={pool: nobody}"],
            "teacher worker 0 asks for 1 CPU, label pool=nobody",
        ),
        (["cluster.placement.rollout.label_selector={pool: ranks}"], "rollout worker 0 on this machine"),
        (["trainer.ranks=3"], "3 nodes for trainer rank 0"),
    ],
)
def test_what_no_node_has_is_refused_before_anything_is_loaded(nodes: Nodes, settings: list[str], told: str) -> None:
    merge = nodes.merge("refused", *settings)
    _, errors = merge.communicate(timeout=DEADLINE_S)
    assert merge.returncode == 2 and told in errors and nodes.head.address in errors, errors
    assert not (nodes.root / "runs/refused").exists()


def test_weights_that_go_over_the_network_are_those_of_shared_memory(nodes: Nodes) -> None:
    """To engines on two nodes, the second of which gets them from the first."""
    nodes.join(nodes.spare_engines, "pool=engines")
    alone, run = merged_alone(nodes, "alone-two", "rollout.workers=2"), nodes.root / "runs/network"
    spread = "cluster.placement.rollout.strategy=strict_spread"
    seen, _ = merged_here(nodes, "network", *OVER_THE_NETWORK, "rollout.workers=2", spread)
    engines = {("engines", "rollout"), ("spare-engines", "rollout")}
    assert seen == engines | {("head", "rank"), ("ranks", "rank"), ("teachers", "teacher")}
    assert losses(run) == losses(alone) and len(losses(run)) == 6
    assert weights(run) == weights(alone), "bit for bit"
    assert max(line["probe_gap"] for line in records(run)) < 1e-4, "the engine got the weights of every step"


def test_an_engines_node_dies_and_a_spare_one_gets_the_weights_over_the_network(nodes: Nodes) -> None:
    """While engines write a step ahead, the trainer has newer weights than the engine that is lost."""
    nodes.join(nodes.spare_engines, "pool=engines")
    uninterrupted, run = merged_alone(nodes, "ahead", *AHEAD), nodes.root / "runs/lost-engine"
    merge = nodes.merge("lost-engine", *OVER_THE_NETWORK, *AHEAD)
    merged_past_a_death(nodes, merge, run, "rollout", (nodes.engines, nodes.spare_engines))
    assert [line["restarted"] for line in records(run) if line.get("restarted")] == [["rollout worker 0"]], (
        "alone, once"
    )
    assert losses(run) == losses(uninterrupted) and weights(run) == weights(uninterrupted), "bit for bit"


def test_a_scoring_node_dies_and_a_spare_one_takes_its_place(nodes: Nodes, alone: Path) -> None:
    nodes.join(nodes.spare, "pool=teachers")
    run = nodes.root / "runs/spare"
    merge = nodes.merge("spare", "cluster.placement.teachers.strategy=strict_pack", "cluster.start_timeout_s=120")
    told = merged_past_a_death(nodes, merge, run, "teacher", (nodes.teachers, nodes.spare))
    assert "teacher worker 0" in (run / "metrics.jsonl").read_text() + told, (
        "started again, alone or with all, and said so"
    )
    assert losses(run) == losses(alone) and weights(run) == weights(alone)


def test_without_a_spare_node_the_merge_ends_and_says_who_has_no_place(nodes: Nodes) -> None:
    """After the test before there is one node for teachers left; it dies as power fails, without a word."""
    run = nodes.root / "runs/ends"
    merge = nodes.merge("ends", "cluster.start_timeout_s=60")
    wait_for(lambda: steps_of(run) > 1, merge)
    dying, _ = at_work(nodes, "teacher", (nodes.teachers, nodes.spare))
    dying.unplug()
    dying.die()
    _, told = merge.communicate(timeout=DEADLINE_S)
    assert merge.returncode == 1, told
    assert "teacher worker 0" in told and "label pool=teachers" in told and nodes.ranks.address in told, told
    assert not {role for _, role in nodes.roles()}, "nobody is left"
