"""Training experts from a spec: what is learned, what is saved, what is skipped, what is refused before any compute."""

from __future__ import annotations

import json
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from experts import sft
from experts.episodes.rows import read_episode
from experts.model_dir import inspect_model
from experts.registry import Registry
from experts.sft import collate_examples, encode_line, encode_lines, fine_tune
from experts.spec import ExpertsSpec, TrainSettings
from experts.suites import write_suite
from experts.suites.letters import build_tokenizer
from experts.train import build_base_job, train_experts
from opd.errors import ConfigError, ModelError, OpdError, PromptError, RegistryError
from opd.prompts import PromptLine
from opd.prompts.line import read_row
from opd.settings.yaml_files import validate_section
from tests.chatml import CHATML, chat_tokenizer
from tests.conftest import put_in_front

SHAPE = {"tokenizer": "letters", "hidden_size": 32, "layers": 1, "heads": 1, "intermediate_size": 64}
TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 64}
TRAIN = {"max_steps": 20, "learning_rate": 1e-2, "per_device_train_batch_size": 16, "max_length": 32}


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    written = write_suite("letters", tmp_path / "prompts", domains=["mask", "shift"], train=100, eval=5, seed=0)
    return {domain: str(paths["train"]) for domain, paths in written.items()}


@pytest.fixture
def raw(tmp_path: Path, data: dict[str, str]) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path / "models"),
        "base": {"from_scratch": SHAPE},
        "train": TRAIN,
        "experts": {name: {"domain": name, "data": path} for name, path in data.items()},
        "registry": str(tmp_path / "registry"),
    }


def run(raw: dict[str, Any]) -> tuple[list[Path], list[str]]:
    lines: list[str] = []
    return train_experts(validate_section(ExpertsSpec, raw, "spec.yaml"), lines.append), lines


def losses(lines: list[str], name: str) -> list[float]:
    return [float(line.split("loss ")[1].split(" ")[0]) for line in lines if line.startswith(f"{name}: step")]


def test_a_seed_that_numpy_does_not_take_trains_all_the_same(raw: dict[str, Any]) -> None:
    raw |= {"seed": (1 << 32) + 5, "train": TRAIN | {"max_steps": 2}}
    directories, _ = run(raw)
    assert [directory.name for directory in directories] == ["mask", "shift"]


def test_a_base_and_its_experts_are_trained_saved_and_registered(raw: dict[str, Any], data: dict[str, str]):
    raw["base"] |= {"data": list(data.values()), "train": {"max_steps": 10}}
    directories, lines = run(raw)

    assert [directory.name for directory in directories] == ["mask", "shift"]
    for name, reports in {"base": 10, "mask": 10, "shift": 10}.items():
        found = losses(lines, name)
        assert len(found) == reports
        assert found[-1] < found[0]
    assert Registry(Path(raw["registry"])).names() == ["mask", "shift"]
    saved = {path.name for path in directories[0].iterdir()}
    assert saved >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert json.loads((directories[0] / "generation_config.json").read_text())["eos_token_id"] == 2
    assert not list(Path(raw["output_dir"]).glob(".*")), "nothing temporary stays"


def test_a_second_call_trains_only_what_is_missing(raw: dict[str, Any]):
    directories, _ = run(raw)
    before = directories[0].joinpath("model.safetensors").stat().st_mtime_ns
    # As an interruption during the second expert leaves it.
    directories[1].rename(directories[1].with_name(".shift.tmp"))
    again, lines = run(raw)

    assert again == directories
    assert [line for line in lines if "kept" in line] == ["base: finished before, kept", "mask: finished before, kept"]
    assert losses(lines, "shift") and not losses(lines, "mask")
    assert directories[0].joinpath("model.safetensors").stat().st_mtime_ns == before
    assert not Registry(Path(raw["registry"])).verify("shift")


def test_the_same_spec_gives_the_same_weights(raw: dict[str, Any], tmp_path: Path):
    first, _ = run(raw | {"registry": None})
    second, _ = run(raw | {"registry": None, "output_dir": str(tmp_path / "again")})
    ours, theirs = (load_file(directories[0] / "model.safetensors") for directories in (first, second))
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_lora_leaves_a_plain_model_that_moved(raw: dict[str, Any]):
    train = TRAIN | {"max_steps": 10}
    directories, lines = run(raw | {"method": "lora", "lora": {"r": 4, "alpha": 8}, "train": train})
    base, expert = (
        load_file(path / "model.safetensors") for path in (directories[0].with_name("base"), directories[0])
    )

    assert losses(lines, "mask")[-1] < losses(lines, "mask")[0]
    assert base.keys() == expert.keys()
    moved = {key for key in base if not torch.equal(base[key], expert[key])}
    assert moved == {key for key in base if "_proj" in key}, "adapters on all linear layers, merged; nothing else moves"


@pytest.mark.parametrize("targets", [["q_prj"], "q_prj", "*"])
def test_lora_of_modules_that_the_base_lacks_is_refused(raw: dict[str, Any], targets: Any):
    with pytest.raises(ConfigError, match=r"(?s)^lora\.target_modules\n.*wanted: .*q_proj"):
        run(raw | {"method": "lora", "lora": {"target_modules": targets}, "train": TRAIN | {"max_steps": 1}})
    assert not Path(raw["output_dir"]).exists(), "the base is not trained first"


def test_lora_of_modules_that_a_given_base_lacks_is_refused(raw: dict[str, Any], tmp_path: Path, make_model_dir: Any):
    raw["base"] = {"model": str(make_model_dir(tmp_path / "given"))}
    with pytest.raises(ConfigError, match=r"(?s)^lora\.target_modules\n.*wanted: .*q_proj"):
        run(raw | {"method": "lora", "lora": {"target_modules": ["q_prj"]}})
    assert not Path(raw["output_dir"]).exists()


def test_experts_keep_the_type_of_their_base(raw: dict[str, Any], tmp_path: Path, make_model_dir: Any):
    from transformers import AutoModelForCausalLM

    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(make_model_dir(half), dtype=torch.bfloat16).save_pretrained(half)
    directories, _ = run(raw | {"base": {"model": str(half)}, "train": TRAIN | {"max_steps": 1}})
    weights = load_file(directories[0] / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_loss_covers_the_completion_and_the_end_token_only():
    tokenizer = build_tokenizer()
    example = encode_line(tokenizer, PromptLine(prompt="rev ab=", completion="ba"))
    assert tokenizer.decode(example["input_ids"]) == "rev ab=ba<eos>"
    learned = [label for label in example["labels"] if label != -100]
    assert tokenizer.decode(learned) == "ba<eos>"
    assert example["labels"][: len("rev ab=")] == [-100] * len("rev ab=")


def test_a_batch_without_logits_over_its_prompts_has_the_loss_of_its_rows_one_by_one():
    tokenizer = build_tokenizer()
    rows = [PromptLine(prompt="rev ab=", completion="ba"), PromptLine(prompt="dbl pqrs=", completion="ppqqrrss")]
    examples = encode_lines(tokenizer, rows, max_length=32)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **TINY)).eval()

    out = model(**collate_examples(examples))
    surprises = []
    for example in examples:
        logprobs = model(input_ids=torch.tensor([example["input_ids"]])).logits[0].log_softmax(-1)
        surprises += [-logprobs[t - 1, label] for t, label in enumerate(example["labels"]) if label != -100]

    assert len(surprises) == len("ba") + len("ppqqrrss") + 2, "two end tokens"
    assert torch.isclose(out.loss, torch.stack(surprises).mean(), atol=1e-5)
    assert out.logits.shape[1] == 1 + max(len(e["input_ids"]) for e in examples) - len("rev ab="), "no more than needed"


def test_chat_rows_go_through_the_template_and_end_at_the_end_token():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}<eos> {% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    row = PromptLine(
        prompt=[{"role": "user", "content": "rev ab"}], completion=[{"role": "assistant", "content": "ba"}]
    )
    example = encode_line(tokenizer, row)
    assert tokenizer.decode(example["input_ids"]) == "u:rev ab<eos> a:ba<eos>"
    assert tokenizer.decode([label for label in example["labels"] if label != -100]) == "ba<eos>"


DATED = "{{ '<|im_start|>system\n' + strftime_now('%Y-%m-%d') + '<|im_end|>\n' }}"


def test_rows_are_read_on_the_day_and_with_the_calls_of_the_merge():
    """The same day in rows with a completion and in episodes; calls in the form that the merge's student is told of."""
    tokenizer, day = chat_tokenizer(DATED + CHATML), date(2020, 1, 2)
    prompt, said = [{"role": "user", "content": "1+2"}], [{"role": "assistant", "content": "3"}]
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
    rows = [
        PromptLine(prompt=prompt, completion=said),
        read_episode({"prompt": prompt, "messages": said}),
        read_episode({"prompt": prompt, "messages": said, "tools": [tool]}),
    ]
    texts = [tokenizer.decode(e["input_ids"]) for e in encode_lines(tokenizer, rows, 900, (), day, "qwen3_xml")]
    assert all(text.startswith("<|im_start|>system\n2020-01-02<|im_end|>") for text in texts)
    assert texts[0] == texts[1] and "<function=NAME>" in texts[2]


def test_the_day_and_the_parser_of_a_spec_reach_the_rows_and_the_record(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[Any] = []

    def stop(*given: Any) -> None:
        seen.append(given[4:])
        raise ModelError("far enough")

    plain = build_base_job(validate_section(ExpertsSpec, raw, "s.yaml")).record
    raw["base"] |= {"template_date": "2020-01-02", "tool_call_parser": "qwen3_xml"}
    monkeypatch.setattr("experts.sft.encode_lines", stop)
    with pytest.raises(ModelError, match="far enough"):
        run(raw)
    assert seen == [(date(2020, 1, 2), "qwen3_xml", {})]
    recorded = build_base_job(validate_section(ExpertsSpec, raw, "s.yaml")).record
    assert recorded == {"template_date": "2020-01-02", "tool_call_parser": "qwen3_xml", **plain}
    assert "template_date" not in plain, "a record of an older version is that of the same settings"


def test_an_expert_learns_after_the_tools_and_variables_of_its_row():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    ).replace("{{ m['content'] }}", "{{ m['content'] | upper if fast else m['content'] }}")
    row = {
        "prompt": [{"role": "user", "content": "rev ab="}],
        "completion": [{"role": "assistant", "content": "ba"}],
        "tools": [{"type": "function", "function": {"name": "add"}}],
    }
    assert tokenizer.decode(encode_line(tokenizer, read_row(row))["input_ids"]) == "add rev ab=ba<eos>"
    row["chat_template_kwargs"] = {"fast": False}
    given = {"fast": True}
    assert tokenizer.decode(encode_line(tokenizer, read_row(row), variables=given)["input_ids"]) == "add rev ab=ba<eos>"
    del row["chat_template_kwargs"]
    assert tokenizer.decode(encode_line(tokenizer, read_row(row), variables=given)["input_ids"]) == "add REV AB=BA<eos>"
    (example,) = encode_lines(tokenizer, [read_row(row)], 32, variables=given)
    assert tokenizer.decode(example["input_ids"]) == "add REV AB=BA<eos>"


def test_a_template_that_rewrites_the_prompt_is_refused():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    row = PromptLine(
        prompt=[{"role": "user", "content": "rev ab"}], completion=[{"role": "assistant", "content": "ba"}]
    )
    with pytest.raises(PromptError, match="does not begin with its prompt"):
        encode_line(tokenizer, row)


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no system message') }}", "{% if %}"])
def test_messages_that_the_template_refuses_are_named(template: str | None):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    row = PromptLine(prompt=[{"role": "user", "content": "ab"}], completion=[{"role": "assistant", "content": "ba"}])
    with pytest.raises(PromptError, match=r"(?s)prompt \[.*'content': 'ab'.*chat template"):
        encode_line(tokenizer, row)


def test_a_tokenizer_without_an_end_token_is_refused():
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="eos_token"):
        encode_lines(tokenizer, [PromptLine(prompt="rev ab=", completion="ba")], max_length=32)


def test_rows_that_are_too_long_are_left_out_and_all_too_long_is_an_error():
    rows = [PromptLine(prompt="rev ab=", completion="ba"), PromptLine(prompt="rev abcdefgh=", completion="hgfedcba")]
    assert len(encode_lines(build_tokenizer(), rows, max_length=12)) == 1
    with pytest.raises(PromptError, match="raise max_length"):
        encode_lines(build_tokenizer(), rows, max_length=5)


def test_rows_left_out_are_reported(raw: dict[str, Any]):
    _, lines = run(raw | {"train": TRAIN | {"max_steps": 1, "max_length": 12}})
    assert any(line.startswith("mask: left out ") and "longer than max_length 12" in line for line in lines)


def test_rows_of_like_lengths_share_a_batch_if_wanted(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    def padding(**settings: Any) -> int:
        lengths: list[list[int]] = []

        def spy(batch: list[Any]) -> Any:
            lengths.append([len(example["input_ids"]) for example in batch])
            return collate_examples(batch)

        monkeypatch.setattr("experts.sft.collate_examples", spy)
        rows = [PromptLine(prompt="rev ab=", completion="a" * (1 + 7 * i % 20)) for i in range(64)]
        examples = encode_lines(build_tokenizer(), rows, max_length=64)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=80, **TINY))
        chosen = TrainSettings(max_steps=8, learning_rate=1e-3, per_device_train_batch_size=8, **settings)
        fine_tune(model, examples, chosen, seed=0, scratch=Path(raw["output_dir"]), report=lambda step, loss: None)
        return sum(max(found) * len(found) - sum(found) for found in lengths[:8])

    assert padding(train_sampling_strategy="group_by_length") < 0.7 * padding()
    assert "train_sampling_strategy" not in TrainSettings(max_steps=1, learning_rate=1).model_dump(), "as of old"


def test_a_given_base_can_learn_a_few_texts_first(raw: dict[str, Any], data: dict[str, str], tmp_path: Path):
    made = raw | {"output_dir": str(tmp_path / "first"), "registry": None, "experts": {"mask": raw["experts"]["mask"]}}
    run(made)
    given = tmp_path / "first" / "base"
    before = {path.name: path.read_bytes() for path in given.iterdir()}
    raw["base"] = {"model": str(given), "data": [data["shift"]], "train": {"max_steps": 10}}
    directories, lines = run(raw)

    base = directories[0].parent / "base"
    assert losses(lines, "base")[-1] < losses(lines, "base")[0]
    assert {path.name: path.read_bytes() for path in given.iterdir()} == before, "the given model stays as it is"
    assert (base / "model.safetensors").read_bytes() != before["model.safetensors"]
    record = json.loads((directories[0] / "training.json").read_text())["base"]
    assert record["weights"] == inspect_model(given).weight_files, "the lineage begins at the given model"
    assert len(record["data"]) == 1
    _, again = run(raw)
    assert again[0] == "base: finished before, kept"


@pytest.fixture
def beginning(raw: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The spec with a given base whose tokenizer puts a begin token in front."""
    run(raw | {"output_dir": str(tmp_path / "first"), "registry": None, "train": TRAIN | {"max_steps": 1}})
    put_in_front(build_tokenizer()).save_pretrained(tmp_path / "first" / "base")
    return raw | {"base": {"model": str(tmp_path / "first" / "base")}, "train": TRAIN | {"max_steps": 2}}


@pytest.mark.parametrize("add", [True, False])
def test_plain_rows_begin_as_the_tokenizer_has_it_unless_the_spec_says_otherwise(
    add: bool, beginning: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    monkeypatch.setattr(
        sft, "fine_tune", lambda model, examples, *_, **__: seen.extend(e["input_ids"] for e in examples)
    )
    (directory, _), _ = run(beginning | {"add_special_tokens": add})
    assert {ids[0] == 1 for ids in seen} == {add}
    assert json.loads((directory / "training.json").read_text()).get("ids_in_front") == ([1] if add else None)
    saved = AutoTokenizer.from_pretrained(directory)
    assert saved("ab")["input_ids"][0] == 1, "the expert's tokenizer is its base's"


def test_experts_of_one_spec_do_not_begin_differently(beginning: dict[str, Any]) -> None:
    """An earlier release put no begin token in front, and recorded nothing of it."""
    directories, _ = run(beginning)
    record = directories[0] / "training.json"
    record.write_text(json.dumps({k: v for k, v in json.loads(record.read_text()).items() if k != "ids_in_front"}))
    run(beginning)  # all is finished
    shutil.rmtree(directories[1])
    with pytest.raises(ConfigError, match=r"training.json: ids_in_front\n  found:  \[\] .*`mask`") as refusal:
        run(beginning)
    assert "add_special_tokens: false" in str(refusal.value)
    _, lines = run(beginning | {"add_special_tokens": False})
    assert "mask: finished before, kept" in lines and losses(lines, "shift")


@pytest.mark.parametrize(
    ("path", "value", "error", "says"),
    [
        ("train.learning_rat", 1, ConfigError, "did you mean `learning_rate`?"),
        ("experts.mask.train", {"max_step": 5}, ConfigError, "experts.mask.train.max_step"),
        ("base", {}, ConfigError, "exactly one of `model` and `from_scratch`"),
        ("base.model", "somewhere", ConfigError, "exactly one of `model` and `from_scratch`"),
        ("base", {"model": "nowhere"}, ModelError, "nowhere"),
        ("base.train", {"max_steps": 3, "learning_rate": 1}, ConfigError, "`data` and `train` together"),
        ("base.from_scratch.heads", 3, ConfigError, "must be an even whole number"),
        ("experts.shift.data", "nowhere.jsonl", PromptError, "nowhere.jsonl"),
        ("base.data", ["nowhere.jsonl"], PromptError, "nowhere.jsonl"),
        ("experts.base", {"domain": "base", "data": "x.jsonl"}, ConfigError, "other than `base`"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    raw: dict[str, Any], path: str, value: Any, error: type[OpdError], says: str
):
    *parents, last = path.split(".")
    section = raw
    for key in parents:
        section[key] = dict(section[key])
        section = section[key]
    section[last] = value
    with pytest.raises(error) as caught:
        run(raw)
    assert says in str(caught.value)
    assert not Path(raw["output_dir"]).exists()


@pytest.mark.parametrize("base", ["made", "given"])
def test_rows_that_cannot_be_learned_are_refused_before_the_first_training(
    base: str, raw: dict[str, Any], tmp_path: Path, make_model_dir: Any
):
    if base == "given":
        raw["base"] = {"model": str(make_model_dir(tmp_path / "given"))}
    raw["experts"]["shift"]["train"] = {"max_length": 3}
    with pytest.raises(PromptError, match=r"(?s)^shift: max_length\n.*rows, all longer"):
        run(raw)
    assert not Path(raw["output_dir"]).exists()


def test_rows_of_a_finished_expert_are_not_looked_at_again(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    run(raw)
    monkeypatch.setattr("experts.sft.encode_lines", lambda *_: pytest.fail("all is finished"))
    assert [line for line in run(raw)[1] if "kept" in line]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "train.jsonl:2"),
        ('{"prompt": "upr a=", "answer": "A"}', "row 2: completion"),
        ('{"prompt": "upr a=", "completion": [{"role": "assistant", "content": "A"}]}', "row 2: completion"),
        ('{"prompt": "", "completion": "A"}', "row 2: prompt"),
        ('{"prompt": [], "completion": [{"role": "assistant", "content": "A"}]}', "row 2: prompt"),
        ('{"prompt": "\\ud800", "completion": "A"}', "text or messages that the base's tokenizer"),
        (
            '{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "\\ud800"}]}',
            "the base's",
        ),
    ],
)
def test_a_bad_line_is_named(raw: dict[str, Any], data: dict[str, str], line: str, says: str):
    file = Path(data["shift"])
    file.write_text(file.read_text().splitlines()[0] + "\n" + line + "\n")
    assert list(raw["experts"])[-1] == "shift", "it would be trained after others"
    with pytest.raises(PromptError) as caught:
        run(raw)
    assert says in str(caught.value)
    assert not Path(raw["output_dir"]).exists()


def test_what_another_spec_made_is_never_taken_for_ours(raw: dict[str, Any], tmp_path: Path):
    short = TRAIN | {"max_steps": 1}
    run(raw | {"train": short})
    with pytest.raises(ConfigError, match="did not make"):
        run(raw | {"train": short | {"learning_rate": 5e-3}})
    with pytest.raises(RegistryError, match="the name of"):
        run(raw | {"train": short, "output_dir": str(tmp_path / "elsewhere")})
