"""Responses to one prompt in one row: each sees the prompt and itself, and gets what it gets alone."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from opd.losses.reverse_kl import ReverseKL
from opd.models import layouts
from opd.models.heads import Head
from opd.models.layouts import (
    LAYOUTS,
    SHARED,
    Packed,
    find_positions_before,
    layout_error,
    measure_layout_differences,
    prove_layout,
)
from opd.models.logit_rule import IDENTITY
from opd.models.weights import choose_attention, obeys_masks
from opd.records.types import LayoutProof
from opd.stream.schema import TargetRow
from opd.train.batch import MicroBatch, build_micro_batch
from opd.train.student import Student
from pipelines.merging.layouts import _layout_lines, _layout_record
from tests.models.families import FAMILIES, build_config
from tests.rows import make_row

VOCABULARY = 76


def families(prompts: Sequence[int], n: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """(prompt, response) with prompts of these lengths and `n` responses each, of 1 to 12 tokens."""
    rng = random.Random(seed)
    made = []
    for length in prompts:
        prompt = rng.choices(range(VOCABULARY), k=length)
        made += [(prompt, rng.choices(range(VOCABULARY), k=rng.randint(1, 12))) for _ in range(n)]
    return made


def alike(questions: Sequence[int], seed: int = 2) -> list[tuple[list[int], list[int]]]:
    """(prompt, response): one instruction of 24 tokens, a question of each of these lengths behind it, a response to each."""
    begin = random.Random(seed).choices(range(VOCABULARY), k=24)
    return [(begin + question, response) for question, response in families(questions, n=1, seed=seed)]


PAIRS = families([30, 61, 9, 150], n=4) + families([20], n=1, seed=1) + alike([7, 31, 12, 90, 5])
SEQUENCES = [prompt + response for prompt, response in PAIRS]


# The layout


def test_each_token_sees_its_own_way_to_the_root_and_nothing_else() -> None:
    laid_out = LAYOUTS[SHARED](SEQUENCES)
    mask_B_1_T_T = laid_out.inputs()["attention_mask"]
    assert laid_out.position_ids_B_T is not None
    ids_N, positions_N = laid_out.input_ids_B_T.flatten(), laid_out.position_ids_B_T.flatten()
    rows, width = laid_out.input_ids_B_T.shape
    used = set()
    for i, sequence in enumerate(SEQUENCES):
        path = [laid_out.flat_index(i, place) for place in range(len(sequence))]
        assert ids_N[path].tolist() == sequence
        assert positions_N[path].tolist() == list(range(len(sequence)))
        for place, flat in enumerate(path):
            row, column = divmod(flat, width)
            seen = [row * width + other for other in mask_B_1_T_T[row, 0, column].nonzero().flatten().tolist()]
            assert seen == path[: place + 1]
        used |= set(path)
    assert len(used) <= sum(map(len, SEQUENCES)) - 3 * (30 + 61 + 9 + 150) - 3 * 24, "every beginning is there once"
    for flat in set(range(rows * width)) - used:
        row, column = divmod(flat, width)
        assert mask_B_1_T_T[row, 0, column].nonzero().flatten().tolist() == [column], "a row without any would give NaN"


def test_the_mask_is_made_once_in_the_models_type() -> None:
    laid_out = LAYOUTS[SHARED](SEQUENCES)
    seen, added = laid_out.inputs()["attention_mask"], laid_out.inputs(torch.bfloat16)["attention_mask"]
    assert (seen.dtype, added.dtype) == (torch.bool, torch.bfloat16)
    assert torch.equal(added == 0, seen) and torch.equal(added == -math.inf, ~seen)
    assert "attention_mask" not in LAYOUTS["packed"](SEQUENCES).inputs(torch.bfloat16)


def test_a_prompts_last_token_predicts_the_first_of_every_response() -> None:
    laid_out = LAYOUTS[SHARED]([[5, 6, 7, 1], [5, 6, 7, 2, 3]])
    found = find_positions_before(laid_out, [(3, 4), (3, 5)])
    assert laid_out.input_ids_B_T.flatten()[found].tolist() == [7, 7, 2]
    assert found[0] == found[1]


def test_without_sequences_or_shared_tokens_it_is_an_ordinary_row() -> None:
    assert LAYOUTS[SHARED]([]).input_ids_B_T.numel() == 0
    apart = [[1, 2, 3], [4, 5], [6]]
    found, packed = LAYOUTS[SHARED](apart), LAYOUTS["packed"](apart)
    for name in ("input_ids_B_T", "position_ids_B_T"):
        assert torch.equal(getattr(found, name), getattr(packed, name))


# The proof


def body(lm: Any) -> Callable[[Packed], Tensor]:
    return lambda packed: lm.base_model(**packed.inputs(lm.dtype)).last_hidden_state.flatten(0, 1)


def model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    config = build_config(FAMILIES[family])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation=choose_attention(config)).to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3-MoE", "GLM-4", "OLMo2", "GPT-NeoX"])
def test_attention_alone_shares_prompts(family: str, dtype: torch.dtype) -> None:
    lm = model(family, dtype)
    assert obeys_masks(lm)
    alone, neighbour = measure_layout_differences(body(lm), SHARED, VOCABULARY)
    assert neighbour == 0
    assert alone <= (1e-5 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize(
    "family", ["Mistral", "Gemma 2", "Gemma 3", "gpt-oss", "LFM2", "Bamba", "Qwen3-Next", "Falcon-H1"]
)
def test_windows_and_recurrent_states_do_not(family: str) -> None:
    lm = model(family)
    assert not obeys_masks(lm)
    assert layout_error(body(lm), SHARED, VOCABULARY, torch.float32, masks_decide=obeys_masks(lm)) == math.inf


def test_trees_are_tried_first_and_only_where_prompts_are_shared() -> None:
    errors = {SHARED: 0.5, "packed": 0.25, "packed_indexed": 0.25, "padded": 0.25}
    assert prove_layout(errors.__getitem__, "m", share=True) == LayoutProof(layout=SHARED, tried={SHARED: 0.5})
    assert prove_layout(errors.__getitem__, "m") == LayoutProof(layout="packed", tried={"packed": 0.25})
    errors[SHARED] = math.inf
    fallen = prove_layout(errors.__getitem__, "m", share=True)
    assert (fallen.layout, dict(fallen.tried)) == ("packed", {SHARED: math.inf, "packed": 0.25})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("fault", ["siblings", "trees", "positions"])
def test_a_tree_that_is_not_kept_apart_is_found(
    fault: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = LAYOUTS[SHARED]

    def wrong(sequences: Sequence[Sequence[int]]) -> Packed:
        laid_out = right(sequences)
        assert laid_out.ends_B_T is not None and laid_out.position_ids_B_T is not None
        width = laid_out.input_ids_B_T.shape[1]
        if fault == "siblings":  # the first response is seen by those that follow in its tree
            return dataclasses.replace(laid_out, ends_B_T=laid_out.ends_B_T.clamp(min=int(laid_out.ends_B_T[0, 0])))
        if fault == "trees":
            return dataclasses.replace(laid_out, ends_B_T=torch.full_like(laid_out.ends_B_T, width))
        columns_B_T = torch.arange(width).expand_as(laid_out.position_ids_B_T)
        return dataclasses.replace(laid_out, position_ids_B_T=columns_B_T)

    states = body(model("Llama", dtype))
    assert layout_error(states, SHARED, VOCABULARY, dtype) <= 1
    monkeypatch.setitem(layouts.LAYOUTS, SHARED, wrong)  # type: ignore[arg-type]
    assert layout_error(states, SHARED, VOCABULARY, dtype) > 1


def test_who_cannot_share_prompts_is_told_with_the_reason() -> None:
    by_config = LayoutProof(layout="packed", tried={SHARED: math.inf, "packed": 0.1})
    by_numbers = LayoutProof(layout="padded", tried={SHARED: 70.0, "packed": 90.0, "padded": 0.1})
    (line,) = _layout_lines("the student", by_config)
    assert line.startswith(
        "the student: what responses share is computed again for each: its layers do not go by a mask"
    )
    first, second = _layout_lines("the student", by_numbers)
    assert "states differ by 70 times what rounding explains" in first
    assert "(packed: 90 times" in second and "the layout is padded" in second
    assert list(_layout_lines("the student", LayoutProof(layout=SHARED, tried={SHARED: 0.1}))) == []
    assert _layout_record(by_config) == {"layout": "packed", "tried": {SHARED: None, "packed": 0.1}}


# Loss and gradient


@pytest.fixture(scope="module")
def lm(tiny_model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32, attn_implementation="sdpa").eval()


@pytest.fixture(scope="module")
def teacher(expert_dirs: dict[str, Path]) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(expert_dirs["rev"], dtype=torch.float32, attn_implementation="sdpa")


@torch.no_grad()
def scored(teacher: Any, index: int) -> TargetRow:
    prompt, response = PAIRS[index]
    states = teacher.base_model(input_ids=torch.tensor([prompt + response]), use_cache=False).last_hidden_state[0]
    mask = [place % 5 != 3 for place in range(len(response))]  # some tokens are not trained
    return make_row(
        sample_id=f"s{index}", step=1, domain=f"d{index % 2}", teacher="t", policy_version=0, prompt_ids=prompt,
        response_ids=response, loss_mask=mask, behaviour_logprobs=[-1.0] * len(response), head="h", hidden_size=64,
        hidden=states[len(prompt) - 1 : -1][torch.tensor(mask)].numpy().tobytes(),
    )  # fmt: skip


def trained(lm: Any, teacher: Any, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, per-token numbers and gradients of a micro-batch with uneven weights."""
    lm.zero_grad()
    weight_N = torch.linspace(0.5, 1.5, len(batch.token_N)) / len(batch.token_N)
    heads = {"h": Head(teacher.get_output_embeddings().weight.detach(), IDENTITY)}
    student = Student(lm, ReverseKL(), chunk=16, vocab_size=VOCABULARY)
    loss, stats = student(batch, heads, {"divergence": weight_N})
    loss.backward()
    numbers = {f.name: getattr(stats, f.name) for f in dataclasses.fields(stats)}
    return loss.detach(), numbers, {name: param.grad.clone() for name, param in lm.named_parameters()}


def test_loss_numbers_and_gradients_are_those_of_separate_rows(lm: Any, teacher: Any) -> None:
    samples = [(scored(teacher, i),) for i in range(len(PAIRS))]
    fast, slow = (build_micro_batch(samples, torch.float32, None, layout) for layout in (SHARED, "padded"))
    assert torch.equal(fast.token_N, slow.token_N) and fast.domains == slow.domains
    assert fast.packed.input_ids_B_T.numel() < sum(map(len, SEQUENCES))
    (loss, numbers, gradients), (want, wanted, right) = (trained(lm, teacher, batch) for batch in (fast, slow))
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6)
    for name, value in wanted.items():
        torch.testing.assert_close(numbers[name], value, rtol=0, atol=1e-5, equal_nan=True, msg=name)
    for name, gradient in right.items():
        assert float((gradients[name] - gradient).norm()) < 1e-5 * float(gradient.norm()), name
