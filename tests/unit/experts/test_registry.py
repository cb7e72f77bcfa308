"""Adding, reading, verifying and removing experts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from experts import weight_files
from experts.adapter import inspect_adapter
from experts.model_dir import inspect_model
from experts.registry import ExpertManifest, Registry, default_root
from experts.safetensors_header import read_header
from opd.errors import ModelError, PromptError, RegistryError
from opd.files import blake3_file


@pytest.fixture
def model(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "math.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2=", "answer": "4"}\n')
    return file


def test_what_is_added_can_be_read_again(registry: Registry, model: Path, prompts: Path, tmp_path: Path) -> None:
    manifest = registry.add("math", model, domain="sums", prompts=prompts)
    assert registry.get("math") == manifest
    assert (manifest.name, manifest.domain, manifest.model) == ("math", "sums", str(model.resolve()))
    assert (manifest.prompts, manifest.prompts_count) == (str(prompts.resolve()), 2)
    assert datetime.fromisoformat(manifest.registered_at).tzinfo == UTC
    assert [p.name for p in (tmp_path / "registry").iterdir()] == ["math"]
    assert [p.name for p in (tmp_path / "registry/math").iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("text", [None, "{", "[]", '{"method": "ppo", "base": {"seed": 0}}'])
def test_the_manifest_has_what_the_model_says_of_its_training(
    text: str | None, registry: Registry, model: Path
) -> None:
    if text is not None:
        (model / "training.json").write_text(text)
    known = {"method": "ppo", "base": {"seed": 0}} if text and "ppo" in text else None
    assert registry.add("math", model, domain="d").training == known == registry.get("math").training
    assert registry.verify("math") == []


def test_names_and_all_are_sorted_and_skip_what_is_no_entry(registry: Registry, model: Path, tmp_path: Path) -> None:
    assert registry.names() == []
    for name in ("b", "a"):
        registry.add(name, model, domain="d")
    (tmp_path / "registry" / "empty").mkdir()
    shutil.copytree(tmp_path / "registry" / "a", tmp_path / "registry" / ".c.1.tmp")
    assert registry.names() == ["a", "b"]
    assert [m.name for m in registry.list_manifests()] == ["a", "b"]


def test_relative_paths_are_stored_absolute(registry: Registry, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    assert registry.add("math", Path("model"), domain="d").model == str(model.resolve())


def test_the_default_root_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPD_REGISTRY", raising=False)
    assert default_root() == Path("registry")
    monkeypatch.setenv("OPD_REGISTRY", "/data/experts")
    assert default_root() == Path("/data/experts")


# Names

BAD_NAMES = ["", ".", "..", "../x", "a/b", "/abs", "a\\b", "a\0b", "math\n", "mаth", "-x", ".x", "x.", "a b", "x" * 65]


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("field", ["name", "domain"])
def test_bad_names_are_refused(name: str, field: str, registry: Registry, model: Path, tmp_path: Path) -> None:
    names = {"name": "math", "domain": "math"} | {field: name}
    with pytest.raises(RegistryError, match=f"^{field}\n") as error:
        registry.add(names["name"], model, domain=names["domain"])
    assert repr(name) in str(error.value)
    assert not (tmp_path / "registry").exists()


@pytest.mark.parametrize("name", ["../secret", "..", "a/../../secret"])
def test_a_name_never_leaves_the_root(name: str, registry: Registry, model: Path, tmp_path: Path) -> None:
    registry.add("a", model, domain="d")
    shutil.copytree(tmp_path / "registry" / "a", tmp_path / "secret")
    for method in (registry.get, registry.remove, registry.verify):
        with pytest.raises(RegistryError, match="no such expert"):
            method(name)
    assert (tmp_path / "secret" / "manifest.json").exists()


def test_a_taken_name_is_refused_and_kept(registry: Registry, model: Path) -> None:
    first = registry.add("math", model, domain="d")
    with pytest.raises(RegistryError, match="opd experts remove math"):
        registry.add("math", model, domain="other")
    assert registry.get("math") == first


def test_the_second_of_two_writers_at_a_time_fails(
    registry: Registry, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = registry.add("math", model, domain="d")
    late = first.model_copy(update={"domain": "late"})
    with pytest.raises(RegistryError, match="opd experts remove math"):
        registry._write(late)
    assert registry.get("math") == first
    assert [p.name for p in (tmp_path / "registry").iterdir()] == ["math"]


def test_an_unknown_name_is_refused_with_the_nearest(registry: Registry, model: Path) -> None:
    with pytest.raises(RegistryError, match="there is none yet"):
        registry.get("math")
    registry.add("math", model, domain="d")
    with pytest.raises(RegistryError, match="did you mean `math`"):
        registry.get("mth")


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "registry").write_text("")
    with pytest.raises(RegistryError, match="registry\n  found:  a file"):
        Registry(tmp_path / "registry")


# Prompts


SHAREGPT = '{"prompt": "1+1="}\n{"prompt": [{"from": "human", "value": "1+2?"}], "answer": "3"}\n'


@pytest.mark.parametrize("text", [None, '{"prompt": "1+1="}\n{"prompt": \n', SHAREGPT])
def test_bad_prompts_are_refused_and_nothing_is_written(
    text: str | None, registry: Registry, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "bad.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(PromptError, match="bad.jsonl" if text is None else "bad.jsonl:2"):
        registry.add("math", model, domain="d", prompts=file)
    assert not (tmp_path / "registry").exists()


# Manifests


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda text: text[:100], "Invalid JSON"),
        (lambda text: json.dumps({**json.loads(text), "extra": 1}), "extra"),
        (lambda text: json.dumps({**json.loads(text), "format_version": 2}), "format_version"),
        (lambda text: json.dumps({**json.loads(text), "name": "other"}), "`other`"),
    ],
)
def test_a_broken_manifest_names_its_file_and_can_be_removed(
    damage: Callable[[str], str], word: str, registry: Registry, model: Path, tmp_path: Path
) -> None:
    registry.add("math", model, domain="d")
    file = tmp_path / "registry" / "math" / "manifest.json"
    file.write_text(damage(file.read_text()))
    with pytest.raises(RegistryError) as error:
        registry.get("math")
    assert str(file) in str(error.value)
    assert word in str(error.value)
    registry.remove("math")
    assert registry.names() == []


def test_remove_deletes_only_the_manifest(registry: Registry, model: Path, tmp_path: Path) -> None:
    registry.add("math", model, domain="d")
    registry.add("code", model, domain="d")
    (tmp_path / "registry" / "code" / "notes.txt").write_text("mine")
    registry.remove("math")
    registry.remove("code")
    assert [p.name for p in (tmp_path / "registry").iterdir()] == ["code"]
    assert [p.name for p in (tmp_path / "registry" / "code").iterdir()] == ["notes.txt"]
    assert (model / "model.safetensors").exists()
    assert registry.add("math", model, domain="d2").domain == "d2"
    with pytest.raises(RegistryError, match="not an expert"):
        registry.add("code", model, domain="d")
    assert (tmp_path / "registry" / "code" / "notes.txt").read_text() == "mine"


def test_twins_have_the_same_weights(
    registry: Registry, model: Path, make_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    first = registry.add("first", model, domain="d")
    assert registry.list_duplicates(first) == []
    registry.add("other", make_model_dir(tmp_path / "other", seed=7), domain="d")
    copy = registry.add("copy", Path(shutil.copytree(model, tmp_path / "copy")), domain="d")
    assert registry.list_duplicates(copy) == ["first"]


# Verify


@pytest.fixture
def registered(registry: Registry, model: Path, prompts: Path) -> ExpertManifest:
    return registry.add("math", model, domain="d", prompts=prompts)


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_an_untouched_expert_has_no_problems(registry: Registry, registered: ExpertManifest) -> None:
    assert registry.verify("math") == []


def test_a_flipped_bit_is_found(registry: Registry, registered: ExpertManifest, model: Path) -> None:
    data = bytearray((model / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (model / "model.safetensors").write_bytes(data)
    (problem,) = registry.verify("math")
    assert "model.safetensors: changed weight file" in problem
    assert f"expected {registered.info.weight_files['model.safetensors']}, actual " in problem


def test_a_missing_and_an_extra_weight_file_are_found(
    registry: Registry, registered: ExpertManifest, model: Path
) -> None:
    (model / "model.safetensors").rename(model / "weights.safetensors")
    problems = registry.verify("math")
    assert any("model.safetensors: missing weight file" in p for p in problems)
    assert any("weights.safetensors: extra weight file" in p for p in problems)


def test_files_beside_the_models_do_not_matter_whichever_release_registered_it(registry: Registry, model: Path) -> None:
    """Older releases recorded a hash of every safetensors file of the directory."""
    shard = "model-00001-of-00001.safetensors"
    names = dict.fromkeys(read_header(model / "model.safetensors"), shard)
    (model / "model.safetensors").rename(model / shard)
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    beside = model / "consolidated.safetensors"
    save_file({"norm.weight": torch.full((3,), torch.nan)}, beside)
    manifest = registry.add("math", model, domain="math")
    assert list(manifest.info.weight_files) == [shard] and registry.verify("math") == []
    info = manifest.info.model_copy(
        update={"weight_files": manifest.info.weight_files | {beside.name: blake3_file(beside)}}
    )
    (registry._root / "math" / "manifest.json").write_text(manifest.model_copy(update={"info": info}).model_dump_json())
    assert registry.verify("math") == []
    (model / shard).write_bytes((model / shard).read_bytes()[:-1] + b"x")
    assert any(f"{shard}: changed weight file" in problem for problem in registry.verify("math"))


def test_an_edit_of_the_config_that_is_no_field_of_ours_is_found(
    registry: Registry, registered: ExpertManifest, model: Path
) -> None:
    edit(model / "config.json", rms_norm_eps=0.5)
    (problem,) = registry.verify("math")
    assert problem.startswith(f"{model / 'config.json'}: changed config, expected {registered.config_hash}, actual ")


def test_an_expert_that_an_older_release_registered_is_judged_by_what_it_recorded(
    registry: Registry, registered: ExpertManifest, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "registry" / "math" / "manifest.json"
    data = json.loads(file.read_text())
    del data["config_hash"]
    file.write_text(json.dumps(data))
    edit(model / "config.json", rms_norm_eps=0.5)
    assert registry.verify("math") == []


@pytest.mark.parametrize(
    ("file", "changes", "field"),
    [
        ("generation_config.json", {"eos_token_id": [2, 3]}, "eos_token_ids"),
        (
            "tokenizer.json",
            {"added_tokens": [{"id": 2, "content": "<unk>"}, {"id": 3, "content": "<eos>"}]},
            "vocab_hash",
        ),
        ("config.json", {"max_position_embeddings": 64}, "context"),
    ],
)
def test_a_changed_property_is_found(
    file: str, changes: dict[str, object], field: str, registry: Registry, registered: ExpertManifest, model: Path
) -> None:
    edit(model / file, **changes)
    assert any(
        f"changed {field}, expected {getattr(registered.info, field)}, actual " in p for p in registry.verify("math")
    )


def test_a_changed_template_and_changed_prompts_are_found(
    registry: Registry, registered: ExpertManifest, model: Path, prompts: Path
) -> None:
    (model / "chat_template.jinja").write_text("other")
    prompts.write_text('{"prompt": "1+2="}\n')
    template, changed = registry.verify("math")
    assert "changed chat_template_hash" in template
    assert f"{prompts}: changed prompts, expected {registered.prompts_hash}" in changed
    prompts.unlink()
    assert "missing prompts file" in registry.verify("math")[1]


def test_a_model_directory_that_went_away_is_one_problem(
    registry: Registry, registered: ExpertManifest, model: Path
) -> None:
    shutil.rmtree(model)
    (problem,) = registry.verify("math")
    assert str(model) in problem
    assert "no such directory" in problem


# LoRA adapters


@pytest.fixture
def adapter(model: Path, make_adapter: Callable[..., Path], tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "lora", model)


def test_an_adapter_is_registered_with_its_base(registry: Registry, adapter: Path, model: Path) -> None:
    manifest = registry.add("math", adapter, domain="d")
    assert registry.get("math") == manifest
    assert (manifest.model, manifest.info.path) == (str(adapter.resolve()), str(model.resolve()))
    assert manifest.info == inspect_model(model)
    assert manifest.adapter == inspect_adapter(adapter)
    assert manifest.architecture == "LlamaForCausalLM + LoRA r=4"
    assert manifest.parameters == manifest.info.parameters + manifest.adapter.parameters
    assert registry.verify("math") == []


def test_an_adapters_base_may_be_given(registry: Registry, adapter: Path, model: Path) -> None:
    elsewhere = model.rename(model.with_name("moved"))
    with pytest.raises(ModelError, match="base_model_name_or_path"):
        registry.add("math", adapter, domain="d")
    assert registry.add("math", adapter, domain="d", base=elsewhere).info.path == str(elsewhere.resolve())
    assert registry.verify("math") == [], "the base that was registered, not the one that the adapter names"


def test_a_manifest_from_before_adapters_is_readable(registry: Registry, model: Path, tmp_path: Path) -> None:
    manifest = registry.add("math", model, domain="d")
    file = tmp_path / "registry" / "math" / "manifest.json"
    data = json.loads(file.read_text())
    assert data.pop("adapter") is None
    file.write_text(json.dumps(data))
    assert registry.get("math") == manifest
    assert registry.verify("math") == []


def test_twins_need_the_same_base_and_the_same_adapter(
    registry: Registry, model: Path, adapter: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    registry.add("base", model, domain="d")
    first = registry.add("first", adapter, domain="d")
    other = registry.add("other", make_adapter(tmp_path / "other", model, seed=1), domain="d")
    assert registry.list_duplicates(first) == registry.list_duplicates(other) == []
    copy = registry.add("copy", Path(shutil.copytree(adapter, tmp_path / "copy")), domain="d")
    assert registry.list_duplicates(copy) == ["first"]


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_flipped_bit_of_base_or_adapter_is_found(registry: Registry, adapter: Path, model: Path) -> None:
    registry.add("math", adapter, domain="d")
    flip(adapter / "adapter_model.safetensors")
    (problem,) = registry.verify("math")
    assert problem.startswith(f"{adapter / 'adapter_model.safetensors'}: changed weight file, expected ")
    flip(model / "model.safetensors")
    first, second = registry.verify("math")
    assert (first.split(": ")[0], second) == (str(model / "model.safetensors"), problem)


def test_a_changed_scaling_is_found(registry: Registry, adapter: Path) -> None:
    registry.add("math", adapter, domain="d")
    edit(adapter / "adapter_config.json", lora_alpha=9)
    file, alpha = registry.verify("math")
    assert "adapter_config.json: changed weight file" in file
    assert alpha == f"{adapter}: changed alpha, expected 8.0, actual 9.0"


def test_an_adapter_whose_base_changed_its_shape_is_found(
    registry: Registry, adapter: Path, model: Path, make_model_dir: Callable[..., Path]
) -> None:
    registry.add("math", adapter, domain="d")
    shutil.rmtree(model)
    make_model_dir(model, hidden=96, heads=3)
    problems = registry.verify("math")
    assert any("model.safetensors: changed weight file" in p for p in problems)
    assert any("changed hidden_size, expected 64, actual 96" in p for p in problems)
    assert any("96 outputs" in p for p in problems)


def test_an_adapter_that_went_away_is_one_problem(registry: Registry, adapter: Path) -> None:
    registry.add("math", adapter, domain="d")
    shutil.rmtree(adapter)
    (problem,) = registry.verify("math")
    assert problem.startswith(f"{adapter}\n  found:  no such directory")


def test_the_base_of_several_adapters_is_read_once(
    registry: Registry, adapter: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    (model / "chat_template.jinja").unlink()  # hashed each time; it is small
    for name in ("a", "b"):
        registry.add(name, adapter, domain="d")
    monkeypatch.setattr(weight_files, "blake3_file", lambda file: read.append(file.name) or blake3_file(file))
    known: dict[Path, dict[str, str]] = {}
    assert [registry.verify(name, known) for name in ("a", "b")] == [[], []]
    assert read == ["model.safetensors"]
    assert [registry.verify(name) for name in ("a", "b")] == [[], []]
    assert read == ["model.safetensors"] * 3, "another call reads again"
