"""Place a pipeline's workers on the nodes of a Ray cluster: what they ask for, what is impossible, and the reservation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm

from opd import cluster
from opd.cluster import LOCAL, Node, Seat, SeatedWorker, WorkerGroup
from opd.cluster.placement import NODE, format_resources, join_names, join_nodes, matches_selector
from opd.config import PipelineConfig
from opd.config.devices import WorkerGpus, rollout_devices, teacher_devices, trainer_devices
from opd.config.placement import RolePlacement
from opd.config.teachers import VLLMTeachers
from opd.errors import ConfigError
from opd.rollouts import engines
from opd.settings.user_objects import is_import_name
from opd.train.ranks import rank_name
from pipelines.gpu_sharing import DealtWorker, SharingRole, deal_workers
from pipelines.teacher_groups import engine_cluster
from teachers import pool

ROLLOUT, TEACHERS, TRAINER = (f"cluster.placement.{role}" for role in ("rollout", "teachers", "trainer"))
ALL_ROLES = (ROLLOUT, TEACHERS, TRAINER)


def local_worker_names(config: PipelineConfig) -> frozenset[str]:
    """Return the names of the workers that have to be on the machine of `opd merge`: new weights go through its shared memory
    from trainer rank 0 to the rollout engines. A push over the network would need none of them there."""
    if config.push_kind != "shared_memory":
        return frozenset()
    return frozenset({rank_name("trainer", 0), *map(engines.worker_name, range(config.rollout.workers))})


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlacedRole:
    """The workers of one role, and what each asks for."""

    name: str
    key: str
    """Key of the pipeline that says where they go, for errors."""
    placement: RolePlacement
    names: tuple[str, ...]
    gpus: WorkerGpus
    processes: int = 1
    """Processes of each worker that compute; they inherit its environment and share its CPUs."""
    apart: bool = True
    """The same as in `SharingRole`."""
    one_node: bool = False
    """The same as in `WorkerGroup`."""

    def seat_worker(self, index: int, bundles: tuple[int, ...] = (0,)) -> SeatedWorker:
        """Return worker number `index` as its seat has it; `bundles`: the seat's bundles with the GPUs of the worker."""
        cpus = self.placement.cpus
        gpus = self.gpus.share if self.gpus.is_shared else float(self.gpus.count)
        return SeatedWorker(
            name=self.names[index],
            asks={"CPU": float(cpus or 1), **({"GPU": gpus} if gpus else {}), **self.placement.resources},
            bundles=bundles,
            threads=None if cpus is None else max(1, cpus // self.processes),
        )


def list_worker_groups(
    config: PipelineConfig, keys: Collection[str] = ALL_ROLES, scorers: Sequence[str] | None = None
) -> list[WorkerGroup]:
    """Return the workers of these roles and what each asks for: first those that share GPUs, then those that exchange most.

    `scorers`: names of the scoring workers; default: those of a merge.
    """
    roles = [role for role in _list_roles(config, scorers) if role.key in keys and role.names]
    sharing = [role for role in roles if role.gpus.is_shared]
    # A user's engine starts workers that we do not know, on the GPUs of this one: what they take of them stays free.
    unknown = config.cluster.rollout_gpus if is_import_name(config.rollout.engine) else 0
    groups = [_group_sharing(sharing, leaves_room=0 < unknown < 1)] if sharing else []
    return [*groups, *(_group_role(role) for role in roles if role not in sharing)]


def _list_roles(config: PipelineConfig, scorers: Sequence[str] | None) -> Iterator[_PlacedRole]:
    """Yield the roles of a merge, first those whose workers exchange weights and gradients: they choose their nodes first."""
    placement, ranks = config.cluster.placement, range(config.trainer.ranks)
    for name in ("trainer", *config.objective.judging_models):
        yield _PlacedRole(
            name=name,
            key=TRAINER,
            placement=placement.trainer,
            names=tuple(rank_name(name, rank) for rank in ranks),
            gpus=trainer_devices(config.cluster),
            one_node=True,
        )
    if not is_import_name(config.rollout.engine):
        yield _PlacedRole(
            name="rollout",
            key=ROLLOUT,
            placement=placement.rollout,
            names=tuple(engines.worker_name(index) for index in range(config.rollout.workers)),
            gpus=rollout_devices(config.cluster, config.rollout),
            processes=config.rollout.tensor_parallel_size,
        )
    first = 0
    for number, section in enumerate(config.engines if scorers is None else config.engines[:1]):
        workers = range(first, first + section.scoring_workers)
        first = workers.stop
        yield _PlacedRole(
            name=f"teachers {number}" if number else "teachers",
            key=TEACHERS,
            placement=placement.teachers,
            names=tuple(scorers or map(pool.worker_name, workers)),
            gpus=teacher_devices(engine_cluster(config, section), section),
            processes=section.tensor_parallel_size if isinstance(section, VLLMTeachers) else 1,
            apart=False,
        )


def _group_role(role: _PlacedRole) -> WorkerGroup:
    """Return the group of a role whose workers share no GPU: each has a seat of its own."""
    workers = map(role.seat_worker, range(len(role.names)))
    seats = (Seat(workers=(one,), bundles=(one.asks,), labels=role.placement.label_selector) for one in workers)
    return WorkerGroup(
        key=role.key, strategy=role.placement.strategy.upper(), seats=tuple(seats), one_node=role.one_node
    )


def _group_sharing(roles: Sequence[_PlacedRole], *, leaves_room: bool) -> WorkerGroup:
    """Return the group of the roles that share GPUs, with a bundle for each GPU. `opd.config.devices` has refused roles that want
    different nodes. `leaves_room`: a bundle has of its GPU only what its workers ask for, else all of it."""
    gpus = deal_workers(
        [SharingRole(name=role.name, workers=len(role.names), gpus=role.gpus, apart=role.apart) for role in roles]
    )
    size, first = lcm(*(role.gpus.count for role in roles)), roles[0]
    blocks = [gpus[start : start + size] for start in range(0, len(gpus), size)]
    by_name = {role.name: role for role in roles}
    return WorkerGroup(
        key=first.key,
        strategy=first.placement.strategy.upper(),
        seats=tuple(_seat_block(block, by_name, leaves_room=leaves_room) for block in blocks),
        one_node=any(role.one_node for role in roles),
    )


def _seat_block(gpus: Sequence[Sequence[DealtWorker]], roles: Mapping[str, _PlacedRole], *, leaves_room: bool) -> Seat:
    """Return the seat of some GPUs and the workers on them, which have to be on one node if one of them is on several of the GPUs."""
    bundles_of: dict[DealtWorker, list[int]] = {}
    for bundle, gpu in enumerate(gpus):
        for dealt in gpu:
            bundles_of.setdefault(dealt, []).append(bundle)
    workers = [roles[dealt.role].seat_worker(dealt.index, tuple(numbers)) for dealt, numbers in bundles_of.items()]
    bundles = [
        _sum_asks([worker.asks for worker in workers if worker.bundles[0] == bundle])
        | {"GPU": sum(dealt.share for dealt in gpu) if leaves_room else 1.0}
        for bundle, gpu in enumerate(gpus)
    ]
    labels = next(iter(roles.values())).placement.label_selector
    return Seat(workers=tuple(workers), bundles=tuple(bundles), labels=labels)


def refuse_unplaceable(config: PipelineConfig) -> None:
    """Refuse a pipeline whose workers the cluster's nodes can never hold. Nothing is loaded yet. Raises: ConfigError, also if
    there is no cluster."""
    if config.cluster.address == LOCAL:
        return
    with cluster.ray_session(config.cluster, 0):
        refuse_on_nodes(config, cluster.list_nodes())


def refuse_on_nodes(config: PipelineConfig, nodes: Sequence[Node]) -> None:
    """Refuse a pipeline whose workers these nodes can never hold, or cannot send new weights between. Raises: ConfigError."""
    _refuse_unreached_engines(config, nodes)
    refuse_impossible_placement(list_worker_groups(config), local_worker_names(config), nodes)


def _refuse_unreached_engines(config: PipelineConfig, nodes: Sequence[Node]) -> None:
    """Refuse direct pushes to engines of several processes if rank 0 may be on another node: the processes of such an engine use NCCL and
    gloo through loopback alone. Raises: ConfigError."""
    size = config.rollout.tensor_parallel_size
    if config.push_kind == "direct" and size > 1 and len(nodes) > 1:
        raise ConfigError.at(
            "sync.kind",
            found=f"direct with rollout.tensor_parallel_size {size} on {len(nodes)} nodes",
            wanted="network or shared_memory: the processes of a divided engine connect through loopback alone, which no other node "
            "reaches",
            fix="set sync.kind to network; or to shared_memory, which has trainer rank 0 and all engines on this machine",
        )


def reserve_places(
    config: PipelineConfig,
    keys: Collection[str] = ALL_ROLES,
    local_workers: Collection[str] = (),
    scorers: Sequence[str] | None = None,
) -> dict[str, Node]:
    """Reserve the places of these roles' workers, with `local_workers` on this machine. Returns worker -> address of its node;
    nothing for Ray on this machine, which has one place. Raises: RunError past `cluster.start_timeout_s`."""
    groups, timeout_s = list_worker_groups(config, keys, scorers), config.cluster.start_timeout_s
    if config.cluster.address == LOCAL:
        sharing = [group for group in groups if group.shares_gpus]
        if sharing:
            cluster.reserve_seats(sharing, timeout_s=timeout_s)
        return {}
    nodes = cluster.list_nodes()
    groups = [replace(group, seats=_pin_seats(group.seats, local_workers, nodes[0])) for group in groups]
    node_ids = cluster.reserve_seats(_order_groups(groups, nodes), timeout_s=timeout_s)
    by_id = {node.id: node for node in cluster.list_nodes()}
    return {worker: by_id[node] for worker, node in node_ids.items() if node in by_id}


def _order_groups(groups: Sequence[WorkerGroup], nodes: Sequence[Node]) -> list[WorkerGroup]:
    """Return the groups in the order in which they choose their nodes: those first that have least choice, else as `list_worker_groups` has them."""

    def count_choices(group: WorkerGroup) -> int:
        return max(sum(seat.fits_node(node) for node in nodes) for seat in group.seats)

    return sorted(groups, key=count_choices)


def describe_divided_trainer(config: PipelineConfig, nodes: Mapping[str, Node]) -> str | None:
    """Return a sentence for the user if the trainer's ranks are on several nodes; None if one has them all. `nodes`: worker -> its node."""
    names = [rank_name("trainer", rank) for rank in range(config.trainer.ranks)]
    ranks = [nodes[name] for name in names if name in nodes]
    counts = Counter(node.id for node in ranks)
    if len(counts) < 2:
        return None
    where = ", ".join(f"{counts[node.id]} on {node.address}" for node in {node.id: node for node in ranks}.values())
    return (
        f"the trainer's {len(ranks)} ranks are on several nodes ({where}), because none had room for all of them: weights and "
        "gradients cross the network in every micro-batch"
    )


def place_rollouts(config: PipelineConfig, scorer: str | None = None) -> None:
    """Have places for the rollout workers of a command that trains nothing. They are on this machine, because a model may lie in
    its temporary directory. `scorer`: name of a worker with the GPUs of a scoring worker, for which there is room beside them.
    Raises: ConfigError, RunError."""
    local_workers = [engines.worker_name(i) for i in range(config.rollout.workers)]
    roles = (rollout_devices(config.cluster, config.rollout), teacher_devices(config.cluster, config.teachers))
    if scorer is not None and all(gpus.is_shared for gpus in roles):
        _place_roles(config, {ROLLOUT, TEACHERS}, local_workers, (scorer,))
    else:
        _place_roles(config, {ROLLOUT}, local_workers)


def place_teachers(config: PipelineConfig) -> None:
    """Have places for the scoring workers of a command that only serves them. Raises: ConfigError, RunError."""
    _place_roles(config, {TEACHERS}, ())


def _place_roles(
    config: PipelineConfig, keys: set[str], local_workers: Collection[str], scorers: Sequence[str] | None = None
) -> None:
    if config.cluster.address != LOCAL:
        refuse_impossible_placement(list_worker_groups(config, keys, scorers), local_workers, cluster.list_nodes())
    reserve_places(config, keys, local_workers, scorers)


def refuse_impossible_placement(
    groups: Sequence[WorkerGroup], local_workers: Collection[str], nodes: Sequence[Node]
) -> None:
    """Refuse groups of workers that the nodes could not hold even if they were empty. Raises: ConfigError.

    Only certain cases are refused. Whether all groups fit together, beside other users of the cluster, Ray finds out later.
    """
    this_node = nodes[0]
    assert this_node.is_local, "a driver is on a node of its cluster"
    for group in groups:
        _refuse_far(group, [seat for seat in group.seats if set(seat.names) & set(local_workers)], this_node)
        pinned = replace(group, seats=_pin_seats(group.seats, local_workers, this_node))
        for seat in pinned.seats:
            if not any(seat.fits_node(node) for node in nodes):
                raise _make_placement_error(group, _describe_request(seat, this_node), "a node that has it", nodes)
        _refuse_together(pinned, nodes)
    _refuse_too_many(groups, local_workers, nodes)


def _pin_seats(seats: Sequence[Seat], local_workers: Collection[str], this_node: Node) -> tuple[Seat, ...]:
    return tuple(
        replace(s, labels={**s.labels, NODE: this_node.id}) if set(s.names) & set(local_workers) else s for s in seats
    )


def _refuse_far(group: WorkerGroup, local_seats: Sequence[Seat], this_node: Node) -> None:
    """Refuse a group whose placement excludes this machine, if some of its workers have to be here. Raises: ConfigError."""
    reason = f"{_join_names(local_seats)} on this machine: new weights go through its shared memory"
    for seat in local_seats:
        unmet = {
            key: selector
            for key, selector in seat.labels.items()
            if not matches_selector(this_node.labels.get(key), selector)
        }
        if unmet:
            raise ConfigError.at(
                f"{group.key}.label_selector",
                found=f"{format_resources({}, unmet)}, and this machine is {this_node}",
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
        requirement = (
            f"{len(group.seats)} nodes for {_join_names(group.seats)}, and {len(fitting)} have what each asks for"
        )
        raise _make_placement_error(group, "strict_spread", requirement, nodes)
    if group.strategy == "STRICT_PACK":
        combined = group.combine_seats()
        if not any(combined.fits_node(node) for node in nodes):
            raise _make_placement_error(
                group, "strict_pack", f"one node with {combined} for {_join_names(group.seats)}", nodes
            )


def _refuse_too_many(groups: Sequence[WorkerGroup], local_workers: Collection[str], nodes: Sequence[Node]) -> None:
    """Refuse workers that together ask for more than this machine, or all machines, have. Raises: ConfigError."""
    every = [seat for group in groups for seat in group.seats]
    local_seats = [seat for seat in every if set(seat.names) & set(local_workers)]
    for seats, candidates, scope in ((local_seats, nodes[:1], "this machine"), (every, nodes, "all nodes")):
        for name, amount in _sum_asks([seat.asks for seat in seats]).items():
            has = sum(node.has.get(name, 0) for node in candidates)
            # 1e-9: fractions of a GPU that add up to whole ones are a little more in floating point.
            if amount > has + 1e-9:
                raise ConfigError.at(
                    "cluster",
                    found=f"{amount:g} {name} for {_join_names([seat for seat in seats if name in seat.asks])}",
                    wanted=f"at most the {has:g} {name} of {scope}: {join_nodes(candidates)}",
                    fix="start more nodes, ask for fewer workers (rollout.workers, teachers.workers, trainer.ranks), or for "
                    "less for each (cluster.placement, cluster.*_gpus)",
                )


def _make_placement_error(group: WorkerGroup, problem: str, requirement: str, nodes: Sequence[Node]) -> ConfigError:
    return ConfigError.at(
        group.key,
        found=f"{problem}; the nodes: {join_nodes(nodes)}",
        wanted=requirement,
        fix="start such a node (`ray start --address ... --labels KEY=VALUE --resources JSON`), or ask for less",
    )


def _describe_request(seat: Seat, this_node: Node) -> str:
    here = f", on this machine ({this_node.address})" if NODE in seat.labels else ""
    return seat.describe_request() + here


def _join_names(seats: Sequence[Seat]) -> str:
    return join_names([name for seat in seats for name in seat.names])


def _sum_asks(asks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return resource -> amount of all of them together."""
    names = sorted({name for each in asks for name in each})
    return {name: sum(each.get(name, 0) for each in asks) for name in names}
