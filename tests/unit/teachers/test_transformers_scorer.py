"""A teacher's hidden states are those that its own head turns into its log-probs of the student's tokens."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from opd.errors import RunError
from opd.models.logit_rule import IDENTITY
from opd.payloads.sampled_logprobs import SampledLogprobs
from opd.payloads.top_k import TopTokens
from opd.records.types import Teacher
from opd.stream.schema import read_stream, write_stream
from teachers.scorers import ScorerOptions, transformers
from teachers.scorers.rows import split_batches
from teachers.scorers.transformers import TransformersScorer
from teachers.weights import weights_nbytes
from tests.unit.teachers.conftest import rollout

VOCABULARY = 76


def scorer(
    dtype: str = "float32", payload: str = "hidden_states", top_k: int = 4, vocab_size: int = VOCABULARY, **more: Any
) -> Any:
    return TransformersScorer(
        ScorerOptions(dtype=dtype, payload=payload, top_k=top_k, vocab_size=vocab_size, memory_bytes=1 << 30, **more)
    )


def test_states_and_head_give_the_teachers_log_probs(
    teachers: dict[str, Teacher], expert_dirs: dict[str, Path], check_rows: Callable[..., None]
) -> None:
    scoring = scorer()
    rows, heads = [], {}
    for turn in range(2):  # back and forth: weights are swapped in place
        for domain, teacher in teachers.items():
            rollouts = [rollout(10 * turn + i, domain, prompt=1 + 3 * i, response=1 + i) for i in range(6)]
            scored = [row for batch in scoring.score(teacher, rollouts, {}) for row in batch]
            assert {r.rollout.sample_id for r in scored} == {r.sample_id for r in rollouts}
            rows += scored
            heads[scoring.head_key(teacher)] = scoring.head(teacher)
    assert {r.teacher for r in rows} == {"rev", "up"}
    assert len(heads) == 2
    check_rows(rows, heads, expert_dirs)


@pytest.mark.parametrize("lends", [True, False])
def test_a_gpu_that_an_engine_sleeps_on_has_nothing_left_of_a_pass_when_it_wakes(
    teachers: dict[str, Teacher], lends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append("emptied"))
    scoring, teacher = scorer(lends_memory=lends), teachers["reverse"]
    for batch in scoring.score(teacher, [rollout(i) for i in range(3)], {}):
        happened.append(f"{len(batch)} rows")
    assert happened == ["3 rows", *["emptied"] * lends]


def test_responses_to_one_prompt_are_scored_in_one_row_as_if_they_were_alone(
    teachers: dict[str, Teacher],
    expert_dirs: dict[str, Path],
    check_rows: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("teachers.scorers.transformers.SCORE_TOKENS", 100)
    scoring, teacher = scorer(share_prompts=True), teachers["reverse"]
    assert scoring.layout(teacher).layout == "shared"
    computed: list[int] = []
    states = scoring._compute_states

    def noted_states(packed: Any) -> Any:
        assert packed.paths
        computed.append(len({flat for path in packed.paths for flat in path}))
        return states(packed)

    monkeypatch.setattr(scoring, "_compute_states", noted_states)
    prompts = [rollout(i, prompt=30, response=1).prompt_ids for i in range(3)]
    given = [dataclasses.replace(rollout(10 * i + j), prompt_ids=p) for i, p in enumerate(prompts) for j in range(4)]
    rows = [row for batch in scoring.score(teacher, given, {}) for row in batch]
    assert sorted(r.rollout.sample_id for r in rows) == sorted(r.sample_id for r in given)
    check_rows(rows, {scoring.head_key(teacher): scoring.head(teacher)}, expert_dirs)
    assert sum(computed) <= 3 * (30 + 4 * 5) and len(computed) == 2, "each prompt once, two prompts in a pass"


def test_a_row_carries_its_rollout(teachers: dict[str, Teacher]) -> None:
    given = rollout(3)
    ((row,),) = scorer().score(teachers["reverse"], [given], {})
    assert (row.rollout, row.teacher, row.answer.hidden_size) == (given, "rev", 64)


def test_shards_of_an_earlier_save_are_not_scored(
    teachers: dict[str, Teacher], expert_dirs: dict[str, Path], check_rows: Callable[..., None], tmp_path: Path
) -> None:
    """transformers and vLLM follow the index; the scorer read every file, and taught what the model had been before."""
    teacher = teachers["reverse"]
    copy = Path(shutil.copytree(teacher.model_dir, tmp_path / "copy"))
    state = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").rename(copy / "model-00001-of-00001.safetensors")
    names = dict.fromkeys(state, "model-00001-of-00001.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    save_file({name: tensor * 2 for name, tensor in state.items()}, copy / "model-00001-of-00002.safetensors")
    save_file({"norm.weight": torch.ones(3)}, copy / "consolidated.safetensors")
    scoring, copied = scorer(), dataclasses.replace(teacher, model_dir=copy)
    rows = [row for batch in scoring.score(copied, [rollout(i) for i in range(3)], {}) for row in batch]
    check_rows(rows, {scoring.head_key(copied): scoring.head(copied)}, expert_dirs)
    head = scoring.head_file(copied).read()
    assert head is not None and torch.equal(head, state["model.embed_tokens.weight"])
    assert weights_nbytes(copy, torch.float32) == sum(tensor.nbytes for tensor in state.values())


def test_equal_heads_have_one_key(teachers: dict[str, Teacher], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(teachers["reverse"].model_dir, tmp_path / "copy"))
    scoring = scorer()
    keys = [scoring.head_key(t) for t in teachers.values()]
    assert len(set(keys)) == 2
    assert scoring.head_key(Teacher(name="other", model_dir=copy)) == keys[0]
    assert scorer(dtype="bfloat16").head_key(teachers["reverse"]) not in keys


@pytest.mark.parametrize("payload", ["hidden_states", "sampled_logprobs", "top_k"])
def test_responses_whose_states_are_not_finite_are_left_out_and_named(
    payload: str, teachers: dict[str, Teacher], tmp_path: Path, damaged: Callable[..., Teacher]
) -> None:
    bad = damaged(teachers["reverse"], tmp_path, "model.norm.weight", 3)
    scoring, broken = scorer(payload=payload, vocab_size=VOCABULARY), {}
    rollouts = [rollout(i) for i in range(3)]
    assert [row for batch in scoring.score(bad, rollouts, broken) for row in batch] == []
    assert broken == {r.sample_id: "teacher bad: hidden states are not finite" for r in rollouts}
    other: dict[str, str] = {}
    rows = [row for batch in scoring.score(teachers["upper"], rollouts, other) for row in batch]
    assert ({r.rollout.sample_id for r in rows}, other) == ({r.sample_id for r in rollouts}, {})


def test_a_response_that_breaks_its_teacher_leaves_its_neighbours_alone(
    teachers: dict[str, Teacher], tmp_path: Path, damaged: Callable[..., Teacher]
) -> None:
    # Packed side by side: a masked neighbour's NaN would still come through, as 0 * NaN.
    scoring, broken = scorer(vocab_size=VOCABULARY), {}
    bad = damaged(teachers["reverse"], tmp_path, "model.embed_tokens.weight", 70, tie=False)
    rollouts = [
        dataclasses.replace(rollout(i, response=3), prompt_ids=(5 + i, 6), response_ids=(7, 8, 9)) for i in range(5)
    ]
    rollouts[2] = dataclasses.replace(rollouts[2], prompt_ids=(70, 6))
    rows = [row for batch in scoring.score(bad, rollouts, broken) for row in batch]
    assert list(broken) == [rollouts[2].sample_id]
    assert {r.rollout.sample_id for r in rows} == {r.sample_id for r in rollouts} - set(broken)
    again = [row for batch in scoring.score(bad, [rollouts[3]], {}) for row in batch]
    (same,) = (r for r in rows if r.rollout.sample_id == rollouts[3].sample_id)
    states = [torch.frombuffer(bytearray(r.answer.hidden), dtype=torch.float32) for r in (same, again[0])]
    torch.testing.assert_close(*states, rtol=0, atol=1e-5)


@pytest.mark.parametrize("payload", ["hidden_states", "sampled_logprobs"])
def test_rows_that_are_made_while_the_next_batch_is_computed_are_the_same(
    payload: str,
    teachers: dict[str, Teacher],
    tmp_path: Path,
    damaged: Callable[..., Teacher],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, also if a batch has a row whose states are not finite, and if a rank asks for another teacher's head."""
    monkeypatch.setattr(transformers, "SCORE_TOKENS", 20)
    bad = damaged(teachers["reverse"], tmp_path, "model.embed_tokens.weight", 70, tie=False)
    rollouts = [
        dataclasses.replace(rollout(i), prompt_ids=(5 + i, 6), response_ids=(7, 8, 9, 10, 11)) for i in range(7)
    ]
    rollouts[3] = dataclasses.replace(rollouts[3], prompt_ids=(70, 6))
    scored = {}
    for ahead in (0, 1):
        scoring, broken, rows = scorer(payload=payload), dict[str, str](), []
        scoring._batches_ahead = ahead
        batches = 0
        for batch in scoring.score(bad, rollouts, broken):
            rows += batch
            batches += 1
            scoring.head(teachers["upper"])
        assert batches == 4
        scored[ahead] = [(r.rollout.sample_id, r.answer) for r in rows], broken
    assert scored[0] == scored[1]
    assert set(scored[0][1]) == {rollouts[3].sample_id} and len(scored[0][0]) == 6


@pytest.mark.parametrize("tie", [True, False])
def test_a_head_that_is_not_finite_stops_the_run(
    tie: bool, teachers: dict[str, Teacher], tmp_path: Path, damaged: Callable[..., Teacher]
) -> None:
    name = "model.embed_tokens.weight" if tie else "lm_head.weight"
    bad = damaged(teachers["reverse"], tmp_path, name, 40, tie=tie)
    with pytest.raises(RunError, match="teacher bad: output head is not finite"):
        scorer().head_key(bad)


# Other payloads


@torch.no_grad()
def plain_log_probs(path: Path, row: Any) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    ids = [*row.rollout.prompt_ids, *row.rollout.response_ids]
    # Eager: torch's kernel leaves Gemma 2's bound on attention scores out.
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits.log_softmax(-1)[len(row.rollout.prompt_ids) - 1 : -1]


def test_sampled_log_probs_are_those_of_a_plain_forward(
    teachers: dict[str, Teacher], expert_dirs: dict[str, Path]
) -> None:
    scoring = scorer(payload="sampled_logprobs")
    for domain, teacher in teachers.items():
        rollouts = [rollout(i, domain, prompt=1 + 3 * i, response=1 + i) for i in range(5)]
        rows = [row for batch in scoring.score(teacher, rollouts, {}) for row in batch]
        assert len(rows) == len(rollouts)
        for row in rows:
            want = plain_log_probs(expert_dirs[teacher.name], row)[
                range(len(row.rollout.response_ids)), list(row.rollout.response_ids)
            ]
            torch.testing.assert_close(torch.tensor(row.answer.teacher_logprobs), want, rtol=0, atol=1e-5)
            assert type(row.answer) is SampledLogprobs


@pytest.mark.parametrize("k", [1, 5, 76, 1000])
def test_top_k_is_that_of_a_plain_forward(k: int, teachers: dict[str, Teacher], expert_dirs: dict[str, Path]) -> None:
    teacher = teachers["upper"]
    rollouts = [rollout(i, "upper", prompt=2 + 3 * i, response=1 + i) for i in range(5)]
    rows = [row for batch in scorer(payload="top_k", top_k=k).score(teacher, rollouts, {}) for row in batch]
    for row in rows:
        want = plain_log_probs(expert_dirs["up"], row).topk(min(k, VOCABULARY))
        found = torch.tensor(row.answer.topk_logprobs).view(len(row.rollout.response_ids), -1)
        torch.testing.assert_close(found, want.values, rtol=0, atol=1e-5)
        assert row.answer.topk_ids == want.indices.flatten().tolist()
        assert type(row.answer) is TopTokens
    assert len(read_stream(write_stream(rows, "float32", "top_k")).rows) == 5


def test_rows_of_the_head_beyond_the_vocabulary_are_padding(
    teachers: dict[str, Teacher], expert_dirs: dict[str, Path]
) -> None:
    small = dataclasses.replace(rollout(0, response=3), prompt_ids=(1, 2), response_ids=(3, 4, 5))
    ((row,),) = scorer(payload="top_k", top_k=100, vocab_size=60).score(teachers["reverse"], [small], {})
    want = plain_log_probs(expert_dirs["rev"], row)[:, :60].log_softmax(-1)
    assert sorted(set(row.answer.topk_ids)) == list(range(60))
    found = torch.full_like(want, torch.nan).scatter(
        1, torch.tensor(row.answer.topk_ids).view(3, -1), torch.tensor(row.answer.topk_logprobs).view(3, -1)
    )
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)


# Architectures that do something to their logits


def built(architecture: str, path: Path, **changes: Any) -> Teacher:
    """A tiny model of that architecture with random, wide weights."""
    import transformers

    sizes = {"vocab_size": 76, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.3}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64}
    config = getattr(transformers, f"{architecture}Config")(**sizes | heads | ids | changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        getattr(transformers, f"{architecture}ForCausalLM")(config).save_pretrained(path)
    return Teacher(name="odd", model_dir=path)


ODD = {
    "capped": ("Gemma2", {"final_logit_softcapping": 2.0}),
    "scaled": ("Cohere", {"logit_scale": 0.25}),
    "divided": ("Granite", {"logits_scaling": 4.0}),
}


@pytest.mark.parametrize("payload", ["hidden_states", "sampled_logprobs"])
@pytest.mark.parametrize("kind", ODD)
def test_scaled_and_capped_logits_are_those_of_transformers(kind: str, payload: str, tmp_path: Path) -> None:
    architecture, changes = ODD[kind]
    teacher = built(architecture, tmp_path / "odd", **changes)
    scoring = scorer(payload=payload)
    ((row,),) = scoring.score(teacher, [rollout(1)], {})
    want = plain_log_probs(teacher.model_dir, row)
    picked = want[range(5), list(row.rollout.response_ids)]
    if payload == "sampled_logprobs":
        torch.testing.assert_close(torch.tensor(row.answer.teacher_logprobs), picked, rtol=0, atol=1e-4)
        return
    rule = scoring.head_rule(teacher)
    assert rule != IDENTITY
    states = torch.frombuffer(bytearray(row.answer.hidden), dtype=torch.float32).view(-1, row.answer.hidden_size)
    found = rule.apply(states @ scoring.head(teacher).T).log_softmax(-1)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-4)
    plain = (states @ scoring.head(teacher).T).log_softmax(-1)
    assert float((plain - want).abs().max()) > 0.1, "the rule does nothing, the test shows nothing"


def test_equal_heads_under_other_rules_have_two_keys(tmp_path: Path) -> None:
    keys = {scorer().head_key(built("Granite", tmp_path / str(factor), logits_scaling=factor)) for factor in (1.0, 4.0)}
    assert len(keys) == 2


def with_a_bias(path: Path, size: float) -> Teacher:
    """A head that adds something to its logits."""
    teacher = built("Phi", path)
    state = load_file(teacher.model_dir / "model.safetensors")
    state["lm_head.bias"] += size * torch.randn(76, generator=torch.Generator().manual_seed(0))
    save_file(state, teacher.model_dir / "model.safetensors", {"format": "pt"})
    return teacher


def test_a_factor_where_others_divide_stops_the_run(tmp_path: Path) -> None:
    teacher = built("HyperCLOVAX", tmp_path / "odd", logits_scaling=0.25)
    with pytest.raises(RunError, match="teacher odd: HyperCLOVAXForCausalLM computes its logits otherwise"):
        scorer().head_key(teacher)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1.0, 0.01])
def test_a_head_with_a_bias_stops_the_run_however_small_it_is(size: float, dtype: str, tmp_path: Path) -> None:
    teacher = with_a_bias(tmp_path / "odd", size)
    with pytest.raises(RunError, match="teacher odd: PhiForCausalLM computes its logits otherwise"):
        scorer(dtype).head_key(teacher)


def test_a_bias_of_zeros_is_none(tmp_path: Path) -> None:
    assert scorer().head_key(with_a_bias(tmp_path / "plain", 0.0))


@pytest.mark.parametrize("padding", [torch.nan, torch.inf])
def test_padding_rows_that_are_not_finite_hide_no_other_logits(padding: float, tmp_path: Path) -> None:
    teacher = built("HyperCLOVAX", tmp_path / "odd", logits_scaling=0.25)
    state = load_file(teacher.model_dir / "model.safetensors")
    state["lm_head.weight"][60:] = padding
    save_file(state, teacher.model_dir / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunError, match="teacher odd: HyperCLOVAXForCausalLM computes its logits otherwise"):
        scorer(vocab_size=60).head_key(teacher)


@pytest.mark.parametrize("damage", ["missing", "unexpected"])
def test_weights_that_do_not_fit_their_config_stop_the_run(
    damage: str, teachers: dict[str, Teacher], tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(teachers["reverse"].model_dir, tmp_path / "broken"))
    state = load_file(broken / "model.safetensors")
    if damage == "missing":
        del state["model.layers.1.mlp.up_proj.weight"]
    else:
        state["model.layers.9.mlp.up_proj.weight"] = torch.zeros(1)
    state["model.norm.weight"] *= 2
    save_file(state, broken / "model.safetensors", {"format": "pt"})
    scoring = scorer()
    (want,) = scoring.score(teachers["reverse"], [rollout(1)], {})
    bad = Teacher(name="bad", model_dir=broken)
    for _ in range(2):  # a half-loaded teacher must not pass for the whole one the second time
        with pytest.raises(RunError, match=f"teacher bad: .*{damage} .*up_proj"):
            list(scoring.score(bad, [rollout(1)], {}))
    (again,) = scoring.score(teachers["reverse"], [rollout(1)], {})
    assert bytes(again[0].answer.hidden) == bytes(want[0].answer.hidden)


def test_batches_hold_every_row_once_and_stay_small() -> None:
    rollouts = [rollout(i, prompt=300, response=10 + i) for i in range(60)]
    found = list(split_batches(rollouts, 4096))
    assert sorted(r.sample_id for b in found for r in b) == sorted(r.sample_id for r in rollouts)
    assert all(sum(len(r.prompt_ids) + len(r.response_ids) for r in b) <= 4096 for b in found)
    assert list(split_batches([], 4096)) == []
    assert [len(b) for b in split_batches([rollout(0, prompt=9000), rollout(1)], 4096)] == [1, 1]
