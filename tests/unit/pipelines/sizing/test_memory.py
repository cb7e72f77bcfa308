"""The estimate of memory: what each line is made of, which keys move it, and when a merge is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opd.config import PipelineConfig, load_pipeline
from opd.errors import ConfigError
from pipelines.inputs.read import Inputs, read_inputs
from pipelines.sizing import machine, memory, micro_batch
from pipelines.sizing.machine import machine_bytes
from pipelines.sizing.memory import (
    HostMemoryNeed,
    describe_shortage,
    estimate_memory,
    need_rows,
    refuse_too_large,
    suggest_fix,
)

PARAMETERS, VOCABULARY, WIDTH = 87_104, 76, 64
"""Of the tiny model: 76 * 64 + 2 * (4 * 64² + 3 * 64 * 128 + 2 * 64) + 64."""


@pytest.fixture
def given(world: Any) -> tuple[PipelineConfig, Inputs]:
    config = load_pipeline(world.write())
    return config, read_inputs(config)


def lines(given: tuple[PipelineConfig, Inputs], **sections: dict[str, Any]) -> dict[str, int]:
    """The estimate by line, with some keys changed. A section of another kind has none of the old one's keys."""
    config, inputs = given
    data = config.model_dump()
    merged = {name: keys if "kind" in keys else data[name] | keys for name, keys in sections.items()}
    changed = PipelineConfig.model_validate(data | merged)
    return {need.part: need.nbytes for need in estimate_memory(changed, inputs)}


def test_the_tiny_model_is_what_it_was(given: Any) -> None:
    student = given[1].student
    assert (student.parameters, student.vocab_rows, student.hidden_size) == (PARAMETERS, VOCABULARY, WIDTH)


def test_the_trainers_state_is_20_bytes_a_parameter_and_a_gathered_copy_on_each_rank(given: Any) -> None:
    what = "trainer: weights, gradients, AdamW"
    assert lines(given, trainer={"ranks": 1})[what] == (20 + 4) * PARAMETERS
    assert lines(given, trainer={"ranks": 3})[what] == (20 + 3 * 4) * PARAMETERS
    assert lines(given, trainer={"ranks": 3, "dtype": "bfloat16"})[what] == (18 + 3 * 2) * PARAMETERS
    narrow = {"ranks": 1, "dtype": "bfloat16", "grad_accum_dtype": "bfloat16"}
    assert lines(given, trainer=narrow)[what] == (16 + 2) * PARAMETERS
    compared = lines(given, trainer={"ranks": 1}, objective={"reward": {"compare_every": 5}})[what]
    assert compared == (20 + 12 + 4) * PARAMETERS, "three copies of the gradient"


LORA = 2 * 4 * (4 * 2 * 64 + 3 * (64 + 128))
"""Numbers of adapters of rank 4 on all linear modules."""
LINEAR = 2 * (4 * 64**2 + 3 * 64 * 128)
"""Numbers of all linear modules in the layers."""


def test_of_a_lora_student_the_optimiser_sees_the_adapters_alone(world: Any, given: Any) -> None:
    full = lines(given, trainer={"ranks": 1})
    world.data["student"]["lora"] = {"r": 4}
    config = load_pipeline(world.write())
    inputs = read_inputs(config)
    assert (inputs.trained, inputs.pushed) == (LORA, LINEAR)
    found = lines((config, inputs), trainer={"ranks": 1})
    state = "trainer: weights, gradients, AdamW"
    assert found[state] == 4 * PARAMETERS + 20 * LORA + 4 * PARAMETERS < full[state] / 2
    assert found["new weights on their way"] == 2 * 4 * LINEAR
    work = "trainer: activations and logits of a micro-batch, or the writing of a checkpoint"
    assert full[work] - found[work] == 4 * VOCABULARY * WIDTH, "the head has no gradient"


def test_what_a_push_takes_on_its_way(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the network: a bucket at rank 0, one in the object store, one in each engine; all of it where it is kept."""
    what = "new weights on their way"
    assert lines(given)[what] == 2 * 4 * PARAMETERS
    network = {"sync": {"kind": "network"}}
    assert lines(given, **network)[what] == 3 * 4 * PARAMETERS, "all of it is less than a bucket"
    monkeypatch.setattr(memory, "BUCKET_BYTES", 40_000)
    assert lines(given, **network)[what] == 3 * 40_000
    assert lines(given, **network, rollout={"workers": 4})[what] == 6 * 40_000
    assert lines(given, **network, trainer={"dtype": "bfloat16"})[what] == 3 * 40_000
    ahead = lines(given, **network, schedule={"mode": "one_step_off", "max_staleness": None})
    assert ahead[what] == 4 * PARAMETERS + 3 * 40_000
    monkeypatch.setattr(memory, "BUCKET_BYTES", 1000)
    assert lines(given, **network)[what] == 3 * 4 * 64 * 128, "a weight is not cut"


def test_a_bucket_bounds_what_a_rank_holds_beside_its_shares(given: Any) -> None:
    state, sums = "trainer: weights, gradients, AdamW", "trainer: gradients on their way to the sum over ranks"
    largest = 64 * 128
    assert lines(given, trainer={"ranks": 3})[sums] == 3 * 4 * PARAMETERS
    small = lines(given, trainer={"ranks": 3, "bucket": 1000})
    assert small[sums] == 3 * 4 * 1000
    assert small[state] == (20 * PARAMETERS) + 3 * 4 * (1000 + largest), "one weight may be larger"
    narrow = lines(given, trainer={"ranks": 3, "grad_accum_dtype": "bfloat16"})
    assert narrow[sums] == 3 * 2 * PARAMETERS
    tiny: dict[str, Any] = {"objective": {"chunk": 1}, "rollout": {"max_model_len": 8}}
    many = lines(given, trainer={"ranks": 9, "micro_batch_tokens": 16}, **tiny)
    what = "trainer: activations and logits of a micro-batch, or the writing of a checkpoint"
    assert many[what] == 9 * 4 * PARAMETERS > 12 * PARAMETERS, "the copy that is sent"


def test_what_a_rank_needs_is_its_part_of_the_ranks_lines(given: Any) -> None:
    config, inputs = given
    two = PipelineConfig.model_validate(config.model_dump() | {"trainer": config.trainer.model_dump() | {"ranks": 2}})
    needs = estimate_memory(two, inputs)
    trainer = sum(need.nbytes for need in needs if need.part.startswith("trainer: "))
    assert memory.rank_bytes(needs) == memory.TRAINER_PROCESS + trainer // 2
    shown = f"{memory.rank_bytes(needs) / 2**30:.2f}"
    assert need_rows(needs)[-3] == ("in it: each trainer rank, at most", shown, "trainer.ranks, trainer.bucket")


def test_activations_are_the_ends_of_every_linear_layer(given: Any) -> None:
    what = "trainer: activations and logits of a micro-batch, or the writing of a checkpoint"
    # Each of 2 layers: q, k, v, o with 64 + 64, gate, up, down with 64 + 128.
    per_token = 2 * (4 * 128 + 3 * 192) * 4
    # Sequences are short here, so rows have 128 columns: 158 of them, and 79.
    small, large = (lines(given, trainer={"ranks": 1, "micro_batch_tokens": n})[what] for n in (10_080, 20_192))
    assert large - small == 79 * 128 * per_token
    both = lines(given, trainer={"ranks": 2, "micro_batch_tokens": 20_192})[what]
    assert both == 2 * large
    kept = {"gradient_checkpointing": True, "ranks": 1}
    small, large = (lines(given, trainer=kept | {"micro_batch_tokens": n})[what] for n in (10_080, 20_192))
    assert large - small == 79 * 128 * (2 * 64 + (4 * 128 + 3 * 192)) * 4
    few, many = (lines(given, trainer={"ranks": 1}, objective={"chunk": n})[what] for n in (10_000, 20_000))
    assert many - few == 20 * 10_000 * VOCABULARY


def test_of_an_mlp_in_tiles_the_input_and_the_inside_of_one_tile_count(given: Any) -> None:
    config, inputs = given

    def parts(**trainer: Any) -> dict[str, int]:
        changed = config.model_dump() | {
            "trainer": config.trainer.model_dump() | {"micro_batch_tokens": 10_080} | trainer
        }
        return micro_batch.micro_batch_parts(PipelineConfig.model_validate(changed), inputs)

    tokens, attention, mlp = 79 * 128, 4 * 128, 3 * 192
    assert parts()["activations"] == tokens * 2 * (attention + mlp) * 4
    tiled = parts(mlp_tile_tokens=100)
    assert (tiled["activations"], tiled["a tile of an MLP"]) == (tokens * 2 * (attention + WIDTH) * 4, 100 * mlp * 4)
    recomputed = parts(mlp_tile_tokens=100, gradient_checkpointing=True)
    assert recomputed["activations inside a layer"] == tokens * (attention + WIDTH) * 4
    assert recomputed["activations at checkpoints"] == tokens * 2 * WIDTH * 4
    moved = {"gradient_checkpointing": True, "activation_offloading": True}
    assert parts(**moved) == parts(gradient_checkpointing=True), "a CPU has no other memory"
    few, more = ({"trainer": {"ranks": 3, "bucket": 1000} | keys} for keys in ({}, {"mlp_tile_tokens": 100}))
    state = "trainer: weights, gradients, AdamW"
    assert lines(given, **more)[state] - lines(given, **few)[state] == 3 * 4 * 2 * 64 * 128, "an MLP is gathered as one"


def test_rows_that_begin_alike_are_counted_as_the_largest_tree_and_its_mask(given: Any) -> None:
    what = "trainer: activations and logits of a micro-batch, or the writing of a checkpoint"
    per_token = 2 * (4 * 128 + 3 * 192) * 4
    alone, tree = given[0].rollout.max_model_len, max(512, 2 * given[0].rollout.max_model_len)
    steps = {"samples_per_step": 8, "micro_batch_tokens": 10_000, "ranks": 1}
    one, four, alike = (lines(given, trainer=steps, rollout=r) for r in ({}, {"n": 4}, {"share_prefixes": True}))
    assert four[what] - one[what] == (10_000 + tree - 79 * 128) * per_token + 5 * (10_000 + tree) * tree, (
        "alone: full rows"
    )
    assert alike[what] == four[what]
    scored = min(4096, 8 * alone)
    assert four["teachers: activations"] - one["teachers: activations"] == 5 * scored * tree


def test_a_checkpoint_is_the_peak_where_micro_batches_are_small(given: Any) -> None:
    what = "trainer: activations and logits of a micro-batch, or the writing of a checkpoint"
    tiny = {
        "trainer": {"ranks": 1, "micro_batch_tokens": 16},
        "objective": {"chunk": 1},
        "rollout": {"max_model_len": 8},
    }
    assert lines(given, **tiny)[what] == 12 * PARAMETERS


def test_what_roles_on_gpus_have_in_the_machines_memory(given: Any) -> None:
    """A checkpoint is written from a copy on the CPU, and vLLM puts the weights of an engine that sleeps there."""
    copied, asleep = "copy from GPUs that a checkpoint is written from", "weights of engines that sleep"
    assert {copied, asleep}.isdisjoint(lines(given))
    on_gpus = {"cluster": {"trainer_gpus": 1, "rollout_gpus": 1}, "rollout": {"sleep": True, "workers": 2}}
    found = lines(given, **on_gpus)
    assert (found[copied], found[asleep]) == (12 * PARAMETERS, 2 * 4 * PARAMETERS)
    critic = {"objective": {"reward": {"baseline": {"kind": "critic"}}}}
    assert lines(given, **on_gpus, **critic)[copied] == 24 * PARAMETERS, "both are copied before either is written"
    on_cpu = lines(given, trainer={"ranks": 1}, **critic)
    assert on_cpu["critic: weights, gradients, AdamW, and a copy for a checkpoint"] == (20 + 4 + 12) * PARAMETERS


def test_engines_have_caches_each(given: Any) -> None:
    what = "rollout: key-value cache"
    assert lines(given, rollout={"kv_cache_gib": 3, "workers": 2})[what] == 6 << 30


def test_processes_of_an_engine_divide_its_weights_and_have_caches_each(given: Any) -> None:
    teachers = {"engine": "vllm"}
    one = lines(given, teachers=teachers)
    two = lines(given, rollout={"tensor_parallel_size": 2}, teachers=teachers | {"tensor_parallel_size": 2})
    weights, working = memory.cpu_engine_weights(*given), memory.engine_activations(*given)
    assert one["rollout: weights and logits"] == weights + working
    assert two["rollout: weights and logits"] == weights + 2 * working
    assert two["rollout: key-value cache"] == 2 * one["rollout: key-value cache"]
    assert two["teachers: weights"] - one["teachers: weights"] == 1 << 30
    assert two["teachers: activations"] == 2 * one["teachers: activations"]
    what = "processes, Ray and prompts"
    assert two[what] - one[what] == 4 * memory.ROLLOUT_PROCESS, "two beside each worker's own"


def test_teachers_stay_within_their_budget_but_one_is_always_there(given: Any) -> None:
    whole = PARAMETERS * 4
    for budget, kept in ((1, whole), (whole + 1, whole + 1), (5 * whole, 2 * whole)):
        assert lines(given, teachers={"memory": budget})["teachers: weights"] == kept
    assert lines(given, teachers={"memory": 1, "workers": 3})["teachers: weights"] == 3 * whole
    assert lines(given, teachers={"dtype": "bfloat16"})["teachers: weights"] == whole


def test_the_start_student_is_one_more_teacher_where_the_target_lies_beyond_the_experts(world: Any, given: Any) -> None:
    without = lines(given)
    world.data["objective"] = {"extrapolate": 1.25}
    config = load_pipeline(world.write())
    found = lines((config, read_inputs(config)))
    assert found["teachers: weights"] - without["teachers: weights"] == 4 * PARAMETERS
    head = 4 * VOCABULARY * WIDTH
    ranks = config.trainer.ranks
    heads = "trainer: teachers' output heads"
    assert found[heads] - without[heads] == ranks * head
    assert found["a step's scored rows"] == 2 * without["a step's scored rows"]
    # An expert that is an adapter of the start student has its weights in memory already.
    world.data["experts"]["rev"]["model"] = world.data["student"]["model"]
    config = load_pipeline(world.write())
    assert lines((config, read_inputs(config)))["teachers: weights"] == without["teachers: weights"]


def test_a_start_student_that_the_trainer_asks_is_in_memory_once(world: Any) -> None:
    world.data["student"]["lora"] = {"r": 4}
    config = load_pipeline(world.write())
    without = lines((config, read_inputs(config)))
    world.data["objective"] = {"extrapolate": 1.25}
    config = load_pipeline(world.write())
    work = "trainer: activations and logits of a micro-batch, or the writing of a checkpoint"
    # Its logits are beside the expert's in a chunk of the loss.
    logits = config.trainer.ranks * 4 * config.objective.chunk * VOCABULARY
    assert lines((config, read_inputs(config))) == without | {work: without[work] + logits}


def test_each_teacher_of_a_mixture_has_logits_in_a_chunk(world: Any) -> None:
    config = load_pipeline(world.write())
    inputs = read_inputs(config)
    domain, (alone,) = next((d, t) for d, t in inputs.scoring.items() if len(t) == 1)
    values = config.objective.chunk * inputs.student.vocab_size
    for teachers in (1, 4):
        mixture = replace(inputs, scoring={domain: (alone,) * teachers})
        assert micro_batch.logits_bytes(config, mixture) == (20 + (teachers - 1) * 4) * values


def test_ranks_that_score_with_adapters_keep_these_and_no_teacher(world: Any, make_adapter: Any) -> None:
    for name in ("rev", "up"):
        make_adapter(world.root / f"{name}-lora", world.root / "base", seed=len(name))
        world.data["experts"][name] |= {"model": f"{name}-lora"}
    world.data["student"]["lora"] = {"r": 4}
    config = load_pipeline(world.write())
    by_workers = lines((config, read_inputs(config)))
    world.data["teachers"] = {"engine": "trainer"}
    config = load_pipeline(world.write())
    inputs = read_inputs(config)
    found = lines((config, inputs))
    adapters = [expert.adapter.parameters for expert in inputs.experts.values() if expert.adapter]
    own = "trainer: experts' adapters, and their scores of a micro-batch"
    tokens = config.trainer.micro_batch_tokens + config.rollout.max_model_len
    # All adapters, one on the device, and the states of an expert and the start student.
    assert found[own] == config.trainer.ranks * 4 * (sum(adapters) + max(adapters) + 2 * tokens * WIDTH)
    assert set(by_workers) - set(found) == {
        "teachers: weights", "teachers: activations", "trainer: teachers' output heads"
    }  # fmt: skip
    assert found["a step's scored rows"] < by_workers["a step's scored rows"] / 8


def test_heads_stay_within_theirs(given: Any) -> None:
    head, what = VOCABULARY * WIDTH * 4, "trainer: teachers' output heads"
    for budget, kept in ((1, head), (10 * head, 2 * head)):
        assert lines(given, trainer={"head_memory": budget, "ranks": 2})[what] == 2 * kept
    sampled = {"teachers": {"payload": "sampled_logprobs"}, "objective": {"kind": "sampled"}}
    assert what not in lines(given, **sampled)


def test_adapters_share_their_base(world: Any, make_adapter: Any) -> None:
    for name in ("rev", "up"):
        make_adapter(world.root / f"{name}-lora", world.root / "base", seed=len(name))
        world.data["experts"][name]["model"] = f"{name}-lora"
    config = load_pipeline(world.write())
    inputs = read_inputs(config)
    adapters = sum(expert.adapter.parameters for expert in inputs.experts.values() if expert.adapter)
    assert adapters
    assert lines((config, inputs))["teachers: weights"] == 4 * (PARAMETERS + adapters)


def test_a_steps_rows_grow_with_responses_and_width(given: Any) -> None:
    what = "a step's scored rows"
    small = {"trainer": {"samples_per_step": 10}, "rollout": {"max_new_tokens": 8}}
    assert lines(given, **small)[what] == 2 * 80 * (WIDTH * 4 + 16)
    for limits, most in (({"max_turns": 3}, 24), ({"max_turns": 90}, 64), ({"max_turns": 90, "max_tokens": 20}, 20)):
        config = given[0].model_dump()
        next(iter(config["domains"].values()))["environment"] = {"name": "m:Maze", **limits}
        config["trainer"] |= small["trainer"]
        config["rollout"] |= {"max_new_tokens": 8, "max_model_len": 64}
        acting = {n.part: n.nbytes for n in estimate_memory(PipelineConfig.model_validate(config), given[1])}
        assert acting[what] == 2 * 10 * most * (WIDTH * 4 + 16)
    top = {"teachers": {"payload": "top_k"}, "objective": {"kind": "top_k", "k": 5}}
    config = given[0].model_dump() | {"objective": {"kind": "top_k", "k": 5}}
    config["teachers"] |= top["teachers"]
    config["trainer"] |= small["trainer"]
    found = {n.part: n.nbytes for n in estimate_memory(PipelineConfig.model_validate(config), given[1])}
    assert found[what] == 2 * 80 * (8 * 5 + 16)


def test_what_runs_elsewhere_is_not_counted(given: Any) -> None:
    def parts(**keys: Any) -> set[str]:
        return {what.split(":")[0] for what in lines(given, **keys)}

    everything = {"trainer", "rollout", "teachers", "new weights on their way", "a step's scored rows"}
    processes = {"processes, Ray and prompts"}
    assert parts() == everything | processes
    for role in ("rollout", "teacher"):
        assert parts(cluster={f"{role}_gpus": 1}) == parts() - {role, f"{role}s"}
    copied = "copy from GPUs that a checkpoint is written from"
    assert parts(cluster={"trainer_gpus": 1}) == parts() - {"trainer"} | {copied}
    served = {"engine": "flight", "address": "grpc://127.0.0.1:1"}
    assert parts(teachers=served) == parts() - {"teachers"}
    fewer = lines(given)["processes, Ray and prompts"] - lines(given, teachers=served)["processes, Ray and prompts"]
    assert fewer == memory.TEACHER_PROCESS


# The sum


NEEDS = [
    HostMemoryNeed(part="small", nbytes=1 << 29, knobs="a.b"),
    HostMemoryNeed(part="large", nbytes=3 << 30, knobs="c.d, e.f"),
    HostMemoryNeed(part="none", nbytes=0, knobs="g.h"),
    HostMemoryNeed(part="medium", nbytes=1 << 30, knobs="c.d"),
]


def test_the_sum_is_refused_with_its_parts_and_keys_largest_first(given: Any) -> None:
    config = given[0]
    found = describe_shortage(config, NEEDS, (9 << 29) - 1)
    assert (
        found == "about 4.50 GiB of memory for a machine with 4.50: 3.00 large + 1.00 medium + 0.50 small + 0.00 none"
    )
    assert suggest_fix(NEEDS) == "lower c.d, e.f, a.b"
    assert describe_shortage(config, NEEDS, 9 << 29) is None
    assert need_rows(NEEDS)[1] == ("large", "3.00", "c.d, e.f")
    assert need_rows(NEEDS)[-2:] == [("together", "4.50", ""), ("this machine", f"{machine_bytes() / 2**30:.2f}", "")]


def test_other_machines_are_not_judged_by_this_one(given: Any) -> None:
    config = given[0]
    remote = config.model_copy(update={"cluster": config.cluster.model_copy(update={"address": "10.0.0.1:6379"})})
    assert describe_shortage(remote, NEEDS, 1) is None


def test_a_merge_that_does_not_fit_is_refused(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    total = sum(need.nbytes for need in estimate_memory(*given))
    monkeypatch.setattr(memory, "machine_bytes", lambda: total)
    refuse_too_large(*given)
    monkeypatch.setattr(memory, "machine_bytes", lambda: total - 1)
    with pytest.raises(ConfigError, match=r"^memory\n  found:  about .* GiB of memory"):
        refuse_too_large(*given)


@pytest.mark.parametrize(("text", "limit"), [("1048576\n", 1 << 20), ("max\n", None), ("9223372036854771712", None)])
def test_a_containers_limit_counts(
    text: str, limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CGROUP_LIMITS", ())
    whole = machine_bytes()
    assert whole > 1 << 28
    (tmp_path / "memory.max").write_text(text)
    monkeypatch.setattr(machine, "CGROUP_LIMITS", (tmp_path / "none", tmp_path / "memory.max"))
    assert machine_bytes() == (limit or whole)


def test_an_expert_with_tokens_of_its_own_has_logits_of_these_in_a_chunk(world: Any) -> None:
    config = load_pipeline(world.write())
    inputs = read_inputs(config)
    world.data["experts"]["rev"]["engine"] = {"kind": "transformers", "payload": "aligned_states"}
    world.data["domains"]["reverse"]["objective"] = {"kind": "aligned_kl"}
    own = load_pipeline(world.write())
    rev = inputs.scorers["rev"]
    expert = replace(rev, info=rev.info.model_copy(update={"vocab_size": 1000}))
    models = replace(inputs, scorers={**inputs.scorers, "rev": expert})
    more = micro_batch.logits_bytes(own, models) - micro_batch.logits_bytes(config, models)
    assert more == 20 * config.objective.chunk * (1000 + inputs.student.vocab_size)
