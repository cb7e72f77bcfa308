"""A teacher whose layers lie on several devices says bit for bit what it says on one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from opd.errors import RunError
from opd.records.types import Teacher
from teachers.scorers import ScorerOptions
from teachers.scorers.division import Division
from teachers.scorers.transformers import TransformersScorer, _build_skeleton, _read_config
from tests.unit.teachers.conftest import rollout

VOCABULARY = 76
LAYERS = 6
HALF = 0.6
"""Of a model's bytes: room for about half of its layers, because accelerate keeps room for the largest one."""


def scorer(max_memory: Mapping[int | str, int] | None, payload: str = "hidden_states") -> TransformersScorer:
    """`max_memory` None: not divided."""
    divided = {} if max_memory is None else {"device_map": "auto", "max_memory": max_memory}
    return TransformersScorer(
        ScorerOptions(dtype="float32", payload=payload, top_k=4, vocab_size=VOCABULARY, memory_bytes=1 << 30, **divided)  # type: ignore[arg-type]
    )


def said(scoring: TransformersScorer, teacher: Teacher) -> Any:
    rows = [row for batch in scoring.score(teacher, [rollout(i) for i in range(6)], {}) for row in batch]
    return [(row.rollout.sample_id, row.answer) for row in rows], scoring.head(teacher).numpy().tobytes()


def nbytes(path: Path) -> int:
    return sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())


def skeleton(model_dir: Path) -> Any:
    return _build_skeleton(_read_config(model_dir)[0], torch.float32, None)


@pytest.fixture(scope="module")
def experts(
    make_model_dir: Callable[..., Path], make_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Teacher]:
    """Two full experts, one with a head of its own, and two LoRA experts of one base."""
    root = tmp_path_factory.mktemp("divided")
    made = {
        name: Teacher(name=name, model_dir=make_model_dir(root / name, seed=seed, tie=name == "rev", layers=LAYERS))
        for seed, name in enumerate(("rev", "untied"), start=1)
    }
    base = make_model_dir(root / "base", layers=LAYERS)
    for seed, name in enumerate(("one", "two")):
        made[name] = Teacher(name=name, model_dir=base, adapter_dir=make_adapter(root / name, base, seed=seed))
    return made


@pytest.mark.parametrize("payload", ["hidden_states", "sampled_logprobs", "top_k"])
@pytest.mark.parametrize("share", [0.0, HALF])
def test_layers_that_stay_in_the_files_change_no_bit(share: float, payload: str, experts: dict[str, Teacher]) -> None:
    whole, size = scorer(None, payload), nbytes(experts["rev"].model_dir)
    on_cpu = {"cpu": int(share * size)} if share else {}
    parts = scorer({**on_cpu, "disk": 2 * size}, payload)
    for name in ("rev", "one", "two", "untied", "one", "rev"):  # nothing stays from the one before
        teacher = experts[name]
        assert said(parts, teacher) == said(whole, teacher), name
        assert parts.head_key(teacher) == whole.head_key(teacher)
        division = parts._get_architecture(teacher.model_dir).division
        away = {name for name, param in parts._model.named_parameters(remove_duplicate=False) if param.is_meta}
        assert division is not None and away == division.on_disk
        layers = {name.split(".")[2] for name in away if ".layers." in name}
        assert 1 < len(layers) < LAYERS - 1 if share else len(layers) == LAYERS, "really divided"
        held = sum(t.nbytes for t in parts._weights.get(teacher)[0].values())
        stored = load_file(teacher.model_dir / "model.safetensors")
        assert held == sum(t.nbytes for name, t in stored.items() if name not in away), (
            "what is on disk is not in memory too"
        )


def test_all_in_memory_is_as_without_a_map(experts: dict[str, Teacher]) -> None:
    whole = scorer(None)
    for max_memory in ({}, {"cpu": 1 << 30}):
        parts = scorer(max_memory)
        assert said(parts, experts["one"]) == said(whole, experts["one"])
        assert not any(param.is_meta for param in parts._model.parameters())


def test_a_teacher_that_is_read_ahead_leaves_its_layers_on_disk(experts: dict[str, Teacher]) -> None:
    size = nbytes(experts["rev"].model_dir)
    parts = scorer({"cpu": int(HALF * size), "disk": size})
    parts.prefetch(experts["rev"])
    assert said(parts, experts["rev"]) == said(scorer(None), experts["rev"])
    assert parts._weights.loads == 1 and parts._weights.nbytes < HALF * size
    assert parts._weights.nbytes == sum(parts._weights._sizes.values()), "the budget counts what is held"


def test_no_room_for_a_teacher_is_told_with_the_way_out(experts: dict[str, Teacher]) -> None:
    size = nbytes(experts["rev"].model_dir)
    for max_memory in ({"cpu": size // 2}, {"cpu": size // 2, "disk": size // 9}):
        with pytest.raises(
            RunError, match=r"rev: no room for .* of its .* of weights: cpu .*; raise teachers\.max_memory"
        ):
            said(scorer(max_memory), experts["rev"])


@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_weights_that_stay_on_disk_have_to_fit(
    damage: str, experts: dict[str, Teacher], make_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    broken, name = make_model_dir(tmp_path / "broken", seed=3, layers=LAYERS), "model.layers.1.mlp.up_proj.weight"
    state = load_file(broken / "model.safetensors")
    if damage == "missing":
        del state[name]
    else:
        state[name] = state[name][:-1].clone()
    save_file(state, broken / "model.safetensors", {"format": "pt"})
    parts = scorer({"disk": 1 << 30})
    for _ in range(2):  # a half-loaded teacher must not pass for the whole one the second time
        with pytest.raises(RunError, match=rf"teacher broken: .*fit its config: .*{name}"):
            said(parts, Teacher(name="broken", model_dir=broken))
    assert said(parts, experts["rev"]) == said(scorer(None), experts["rev"])


def test_an_adapter_of_another_model_is_refused(
    experts: dict[str, Teacher], make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    """It names modules that no part of the map has."""
    one = experts["one"]
    path = make_adapter(tmp_path / "foreign", one.model_dir)
    weights = load_file(path / "adapter_model.safetensors")
    renamed = {name.replace(".model.model.", ".model.transformer."): tensor for name, tensor in weights.items()}
    assert not renamed.keys() & weights.keys()
    save_file(renamed, path / "adapter_model.safetensors", {"format": "pt"})
    parts = scorer({"cpu": int(HALF * nbytes(one.model_dir)), "disk": 1 << 30})
    foreign = Teacher(name="foreign", model_dir=one.model_dir, adapter_dir=path)
    with pytest.raises(
        RunError, match=r"teacher foreign: its adapter changes transformer\..*, which is no linear module"
    ):
        said(parts, foreign)
    assert said(parts, one) == said(scorer(None), one)


def test_weights_under_other_names_cannot_stay_on_disk(make_mixture_dir: Callable[..., Path], tmp_path: Path) -> None:
    teacher = Teacher(name="mixture", model_dir=make_mixture_dir(tmp_path / "mixture", "qwen3_moe"))
    with pytest.raises(
        RunError, match=r"teacher mixture: .* so none can stay on disk: raise what teachers\.max_memory"
    ):
        said(scorer({"disk": 1 << 30}), teacher)
    assert said(scorer({"cpu": 1 << 30}), teacher) == said(scorer(None), teacher)


def test_what_nobody_knows_how_to_divide_is_refused(experts: dict[str, Teacher]) -> None:
    model = skeleton(experts["rev"].model_dir)
    model._no_split_modules = set()  # as classes of transformers have it that do not say
    with pytest.raises(RunError, match=r"where LlamaForCausalLM may be divided; remove teachers\.device_map"):
        Division.from_skeleton(model, {"cpu": 1 << 30}, "cpu")


def test_a_module_without_weights_may_be_the_only_one_on_disk(
    experts: dict[str, Teacher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rotary embedding comes last in a map, and no file has it."""
    modules = ("model.embed_tokens", "model.layers", "model.norm", "lm_head")
    places: dict[str, int | str] = dict.fromkeys(modules, "cpu") | {"model.rotary_emb": "disk"}
    made = Division(device_map=places, main_device="cpu", on_disk=frozenset())
    monkeypatch.setattr(Division, "from_skeleton", lambda *_: made)
    assert said(scorer({"cpu": 1 << 30}), experts["one"]) == said(scorer(None), experts["one"])


def test_gpus_share_the_layers_equally_and_the_rest_computes_on_the_first(experts: dict[str, Teacher]) -> None:
    """Check where layers go, which needs no GPU. On GPUs: tests/integration/test_divided_teacher.py."""
    model_dir = experts["rev"].model_dir
    size = nbytes(model_dir)
    both = Division.from_skeleton(skeleton(model_dir), {0: 2 * size, 1: 2 * size}, 0)
    assert set(both.device_map.values()) == {0, 1} and not both.on_disk
    layers = [both.find_device(f"model.layers.{i}.mlp.up_proj").index for i in range(LAYERS)]
    assert layers == sorted(layers) and 2 <= sum(layers) <= 4, "about half of the layers, the last ones"
    assert both.find_device("lm_head") == both.find_device("model.embed_tokens") == torch.device("cuda", 0), "tied"
    spilt = Division.from_skeleton(skeleton(model_dir), {0: int(HALF * size), "cpu": 2 * size}, 0)
    assert set(spilt.device_map.values()) == {0, "cpu"}
    assert {spilt.find_device(f"model.layers.{i}") for i in range(LAYERS)} == {torch.device("cuda", 0)}
    with pytest.raises(KeyError):  # and not a search without end
        spilt.find_device("transformer.h.0")
