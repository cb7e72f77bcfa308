"""Plans: numbers that can be derived by hand, what moves them, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from cli import app
from docs.shipped_plans import SHIPPED_PLANS
from opd.config import PipelineConfig, load_pipeline
from opd.errors import ConfigError
from pipelines.catalog import find_pipeline, shipped_plans
from pipelines.inputs.read import read_inputs
from pipelines.placement import list_worker_groups
from pipelines.plan import measure
from pipelines.plan.cost import apply_placement
from pipelines.plan.models import read_models
from pipelines.plan.plan import MergePlan, make_plan
from pipelines.plan.spec import ClusterSpec, load_spec, shipped_specs, with_lengths
from pipelines.plan.tables import format_short, plan_tables
from pipelines.sizing import gpu_memory
from pipelines.sizing.auto import choose_numbers
from pipelines.sizing.gpu_memory import refuse_crowded_gpus, refuse_idle_gpus
from pipelines.sizing.memory import estimate_memory
from pipelines.sizing.models import read_shape

PLANS = Path(__file__).parents[4] / "docs" / "results" / "plans.json"


def plan(name: str, cluster: str, changes: Sequence[str] = (), **sections: Any) -> MergePlan:
    config = load_pipeline(find_pipeline(name), list(changes))
    data = load_spec(cluster).model_dump()
    return make_plan(config, ClusterSpec.model_validate(data | {k: data[k] | v for k, v in sections.items()}))


def seconds(made: MergePlan) -> dict[str, float]:
    return {phase.name: phase.seconds for phase in made.phases}


def held(made: MergePlan, role: str) -> dict[str, float]:
    return {one.part: one.nbytes for one in made.memory if one.role == role}


@pytest.fixture(scope="module")
def shipped() -> dict[str, MergePlan]:
    return {name: plan(name, cluster) for name, cluster in SHIPPED_PLANS.items()}


def test_every_shipped_plan_fits_and_stands_among_the_results(shipped: dict[str, MergePlan]) -> None:
    """A formula or a rate that changes has to be seen: `python docs/make_reference.py` writes the file anew."""
    assert set(shipped_plans()) == set(SHIPPED_PLANS) and set(SHIPPED_PLANS.values()) < set(shipped_specs())
    recorded = json.loads(PLANS.read_text(encoding="utf-8"))
    for name, made in shipped.items():
        assert made.fits, name
        assert {one.title: [list(row) for row in one.rows] for one in plan_tables(made)} == recorded[name], name


def test_744_billion_in_two_days(shipped: dict[str, MergePlan]) -> None:
    """Machines pass the weights on; rank 0 is slower, which copies all of them twice, as text on the page says."""
    made = shipped["merge-744b"]
    pushed = seconds(made)["sync"]
    assert 53 < made.hours < 56
    assert made.experts == 12 and made.devices == 256
    copy = 2 * made.parameters / (50e9 * 0.7)
    gathered = 2 * 2 * made.parameters * 255 / 256 / (400e9 * 0.7)  # once more for the probe
    buckets = ceil(made.parameters / (154_880 * 6144))
    machine = (4.01 / 4 + 1 + 1 / 32) * copy / buckets
    assert pushed == pytest.approx(gathered + 2 * copy + 31 * machine, rel=0.03)
    assert made.device_hours == pytest.approx(256 * made.hours)
    assert made.hours == pytest.approx(made.steps * made.step_s / 3600)


def test_a_rank_holds_its_share_of_18_bytes_a_parameter(shipped: dict[str, MergePlan]) -> None:
    made = shipped["merge-70b"]
    rank = held(made, "trainer rank")
    state = rank["weights"] + rank["gradients"] + rank["optimiser"]
    assert state == pytest.approx(18 * 70_553_706_496 / 32)
    summed = "gradients on their way to the sum over ranks"
    assert (rank[summed], held(shipped["merge-7b"], "trainer rank")[summed]) == (4 * 100_000_000, 4 * 500_000_000)
    assert held(made, "rollout engine")["weights"] == pytest.approx(2 * 70_553_706_496 / 8)
    layer = read_models(load_pipeline(find_pipeline("merge-744b"))).student
    experts = 256 * 3 * 6144 * 2048
    assert layer.body.largest == experts
    assert held(shipped["merge-744b"], "trainer rank")["gathered weights"] == 2 * experts


def test_bytes_of_a_step(shipped: dict[str, MergePlan]) -> None:
    made = shipped["merge-7b"]
    sent = {one.what: one.nbytes for one in made.traffic}
    assert sent["new weights"] == 8 * 2 * 7_615_616_512
    adapter = 28 * 32 * (4 * 3584 + 2 * 512 + 2 * 3584 + 3 * (3584 + 18944))
    assert sent["teachers' weights"] == 10 * 2 * adapter
    tokens = sent["rollouts"] - 512 * (100 + 4 * 300)
    assert sent["target rows"] == pytest.approx(sent["rollouts"] + tokens / 8 * 3584 * 2)


def test_a_start_student_that_the_ranks_ask_is_their_work_and_not_the_teachers() -> None:
    lora = "student.lora.r=16"
    without = plan("merge-7b", "8-gpus", [lora])
    asked = plan("merge-7b", "8-gpus", [lora, "objective.extrapolate=1.25"])
    scored = plan("merge-7b", "8-gpus", ["objective.extrapolate=1.25"])
    assert seconds(asked)["score"] == seconds(without)["score"] < seconds(scored)["score"]
    assert seconds(without)["train"] < seconds(asked)["train"]
    before, after = ({one.what: one.nbytes for one in made.traffic} for made in (without, asked))
    assert after.pop("gathered weights") == 1.5 * before.pop("gathered weights") and after == before
    other, memory = (held(made, "trainer rank") for made in (without, asked))
    work = "logits of a chunk of the loss"
    assert memory == other | {work: other[work] + 2 * 1024 * 152_064}, "its logits of a chunk"
    assert held(asked, "scoring worker") == held(without, "scoring worker")


def test_lora_experts_on_the_students_base_are_the_ranks_work_and_need_no_worker() -> None:
    lora = ["student.lora.r=16"]
    by_workers = plan("merge-7b", "8-gpus", lora)
    keep = {"engine": "trainer", "dtype": "bfloat16"}
    by_ranks = plan("merge-7b", "8-gpus", [*lora, f"teachers={json.dumps(keep)}", "cluster.teacher_gpus=0"])
    assert seconds(by_ranks)["score"] == 0 < seconds(by_workers)["score"]
    assert seconds(by_workers)["train"] < seconds(by_ranks)["train"]
    assert by_ranks.fits and not held(by_ranks, "scoring worker")
    flops = [{phase.name: phase.flops for phase in made.phases} for made in (by_workers, by_ranks)]
    assert flops[1]["score"] == 0 and flops[1]["train"] > flops[0]["train"]
    assert {one.what for one in by_workers.traffic} - {one.what for one in by_ranks.traffic} == {
        "target rows", "teachers' weights"
    }  # fmt: skip


def test_seconds_follow_rates() -> None:
    """Each rate moves the phases that use it, and no others."""
    before = seconds(plan("merge-7b", "8-gpus"))
    quick = seconds(plan("merge-7b", "8-gpus", rates={"memory": 6.7e12}))
    assert quick["rollout"] < before["rollout"] and quick["score"] == before["score"]
    fast = seconds(plan("merge-7b", "8-gpus", rates={"bfloat16": 1978e12}))
    # Teachers that come to several workers cost the same copies at any rate.
    assert fast["train"] < 0.65 * before["train"] and fast["score"] < 0.75 * before["score"]
    assert fast["rollout"] > 0.9 * before["rollout"], "decoding waits for memory"
    linked = seconds(plan("merge-744b", "256-gpus", links={"between": 100e9}))
    slow = seconds(plan("merge-744b", "256-gpus"))
    assert linked["sync"] < slow["sync"] and linked["score"] == slow["score"]
    hosted = seconds(plan("merge-744b", "256-gpus", links={"load": 100e9}))
    assert hosted["sync"] < 0.7 * slow["sync"], "rank 0's own copies take longest"


def test_a_long_tail_costs_the_rollouts_alone() -> None:
    even = plan("merge-7b", "8-gpus", lengths={"tail": 1.0, "response": 600})
    tailed = plan("merge-7b", "8-gpus", lengths={"tail": 4.0, "response": 500})
    assert even.response == 600 and tailed.response == pytest.approx(600, rel=0.05)
    assert seconds(tailed)["rollout"] > 1.5 * seconds(even)["rollout"]
    assert tailed.sequences < even.sequences
    assert {role.name: role.busy for role in tailed.roles}["trainer"] < {r.name: r.busy for r in even.roles}["trainer"]


def test_writing_beside_training_hides_the_shorter_of_the_two() -> None:
    """Roles with GPUs of their own."""
    own = {"placement": {"shared": False, "ranks": 4, "rollout": {"workers": 3}, "teachers": {"workers": 1}}}
    before = plan("merge-7b", "8-gpus", ["rollout.sleep=false"], **own)
    after = plan("merge-7b", "8-gpus", ["rollout.sleep=false", "schedule.mode=one_step_off"], **own)
    parts = seconds(after)
    taught = before.step_s - seconds(before)["rollout"] - seconds(before)["sync"]
    assert taught < parts["score"] + parts["train"], "micro-batches begin before the last row is scored"
    assert after.step_s == pytest.approx(max(parts["rollout"], taught) + parts["sync"], rel=0.05)


def test_new_weights_through_shared_memory_stay_on_one_machine() -> None:
    """`opd merge` refuses to place such workers; engines on one machine with rank 0 are fine."""
    with pytest.raises(ConfigError, match=r"set sync\.kind to network"):
        plan("merge-70b", "32-gpus", ["sync.kind=shared_memory"])

    def beside(devices: int) -> MergePlan:
        engine, scorer = {"workers": 1, "devices": devices}, {"workers": 1}
        own = {"placement": {"shared": False, "ranks": 8, "rollout": engine, "teachers": scorer}}
        return plan("merge-7b", "32-gpus", ["rollout.sleep=false", "sync.kind=shared_memory"], **own)

    placed, auto = beside(7).notes
    assert placed.startswith("planned in the placement of 32-gpus; `opd merge` has it with --set rollout.workers=1 ")
    assert auto.startswith("auto: ")
    with pytest.raises(ConfigError, match="9 GPUs, and 8 on a machine"):
        beside(8)


def test_weights_that_go_directly_do_not_pass_the_host() -> None:
    """`auto` on GPUs; a bucket's gather hides behind the broadcast before it."""
    kinds = ("auto", "direct", "network", "shared_memory")
    auto, direct, network, files = (
        seconds(plan("merge-7b", "8-gpus", [f"sync.kind={kind}"]))["sync"] for kind in kinds
    )
    assert auto == direct < network / 2 and direct < files / 2
    spec = load_spec("8-gpus")
    weights = 2 * read_models(load_pipeline(find_pipeline("merge-7b"))).student.parameters
    assert direct > weights / spec.links.inside, "never faster than the link"


def test_a_divided_teacher_takes_as_long_as_on_one_gpu() -> None:
    """Layers compute one after the other. What no GPU has comes to the first one in every pass."""
    own = {"placement": {"shared": False, "ranks": 2, "rollout": {"workers": 1}, "teachers": {"workers": 1}}}
    awake = ["rollout.sleep=false", "teachers.device_map=auto", "cluster.teacher_gpus=1"]
    one = plan("merge-7b", "8-gpus", awake, **own)
    own["placement"]["teachers"] = {"workers": 1, "devices": 4}
    four = plan("merge-7b", "8-gpus", awake, **own)
    assert seconds(four)["score"] == pytest.approx(seconds(one)["score"])
    assert "cluster.teacher_gpus=4" in four.notes[0] and len(four.notes) == len(one.notes)
    weights = "weights of one teacher"
    assert held(four, "scoring worker")[weights] < 0.5 * held(one, "scoring worker")[weights]
    activations = "activations of one pass"
    assert held(four, "scoring worker")[activations] == held(one, "scoring worker")[activations]
    own["placement"]["teachers"] = {"workers": 1}
    helped = plan("merge-7b", "8-gpus", [*awake, "teachers.max_memory={0: 8GiB, cpu: 100GiB}"], **own)
    assert held(helped, "scoring worker")[weights] == 8 << 30
    a_pass = (2 * 7_615_616_512 - (8 << 30)) / 50e9 / 0.7
    passes = 20 * (seconds(helped)["score"] - seconds(one)["score"]) / a_pass  # of the 20 steps that are simulated
    assert passes == pytest.approx(round(passes)) and passes > 20 * 100


def test_what_a_merge_refuses_is_not_planned(shipped: dict[str, MergePlan]) -> None:
    for name in shipped:
        refuse_idle_gpus(load_pipeline(find_pipeline(name)))
    data = load_spec("8-gpus").model_dump() | {"placement": None}
    with pytest.raises(ConfigError, match=r"cluster\.teacher_gpus"):
        config = load_pipeline(find_pipeline("merge-7b"), ["cluster.teacher_gpus=8"])
        make_plan(config, ClusterSpec.model_validate(data))


def test_the_plan_of_eight_gpus_is_a_merge_that_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the very functions that `opd merge` and `opd check` call, on a machine like that of the plan."""
    spec, config = load_spec("8-gpus"), load_pipeline(find_pipeline("merge-7b"))
    made = plan("merge-7b", "8-gpus")
    assert made.fits and not any("placement" in note for note in made.notes), "it has the plan's placement itself"
    models = read_models(config).merge
    config = choose_numbers(config, models, spec.hardware)
    monkeypatch.setattr(gpu_memory, "gpu_sizes", lambda: list(spec.hardware.gpus))
    refuse_idle_gpus(config)
    assert refuse_crowded_gpus(config, models) == []
    (group,) = list_worker_groups(config)
    assert [seat.names for seat in group.seats] == [
        (f"trainer rank {i}", f"rollout worker {i}", f"teacher worker {i}") for i in range(8)
    ]
    monkeypatch.setattr(gpu_memory, "gpu_sizes", lambda: list(spec.hardware.gpus)[:7])
    with pytest.raises(ConfigError, match="24 workers that need 8 GPUs, and 7 here"):
        refuse_crowded_gpus(config, models)


def test_a_shared_placement_is_said_as_keys_with_which_a_merge_has_it(world: Any) -> None:
    config, spec = load_pipeline(world.write()), load_spec("8-gpus")
    (note,) = [note for note in make_plan(config, spec).notes if note.startswith("planned in the placement")]
    keys = [word for word in note.split() if "=" in word]
    assert "cluster.trainer_gpus=0.33" in keys
    assert load_pipeline(world.write(), keys) == apply_placement(config, spec)


def test_a_placement_that_a_merge_refuses_is_said(shipped: dict[str, MergePlan]) -> None:
    refusals = {name: [note for note in made.notes if "refuses" in note] for name, made in shipped.items()}
    assert {name for name, notes in refusals.items() if notes} == {"merge-744b"}
    assert (
        "trainer rank 0 to 63, rollout worker 0, rollout worker 1, teacher worker 0 ask for 67 CPU, 64 GPU"
        in refusals["merge-744b"][0]
    )
    rank_alone = ["cluster.rollout_gpus=0.4", "cluster.trainer_gpus=0.4", "rollout.engine=my:Engine"]
    with pytest.raises(ConfigError, match=r"does not know the workers of this engine"):
        load_pipeline(find_pipeline("merge-7b"), rank_alone)


def test_a_share_lets_a_role_have_its_gpu_while_the_others_wait(shipped: dict[str, MergePlan]) -> None:
    other = plan("merge-7b", "8-gpus", ["cluster.rollout_gpus=0.1", "cluster.teacher_gpus=0.1"])
    assert other.step_s == shipped["merge-7b"].step_s
    data = load_spec("8-gpus").model_dump() | {"placement": None}
    alone = make_plan(load_pipeline(find_pipeline("merge-7b")), ClusterSpec.model_validate(data))
    assert alone.step_s == shipped["merge-7b"].step_s and alone.fits


def test_a_machine_more_costs_a_buckets_time() -> None:
    """Of a small model, so that a bucket has 64 MiB, to machines of one GPU beside that of the trainer."""

    def pushed(machines: int) -> float:
        place = {"shared": False, "ranks": 1, "rollout": {"workers": machines}, "teachers": {"workers": 1}}
        cluster = {"machines": 8, "machine": load_spec("8-gpus").machine.model_dump() | {"gpus": 1}, "placement": place}
        return seconds(plan("merge-7b", "8-gpus", ["rollout.sleep=false", "sync.kind=network"], **cluster))["sync"]

    one, two, five = map(pushed, (1, 2, 5))
    spec = load_spec("8-gpus")
    numbers = read_models(load_pipeline(find_pipeline("merge-7b"))).student
    bucket = 2 * numbers.head
    link = spec.factors.link.share
    each = 4.01 / 4 * bucket / (spec.links.between * link) + 2 * bucket / (spec.links.load * link)
    assert two - one == pytest.approx(each, rel=0.1) and five - one == pytest.approx(4 * (two - one))


def test_a_push_over_the_network_reaches_each_machine_once(shipped: dict[str, MergePlan]) -> None:
    sent = {one.what: one for one in shipped["merge-70b"].traffic}["new weights"]
    assert sent.nbytes == pytest.approx(3 * 4.01 / 4 * 2 * 70_553_706_496) and "object store" in sent.link
    assert not any("push" in note for note in shipped["merge-70b"].notes)
    near, far = (
        seconds(plan("quickstart", "two-cores", [f"sync.kind={kind}"])) for kind in ("shared_memory", "network")
    )
    assert far["sync"] > near["sync"] and far["train"] == near["train"]


def test_roles_side_by_side_on_one_core_take_as_long_as_one_after_the_other() -> None:
    """On two cores each has one; on one core they share it, so that nothing is won."""
    mode = ["trainer.ranks=1", "schedule.mode=one_step_off"]
    two, one = (load_spec("two-cores").machine.model_dump() | {"cores": n} for n in (2, 1))
    after = plan("quickstart", "two-cores", [mode[0], "schedule.mode=sync"], machine=one)
    beside = plan("quickstart", "two-cores", mode, machine=one)
    assert beside.step_s == pytest.approx(after.step_s)
    assert seconds(beside)["train"] > seconds(after)["train"]
    apart = plan("quickstart", "two-cores", mode, machine=two)
    parts = seconds(apart)
    assert apart.step_s == pytest.approx(max(parts["rollout"], parts["score"] + parts["train"]) + parts["sync"])


def test_overheads_follow_the_rate_of_small_calls() -> None:
    sync = ["schedule.mode=sync"]  # roles that share cores take longer, overheads and all
    before = plan("quickstart", "two-cores", sync)
    after = plan("quickstart", "two-cores", sync, overheads={"calls": 4e5}, rates={"calls": 2e5})
    for quick, late in zip(before.phases, after.phases, strict=True):
        assert late.overhead == pytest.approx(2 * quick.overhead) and late.compute == pytest.approx(quick.compute)


def test_what_does_not_fit_is_said() -> None:
    crowded = plan("merge-70b", "32-gpus", ["trainer.micro_batch_tokens=32768"])
    assert not crowded.fits and any(not room.fits for room in crowded.room)
    small = plan("merge-7b", "8-gpus", ["rollout.gpu_memory_utilization=0.22"])
    assert any("key-value cache holds" in note for note in small.notes)
    assert seconds(small)["rollout"] > seconds(plan("merge-7b", "8-gpus"))["rollout"]


@pytest.mark.parametrize("name", ["merge-70b", "merge-744b"])
def test_a_student_that_leaves_no_room_for_a_sequence_is_planned_too(name: str) -> None:
    command = CliRunner().invoke(app, ["plan", name, "--cluster", "8-gpus"])
    assert isinstance(command.exception, SystemExit) and command.exit_code == 1, command.exception
    assert "planned as if it had room for one" in command.output and "does it fit?" in command.output
    made = plan(name, "8-gpus")
    assert not made.fits and made.sequences == pytest.approx(1) and any(not room.fits for room in made.room)


def test_the_sum_is_that_of_opd_check(world: Any) -> None:
    """A merge that is on disk: the plan's sum, from configs alone, is the check's, from weights."""
    config = load_pipeline(world.write())
    wanted = {need.part: need.nbytes for need in estimate_memory(config, read_inputs(config))}
    found = {need.part: need.nbytes for need in estimate_memory(config, read_models(config).merge)}
    processes = "processes, Ray and prompts"
    assert {k: v for k, v in found.items() if k != processes} == {k: v for k, v in wanted.items() if k != processes}
    made = make_plan(config, load_spec("two-cores"))
    assert made.room[0].needed == sum(found.values())


def advice_of(name: str, cluster: str, *changes: str) -> str:
    given = [part for change in changes for part in ("--set", change)]
    shown = CliRunner().invoke(app, ["plan", name, "--cluster", cluster, *given])
    assert shown.exit_code == 1, shown.output
    return next(line for line in shown.output.splitlines() if line.startswith("does not fit: "))


def test_what_would_fit_is_said_and_fits() -> None:
    crowded = ["trainer.micro_batch_tokens=131072", "trainer.gradient_checkpointing=false"]
    said = advice_of("merge-7b", "8-gpus", *crowded)
    changes = [word for word in said.split() if "=" in word]
    assert changes and plan("merge-7b", "8-gpus", [*crowded, *changes]).fits
    for left in changes:
        assert not plan("merge-7b", "8-gpus", [*crowded, *(one for one in changes if one != left)]).fits
    assert advice_of("merge-70b", "8-gpus").endswith("it would fit on 32-gpus (--cluster 32-gpus)")


def test_the_shipped_clusters_are_listed() -> None:
    listed = CliRunner().invoke(app, ["plan", "--cluster", "list"])
    assert listed.exit_code == 0 and all(name in listed.output for name in shipped_specs())
    assert CliRunner().invoke(app, ["plan"]).exit_code == 2
    as_json = CliRunner().invoke(app, ["plan", "--cluster", "list", "--json"])
    assert as_json.exit_code == 2 and "leave --json out" in as_json.stderr and not as_json.stdout


def test_the_command(world: Any, tmp_path: Path) -> None:
    pipeline = str(world.write())
    shown = CliRunner().invoke(app, ["plan", pipeline, "--prompt-tokens", "5", "--response-tokens", "4"])
    assert shown.exit_code == 0 and "seconds of one step" in shown.output and "what limits" in shown.output
    told = CliRunner().invoke(app, ["plan", pipeline, "--json", "--set", "trainer.steps=7"])
    assert json.loads(told.stdout)["steps"] == 7
    refused = CliRunner().invoke(app, ["plan", pipeline, "--cluster", str(tmp_path / "none.yaml")])
    assert refused.exit_code == 2 and "8-gpus" in refused.output
    both = CliRunner().invoke(app, ["plan", pipeline, "--cluster", "8-gpus", "--measure", str(tmp_path / "m.yaml")])
    assert both.exit_code == 2 and "8-gpus, beside --measure" in both.output and not (tmp_path / "m.yaml").exists()
    spec = tmp_path / "tight.yaml"
    spec.write_text(shipped_specs()["two-cores"].read_text().replace("24GiB", "1GiB"))
    tight = CliRunner().invoke(app, ["plan", pipeline, "--cluster", str(spec)])
    assert tight.exit_code == 1 and "does it fit?" in tight.output, "a traceback has that code too"


def test_an_adapter_that_names_its_base_is_planned_on_it(world: Any, make_adapter: Callable[..., Path]) -> None:
    make_adapter(world.root / "low", world.root / "base")
    world.data["experts"]["rev"]["model"] = "low"
    world.write()
    (expert, _) = read_models(load_pipeline(world.root / "pipeline.yaml")).merge.experts.values()
    assert expert.adapter is not None and expert.adapter.base == str(world.root / "base")
    make_adapter(world.root / "hub", world.root / "base", base_model_name_or_path="owner/base")
    world.data["experts"]["rev"]["model"] = "hub"
    world.write()
    with pytest.raises(ConfigError, match=r"experts\.rev\.base"):
        read_models(load_pipeline(world.root / "pipeline.yaml"))


def test_a_spec_that_lacks_a_reason_is_refused(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    text = shipped_specs()["two-cores"].read_text()
    spec.write_text(text.replace("{share: 0.8, why:", "{share: 1.8, why:"))
    with pytest.raises(ConfigError, match=r"factors\.memory\.share"):
        load_spec(str(spec))
    spec.write_text(text.replace("cores: 2,", "cores: 2, gpus: 4,"))
    with pytest.raises(ConfigError, match="gpu_memory"):
        load_spec(str(spec))


def test_measuring_writes_a_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SECONDS", 0.01), ("WIDTH", 64), ("IDS", 64), ("COPIED", 1 << 16), ("LAYER_ROWS", 1)):
        monkeypatch.setattr(measure, name, value)
    file = tmp_path / "new" / "here.yaml"
    made = measure.measure_to(file, Path("models/quickstart/base"))
    assert load_spec(str(file)) == made and made.factors.memory == load_spec("two-cores").factors.memory
    for factor in (made.factors.forward, made.factors.backward, made.factors.decode):
        assert 0 < factor.share <= 1 and factor.why.startswith("measured: a layer of the student's shape")
    assert (
        made.rates.calls and made.rates.fresh and min(made.rates.float32, made.rates.bfloat16, made.rates.memory) > 1e6
    )
    again = with_lengths(made, 11, None, None)
    assert again.lengths.prompt == 11 and again.rates == made.rates


def test_a_place_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "measured_spec", None)
    with pytest.raises(ConfigError, match="a directory"):
        measure.measure_to(tmp_path, Path("models/smollm2"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is a file"):
        measure.measure_to(tmp_path / "file" / "here.yaml", Path("models/smollm2"))


@pytest.mark.parametrize("name", ["models/quickstart/base", "models/smollm2"])
def test_the_layer_that_is_measured_is_the_students(name: str) -> None:
    layer, shape = measure.choose_layer(Path(name)), read_shape(Path(name))
    assert layer.whose == "the student" and layer.parameters * shape.layers == shape.active
    assert layer.products == {part.name: (part.inputs, part.outputs) for part in shape.parts}


@pytest.mark.parametrize("name", ["models/moe-744b", "models/llama-3-70b"])
def test_a_mixture_and_a_large_layer_are_not_measured(name: str) -> None:
    assert measure.choose_layer(Path(name)) == measure.SMOLLM2


def test_numbers_are_short() -> None:
    assert [format_short(value) for value in (0, 999, 999.9, 7_615_616_512)] == ["0 ", "999 ", "1 k", "7.62 G"]


def test_a_lora_student_trains_and_pushes_less() -> None:
    data = load_pipeline(find_pipeline("merge-7b")).model_dump()
    data["student"]["lora"] = {"r": 16}
    made = make_plan(PipelineConfig.model_validate(data), load_spec("8-gpus"))
    whole = plan("merge-7b", "8-gpus")
    assert held(made, "trainer rank")["optimiser"] < held(whole, "trainer rank")["optimiser"] / 50
    assert 0.6 < seconds(made)["train"] / seconds(whole)["train"] < 0.9


def test_a_plan_says_what_the_target_log_takes(shipped: dict[str, MergePlan]) -> None:
    """Of 512 responses of 2,048 tokens at most; without a bound of its own as much as a checkpoint."""
    a_step = 512 * 2048 * (2 * 3584 + 16 + 16)
    assert {one.what: one.nbytes for one in shipped["merge-7b"].traffic}["target log, at most"] == a_step
    assert shipped["merge-7b"].log == 12 * shipped["merge-7b"].parameters
    unbound = plan("merge-7b", "8-gpus", ["target_log.max_size=1TiB", "checkpoint.every=10"])
    assert unbound.log == 11 * a_step


def test_a_small_disk_is_said_beside_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.sizing.target_log.shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    shown = CliRunner().invoke(app, ["plan", "merge-7b", "--cluster", "8-gpus"])
    said = " ".join(shown.output.split())
    assert "note: on this machine the target log takes up to 85.11 GiB, and the disk of runs has 1.00 GiB free" in said
    assert "target_log.keep to rollouts" in said
