"""Place a pipeline's workers on the nodes of a Ray cluster: what they ask for, what is impossible, and the reservation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from opd import cluster
from opd.cluster import LOCAL, Node, Seat, WorkerGroup
from opd.cluster.placement import NODE, format_resources, matches_selector
from opd.config import PipelineConfig
from opd.config.devices import rollout_devices, teacher_devices
from opd.config.placement import RolePlacement
from opd.config.teachers import VLLMTeachers
from opd.errors import ConfigError
from opd.rollouts import engines
from opd.train.ranks import rank_name
from teachers import pool

ROLLOUT, TEACHERS, TRAINER = (f"cluster.placement.{role}" for role in ("rollout", "teachers", "trainer"))
ALL_ROLES = (ROLLOUT, TEACHERS, TRAINER)


def local_worker_names(config: PipelineConfig) -> frozenset[str]:
    """Return the names of the workers that have to be on the machine of `opd merge`: new weights go through its shared memory
    from trainer rank 0 to the rollout engines. A push over the network would need none of them there."""
    if config.push_kind != "shared_memory":
        return frozenset()
    return frozenset({rank_name("trainer", 0), *map(engines.worker_name, range(config.rollout.workers))})


def groups_of(config: PipelineConfig, keys: Collection[str] = ALL_ROLES) -> list[WorkerGroup]:
    """Return the workers of these roles and what each asks for."""
    placement, ranks = config.cluster.placement, range(config.trainer.ranks)
    by_role = [
        (
            ROLLOUT,
            placement.rollout,
            rollout_devices(config.cluster, config.rollout),
            [engines.worker_name(i) for i in range(config.rollout.workers)],
            config.rollout.tensor_parallel_size,
        ),
        (
            TEACHERS,
            placement.teachers,
            teacher_devices(config.cluster, config.teachers),
            [pool.worker_name(i) for i in range(config.teachers.scoring_workers)],
            config.teachers.tensor_parallel_size if isinstance(config.teachers, VLLMTeachers) else 1,
        ),
        (TRAINER, placement.trainer, config.cluster.trainer_gpus, [rank_name("trainer", rank) for rank in ranks], 1),
    ]
    if config.objective.has_critic:
        critics = [rank_name("critic", rank) for rank in ranks]
        by_role.append((TRAINER, placement.trainer, config.cluster.trainer_gpus, critics, 1))
    if config.rollout.engine != "vllm":
        by_role = by_role[1:]  # a user's engine has workers that we do not know
    return [
        _group_seats(key, role, gpus, names, processes)
        for key, role, gpus, names, processes in by_role
        if key in keys and names
    ]


def refuse_unplaceable(config: PipelineConfig) -> None:
    """Refuse a pipeline whose workers the cluster's nodes can never hold. Nothing is loaded yet. Raises: ConfigError, also if
    there is no cluster."""
    if config.cluster.address == LOCAL:
        return
    with cluster.ray_session(config.cluster, 0):
        refuse_impossible_placement(groups_of(config), local_worker_names(config), cluster.list_nodes())


def reserve_places(
    config: PipelineConfig, keys: Collection[str] = ALL_ROLES, local_workers: Collection[str] = ()
) -> dict[str, str]:
    """Reserve the places of these roles' workers, with `local_workers` on this machine. Returns worker -> address of its node;
    nothing for Ray on this machine, which has one place. Raises: RunError past `cluster.start_timeout_s`."""
    if config.cluster.address == LOCAL:
        return {}
    this_node = cluster.list_nodes()[0]
    groups = [replace(g, seats=_pin_seats(g.seats, local_workers, this_node)) for g in groups_of(config, keys)]
    return cluster.reserve_seats(groups, timeout_s=config.cluster.start_timeout_s)


def place_rollouts(config: PipelineConfig) -> None:
    """Have places for the rollout workers of a command that trains nothing. They are on this machine, because a model may lie in
    its temporary directory. Raises: ConfigError, RunError."""
    _place_role(config, ROLLOUT, [engines.worker_name(i) for i in range(config.rollout.workers)])


def place_teachers(config: PipelineConfig) -> None:
    """Have places for the scoring workers of a command that only serves them. Raises: ConfigError, RunError."""
    _place_role(config, TEACHERS, ())


def _place_role(config: PipelineConfig, key: str, local_workers: Collection[str]) -> None:
    if config.cluster.address != LOCAL:
        refuse_impossible_placement(groups_of(config, {key}), local_workers, cluster.list_nodes())
        reserve_places(config, {key}, local_workers)


def refuse_impossible_placement(
    groups: Sequence[WorkerGroup], local_workers: Collection[str], nodes: Sequence[Node]
) -> None:
    """Refuse groups of workers that the nodes could not hold even if they were empty. Raises: ConfigError.

    Only certain cases are refused. Whether all groups fit together, beside other users of the cluster, Ray finds out later.
    """
    this_node = nodes[0]
    assert this_node.is_local, "a driver is on a node of its cluster"
    for group in groups:
        _refuse_far(group, [seat for seat in group.seats if seat.worker in local_workers], this_node)
        pinned = replace(group, seats=_pin_seats(group.seats, local_workers, this_node))
        for seat in pinned.seats:
            if not any(seat.fits_node(node) for node in nodes):
                raise _make_placement_error(
                    group, f"{seat.worker} asks for {_describe_request(seat, this_node)}", "a node that has it", nodes
                )
        _refuse_together(pinned, nodes)
    _refuse_too_many(groups, local_workers, nodes)


def _group_seats(key: str, placement: RolePlacement, gpus: float, names: Sequence[str], processes: int) -> WorkerGroup:
    """Return the seats of one role's workers. `processes`: those of each worker that compute; they inherit its environment and
    share its CPUs."""
    asks = {"CPU": float(placement.cpus or 1), **({"GPU": gpus} if gpus else {}), **placement.resources}
    threads = None if placement.cpus is None else max(1, placement.cpus // processes)
    seats = tuple(Seat(worker=name, asks=asks, labels=placement.label_selector, threads=threads) for name in names)
    return WorkerGroup(key=key, strategy=placement.strategy.upper(), seats=seats)


def _pin_seats(seats: Sequence[Seat], local_workers: Collection[str], this_node: Node) -> tuple[Seat, ...]:
    return tuple(replace(s, labels={**s.labels, NODE: this_node.id}) if s.worker in local_workers else s for s in seats)


def _refuse_far(group: WorkerGroup, local_seats: Sequence[Seat], this_node: Node) -> None:
    """Refuse a group whose placement excludes this machine, if some of its workers have to be here. Raises: ConfigError."""
    reason = (
        f"{', '.join(seat.worker for seat in local_seats)} on this machine: new weights go through its shared memory"
    )
    for seat in local_seats:
        missed = {
            key: selector
            for key, selector in seat.labels.items()
            if not matches_selector(this_node.labels.get(key), selector)
        }
        if missed:
            raise ConfigError.at(
                f"{group.key}.label_selector",
                found=f"{format_resources({}, missed)}, and this machine is {this_node}",
                wanted=reason,
                fix="start `opd` on a node that has the labels, or leave them out",
            )
    if len(local_seats) > 1 and "SPREAD" in group.strategy:
        raise ConfigError.at(
            f"{group.key}.strategy", found=group.strategy.lower(), wanted=reason, fix="set it to pack, or leave it out"
        )


def _refuse_together(group: WorkerGroup, nodes: Sequence[Node]) -> None:
    """Refuse a group whose strict strategy no nodes can satisfy. Raises: ConfigError."""
    fitting = [node for node in nodes if any(seat.fits_node(node) for seat in group.seats)]
    if group.strategy == "STRICT_SPREAD" and len(group.seats) > len(fitting):
        requirement = f"{len(group.seats)} nodes for {_group_names(group)}, and {len(fitting)} have what each asks for"
        raise _make_placement_error(group, "strict_spread", requirement, nodes)
    if group.strategy == "STRICT_PACK":
        combined_seat = Seat(
            worker="", asks=_sum_seats(group.seats), labels={k: v for s in group.seats for k, v in s.labels.items()}
        )
        if not any(combined_seat.fits_node(node) for node in nodes):
            raise _make_placement_error(
                group, "strict_pack", f"one node with {combined_seat} for {_group_names(group)}", nodes
            )


def _refuse_too_many(groups: Sequence[WorkerGroup], local_workers: Collection[str], nodes: Sequence[Node]) -> None:
    """Refuse workers that together ask for more than this machine, or all machines, have. Raises: ConfigError."""
    every = [seat for group in groups for seat in group.seats]
    local_seats = [seat for seat in every if seat.worker in local_workers]
    for seats, candidates, scope in ((local_seats, nodes[:1], "this machine"), (every, nodes, "all nodes")):
        for name, amount in _sum_seats(seats).items():
            has = sum(node.has.get(name, 0) for node in candidates)
            # 1e-9: fractions of a GPU that add up to whole ones are a little more in floating point.
            if amount > has + 1e-9:
                raise ConfigError.at(
                    "cluster",
                    found=f"{amount:g} {name} for {', '.join(s.worker for s in seats if name in s.asks)}",
                    wanted=f"at most the {has:g} {name} of {scope}: {'; '.join(map(str, candidates))}",
                    fix="start more nodes, ask for fewer workers (rollout.workers, teachers.workers, trainer.ranks), or for "
                    "less for each (cluster.placement, cluster.*_gpus)",
                )


def _make_placement_error(group: WorkerGroup, problem: str, requirement: str, nodes: Sequence[Node]) -> ConfigError:
    return ConfigError.at(
        group.key,
        found=f"{problem}; the nodes: {'; '.join(map(str, nodes))}",
        wanted=requirement,
        fix="start such a node (`ray start --address ... --labels KEY=VALUE --resources JSON`), or ask for less",
    )


def _describe_request(seat: Seat, this_node: Node) -> str:
    return f"{seat}, on this machine ({this_node.address})" if NODE in seat.labels else str(seat)


def _group_names(group: WorkerGroup) -> str:
    return ", ".join(seat.worker for seat in group.seats)


def _sum_seats(seats: Sequence[Seat]) -> dict[str, float]:
    names = {name for seat in seats for name in seat.asks}
    return {name: sum(seat.asks.get(name, 0) for seat in seats) for name in sorted(names)}
