"""A LoRA expert scores like the full model with W + scaling * B A, and costs no second copy of its base."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from opd.errors import RunError
from opd.records.types import Rollout, Teacher
from teachers.scorers import ScorerOptions
from teachers.scorers.transformers import TransformersScorer
from teachers.shares import assign_rows
from teachers.worker import TeacherRows
from tests.rows import make_rollout

VOCABULARY = 76


def scorer(dtype: str = "float32", payload: str = "hidden_states", memory_bytes: int = 1 << 30) -> TransformersScorer:
    return TransformersScorer(
        ScorerOptions(dtype=dtype, payload=payload, top_k=4, vocab_size=VOCABULARY, memory_bytes=memory_bytes)
    )


def rollouts(num: int = 6) -> list[Rollout]:
    rng = random.Random(0)
    made = []
    for i in range(num):
        prompt, response = (tuple(rng.choices(range(VOCABULARY), k=k)) for k in (1 + 3 * i, 2 + i))
        made.append(
            make_rollout(
                sample_id=f"000001/d/{i}", step=1, domain="d", policy_version=0, prompt_ids=prompt, response_ids=response,
                behaviour_logprobs=(-1.0,) * len(response),
            )
        )  # fmt: skip
    return made


def found(scoring: TransformersScorer, teacher: Teacher) -> dict[str, torch.Tensor]:
    """Sample id → [R, V] log-probs from the hidden states and the head that would be sent."""
    dtype = scoring._dtype
    head = scoring.head(teacher).float()
    rows = [row for batch in scoring.score(teacher, rollouts(), {}) for row in batch]
    assert {row.answer.head for row in rows} == {scoring.head_key(teacher)}
    states = {
        r.rollout.sample_id: torch.frombuffer(bytearray(r.answer.hidden), dtype=dtype).view(-1, r.answer.hidden_size)
        for r in rows
    }
    return {i: (hidden.float() @ head.T).log_softmax(-1) for i, hidden in states.items()}


@torch.no_grad()
def plain(model: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The same from a plain transformers forward of a full model."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    answers = {}
    for r in rollouts():
        logits = loaded(input_ids=torch.tensor([[*r.prompt_ids, *r.response_ids]]), use_cache=False).logits[0].float()
        answers[r.sample_id] = logits.log_softmax(-1)[len(r.prompt_ids) - 1 : -1]
    return answers


def mean_gap(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert set(left) == set(right)
    return float(torch.cat([(left[i] - right[i]).abs().flatten() for i in left]).mean())


def check_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert set(left) == set(right)
    for sample_id, logprobs in left.items():
        torch.testing.assert_close(logprobs, right[sample_id], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def experts(
    tiny_model_dir: Path,
    make_adapter: Callable[..., Path],
    merged_plainly: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Teacher, Path]]:
    """Name → the LoRA expert, and the full model that it has to score like."""
    root = tmp_path_factory.mktemp("lora")
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    made: dict[str, tuple[dict[str, Any], float]] = {
        "two": ({}, 2.0),
        "all": ({"targets": every, "rank": 2, "lora_alpha": 1}, 0.5),
        "rs": ({"seed": 3, "use_rslora": True, "lora_alpha": 4}, 2.0),  # 4 / √4
    }
    pairs = {}
    for name, (options, scaling) in made.items():
        adapter = make_adapter(root / name, tiny_model_dir, **options)
        whole = merged_plainly(tiny_model_dir, adapter, root / f"{name}-whole", scaling)
        pairs[name] = (Teacher(name=name, model_dir=tiny_model_dir, adapter_dir=adapter), whole)
    return pairs


def test_log_probs_are_those_of_the_merged_model(
    experts: dict[str, tuple[Teacher, Path]], tiny_model_dir: Path, expert_dirs: dict[str, Path]
) -> None:
    scoring = scorer()
    full = {name: (Teacher(name=name, model_dir=path), path) for name, path in expert_dirs.items()}
    base = {"base": (Teacher(name="base", model_dir=tiny_model_dir), tiny_model_dir)}
    wanted = {name: plain(path) for name, (_, path) in (experts | full | base).items()}
    assert min(mean_gap(wanted["base"], wanted[name]) for name in experts) > 0.1, "the adapters matter"
    for name in ("two", "all", "base", "rs", "rev", "two", "base", "up", "all"):  # nothing stays from the one before
        teacher = (experts | full | base)[name][0]
        check_equal(found(scoring, teacher), wanted[name])


def test_other_payloads_carry_the_adapters_log_probs_too(experts: dict[str, tuple[Teacher, Path]]) -> None:
    scoring = scorer(payload="sampled_logprobs")
    for teacher, path in experts.values():
        want = plain(path)
        rows = [row for batch in scoring.score(teacher, rollouts(), {}) for row in batch]
        assert len(rows) == len(rollouts())
        for row in rows:
            sampled = want[row.rollout.sample_id].gather(1, torch.tensor(row.rollout.response_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(row.answer.teacher_logprobs), sampled, rtol=0, atol=1e-5)


def test_bfloat16_is_near(experts: dict[str, tuple[Teacher, Path]]) -> None:
    scoring = scorer("bfloat16")
    for teacher, path in experts.values():
        assert mean_gap(found(scoring, teacher), plain(path, torch.float32)) < 0.05


def test_adapters_send_the_bases_head_once(experts: dict[str, tuple[Teacher, Path]], tiny_model_dir: Path) -> None:
    scoring = scorer()
    keys = {scoring.head_key(teacher) for teacher, _ in experts.values()}
    assert keys == {scoring.head_key(Teacher(name="base", model_dir=tiny_model_dir))}


def test_ten_adapters_cost_one_base_and_ten_adapters(
    tiny_model_dir: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    adapters = [make_adapter(tmp_path / f"a{i}", tiny_model_dir, seed=i) for i in range(10)]
    scoring = scorer()
    for _ in range(2):
        for path in adapters:
            teacher = Teacher(name=path.name, model_dir=tiny_model_dir, adapter_dir=path)
            assert sum(1 for _ in scoring.score(teacher, rollouts(), {})) == 1
    base = sum(t.nbytes for t in load_file(tiny_model_dir / "model.safetensors").values())
    small = sum(t.nbytes for path in adapters for t in load_file(path / "adapter_model.safetensors").values())
    cached = {t.data_ptr() for state in scoring._weights._states.values() for t in state.values()}
    own = [p for p in scoring._model.parameters() if p.data_ptr() not in cached]
    assert scoring._weights.nbytes == base + small
    assert own == [], "the skeleton holds the cache's tensors and no copy of them"
    assert scoring._weights.loads == 1 + 10


def test_a_swap_between_adapters_leaves_the_base_where_it_is(experts: dict[str, tuple[Teacher, Path]]) -> None:
    scoring = scorer(memory_bytes=1)  # not even one adapter stays beside the next
    parameters: list[list[torch.nn.Parameter]] = []
    for name in ("two", "all", "rs", "two"):
        list(scoring.score(experts[name][0], rollouts(1), {}))
        parameters.append(list(scoring._model.parameters()))
    for now in parameters[1:]:
        assert all(p is first for p, first in zip(now, parameters[0], strict=True)), "not even put in place again"
    assert scoring._weights.loads == 1 + 4
    hooks = [h for m in scoring._model.modules() for h in m._forward_hooks]
    assert len(hooks) == 4, "two layers with two modules: those of the adapter in use"


def test_a_worker_takes_the_adapters_of_one_base_one_after_the_other() -> None:
    def group(name: str, base: str, num: int) -> TeacherRows:
        teacher = Teacher(name=name, model_dir=Path(base), adapter_dir=Path(name), digest=name, base_digest=base)
        return teacher, 1.0, tuple(rollouts(num))

    sizes = {"a": ("x", 6), "b": ("y", 5), "c": ("x", 4), "d": ("y", 3)}  # by size alone: a, b, c, d
    (share,) = assign_rows([group(name, *of) for name, of in sizes.items()], 1, lambda rows: [rows[2]])
    assert [teacher.name for teacher, _, _ in share] == ["a", "c", "b", "d"]


def test_an_adapter_that_is_not_finite_is_told_row_by_row(
    experts: dict[str, tuple[Teacher, Path]], tiny_model_dir: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    path = make_adapter(tmp_path / "bad", tiny_model_dir)
    tensors = load_file(path / "adapter_model.safetensors")
    next(t for name, t in tensors.items() if "lora_B" in name)[0] = torch.nan
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    scoring, broken = scorer(), {}
    bad = Teacher(name="bad", model_dir=tiny_model_dir, adapter_dir=path)
    assert [row for batch in scoring.score(bad, rollouts(), broken) for row in batch] == []
    assert broken == {r.sample_id: "teacher bad: hidden states are not finite" for r in rollouts()}
    teacher, whole = experts["two"]
    check_equal(found(scoring, teacher), plain(whole))


def test_an_adapter_of_what_is_not_linear_stops_the_run(
    experts: dict[str, tuple[Teacher, Path]], tiny_model_dir: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    path = make_adapter(tmp_path / "odd", tiny_model_dir, targets=["q_proj", "embed_tokens"])
    odd = Teacher(name="odd", model_dir=tiny_model_dir, adapter_dir=path)
    scoring = scorer()
    for _ in range(2):  # a half-loaded teacher must not pass for the whole one the second time
        with pytest.raises(RunError, match=r"teacher odd: its adapter changes model\.embed_tokens"):
            list(scoring.score(odd, rollouts(), {}))
    teacher, whole = experts["two"]
    check_equal(found(scoring, teacher), plain(whole))
