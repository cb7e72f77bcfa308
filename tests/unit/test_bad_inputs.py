"""The 55 bad inputs of our catalogue, one case each: what is given, what `opd` does, and the proof.

`CASES` is the table that docs/bad_inputs.md prints; a test keeps the two equal. Each case makes its bad input for real,
out of tiny models and files, and looks at the exit code, the message and what was written. What can only happen in a
run happens to the part that meets it, with workers in this process.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import pipelines.interrupts
import pipelines.merging.run
import pipelines.sizing.memory
from experts.registry import Registry
from opd import cluster
from opd.cluster.watching import WorkerWatch
from opd.config.monitors import MonitorsConfig
from opd.config.sections import CheckpointConfig
from opd.errors import ModelError, RegistryError, RunDirError, RunError, StorageError
from opd.files import blake3_file, raise_storage_errors
from opd.live.progress import RunReporter
from opd.models.heads import HeadSource
from opd.models.logit_rule import IDENTITY
from opd.monitors.acting import RunMonitors
from opd.records.step import StepRecord
from opd.records.types import DomainStats, Prompt, Rollout, Teacher, WrittenFile
from opd.rollouts.vllm import VLLMRolloutEngine
from opd.rollouts.weight_loading import swap_weights
from opd.rollouts.worker import Generated, _read_output
from opd.run import checkpoints
from opd.run.checkpoints import CheckpointStore
from opd.run.metrics import MetricsFile, PhaseClock
from opd.run.paths import RunPaths
from opd.stream.targets import refuse_many_broken
from opd.sync import SharedMemorySync, SyncSpec
from pipelines.check.measure import template_findings
from pipelines.inputs.read import Inputs
from pipelines.merging.directory import lock_run_directory
from pipelines.specs import pool_spec, rollout_spec, trainer_spec
from tests import messages
from tests.messages import opd
from tests.rows import make_rollout
from tests.steps import Letters
from tests.unit.bad_episodes import (
    agent_in_anothers_name,
    agent_that_does_not_do_its_part,
    call_that_does_not_parse,
    compaction_that_cannot_work,
    environment_or_program_that_is_not_there,
    episode_beyond_the_context,
    template_that_cannot_append,
    too_many_broken_episodes,
    troubled_environment,
)

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "bad_inputs.md"


class Started(Exception):
    """The merge got past every check; nothing is computed in these tests."""


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def tree(root: Path) -> dict[Path, int]:
    return {path: path.lstat().st_mtime_ns for path in root.rglob("*")}


@dataclass
class Bench:
    """A merge that is all right until a case spoils it, and the tools to do so."""

    world: Any
    patch: pytest.MonkeyPatch
    in_process: Any
    make_model_dir: Callable[..., Path]
    make_adapter: Callable[..., Path]
    capsys: Any
    inputs: Inputs | None = None
    """Inputs of the last merge that started."""

    @property
    def root(self) -> Path:
        return self.world.root

    @property
    def data(self) -> dict[str, Any]:
        return self.world.data

    def refused(self, *words: str) -> None:
        """`opd merge` ends with 2, says where, what, what instead and how, has these words, and writes nothing."""
        self.world.write()
        before = tree(self.root)
        result = opd("merge", "pipeline.yaml")
        assert result.exit_code == 2, (result.output, result.exception)
        assert re.match(r"error: .+\n  found:  (?s:.+)\n  wanted: (?s:.+)\n  fix:    .+", result.stderr), result.stderr
        assert [word for word in words if word not in result.stderr] == [], result.stderr
        assert tree(self.root) == before

    def starts(self, *warnings: str) -> Inputs:
        """`opd merge` gets as far as the run, with a warning for each of these words and no other."""
        self.world.write()
        result = opd("merge", "pipeline.yaml", "--run-dir", f"runs/{len(list(self.root.rglob('*')))}")
        assert isinstance(result.exception, Started), (result.output, result.exception)
        assert self.inputs is not None
        assert len(self.inputs.warnings) == len(warnings), self.inputs.warnings
        for word, warning in zip(warnings, self.inputs.warnings, strict=True):
            assert word in warning
        return self.inputs

    def started(self) -> Path:
        """The run directory of a merge that was interrupted at once."""
        self.starts()
        (found,) = (self.root / "runs").iterdir()
        return found

    def register(self) -> Registry:
        """Both experts in ./registry; the pipeline uses them by name."""
        registry = Registry(self.root / "registry")
        for name, domain in (("rev", "reverse"), ("up", "upper")):
            registry.add(name, self.root / name, domain, self.root / f"{domain}.jsonl")
        self.data["experts"] = {"use": ["rev", "up"]}
        return registry

    def prompts(self, *lines: object) -> Path:
        """The domain `upper` gets these lines, text as it is, else as JSON."""
        file = self.root / "upper.jsonl"
        file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return file

    def weights(self, who: str, change: Callable[[dict[str, Any]], None]) -> None:
        from safetensors.torch import load_file, save_file

        file = next((self.root / who).glob("*.safetensors"))
        state = {name: tensor.clone() for name, tensor in load_file(file).items()}
        change(state)
        save_file(state, file, {"format": "pt"})


@pytest.fixture
def bench(
    world: Any,
    monkeypatch: pytest.MonkeyPatch,
    in_process: Any,
    make_model_dir: Callable[..., Path],
    make_adapter: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> Bench:
    made = Bench(world, monkeypatch, in_process, make_model_dir, make_adapter, capsys)

    def run(found: pipelines.merging.run.MergeRun, *_: Any) -> None:
        made.inputs = found.inputs
        raise Started

    monkeypatch.setattr(pipelines.merging.run, "_run_session", run)
    return made


def rollout(i: int = 0, response: Sequence[int] = (5, 6, 2), domain: str = "reverse") -> Rollout:
    return make_rollout(
        sample_id=f"000001/{domain}/{i}", step=1, domain=domain, policy_version=0, prompt_ids=(4, 5),
        response_ids=tuple(response), behaviour_logprobs=(-1.0,) * len(response),
    )  # fmt: skip


def scorer(payload: str = "sampled_logprobs") -> Any:
    from teachers.scorers import ScorerOptions
    from teachers.scorers.transformers import TransformersScorer

    options = ScorerOptions(dtype="float32", payload=payload, top_k=0, vocab_size=76, memory_bytes=1 << 30)
    return TransformersScorer(options, "cpu")


class Heard:
    """A display that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def doing(self, activity: str) -> None:
        pass

    def exams(self, before: Any, expert: Any, clear: Any = None) -> None:
        pass

    def step(self, record: StepRecord) -> None:
        pass


# Tokenizers and vocabularies


def other_tokenizer(b: Bench) -> None:
    file = b.root / "up" / "tokenizer.json"
    sound = file.read_text()
    file.write_text(sound.replace('"q":', '"<tool>":'))
    b.refused("expert `up`", "up/tokenizer.json", "as many tokens, but other ones", "'<tool>'", "fine-tune the expert")
    added = json.loads(sound)["added_tokens"]
    file.write_text(sound)
    edit(file, added_tokens=[*added, {**added[0], "id": 75, "content": "<extra>"}])
    b.refused("expert `up`", "<extra>")
    file.write_text(sound)
    edit(b.root / "up" / "tokenizer_config.json", added_tokens_decoder={"75": {"content": "<tool>"}})
    b.refused("up/tokenizer_config.json", "'<tool>', which tokenizer.json lacks", "save_pretrained")


def permuted_ids(b: Bench) -> None:
    shutil.rmtree(b.root / "up")
    b.make_model_dir(b.root / "up", seed=2, permute_vocab=True)
    b.refused("expert `up`", "up/tokenizer.json", "the same tokens with permuted ids: id 4 is", "fine-tune the expert")


def padded_head(b: Bench) -> None:
    import torch

    given = rollout()
    plain = Teacher(name="up", model_dir=Path(shutil.copytree(b.root / "up", b.root.parent / f"{b.root.name}-plain")))
    ((before,),) = scorer().score(plain, [given], {})

    def pad(state: dict[str, Any]) -> None:
        name = "model.embed_tokens.weight"
        state[name] = torch.cat([state[name], torch.full((4, state[name].shape[1]), 9.0)])

    b.weights("up", pad)
    edit(b.root / "up" / "config.json", vocab_size=80)
    assert b.starts().experts["up"].info.vocab_rows == 80
    ((after,),) = scorer().score(Teacher(name="up", model_dir=b.root / "up"), [given], {})
    assert after.answer.teacher_logprobs == pytest.approx(before.answer.teacher_logprobs, abs=1e-6)


def short_student(b: Bench) -> None:
    file = b.root / "base" / "tokenizer.json"
    data = json.loads(file.read_text())
    (last,) = (token for token, i in data["model"]["vocab"].items() if i == 75)
    del data["model"]["vocab"][last]
    file.write_text(json.dumps(data))
    b.refused("expert `rev`", "76 tokens, the student has 75", f"the student lacks {last!r}")


def other_special_tokens(b: Bench) -> None:
    for name in ("config.json", "generation_config.json"):
        edit(b.root / "up" / name, pad_token_id=3, bos_token_id=0)
    b.starts()
    for name in ("config.json", "generation_config.json"):
        edit(b.root / "up" / name, eos_token_id=1)
    edit(b.root / "up" / "tokenizer_config.json", eos_token="<bos>")
    b.refused("expert `up`: eos_token_id", "1 ('<bos>')", "2 ('<eos>')", "correct `eos_token_id`")


def no_chat_template(b: Bench) -> None:
    for who in ("base", "rev", "up"):
        (b.root / who / "chat_template.jinja").unlink()
    b.starts()  # text needs none
    b.prompts({"prompt": [{"role": "user", "content": "hi"}]})
    b.refused("upper.jsonl: prompt upper/0", "chat_template is not set", "give text instead of messages")


def other_chat_template(b: Bench) -> None:
    (b.root / "up" / "chat_template.jinja").write_text("{{ messages[0]['content'] }} now:")
    inputs = b.starts("expert `up` has another chat template")
    (finding,) = template_findings(inputs)
    assert (finding.level, finding.domain) == ("warn", "upper")
    assert "now:" in finding.message and "add_generation_prompt" in finding.message


# Experts and their files


def same_name_or_weights(b: Bench) -> None:
    b.world.write()
    file = b.root / "pipeline.yaml"
    sound = file.read_text()
    file.write_text(sound.replace("  up:\n", "  rev:\n", 1))
    result = opd("merge", "pipeline.yaml")
    assert result.exit_code == 2
    assert "key `rev` is given twice" in result.stderr and "line" in result.stderr
    shutil.rmtree(b.root / "up")
    shutil.copytree(b.root / "rev", b.root / "up")
    b.starts("experts `rev` and `up` have the same weights")
    b.register()
    taken = opd("experts", "add", "up", "--model", "up", "--domain", "upper")
    assert taken.exit_code == 2 and "a name that is taken" in taken.stderr and "experts remove up" in taken.stderr
    twin = opd("experts", "add", "third", "--model", "up", "--domain", "upper")
    assert twin.exit_code == 0 and "warning: rev has the same weights" in twin.stderr


def names_that_are_paths(b: Bench) -> None:
    for name in ("../rev", "/rev", "a/b", "a\\b", "a\0b", "..", "mаth", "", "x" * 65):  # а is Cyrillic
        with pytest.raises(RegistryError, match=r"^name\n"):
            Registry(b.root / "registry").add(name, b.root / "rev", "reverse")
        assert not (b.root / "registry").exists()
    for key in ("../up", "a/b", "mаth"):
        b.data["experts"] = {"rev": b.data["experts"]["rev"], key: {"model": "up", "domain": "upper"}}
        b.refused("pipeline.yaml: experts")
    b.data["name"] = "../elsewhere"
    b.refused("pipeline.yaml: name", "'../elsewhere'")


def damaged_safetensors(b: Bench) -> None:
    file = b.root / "up" / "model.safetensors"
    sound = file.read_bytes()
    file.write_bytes(sound[:-100])
    b.refused(
        "up/model.safetensors", f"{len(sound) - 100} bytes", f"{len(sound)} bytes, as the header says", "truncated"
    )
    file.write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    b.refused("up/model.safetensors", f"a header of {1 << 40} bytes in a file of 10 bytes")
    (length,) = struct.unpack("<Q", sound[:8])
    header = json.loads(sound[8 : 8 + length])
    second = sorted(header.keys() - {"__metadata__"}, key=lambda name: header[name]["data_offsets"])[1]
    header[second]["data_offsets"][0] -= 4
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + sound[8 + length :])
    b.refused("up/model.safetensors", f"`{second}` at bytes", "no gap, no overlap")


def shards_that_are_not_there(b: Bench) -> None:
    model = b.root / "up"
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    index = model / "model.safetensors.index.json"
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    b.refused("up/model-00002-of-00002.safetensors", "no such file", "copy the missing shard")
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "../base/model.safetensors"}}))
    b.refused("model.safetensors.index.json: weight_map", "'../base/model.safetensors'")
    index.unlink()
    (model / "model-00001-of-00002.safetensors").unlink()
    (model / "model.safetensors").symlink_to(b.root / "base" / "model.safetensors")
    b.refused("up/model.safetensors", "a link to", "outside of the directory", "cp -rL")


def flipped_bit(b: Bench) -> None:
    registry = b.register()
    file = b.root / "up" / "model.safetensors"
    expected = registry.get("up").info.weight_files["model.safetensors"]
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    b.refused(
        "expert up",
        "up/model.safetensors: changed weight file",
        f"expected {expected}, actual ",
        "opd experts remove up",
    )


def pickles(b: Bench) -> None:
    file = b.root / "up" / "model.safetensors"
    for name in ("pytorch_model.bin", "model.pt", "model.pkl"):
        file = file.rename(file.with_name(name))
        b.refused(f"up/{name}", f"only {name}", "safetensors", "save_pretrained(out, safe_serialization=True)")


def custom_code(b: Bench) -> None:
    (b.root / "up" / "modeling.py").write_text("open('ran', 'w')")
    for name, keys in (("config.json", ("auto_map",)), ("tokenizer_config.json", ("extra", "auto_map"))):
        sound = (b.root / "up" / name).read_text()
        value: Any = {"AutoModel": "modeling.Evil"}
        for key in reversed(keys[1:]):
            value = [{key: value}]
        edit(b.root / "up" / name, **{keys[0]: value})
        b.refused(f"up/{name}: {'.0.'.join(keys)}", "modeling.Evil", "never runs code")
        (b.root / "up" / name).write_text(sound)
    assert not (b.root / "ran").exists()


def unfit_types(b: Bench) -> None:
    import torch

    config = b.root / "up" / "config.json"
    sound = config.read_text()
    edit(config, quantization_config={"quant_method": "gptq", "bits": 4})
    b.refused("up/config.json: quantization_config", "gptq", "dequantise")
    config.write_text(sound)

    def half(state: dict[str, Any]) -> None:
        for name, tensor in state.items():
            state[name] = tensor.half()

    b.weights("up", half)
    assert b.starts().experts["up"].info.dtype == "float16"

    def overflow(state: dict[str, Any]) -> None:
        state["model.embed_tokens.weight"][7, 3] = 70_000.0

    b.weights("up", overflow)
    b.refused("up/model.safetensors: tensor `model.embed_tokens.weight`", "1 of 4864 numbers are NaN or infinite")
    one = "model.layers.0.mlp.up_proj.weight"

    def quantise(state: dict[str, Any]) -> None:
        state["model.embed_tokens.weight"][7, 3] = 0
        state[one] = (state[one].float() * 100).to(torch.int8)

    b.weights("up", quantise)
    b.refused(f"tensor `{one}` of type I8", "unquantised weights", "dequantise")


def other_shape(b: Bench) -> None:
    shutil.rmtree(b.root / "up")
    b.make_model_dir(b.root / "up", seed=5, hidden=96, heads=3, layers=1, tie=False)
    assert b.starts().experts["up"].info.hidden_size == 96
    b.make_adapter(b.root / "lora", b.root / "up")
    b.data["experts"]["up"] = {"model": "lora", "base": "base", "domain": "upper"}
    b.refused(
        "lora/adapter_model.safetensors: module", "rank 4, ", " outputs in base", "name the base that it was trained on"
    )


def unfit_adapter(b: Bench) -> None:
    b.make_adapter(b.root / "lora", b.root / "base")
    b.data["experts"]["up"] = {"model": "lora", "domain": "upper"}
    config = b.root / "lora" / "adapter_config.json"
    sound = config.read_text()
    edit(config, r=8)
    b.refused("lora/adapter_model.safetensors: module", "lora_A [4, ", "lora_A [8, ")
    config.write_text(sound)
    b.make_model_dir(b.root / "short", layers=1)
    b.data["experts"]["up"]["base"] = "short"
    b.refused("module `model.layers.1.", "an adapter of a module that the base short lacks")
    registry = Registry(b.root / "registry")
    registry.add("up", b.root / "lora", "upper")
    registry.add("rev", b.root / "rev", "reverse")
    b.data["experts"] = {"use": ["rev", "up"]}
    b.weights("base", lambda state: state["model.norm.weight"].mul_(2))
    b.refused("expert up", "base/model.safetensors: changed weight file, expected ")


def broken_weights(b: Bench) -> None:
    def nan(state: dict[str, Any]) -> None:
        next(iter(state.values())).view(-1)[3] = float("nan")

    b.make_adapter(b.root / "lora", b.root / "base", seed=4)
    sound = {who: (b.root / who / "model.safetensors").read_bytes() for who in ("base", "up")}
    for who in ("base", "up"):
        b.weights(who, nan)
        b.refused(f"{who}/model.safetensors: tensor", "1 of ", "NaN or infinite", "earlier checkpoint")
        (b.root / who / "model.safetensors").write_bytes(sound[who])
    b.weights("lora", nan)
    with pytest.raises(ModelError, match="NaN or infinite"):
        Registry(b.root / "registry").add("lora", b.root / "lora", "upper")
    b.data["experts"]["up"] = {"model": "lora", "domain": "upper"}
    b.refused("lora/adapter_model.safetensors: tensor", "NaN or infinite")


# What a run meets


def broken_states(b: Bench) -> None:
    def break_one_token(state: dict[str, Any]) -> None:
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        state["model.embed_tokens.weight"][9] = float("nan")

    edit(b.root / "up" / "config.json", tie_word_embeddings=False)
    b.weights("up", break_one_token)
    broken: dict[str, str] = {}
    batches = scorer("hidden_states").score(
        Teacher(name="up", model_dir=b.root / "up"), [rollout(0), rollout(1, (9, 5, 6))], broken
    )
    assert [row.rollout.sample_id for rows in batches for row in rows] == ["000001/reverse/0"]
    assert broken == {"000001/reverse/1": "teacher up: hidden states are not finite"}
    refuse_many_broken(broken, 1000, 0.001)
    with pytest.raises(RunError, match=r"2 of 1000 .*000001/reverse/1.*teachers\.max_quarantined is 0\.001"):
        refuse_many_broken(broken | {"x": "why"}, 1000, 0.001)
    nan = SimpleNamespace(token_ids=[0], logprobs=[{0: SimpleNamespace(logprob=float("nan"))}], finish_reason="length")
    with pytest.raises(RunError, match="NaN log-probs"):
        _read_output(nan)


def trainer(b: Bench, mean: float, objective: str = "reverse_kl") -> Any:
    """One rank that answers every step with this mean loss on 3 tokens."""
    from opd.config import PipelineConfig
    from opd.train.deepspeed import DeepSpeedTrainer
    from opd.train.rank import RankResult

    class Rank:
        def __init__(self, *_: Any) -> None:
            pass

        def open_meeting_point(self, address: str) -> tuple[str, int]:
            return "127.0.0.1", 1

        def start(self, address: str, port: int) -> None:
            pass

        def begin_step(self, *_: Any) -> None:
            pass

        def accumulate_micro_batch(self, *_: Any) -> None:
            pass

        def finish_step(self, share: float) -> RankResult:
            rest = dict.fromkeys((f.name for f in DomainStats.__dataclass_fields__.values()), 0.0)
            stats = DomainStats(**rest | {"tokens": 3, "samples": 1, "kl_sum": 3 * mean})
            return RankResult(loss=mean, grad_norm=1.0, domains={"reverse": stats}, positions={})

    b.in_process.replace = Rank
    b.data["trainer"]["ranks"] = 1
    b.data["objective"] = {"kind": objective}
    return DeepSpeedTrainer(trainer_spec(PipelineConfig.model_validate(b.data), 76))


def no_parts() -> Any:
    """Targets of which all that there is was taken."""
    none: Any = SimpleNamespace(quarantined={}, heads={}, arrived=True)
    none.take_part = none.wait_for_parts = none.wait_for_sinks = lambda: None
    none.has = lambda ids: True
    return none


def impossible_divergence(b: Bench) -> None:
    targets = no_parts()
    for mean in (-0.5, 60.0, float("nan")):
        with pytest.raises(RunError, match=r"step 3: reverse_kl of domain reverse is .* nats a token.*targets/"):
            trainer(b, mean).train_step(3, [rollout()], targets)
    for mean in (-1e-5, 49.0):
        assert trainer(b, mean).train_step(3, [rollout()], targets).loss == mean
    assert trainer(b, -0.5, "sampled").train_step(3, [rollout()], targets).loss == -0.5  # an estimate may be negative


def no_prompts(b: Bench) -> None:
    (b.root / "upper.jsonl").write_text("\n")
    b.refused("upper.jsonl", "no prompts", '{"prompt": ')
    del b.data["domains"]["upper"]["prompts"]
    b.refused("domains.upper.prompts", "set domains.upper.prompts")


def teacher_weights(b: Bench) -> None:
    domain = b.data["domains"]["upper"]
    domain["teachers"] = {"up": 0.5, "rev": -0.1}
    b.refused("domains.upper.teachers.rev", "-0.1", "at least 0")
    domain["teachers"] = {"up": 0, "rev": 0}
    b.refused("domains.upper.teachers", "weights of 0 only", "raise one")
    domain["teachers"] = {"up": 3, "rev": 1}
    routes = b.starts("domains.upper.teachers: weights add up to 4, taken as up 0.75, rev 0.25").routes
    assert [(part.teacher.name, part.weight) for part in routes["upper"]] == [("up", 0.75), ("rev", 0.25)]
    domain["teachers"] = {"up": 1, "rev": 0}
    assert [part.teacher.name for part in b.starts().routes["upper"]] == ["up"]


def no_teacher(b: Bench) -> None:
    del b.data["experts"]["up"]
    b.refused("domains.upper", "no expert (experts: rev → reverse)", "opd experts add NAME --model DIR --domain upper")


# Prompts


def prompts_that_ask_nothing(b: Bench) -> None:
    blank = [{"prompt": p} for p in ("", " \n", "<bos><eos>", [{"role": "user", "content": " "}])]
    b.prompts({"prompt": "ab="}, *blank, {"prompt": "cd="})
    inputs = b.starts("upper.jsonl: 4 of 6 prompts have no text and are left out: upper/1, upper/2, upper/3 ...")
    assert [p.id for p in inputs.prompts["upper"]] == ["upper/0", "upper/5"]
    b.prompts(*blank)
    b.refused("upper.jsonl", "4 prompts without text", "is the column `prompt` the right one?")


def engine(b: Bench, **rollout_settings: Any) -> tuple[VLLMRolloutEngine, list[Any]]:
    """An engine whose worker writes each prompt's first token as often as it may, and what it was asked."""
    from opd.config import PipelineConfig

    asked: list[Any] = []

    class Worker:
        def __init__(self, *_: Any) -> None:
            pass

        def generate(self, requests: Sequence[Any]) -> list[Generated]:
            asked.extend(requests)
            return [
                Generated(token_ids=(5,) * r.max_tokens, logprobs=(-1.0,) * r.max_tokens, stop_reason="length")
                for r in requests
            ]

    b.in_process.replace = Worker
    b.data["rollout"] = {"max_model_len": 16, "max_new_tokens": 6} | rollout_settings
    spec = rollout_spec(PipelineConfig.model_validate(b.data), b.root / "base", 76, (2,))
    return VLLMRolloutEngine(spec, SimpleNamespace()), asked


def prompt(i: int, tokens: int) -> Prompt:
    return Prompt(id=f"upper/{i}", domain="upper", token_ids=(7,) * tokens)


def prompt_beyond_context(b: Bench) -> None:
    writer, asked = engine(b)
    batch = writer.generate([prompt(0, 4), prompt(1, 16), prompt(2, 40)], step=1, policy_version=0)
    assert [r.sample_id for r in batch.rollouts] == ["000001/upper/0"]
    assert [q.prompt_id for q in batch.quarantined] == ["upper/1", "upper/2"]
    assert batch.quarantined[1].reason == "40 tokens, rollout.max_model_len is 16: no room for a response"
    assert all(len(request.token_ids) < 16 for request in asked)
    b.data["rollout"] = {"max_model_len": 16, "max_new_tokens": 6}
    b.prompts({"prompt": "a" * 16}, {"prompt": "a" * 40})
    b.refused("upper.jsonl", "no prompt shorter than 16 tokens", "raise rollout.max_model_len")


def response_beyond_context(b: Bench) -> None:
    writer, asked = engine(b)
    batch = writer.generate([prompt(0, 4), prompt(1, 13)], step=1, policy_version=0)
    assert [request.max_tokens for request in asked] == [6, 3]
    assert [(len(r.response_ids), r.truncated) for r in batch.rollouts] == [(6, True), (3, True)]


def sampling_values(b: Bench) -> None:
    for key, value in (
        ("max_new_tokens", 0), ("temperature", -1), ("temperature", 0), ("temperature", 0.005), ("temperature", float("inf")),
        ("temperature", float("nan")), ("max_model_len", 0),
    ):  # fmt: skip
        b.data["rollout"] = {"max_model_len": 32, key: value}
        b.refused(f"pipeline.yaml: rollout.{key}", str(value))
    b.data["rollout"] = {"max_model_len": 32}
    b.data["trainer"]["lr"] = float("inf")
    b.refused("pipeline.yaml: trainer.lr", "finite number")


def filtered_sampling(b: Bench) -> None:
    for key, value in (("top_p", 0.9), ("top_k", 20)):
        b.data["rollout"] = {"max_model_len": 32, key: value}
        b.refused(f"pipeline.yaml: rollout.{key}", "an unknown key", "temperature", "remove the key")


def nothing_to_train(b: Bench) -> None:
    from opd.train.totals import weigh_rows

    ended = rollout(0, (2,))  # the end token alone
    assert (ended.loss_mask, weigh_rows([ended], "token_mean", {})) == ((True,), {ended.sample_id: 1.0})
    targets = no_parts()
    report = trainer(b, 1.0).train_step(3, [rollout(0, ()), rollout(1, ())], targets)
    assert (report.skipped, report.loss, report.grad_norm) == (True, 0.0, 0.0)


def nearly_all_cut(b: Bench) -> None:
    heard = Heard()
    reporter = RunReporter(MetricsFile(b.root / "metrics.jsonl"), RunPaths(b.root), heard)
    monitors = RunMonitors(MonitorsConfig(), RunPaths(b.root), Letters(), tolerance=0.02)
    domains = {name: {"samples": 20, "tokens": 20} for name in ("reverse", "upper")}
    for step in range(1, 14):
        cut = {"domains": domains, "truncated_by_domain": {"reverse": 17, "upper": 19}}
        record = StepRecord.from_json({"step": step, "response_tokens": 20, "phase_s": {"a": 4.0}} | cut)
        reporter.step(replace(record, alarms=monitors.judge(record, [rollout(0, (7,))])))
    (line,) = heard.lines
    assert line.startswith("warning: step 10: truncation: domain upper: 0.95 of the responses end at their limit")
    assert "raise rollout.max_new_tokens" in line


def unreadable_text(b: Bench) -> None:
    file = b.root / "upper.jsonl"
    for bad, word in (
        (b'{"prompt": "\xff"}', "byte 13 is not UTF-8"),
        (b'{"prompt": "a\x00b"}', "control character"),
        (b'{"prompt": "' + b"a" * (10 << 20) + b'"}', "a line of 10,485,774 bytes"),
        (b'{"prompt": ' + b"[" * 100_000, "recursion"),
    ):
        file.write_bytes(b'{"prompt": "a"}\n' + bad + b"\n")
        b.refused("upper.jsonl:2\n", word)
    b.prompts({"prompt": "a"}, '{"prompt": "a\\ud800"}')
    b.refused("upper.jsonl", "upper/1", "correct or delete this row")


def wrong_columns(b: Bench) -> None:
    for bad, word, fix in (
        ('{"question": "a"}', "no column `prompt`, but `question`", "call what asks `prompt`"),
        ('{"prompt": [{"from": "human", "value": "a"}]}', "message 1: the keys `from`, `value`", "NEW.jsonl"),
        ('{"prompt": 3}', "column `prompt", "correct or delete this line"),
        ('{"prompt": "a",}', "property name", "correct or delete this line"),
        ('["a"]', "column `line`", "correct or delete this line"),
    ):
        b.prompts({"prompt": "a"}, "", bad)
        b.refused("upper.jsonl:3\n", word, fix)
    (b.root / "upper.csv").write_text("prompt,metadata\na=,\nb=,{\n")
    b.data["domains"]["upper"]["prompts"] = "upper.csv"
    b.refused("upper.csv, row 2\n", "column `metadata`", "one JSON object")
    b.data["domains"]["upper"]["prompts"] = "upper.jsonl"
    text = b'\xef\xbb\xbf{"prompt": "a="}\r\n\r\n{"prompt": "b="}\r\n'
    (b.root / "upper.jsonl").write_bytes(text)
    assert len(b.starts().prompts["upper"]) == 2


# The pipeline, the run directory, the machine


def pipeline_mistakes(b: Bench) -> None:
    b.data["trainer"]["step"] = 3
    b.refused("pipeline.yaml: trainer.step", "did you mean `steps`?")
    del b.data["trainer"]["step"]
    b.data["trainer"]["steps"] = "many"
    b.refused("pipeline.yaml: trainer.steps", "'many'")
    sound = yaml.safe_dump(b.data)
    bomb = "".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]\n" for i in range(1, 9))
    for text, word in (
        (sound + "seed: 1\nseed: 2\n", "key `seed` is given twice"),
        ("x0: &x0 [a]\n" + bomb + sound, "more than 100,000 values, aliases written out"),
        ("x: " + "[" * 5000, "nested deeper than 32 levels"),
        ("x: &x [*x]\n" + sound, "*x lies in what it names"),
        (sound + "# " + "a" * (1 << 20), "at most 1,048,576 are read"),
        (sound + "x: !!python/object/apply:os.getcwd []\n", "only plain YAML is read"),
    ):
        (b.root / "pipeline.yaml").write_text(text)
        result = opd("merge", "pipeline.yaml")
        assert result.exit_code == 2, result.output
        assert word in result.stderr and "pipeline.yaml" in result.stderr
    assert not (b.root / "runs").exists()


def unfit_run_directory(b: Bench) -> None:
    before = tree(b.root)
    blocked = opd("merge", "pipeline.yaml", "--run-dir", "reverse.jsonl/run")
    assert blocked.exit_code == 2, (blocked.output, blocked.exception)
    assert (
        "reverse.jsonl/run" in blocked.stderr and "Not a directory" in blocked.stderr and "--run-dir" in blocked.stderr
    )
    assert tree(b.root) == before
    run = b.started()
    files = tree(run)
    again = opd("merge", "pipeline.yaml", "--run-dir", run)
    assert again.exit_code == 2 and "a run directory that exists" in again.stderr and f"--resume {run}" in again.stderr
    assert tree(run) == files


def resume_with_another_pipeline(b: Bench) -> None:
    run = b.started()
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    result = opd("merge", "pipeline.yaml", "--resume", run, "--set", "trainer.lr=0.5")
    assert result.exit_code == 2, (result.output, result.exception)
    assert {path: path.read_bytes() for path in before} == before


def resume_with_another_expert(b: Bench) -> None:
    run = b.started()
    b.weights("up", lambda state: state["model.norm.weight"].mul_(2))
    changed = opd("merge", "--resume", run)
    assert changed.exit_code == 2, (changed.output, changed.exception)
    assert "up" in changed.stderr and "manifest.json" in changed.stderr
    shutil.rmtree(b.root / "up")
    missing = opd("merge", "--resume", run)
    assert missing.exit_code == 2 and "up\n  found:  no such directory" in missing.stderr


def two_drivers(b: Bench) -> None:
    run = b.started()
    with (
        lock_run_directory(RunPaths(run)),
        pytest.raises(RunDirError, match="another `opd merge` at work"),
        lock_run_directory(RunPaths(run)),
    ):
        raise AssertionError("two at a time")
    with lock_run_directory(RunPaths(run)):  # the lock went with its holder
        pass


def disk_full(b: Bench) -> None:
    class Disk:
        full = False

        def begin_save(self, path: Path) -> None:
            self.file = Path("/dev/full") if self.full else path / "rank-0.safetensors"

        def saved(self, wait_s: float) -> list[WrittenFile]:
            with raise_storage_errors(self.file), self.file.open("w") as file:
                file.write("state")
                file.flush()
            return [WrittenFile(name=self.file.name, blake3=blake3_file(self.file), size=5, seconds=0.0)]

    disk: Any = Disk()
    root = b.root / "checkpoints"
    store = CheckpointStore(root, disk, CheckpointConfig(keep=1), world_size=1, identity={}, timeout_s=9)
    store.save(1, 1)
    assert store.committed(wait=True)
    disk.full = True
    store.save(2, 2)
    with pytest.raises(StorageError) as error:
        store.committed(wait=True)
    kept = checkpoints.choose_checkpoint(root, "latest", print)
    assert kept is not None and kept.step == 1

    def run(*_: Any) -> None:
        raise error.value

    b.patch.setattr(pipelines.merging.run, "_run_session", run)
    result = opd("merge", "pipeline.yaml")
    assert result.exit_code == 3
    assert "No space left on device" in result.stderr and "opd merge --resume" in result.stderr


def too_little_memory(b: Bench) -> None:
    b.patch.setattr(pipelines.sizing.memory, "machine_bytes", lambda: 3 << 30)
    b.data["rollout"]["kv_cache_gib"] = 2
    b.refused(
        "memory",
        "GiB of memory for a machine with 3.00",
        "2.00 rollout: key-value cache",
        "lower ",
        "rollout.kv_cache_gib",
    )
    b.patch.setattr(pipelines.sizing.memory, "machine_bytes", lambda: 32 << 30)
    b.starts()


class Ends:
    """Both ends of a weight push: an engine that is off by `gaps[n]` nats after load n."""

    def __init__(self, *gaps: float) -> None:
        self.gaps = gaps
        self.places: list[Path] = []

    def export_changed(self, path: Path) -> None:
        (path / "model.safetensors").write_bytes(b"new")

    def load(self, path: Path, restart_weights: Any = None, base: Any = None) -> None:
        self.places.append(path.parent)

    def begin_logprobs(self, sequences: Sequence[Sequence[int]]) -> Callable[[], list[list[float]]]:
        return lambda: [[-1.0] * (len(ids) - 1) for ids in sequences]

    def push(self, told: list[str], nbytes: int = 10) -> float:
        def engine_logprobs(sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
            return [[[-1.0 + self.gaps[len(self.places) - 1]] * (len(ids) - 1) for ids in sequences]]

        reader: Any = SimpleNamespace(load=self.load, logprobs=engine_logprobs)
        writer: Any = self
        ends: dict[str, Any] = {"trainer": writer, "engine": reader, "probe": [[1, 2, 3]]}
        return SharedMemorySync(SyncSpec(**ends, tolerance=0.02, nbytes=nbytes, tell=told.append)).push(7).gap


def small_shared_memory(b: Bench) -> None:
    for name in ("shm", "disk"):
        (b.root / name).mkdir()
    b.patch.setattr("opd.sync.shared_memory.SHARED_MEMORY", b.root / "shm")
    b.patch.setattr("tempfile.tempdir", str(b.root / "disk"))
    b.patch.setattr("opd.sync.shared_memory.shutil.disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    ends, told = Ends(0.0), list[str]()
    ends.push(told, nbytes=100 << 20)
    assert ends.places == [b.root / "disk"]
    assert told == [
        f"{b.root}/shm has 64 MiB free, new weights need 200: they go through {b.root}/disk, which is slower"
    ]


def no_compiler(b: Bench) -> None:
    import torch
    from transformers.modeling_layers import GradientCheckpointingLayer

    from opd.losses.reverse_kl import ReverseKL
    from opd.machine.compiler import can_compile
    from opd.payloads.hidden_states import TeacherBlock
    from opd.train.compiled_layers import compile_layers
    from tests.losses import chunked_objective

    def loss(compiled: bool) -> float:
        generator = torch.Generator().manual_seed(0)
        hidden, head, teacher, other = (torch.randn(n, 8, generator=generator) for n in (6, 20, 6, 20))
        blocks = [TeacherBlock(teacher, other)]
        weight, token = torch.full((6,), 1 / 6), torch.zeros(6, dtype=torch.long)
        value, _ = chunked_objective(
            ReverseKL(), hidden.requires_grad_(), head.requires_grad_(), blocks, weight, token,
            chunk=4, vocab_size=20, compiled=compiled,
        )  # fmt: skip
        return float(value.detach())

    b.patch.setattr("opd.machine.compiler.shutil.which", lambda _: None)
    can_compile.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"no C\+\+ compiler \(g\+\+\), the loss runs eagerly") as seen:
            assert loss(compiled=True) == loss(compiled=True) == loss(compiled=False)
        assert len(seen) == 1
        layer = GradientCheckpointingLayer()
        with pytest.warns(UserWarning, match=r"trainer.compile: no C\+\+ compiler \(g\+\+\), layers run eagerly"):
            compile_layers(torch.nn.Sequential(layer))
        assert "forward" not in vars(layer), "it runs as it was"
    finally:
        can_compile.cache_clear()


def dead_or_hung_worker(b: Bench) -> None:
    from opd.config import PipelineConfig
    from teachers.pool import Pool

    class Dies:
        def __init__(self, *_: Any) -> None:
            pass

        def describe_head(self, teacher: Any) -> Any:
            return HeadSource(key="head", rule=IDENTITY)

        def prove_layout(self, teacher: Any) -> None:
            return None

        def begin_rows(self, *_: Any) -> None:
            pass

        def next_part(self) -> None:
            raise cluster.WorkerDied("teacher worker 0: the worker died during `next_part`", self)

    inputs = b.starts()
    b.in_process.replace = Dies
    pool = Pool(pool_spec(PipelineConfig.model_validate(b.data), 76), inputs.routes)
    pool.wait_ready()
    with pytest.raises(RunError, match="teacher worker 0: the worker died during `next_part`"):
        pool.score([rollout()]).wait_for_parts()
    assert len(b.in_process.workers) == 2, "started again once"


def hung_worker(b: Bench) -> None:
    b.patch.undo()  # the real waiting, with a Ray whose answer never comes
    import ray

    no_node = SimpleNamespace(worker=SimpleNamespace(_global_node=None))
    silent = SimpleNamespace(wait=lambda refs, **_: ([], list(refs)), exceptions=ray.exceptions, _private=no_node)
    b.patch.setitem(sys.modules, "ray", silent)
    with pytest.raises(RunError, match=r"rollout worker 0: `generate` took longer than 0 s \(cluster\.phase_timeout_s"):
        worker = SimpleNamespace(name="rollout worker 0", watch=WorkerWatch())
        cluster.Pending(worker, "generate", "handle").wait_for_result(timeout_s=0.01)  # type: ignore[arg-type]


def dead_and_hung_workers(b: Bench) -> None:
    dead_or_hung_worker(b)
    hung_worker(b)


def clock_jump(b: Bench) -> None:
    moments = iter([2e9, 1e9, 3e9])
    b.patch.setattr(time, "time", lambda: next(moments))
    clock = PhaseClock()
    with clock("rollout"):
        pass
    assert 0 <= clock.take_seconds()["rollout"] < 5
    packages = ("opd", "experts", "teachers", "pipelines")
    files = [file for package in packages for file in (ROOT / package).rglob("*.py")]
    wall = {str(file) for file in files if re.search(r"\btime\.time\(|import time\b.*\btime\b,", file.read_text())}
    assert len(files) > 50
    dated = {ROOT / "opd" / "sinks" / "mlflow.py", ROOT / "opd" / "rollouts" / "endpoint" / "session.py"}
    assert wall == set(map(str, dated)), (
        "only MLflow's entries and an API's replies know a date; durations are monotonic"
    )


def push_that_did_not_arrive(b: Bench) -> None:
    for gaps, pushes in (((0.3, 0.0), 2), ((float("nan"), 0.001), 2), ((0.0, 0.0), 1)):
        ends, told = Ends(*gaps), list[str]()
        assert ends.push(told) <= 0.02
        assert (len(ends.places), len(told)) == (pushes, pushes - 1)
    ends = Ends(0.3, 0.3)
    with pytest.raises(RunError, match=r"weight push 7: .*0\.3000 nats.*sync\.tolerance is 0\.02"):
        ends.push([])
    stale: Any = SimpleNamespace(collective_rpc=lambda *_, **__: None, reset_prefix_cache=lambda: False)
    with pytest.raises(RunError, match="refused to reset its prefix cache"):
        swap_weights(stale, b.root)


def plain_output_and_odd_paths(b: Bench) -> None:
    odd = b.root.parent / f"{b.root.name} é 日本"
    shutil.copytree(b.root, odd)
    b.patch.chdir(odd)
    b.patch.setenv("LC_ALL", "C")
    b.world.root = odd
    assert b.starts().student.path == str(odd / "base")
    b.register()
    for args in (["experts", "list"], ["pipelines", "list"], ["experts", "verify"]):
        result = opd(*args)
        assert result.exit_code == 0, result.output
        assert "\x1b" not in result.output and "\r" not in result.output
    (odd / "x\x1b[31m").mkdir()
    refused = opd("experts", "add", "new", "--model", "x\x1b[31m", "--domain", "d")
    assert refused.exit_code == 2 and "x\\x1b[31m" in refused.stderr and "\x1b" not in refused.stderr


def interrupts(b: Bench) -> None:
    heard = Heard()
    with pipelines.interrupts.interrupts() as found, found.handle_first_signal(heard.say):
        assert not found.should_leave()
        signal.raise_signal(signal.SIGINT)
        assert found.should_leave()
        assert "once more ends at once" in heard.lines[0]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    def run(*_: Any) -> None:
        raise pipelines.interrupts.Interrupted(5, Path("runs/two"), signal.SIGINT)

    b.patch.setattr(pipelines.merging.run, "_run_session", run)
    result = opd("merge", "pipeline.yaml")
    assert result.exit_code == 130 and "opd merge --resume runs/two" in result.stderr


# The table


@dataclass(frozen=True, slots=True)
class Case:
    """One row of docs/bad_inputs.md."""

    number: int
    title: str
    behaviour: str
    """Markdown."""
    proof: Callable[[Bench], None]


CASES = (
    Case(1, "Teacher's tokenizer differs: other bytes, other or more added tokens", "Refused without [`aligned_states`](tokenizers.md); the message names tokens. A tokenizer.json that lacks a token of another file is refused, too.", other_tokenizer),
    Case(2, "Same vocabulary size, permuted ids", "Refused, with the first id that differs.", permuted_ids),
    Case(3, "Output heads padded to other sizes", "Allowed: rows beyond the tokenizer's ids are cut off before the softmax. An `openai` server cannot cut and is refused.", padded_head),
    Case(4, "Student's vocabulary is shorter than the teacher's", "Refused; the missing tokens are listed.", short_student),
    Case(5, "End, padding or begin token differs", "Another end token is refused. Padding and begin tokens may differ.", other_special_tokens),
    Case(6, "Student without a chat template", "Refused if a prompt is chat messages, with its id.", no_chat_template),
    Case(7, "Teacher was trained with another chat template", "Warning; `opd check` shows the difference.", other_chat_template),
    Case(8, "Expert named twice; two names for the same weights", "The same name is refused. Equal weights are a warning.", same_name_or_weights),
    Case(9, "Expert name with `../`, slash, NUL or look-alike letters", "Refused. Names are 1 to 64 of `A-Z a-z 0-9 . _ -`.", names_that_are_paths),
    Case(10, "Truncated safetensors, header longer than the file, overlapping tensors", "Refused with file and byte counts.", damaged_safetensors),
    Case(11, "Shard of the index missing, or outside of the directory", "Refused, also behind a symbolic link.", shards_that_are_not_there),
    Case(12, "Bit flipped since registration", "Refused with both hashes.", flipped_bit),
    Case(13, "Only `.bin`, `.pt` or another pickle", "Refused; the message has the call that converts it.", pickles),
    Case(14, "`auto_map` or custom code in a configuration", "Refused. Code in a model directory is never run.", custom_code),
    Case(15, "Unfit number types: float16 that overflowed, quantised weights", "float16 is converted. Infinite values and quantised tensors are refused by name.", unfit_types),
    Case(16, "Other width or architecture", "Allowed for full models. A LoRA adapter must fit its base.", other_shape),
    Case(17, "LoRA adapter that does not fit: rank, modules, base changed", "Refused with both shapes, or the base's hash.", unfit_adapter),
    Case(18, "NaN or infinity in weights", "Refused with the tensor's name.", broken_weights),
    Case(19, "NaN or infinity in hidden states or log-probs during the run", "The response is quarantined by id; more than `teachers.max_quarantined` stop the run. NaN log-probs of the rollout engine stop it at once.", broken_states),
    Case(20, "Mean divergence below zero or above 50 nats", "Stops before push and checkpoint. Not for objective `sampled`.", impossible_divergence),
    Case(21, "Domain without prompts", "Refused: leave the domain out.", no_prompts),
    Case(22, "Teacher weights negative, zero or not adding up to 1", "Negative ones and zeros only are refused; others are normalised, with a notice.", teacher_weights),
    Case(23, "Domain without a teacher", "Refused, with the experts and their domains.", no_teacher),
    Case(24, "Empty prompt, white space, special tokens only", "Left out and counted in a warning. A file of nothing else is refused.", prompts_that_ask_nothing),
    Case(25, "Prompt as long as the context", "Quarantined by id; nothing is cut. A domain of nothing else is refused.", prompt_beyond_context),
    Case(26, "Prompt and response together exceed the context", "The response's limit is shortened for that prompt.", response_beyond_context),
    Case(27, "`max_new_tokens` 0, temperature below 0.01, infinite or NaN numbers", "Refused with the key, temperature 0 too.", sampling_values),
    Case(28, "`top_p` or `top_k` in sampling", "Refused as unknown keys.", filtered_sampling),
    Case(29, "Response that ends at once; step without a trained token", "The end token is trained. A step without any token is skipped.", nothing_to_train),
    Case(30, "Nearly all responses end at their limit", "Warning from 90 % of a domain's responses over ten steps on, with samples.", nearly_all_cut),
    Case(31, "Invalid UTF-8, surrogates, NUL, a line of 10 MB in a prompts file", "Refused with file and line (a surrogate: with the prompt's id).", unreadable_text),
    Case(32, "Prompts with wrong or missing columns, messages with `from` and `value`, trailing comma; byte-order mark, CRLF", "Refused with file, line and what was found; for `from` and `value` with a command that converts them. Byte-order mark and CRLF are accepted.", wrong_columns),
    Case(33, "Unknown or repeated key, wrong type in a pipeline; YAML made to explode", "Refused with the key, and the nearest known one.", pipeline_mistakes),
    Case(34, "Run directory that exists or cannot be made", "Refused; nothing is overwritten. Missing parents are created.", unfit_run_directory),
    Case(35, "Resume with another pipeline", "Refused: a run keeps its own `pipeline.yaml`.", resume_with_another_pipeline),
    Case(36, "Resume with an expert missing or changed", "Refused by name.", resume_with_another_expert),
    Case(37, "Two merges in one run directory", "The second is refused.", two_drivers),
    Case(38, "Disk full", "Exit code 3; the last checkpoint is whole.", disk_full),
    Case(39, "Not enough memory", "Refused with the sum by parts and the keys to lower.", too_little_memory),
    Case(40, "`/dev/shm` too small", "New weights go through the temporary directory, with a notice.", small_shared_memory),
    Case(41, "No C++ compiler", "`objective.compile` and `trainer.compile` run eagerly, with one warning each.", no_compiler),
    Case(42, "Worker dead or hung", "Started again as docs/resume.md says. A missed deadline stops the run with the worker's name.", dead_and_hung_workers),
    Case(43, "Clock set back or forth", "No effect.", clock_jump),
    Case(44, "Weight push that did not arrive, stale cache", "The probe sees it; the push is made once more; then the run stops before a checkpoint.", push_that_did_not_arrive),
    Case(45, "No terminal; paths with spaces and letters beyond ASCII; escape sequences in names", "No colours or bars in piped output; such paths work; escapes are spelt out.", plain_output_and_odd_paths),
    Case(46, "Ctrl-C once, twice", "Once: the step is finished, a checkpoint written, exit code 130. Twice: at once.", interrupts),
    Case(47, "Environment that raises, hangs, returns 10 MB of text or control characters", "Ends its own episode, as `raised`, `timeout` or `observation`; what the student wrote is trained.", troubled_environment),
    Case(48, "Tool call that does not parse, names no tool, does not fit the schema", "The student reads why, and goes on. For an agent's program such a call stays text.", call_that_does_not_parse),
    Case(49, "Agent's program that exits with an error, never asks, hangs, asks for ever", "Ends its own episode, as `agent`, `silent`, `timeout`, `turns` or `tokens`; its turns are trained.", agent_that_does_not_do_its_part),
    Case(50, "Agent's program that asks in another session's name", "401, and its own episode ends as `foreign`.", agent_in_anothers_name),
    Case(51, "Chat template that cannot append a message", "Refused where episodes of several turns need it.", template_that_cannot_append),
    Case(52, "Episode longer than the context, without compaction", "Ends as `context`, and is trained.", episode_beyond_the_context),
    Case(53, "More broken episodes than `max_broken` allows", "Stops the run with domain, numbers, reasons and the first error.", too_many_broken_episodes),
    Case(54, "Compaction that would come too late, or has no place for the summary; a summary that nobody can read", "Refused with the largest `compact_at` that fits.", compaction_that_cannot_work),
    Case(55, "Environment, option or agent's program that is not there; prompts of another environment", "Refused: each environment begins one task, each program and its script are looked up.", environment_or_program_that_is_not_there),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.number:02d}-{case.proof.__name__}")
def test_bad_input(case: Case, bench: Bench) -> None:
    messages.forget()
    case.proof(bench)
    messages.check(f"bad input {case.number:02d}: {case.title}", bench.world.root)


def test_the_document_is_the_table() -> None:
    assert [case.number for case in CASES] == list(range(1, 56))
    assert len({case.proof for case in CASES}) == 55
    rows = [line for line in DOCUMENT.read_text().splitlines() if re.match(r"\| \d", line)]
    assert rows == [f"| {case.number} | {case.title} | {case.behaviour} |" for case in CASES]
