"""Settings for an engine on a GPU that one on a CPU does not get: CUDA graphs, and to sleep while others compute."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from opd.rollouts import cpu_settings, worker
from opd.rollouts.cpu_settings import ModelKind
from opd.rollouts.worker import EngineOptions, GenerateRequest, VLLMWorker

OPTIONS = EngineOptions(
    model_dir=Path("m"),
    dtype="float32",
    max_model_len=64,
    max_num_seqs=8,
    gpu_memory_utilization=0.4,
    vocab_size=76,
    sleep=True,
)


class Engine:
    """Stands for `vllm.LLM`: notes what it is asked in which order, and answers nothing while it sleeps."""

    said: list[str]

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.said = []
        self.called: list[str] = []
        self.sleeping: set[str] = set()
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace())  # one process: no further ones

    @property
    def asleep(self) -> bool:
        return bool(self.sleeping)

    def sleep(self, level: int) -> None:
        assert not self.asleep
        self.sleeping = {"weights", "kv_cache"}
        self.said.append(f"sleep {level}")

    def collective_rpc(self, method: str, args: tuple[object, ...] = ()) -> list[None]:
        self.called.append(method)
        return [None]

    def reset_prefix_cache(self) -> bool:
        self.said.append("empty")
        return True

    def wake_up(self, tags: list[str]) -> None:
        assert tags and set(tags) <= self.sleeping, "vLLM would only warn"
        self.sleeping -= set(tags)
        self.said.append(f"wake {' and '.join(tags)}")

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        assert not self.asleep
        self.said.append("score" if not isinstance(params, list) else "write")
        text = SimpleNamespace(
            token_ids=[5], logprobs=[{5: SimpleNamespace(logprob=-1.0)}], finish_reason="stop", spec_decode_metrics=None
        )
        scored = [None, {2: SimpleNamespace(logprob=-2.0)}]
        return [SimpleNamespace(outputs=[text], prompt_logprobs=scored) for _ in prompts]


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """vLLM's, a GPU until a test says otherwise; vLLM itself is not imported."""
    found = SimpleNamespace(cpu=False)
    fake, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    fake.LLM, fake.SamplingParams = Engine, SimpleNamespace  # type: ignore[attr-defined]
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: found.cpu)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.llm", fake)
    monkeypatch.setattr(worker, "read_model_shape", lambda model_dir: {"model_type": "llama"})
    monkeypatch.setattr(worker, "own_files", nullcontext)
    monkeypatch.setattr(cpu_settings, "inspect_model_kind", lambda model_dir: ModelKind(recurrent=False, latent=False))
    monkeypatch.setattr(worker, "cut_vocabulary", lambda llm, vocab_size: None)

    def swap(llm: Engine, model_dir: Path, whole: bool = True) -> None:
        assert "weights" not in llm.sleeping
        llm.said.append("load")

    monkeypatch.setattr(worker, "swap_weights", swap)
    return found


@pytest.mark.parametrize("cpu", [True, False], ids=["cpu", "gpu"])
def test_graphs_are_captured_on_a_gpu_alone(platform: SimpleNamespace, cpu: bool) -> None:
    platform.cpu = cpu
    assert worker.start_engine(OPTIONS).settings.get("enforce_eager", False) is cpu


@pytest.mark.parametrize("cpu", [True, False], ids=["cpu", "gpu"])
@pytest.mark.parametrize("latent", [True, False])
def test_latent_attention_does_not_depend_on_the_cores(
    platform: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, cpu: bool, latent: bool
) -> None:
    """Avoid what vLLM takes on cores with AMX: it knows no float32."""
    platform.cpu = cpu
    monkeypatch.setattr(cpu_settings, "inspect_model_kind", lambda model_dir: ModelKind(recurrent=False, latent=latent))
    wanted = "CPU_MLA" if cpu and latent else None
    assert worker.start_engine(OPTIONS).settings.get("attention_backend") == wanted


def test_only_an_engine_that_will_sleep_is_told_so(platform: SimpleNamespace) -> None:
    import dataclasses

    assert worker.start_engine(OPTIONS).settings["enable_sleep_mode"] is True
    awake = worker.start_engine(dataclasses.replace(OPTIONS, sleep=False))
    assert "enable_sleep_mode" not in awake.settings


def test_an_engine_sleeps_from_the_last_token_it_wrote_to_the_next_push(platform: SimpleNamespace) -> None:
    """One night a step: what a step asks comes as push, probe, rollouts."""
    one = VLLMWorker(OPTIONS, (2,))
    request = GenerateRequest(token_ids=(1,), max_tokens=4, temperature=1.0, seed=0)
    for _ in range(2):
        one.load(Path("new"))
        assert one.logprobs([(1, 2)]) == [[-2.0]]
        assert [s.token_ids for s in one.generate([request])] == [(5,)]
    one.generate([request])  # an evaluation comes without a push before it
    write = ["empty", "write", "sleep 1"]
    morning = [
        "wake weights",
        "load",
        "wake kv_cache",
        "score",
    ]  # the trainer has the cache's memory while it sends weights
    evaluation = ["wake weights and kv_cache", *write]
    assert one._llm.said == ["load", "score", *write, *morning, *write, *evaluation]


def test_weights_that_come_in_buckets_wake_the_cache_after_them_too(
    platform: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = VLLMWorker(OPTIONS, (2,))
    one.generate([])
    one.begin_stream(OPTIONS.model_dir, whole=True)
    assert one._llm.sleeping == {"kv_cache"} and one._llm.called[-1] == "opd_begin_stream"
    one.finish_stream()
    assert one._llm.sleeping == {"kv_cache"}
    one.logprobs([(1, 2)])
    assert one._llm.said == ["empty", "write", "sleep 1", "wake weights", "empty", "wake kv_cache", "score"]


def test_a_new_engine_in_place_of_one_that_slept_is_awake(
    platform: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = VLLMWorker(OPTIONS, (2,))
    one.generate([])
    monkeypatch.setattr(worker, "stop_engine", lambda llm: None)
    monkeypatch.setattr(worker, "can_swap", lambda old, new: False)
    one.load(Path("other"))
    assert one.logprobs([(1, 2)]) == [[-2.0]]
    assert one._llm.said == ["score"]


def test_an_engine_that_has_nothing_to_write_sleeps_all_the_same(platform: SimpleNamespace) -> None:
    """As where a resume trains steps from the log: the probe after the push before has left it awake."""
    one = VLLMWorker(OPTIONS, (2,))
    one.load(Path("new"))
    one.logprobs([(1, 2)])
    assert not one._llm.asleep
    assert one.generate([]) == []
    assert one._llm.asleep


def test_an_engine_with_a_gpu_of_its_own_never_sleeps(platform: SimpleNamespace) -> None:
    import dataclasses

    one = VLLMWorker(dataclasses.replace(OPTIONS, sleep=False), (2,))
    one.generate([GenerateRequest(token_ids=(1,), max_tokens=4, temperature=1.0, seed=0)])
    one.load(Path("new"))
    assert one._llm.said == ["empty", "write", "load"], "what it writes does not depend on what it wrote before"
