"""Right inputs as they are read, and the refusals that need no command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experts import weight_files
from experts.registry import Registry
from opd.config import PipelineConfig, load_pipeline
from opd.errors import ConfigError, ModelError, OpdError, PromptError
from opd.files import blake3_file
from opd.settings.yaml_files import validate_section
from opd.verifiers.exact import ExactMatch
from pipelines.inputs.prompts import load_exams
from pipelines.inputs.read import inspect_student, load_tokenizer, read_inputs


def config(world: Any) -> PipelineConfig:
    return load_pipeline(world.write())


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def register(world: Any, **prompts: Path | None) -> Registry:
    """Both experts in ./registry; the pipeline uses them by name."""
    registry = Registry(world.root / "registry")
    for name, domain in (("rev", "reverse"), ("up", "upper")):
        registry.add(name, world.root / name, domain, prompts.get(name, world.root / f"{domain}.jsonl"))
    world.data["experts"] = {"use": ["rev", "up"]}
    return registry


def test_inputs_by_domain(world: Any) -> None:
    inputs = read_inputs(config(world))
    assert list(inputs.teachers) == list(inputs.prompts) == list(inputs.exams) == ["reverse", "upper"]
    assert {d: (t.name, inputs.experts[t.name].domain, t.model_dir) for d, t in inputs.teachers.items()} == {
        "reverse": ("rev", "reverse", world.root / "rev"),
        "upper": ("up", "upper", world.root / "up"),
    }
    first = inputs.prompts["upper"][0]
    assert (first.id, first.domain, first.answer) == ("upper/0", "upper", "aaa")
    assert inputs.tokenizer.decode(first.token_ids) == "upp aaa="
    assert inputs.student.vocab_size == 76
    assert inputs.warnings == ()
    assert inputs.exams["upper"].verifier == ExactMatch()


def test_the_order_of_experts_does_not_matter(world: Any) -> None:
    world.data["experts"] = dict(reversed(world.data["experts"].items()))
    assert list(read_inputs(config(world)).teachers) == ["reverse", "upper"]


def test_exams_are_the_first_prompts(world: Any) -> None:
    world.data["evaluate"] = {"samples": 2}
    inputs = read_inputs(config(world))
    assert [p.id for p in inputs.exams["reverse"].prompts] == ["reverse/0", "reverse/1"]
    assert len(inputs.prompts["reverse"]) == 6


def test_a_domain_without_an_exam_is_trained_but_not_scored(world: Any) -> None:
    del world.data["domains"]["upper"]["eval"]
    inputs = read_inputs(config(world))
    assert list(inputs.exams) == ["reverse"]
    assert list(inputs.prompts) == ["reverse", "upper"]


def test_exams_of_the_named_domains_only(world: Any) -> None:
    pipeline = config(world)
    assert list(load_exams(pipeline, load_tokenizer(pipeline.student.model), ["upper"])) == ["upper"]


def test_a_tokenizer_whose_class_adds_tokens_is_refused(world: Any) -> None:
    """transformers' class for Gemma has a mask token whether or not tokenizer.json has it."""
    edit(world.root / "base" / "tokenizer_config.json", tokenizer_class="GemmaTokenizer")
    wanted = (
        r"tokenizer\.json\n  found:  GemmaTokenizer of transformers .* '<mask>' as id 76, which here does not exist"
    )
    with pytest.raises(ModelError, match=wanted):
        read_inputs(config(world))


# Experts from the registry


@pytest.mark.parametrize("use", ["all", ["rev", "up"], ["up", "rev"]])
def test_registered_experts(use: Any, world: Any) -> None:
    register(world)
    world.data["experts"] = {"use": use}
    inputs = read_inputs(config(world))
    assert {d: t.name for d, t in inputs.teachers.items()} == {"reverse": "rev", "upper": "up"}


def test_registered_experts_carry_their_probe(world: Any) -> None:
    assert {t.probe for t in read_inputs(config(world)).teachers.values()} == {None}
    registry = register(world)
    for name, teacher in ((t.name, t) for t in read_inputs(config(world)).teachers.values()):
        record = registry.get(name).probe
        assert record is not None and teacher.probe == record.probe


def test_a_registered_adapter_carries_its_probe(world: Any, make_adapter: Callable[..., Path]) -> None:
    adapter = make_adapter(world.root / "adapter", world.root / "base")
    record = Registry(world.root / "registry").add("rev", adapter, "reverse", world.root / "reverse.jsonl").probe
    Registry(world.root / "registry").add("up", world.root / "up", "upper", world.root / "upper.jsonl")
    world.data["experts"] = {"use": "all"}
    teacher = read_inputs(config(world)).teachers["reverse"]
    assert record is not None and teacher.probe == record.probe and teacher.adapter_dir == adapter


def test_prompts_default_to_those_the_expert_was_registered_with(world: Any) -> None:
    register(world)
    for domain in world.data["domains"].values():
        del domain["prompts"]
    assert len(read_inputs(config(world)).prompts["upper"]) == 6


def test_the_pipelines_own_registry_comes_before_the_environments(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    register(world)
    (world.root / "registry").rename(world.root / "elsewhere")
    with pytest.raises(OpdError, match="no such expert"):
        read_inputs(config(world))
    monkeypatch.setenv("OPD_REGISTRY", str(world.root / "elsewhere"))
    assert len(read_inputs(config(world)).experts) == 2
    monkeypatch.setenv("OPD_REGISTRY", str(world.root / "nowhere"))
    world.data["registry"] = "elsewhere"
    assert len(read_inputs(config(world)).experts) == 2


def test_an_expert_used_twice_is_refused(world: Any) -> None:
    register(world)
    world.data["experts"]["use"] = ["rev", "up", "rev"]
    with pytest.raises(OpdError, match="`rev` twice"):
        read_inputs(config(world))


def test_a_registered_expert_whose_weights_changed_is_refused(world: Any) -> None:
    register(world)
    file = world.root / "rev" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ModelError) as error:
        read_inputs(config(world))
    assert "expert rev" in str(error.value)
    assert str(file) in str(error.value)


def test_registered_experts_leave_no_domain_out(world: Any) -> None:
    register(world)
    world.data["experts"]["use"] = ["rev"]
    with pytest.raises(ConfigError, match=r"domains\.upper\n  found:  no expert .*rev → reverse"):
        read_inputs(config(world))


def test_all_of_an_empty_registry(world: Any) -> None:
    world.data["experts"] = {"use": "all"}
    with pytest.raises(ConfigError, match="no expert"):
        read_inputs(config(world))


# LoRA experts


@pytest.fixture
def adapters(world: Any, make_adapter: Callable[..., Path]) -> Any:
    """The world with two adapters of `base` as experts."""
    for seed, name in enumerate(("rev", "up")):
        shutil.rmtree(world.root / name)
        make_adapter(world.root / name, world.root / "base", seed=seed)
    return world


def test_an_inline_adapter_is_a_teacher_with_a_base(adapters: Any) -> None:
    inputs = read_inputs(config(adapters))
    teacher = inputs.teachers["upper"]
    assert (teacher.model_dir, teacher.adapter_dir) == (adapters.root / "base", adapters.root / "up")
    assert inputs.experts["up"].info == inputs.student
    assert inputs.experts["up"].adapter.rank == 4
    assert inputs.warnings == ()


def test_digests_tell_adapters_apart_and_bases_together(adapters: Any, expert_dirs: dict[str, Path]) -> None:
    world = adapters
    shutil.copytree(world.root / "up", world.root / "copy")
    shutil.copytree(world.root / "base", world.root / "moved")
    experts = {
        "rev": {"model": "rev", "domain": "reverse"},
        "up": {"model": "up", "domain": "upper"},
        "copy": {"model": "copy", "domain": "c", "base": "moved"},
        "whole": {"model": "base", "domain": "w"},
        "other": {"model": str(expert_dirs["rev"]), "domain": "o"},
    }
    world.data["experts"] = experts
    world.data["domains"] |= {d: {"prompts": "upper.jsonl"} for d in "cwo"}
    world.data["trainer"]["samples_per_step"] = 5
    found = {e.teacher.name: e.teacher for e in read_inputs(config(world)).experts.values()}
    assert found["copy"].model_dir == world.root / "moved"
    assert found["copy"].digest == found["up"].digest
    assert len({t.digest for t in found.values()}) == 4
    assert {found[n].base_digest for n in ("rev", "up", "copy")} == {found["whole"].digest}
    assert found["whole"].base_digest == found["other"].base_digest == ""


def test_bases_of_several_adapters_are_hashed_once(adapters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr(weight_files, "blake3_file", lambda file: read.append(file) or blake3_file(file))
    read_inputs(config(adapters))
    weights = [file.name for file in read if file.suffix == ".safetensors"]
    assert weights == ["model.safetensors"] * 2, "once as the student, once as the base of both experts"


def test_the_base_of_an_adapter_is_what_has_to_fit_the_student(adapters: Any, make_model_dir: Any) -> None:
    make_model_dir(adapters.root / "permuted", permute_vocab=True)
    adapters.data["experts"]["up"]["base"] = "permuted"
    with pytest.raises(ModelError, match=r"`up`.*permuted/tokenizer\.json\n.*permuted ids"):
        read_inputs(config(adapters))


def test_a_base_for_a_full_model_is_refused(world: Any) -> None:
    world.data["experts"]["up"]["base"] = "base"
    with pytest.raises(ModelError, match="up\n  found:  a full model, and the base base\n"):
        read_inputs(config(world))


def test_registered_adapters_and_a_base_that_changed(adapters: Any) -> None:
    register(adapters)
    teachers = read_inputs(config(adapters)).teachers
    assert [t.adapter_dir for t in teachers.values()] == [adapters.root / "rev", adapters.root / "up"]
    assert len({t.base_digest for t in teachers.values()} | {""}) == 2
    file = adapters.root / "base" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ModelError) as error:
        read_inputs(config(adapters))
    assert str(error.value).startswith(f"expert rev\n  found:  {file}: changed weight file")


# Refusals


@pytest.mark.parametrize("domain", ["upper", "lower"])
def test_an_expert_without_a_domain_of_its_own_is_refused(domain: str, world: Any) -> None:
    world.data["experts"]["third"] = {"model": "up", "domain": domain}
    with pytest.raises(ConfigError) as error:
        read_inputs(config(world))
    assert str(error.value).startswith("experts.third.domain\n")
    assert ("which up has already" if domain == "upper" else "reverse, upper") in str(error.value)


def test_a_context_longer_than_the_models_is_refused(world: Any) -> None:
    world.data["rollout"]["max_model_len"] = 513
    with pytest.raises(ConfigError, match=r"rollout\.max_model_len\n  found:  513\n  wanted: at most 512"):
        inspect_student(config(world))
    world.data["rollout"]["max_model_len"] = 512
    assert inspect_student(config(world)).context == 512


@pytest.mark.parametrize("who", ["base", "up"])
def test_capped_logits_are_fine(who: str, world: Any) -> None:
    edit(world.root / who / "config.json", final_logit_softcapping=30.0)
    assert read_inputs(config(world)).warnings == ()


def test_another_chat_template_is_a_warning(world: Any) -> None:
    (world.root / "up" / "chat_template.jinja").write_text("other")
    (warning,) = read_inputs(config(world)).warnings
    assert "`up`" in warning


def test_experts_may_be_wider_and_untied(world: Any, make_model_dir: Any) -> None:
    shutil.rmtree(world.root / "up")
    make_model_dir(world.root / "up", seed=5, hidden=96, heads=3, layers=1, tie=False)
    inputs = read_inputs(config(world))
    assert (inputs.experts["up"].info.hidden_size, inputs.student.hidden_size) == (96, 64)
    assert inputs.warnings == ()


def test_a_few_prompts_longer_than_the_context_are_left_to_the_run(world: Any) -> None:
    file = world.root / "upper.jsonl"
    file.write_text(file.read_text() + json.dumps({"prompt": "a" * 500}) + "\n")
    inputs = read_inputs(config(world))
    assert max(len(p.token_ids) for p in inputs.prompts["upper"]) == 500


def test_a_domain_of_nothing_but_long_prompts_is_refused(world: Any) -> None:
    (world.root / "upper.jsonl").write_text(json.dumps({"prompt": "a" * 32}) + "\n")
    with pytest.raises(PromptError, match=r"upper\.jsonl\n.*32 tokens"):
        read_inputs(config(world))


def test_reading_writes_nothing(world: Any) -> None:
    def tree() -> dict[Path, int]:
        return {p: p.stat().st_mtime_ns for p in world.root.rglob("*")}

    pipeline = config(world)
    before = tree()
    read_inputs(pipeline)
    assert tree() == before


def test_an_unknown_verifier_is_refused_with_the_known_ones(world: Any) -> None:
    world.data["domains"]["upper"]["eval"]["verifier"] = "exact_mach"
    with pytest.raises(ConfigError) as error:
        read_inputs(validate_section(PipelineConfig, world.data, "p.yaml"))
    assert "domains.upper.eval.verifier" in str(error.value)
    assert "exact_mach" in str(error.value)
    assert "exact_match" in str(error.value)


def test_an_exam_whose_scorer_would_run_code_is_refused(world: Any) -> None:
    world.data["domains"]["upper"]["eval"]["verifier"] = "reasoning_gym"
    file = world.root / "upper-eval.jsonl"
    for metadata, word in (
        ({"task": "countdown", "entry": {}}, "metadata.task 'countdown'"),
        ({"task": "number_sorting", "entry": {"answer": "print(1)"}}, "no JSON"),
        ({"task": "gcd"}, "no metadata.entry"),
    ):
        file.write_text(json.dumps({"prompt": "a", "metadata": metadata}) + "\n")
        with pytest.raises(PromptError, match=r"upper-eval\.jsonl: prompt upper/0\n") as error:
            read_inputs(config(world))
        assert word in str(error.value)


def test_weights_that_nobody_looked_at_are_looked_at_once(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr("pipelines.inputs.read.check_finite", lambda path, names: looked.append(path.name))
    read_inputs(config(world))
    assert sorted(looked) == ["base", "rev", "up"]
    register(world)
    looked.clear()
    read_inputs(config(world))
    assert looked == ["base"], "experts were looked at when they were registered"


def test_tokens_that_a_teacher_never_writes_are_masked_in_its_domains(world: Any) -> None:
    world.data["domains"]["upper"]["teachers"] = {"up": 0.5, "rev": 0.5}
    world.data["teachers"] = {"mask_tokens": {"rev": ["a", "<eos>"]}}
    inputs = read_inputs(config(world))
    ids = frozenset(inputs.tokenizer.convert_tokens_to_ids(t) for t in ("a", "<eos>"))
    assert len(ids) == 2
    assert inputs.untrained == {"reverse": ids, "upper": ids}
    world.data["teachers"] = {"mask_tokens": {"up": ["a"]}}
    assert [len(v) for v in read_inputs(config(world)).untrained.values()] == [0, 1]


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        ({"nobody": ["a"]}, ["teachers.mask_tokens\n", "found:  nobody", "experts of this pipeline: rev, up"]),
        (
            {"rev": ["no such token"]},
            ["teachers.mask_tokens.rev\n", "found:  'no such token', which the tokenizer does not know"],
        ),
    ],
)
def test_masks_of_no_expert_or_no_token_are_refused(world: Any, masks: Any, words: list[str]) -> None:
    world.data["teachers"] = {"mask_tokens": masks}
    with pytest.raises(ConfigError) as error:
        read_inputs(config(world))
    assert all(word in str(error.value) for word in words)


def test_cores_without_bfloat16_are_named_before_a_merge(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for section in ("rollout", "trainer"):
        world.data.setdefault(section, {})["dtype"] = "bfloat16"
    half = config(world)
    monkeypatch.setattr("opd.machine.processor.has_bf16", lambda cpuinfo: False)
    (warning,) = read_inputs(half).warnings
    assert warning.startswith("rollout.dtype, trainer.dtype: these cores have no instructions for bfloat16")
    monkeypatch.setattr("opd.machine.processor.has_bf16", lambda cpuinfo: True)
    assert read_inputs(half).warnings == ()
