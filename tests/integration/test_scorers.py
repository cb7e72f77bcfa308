"""Every scorer and payload against a plain float32 transformers forward, two teachers taking turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from opd import cluster
from opd.config import PipelineConfig
from opd.config.sections import ClusterConfig
from opd.errors import RunError
from opd.models.heads import head_tensor
from opd.payloads.hidden_states import HiddenStates
from opd.payloads.top_k import TopTokens
from opd.records.types import Rollout, Teacher, WeightedTeacher
from opd.settings.yaml_files import validate_section
from opd.stream.schema import TargetRow
from pipelines.specs import pool_spec
from teachers.pool import Pool
from teachers.scorers import ScorerOptions, Server
from teachers.scorers.openai import OpenAIScorer
from tests.conftest import read_rows
from tests.integration.conftest import SERVED_TOP_K as TOP_K
from tests.rows import make_rollout

Make = Callable[..., Path]
VOCABULARY = 76
TOLERANCE = {"float32": 0.01, "bfloat16": 0.05}
OBJECTIVES = {"hidden_states": {}, "sampled_logprobs": {"kind": "sampled"}, "top_k": {"kind": "top_k", "k": TOP_K}}
PLAIN = {("transformers", "sampled_logprobs"), ("transformers", "top_k")}
"""Without a pool in tests/unit/teachers/test_transformers_scorer.py, so only in the long run here."""
PADDED = {("vllm", "top_k", "float32"): 60}
"""Ids that the tokenizer knows where the head has more rows."""


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    with cluster.ray_session(ClusterConfig(), 4):
        yield


def rollouts(num: int = 12, *, below: int = VOCABULARY, seed: int = 0) -> list[Rollout]:
    """Half of domain left, half right; made-up tokens. In every third an environment wrote all but the ends."""
    rng = torch.Generator().manual_seed(seed)
    made = []
    for i in range(num):
        response = tuple(torch.randint(3, below, (1 + i % 7,), generator=rng).tolist())
        made.append(
            make_rollout(
                sample_id=f"000001/{'left' if i % 2 else 'right'}/{i}",
                step=1,
                domain="left" if i % 2 else "right",
                policy_version=0,
                prompt_ids=tuple(torch.randint(3, below, (1 + i % 5,), generator=rng).tolist()),
                response_ids=response,
                behaviour_logprobs=(-1.0,) * len(response),
                loss_mask=[i % 3 > 0 or place in (0, len(response) - 1) for place in range(len(response))],
            )
        )
    return made


def route(name: str, model_dir: Path) -> tuple[WeightedTeacher, ...]:
    """A domain's teacher of this name and model."""
    return (WeightedTeacher(teacher=Teacher(name=name, model_dir=model_dir), weight=1.0),)


def start_pool(engine: str, payload: str, left: Path, right: Path, *, dtype: str = "float32", **more: Any) -> Pool:
    config = validate_section(
        PipelineConfig,
        {
            "name": "test",
            "student": {"model": left},
            "experts": {"left": {"model": left, "domain": "left"}, "right": {"model": right, "domain": "right"}},
            "domains": {"left": {}, "right": {}},
            "rollout": {"max_model_len": 64},
            "objective": OBJECTIVES[payload],
            "teachers": {
                "engine": engine, "payload": payload, "dtype": dtype, "max_quarantined": more.pop("max_quarantined", 0)
            },
            "cluster": more.pop("cluster", {}),
            "trainer": {"steps": 1, "samples_per_step": 2},
        },
        "test",
    )  # fmt: skip
    models = {"left": left, "right": right} | more.pop("others", {})
    routes = {name: route(name, model_dir) for name, model_dir in models.items()}
    pool = Pool(pool_spec(config, more.pop("vocab_size", VOCABULARY)), routes)
    assert not more
    pool.wait_ready()
    return pool


def stop(pool: Pool) -> None:
    """Free its memory before the next one starts."""
    pool.stop()


def scored(pool: Pool, given: Sequence[Rollout]) -> tuple[list[TargetRow], dict[str, torch.Tensor]]:
    targets = pool.score(given)
    return read_rows(targets), {key: head_tensor(head.handle.fetch()) for key, head in targets.heads.items()}


@torch.no_grad()
def plain(model: Any, row: TargetRow, vocab_size: int = VOCABULARY) -> torch.Tensor:
    """[N, V] log-probs at the positions before each trained token."""
    ids = torch.tensor([[*row.rollout.prompt_ids, *row.rollout.response_ids]])
    logits_T_V = model(ids).logits[0, :, :vocab_size]
    return logits_T_V.log_softmax(-1)[len(row.rollout.prompt_ids) - 1 : -1][list(row.rollout.trained_positions)]


def reference(model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


def mean_gap(
    rows: Sequence[TargetRow],
    heads: dict[str, torch.Tensor],
    models: dict[str, Any],
    *,
    dtype: str = "float32",
    vocab_size: int = VOCABULARY,
) -> float:
    """Mean |Δ log-prob| over everything that the rows say."""
    gaps = []
    for row in rows:
        want_N_V = plain(models[row.teacher], row, vocab_size)
        if isinstance(row.answer, HiddenStates):
            states = torch.frombuffer(bytearray(row.answer.hidden), dtype=getattr(torch, dtype)).view(
                -1, row.answer.hidden_size
            )
            found = (states.float() @ heads[row.answer.head].float().T).log_softmax(-1)
            gaps.append((found - want_N_V).abs().flatten())
        elif isinstance(row.answer, TopTokens):
            ids = torch.tensor(row.answer.topk_ids).view(row.rollout.num_trained, -1)
            found = torch.tensor(row.answer.topk_logprobs).view(ids.shape)
            assert ids.shape[1] == TOP_K and all(len(set(r)) == TOP_K for r in ids.tolist())
            gaps.append((found - want_N_V.gather(1, ids)).abs().flatten())
            gaps.append((found - want_N_V.topk(TOP_K).values).abs().flatten())
        else:
            want = want_N_V.gather(1, torch.tensor(row.rollout.trained_ids)[:, None])[:, 0]
            gaps.append((torch.tensor(row.answer.teacher_logprobs) - want).abs())
    return float(torch.cat(gaps).mean())


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("engine", "payload"),
    [
        pytest.param(engine, payload, marks=[pytest.mark.slow] if (engine, payload) in PLAIN else [])
        for engine in ("transformers", "vllm")
        for payload in OBJECTIVES
    ],
)
def test_scores_are_those_of_a_plain_forward(
    tmp_path: Path, make_model_dir: Make, ray: None, engine: str, payload: str, dtype: str
) -> None:
    """Two tied teachers of one config are swapped back and forth; one case leaves padding rows of their heads out."""
    left, right = (make_model_dir(tmp_path / n, seed=s) for s, n in enumerate(("left", "right"), start=1))
    models = {"left": reference(left), "right": reference(right)}
    known = PADDED.get((engine, payload, dtype), VOCABULARY)
    pool = start_pool(engine, payload, left, right, dtype=dtype, vocab_size=known)
    for turn in range(2):
        given = rollouts(seed=turn, below=known)
        rows, heads = scored(pool, given)
        assert {(r.rollout.sample_id, r.teacher) for r in rows} == {(r.sample_id, r.domain) for r in given}
        assert max((max(r.answer.topk_ids) for r in rows if isinstance(r.answer, TopTokens)), default=0) < known
        gap = mean_gap(rows, heads, models, dtype=dtype, vocab_size=known)
        swapped = {"left": models["right"], "right": models["left"]}
        wrong = mean_gap(rows, heads, swapped, dtype=dtype, vocab_size=known)
        print(f"{engine} {payload} {dtype} turn {turn}: mean |delta| {gap:.2g} nats, of the other teacher {wrong:.2g}")
        assert gap <= TOLERANCE[dtype]
        assert wrong > 0.3, "the teachers are too alike to show anything"
    stop(pool)


@dataclasses.dataclass(frozen=True)
class Three:
    """A pool of engine vllm: `left` has another shape than `odd` and `right`, and `odd` is broken where token 75 is read."""

    pool: Pool
    models: dict[str, Path]


@pytest.fixture(
    scope="module",
    params=["hidden_states", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sampled_logprobs", "top_k"))],
)
def three(
    ray: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, make_model_dir: Make
) -> Iterator[Three]:
    root = tmp_path_factory.mktemp("three")
    models = {"left": make_model_dir(root / "left", seed=1)}
    for seed, name in enumerate(("odd", "right"), start=2):
        models[name] = make_model_dir(root / name, seed=seed, hidden=128, heads=4, tie=False)
    state = load_file(models["odd"] / "model.safetensors")
    state["model.embed_tokens.weight"][75] = torch.nan
    save_file(state, models["odd"] / "model.safetensors", {"format": "pt"})
    odd = {"odd": models["odd"]}
    pool = start_pool("vllm", request.param, models["left"], models["right"], others=odd, max_quarantined=0.9)
    yield Three(pool, models)
    stop(pool)


def test_vllm_restarts_for_another_shape(three: Three) -> None:
    """There and back: the pool has already tried each teacher."""
    given = rollouts()
    rows, heads = scored(three.pool, given)
    assert {r.rollout.sample_id for r in rows} == {r.sample_id for r in given}
    assert mean_gap(rows, heads, {name: reference(three.models[name]) for name in ("left", "right")}) <= 0.01


def test_vllm_reads_a_prompt_of_the_teachers_own(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(rollout: Rollout) -> tuple[int, ...]:
        return (*range(10, 30), *rollout.prompt_ids[:1])

    (right,) = three.pool._routes["right"]
    monkeypatch.setitem(three.pool._routes, "right", (dataclasses.replace(right, prompts=read),))
    given = [rollout for rollout in rollouts() if rollout.domain == "right"]
    rows, heads = scored(three.pool, given)
    assert {row.rollout.sample_id: row.rollout for row in rows} == {r.sample_id: r for r in given}
    told = [dataclasses.replace(row, rollout=row.rollout.as_read_by(read(row.rollout))) for row in rows]
    models = {"right": reference(three.models["right"])}
    assert mean_gap(told, heads, models) <= 0.01 and mean_gap(rows, heads, models) > 0.1


def test_a_response_that_breaks_its_teacher_leaves_its_neighbours_alone(three: Three) -> None:
    """Also those of a teacher of the same shape, whose weights come into the same engine."""
    given = [dataclasses.replace(r, domain={"left": "odd", "right": "right"}[r.domain]) for r in rollouts(24, below=75)]
    poisoned = (5, 9, 17)
    for i in poisoned:
        given[i] = dataclasses.replace(given[i], prompt_ids=(75, 4))
    models = {name: reference(three.models[name]) for name in ("odd", "right")}
    for _ in range(3):  # what a broken response left in the cache must not reach later ones
        targets = three.pool.score(given)
        rows = read_rows(targets)
        assert set(targets.quarantined) == {given[i].sample_id for i in poisoned}
        heads = {key: head_tensor(head.handle.fetch()) for key, head in targets.heads.items()}
        assert mean_gap(rows, heads, models) <= 0.01


def test_vllm_refuses_weights_that_do_not_fit(
    three: Three, tmp_path: Path, make_model_dir: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = make_model_dir(tmp_path / "right", seed=2)
    state = load_file(right / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, right / "model.safetensors", {"format": "pt"})
    monkeypatch.setitem(three.pool._routes, "right", route("right", right))
    with pytest.raises(RunError, match=r"teacher right: weights do not fit its config: missing .*up_proj"):
        three.pool.wait_ready()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("payload", OBJECTIVES)
def test_vllm_on_a_gpu(tmp_path: Path, make_model_dir: Make, payload: str, dtype: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    left, right = (make_model_dir(tmp_path / n, seed=s) for s, n in enumerate(("left", "right"), start=1))
    with cluster.ray_session(ClusterConfig(), 4):
        pool = start_pool("vllm", payload, left, right, dtype=dtype, cluster={"teacher_gpus": 1})
        for turn in range(2):
            rows, heads = scored(pool, rollouts(seed=turn))
            gap = mean_gap(rows, heads, {"left": reference(left), "right": reference(right)}, dtype=dtype)
            assert gap <= TOLERANCE[dtype]
        stop(pool)


# A real server


def asking(url: str, payload: str, *, model: str = "expert", top_k: int = TOP_K) -> OpenAIScorer:
    return OpenAIScorer(
        ScorerOptions(
            dtype="float32", payload=payload, top_k=top_k, vocab_size=VOCABULARY, memory_bytes=1,
            servers={"left": Server(base_url=url, model=model)}, api_key_env="OPD_TEST_KEY",
        )
    )  # fmt: skip


@pytest.mark.parametrize("payload", ["sampled_logprobs", "top_k"])
def test_a_server_scores_like_a_plain_forward(
    served_model: tuple[Path, str], payload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, url = served_model
    monkeypatch.setenv("OPD_TEST_KEY", "secret")
    given, broken = rollouts(40), {}
    teacher = Teacher(name="left", model_dir=model)
    rows = [row for batch in asking(url, payload).score(teacher, given, broken) for row in batch]
    assert ({r.rollout.sample_id for r in rows}, broken) == ({r.sample_id for r in given}, {})
    gap = mean_gap(rows, {}, {"left": reference(model)})
    print(f"openai {payload} float32: mean |delta| {gap:.2g} nats")
    assert gap <= 0.01
    own = [rollout.as_read_by((*range(10, 30), *rollout.prompt_ids)) for rollout in given]
    rows = [row for batch in asking(url, payload).score(teacher, own, broken) for row in batch]
    assert mean_gap(rows, {}, {"left": reference(model)}) <= 0.01


def test_a_server_refuses_what_it_does_not_know(
    served_model: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, url = served_model
    teacher = Teacher(name="left", model_dir=model)
    monkeypatch.setenv("OPD_TEST_KEY", "secret")
    with pytest.raises(RunError, match="404, no model 'other'"):
        asking(url, "top_k", model="other").head_key(teacher)
    with pytest.raises(RunError, match=r"status 400.*max"):
        asking(url, "top_k", top_k=TOP_K + 1).head_key(teacher)
    monkeypatch.setenv("OPD_TEST_KEY", "wrong")
    with pytest.raises(RunError, match="401, the key is missing or wrong"):
        asking(url, "top_k").head_key(teacher)
