"""Experts that fit a student."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from experts.model_dir import ModelInfo, inspect_model
from experts.teacher_check import check_fits
from opd.errors import ModelError


@pytest.fixture
def student(tiny_model_dir: Path) -> ModelInfo:
    return inspect_model(tiny_model_dir)


@pytest.fixture
def expert_dir(tiny_model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "expert"))


def refusal(student: ModelInfo, expert: Path) -> str:
    with pytest.raises(ModelError) as error:
        check_fits(student, inspect_model(expert), "math")
    assert "`math`" in str(error.value)
    return str(error.value)


def edit_tokens(model: Path, edit: Callable[[dict[str, int]], dict[str, int]]) -> None:
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"] = edit(tokenizer["model"]["vocab"])
    file.write_text(json.dumps(tokenizer))


def test_another_width_and_depth_fits(student: ModelInfo, make_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    expert = inspect_model(make_model_dir(tmp_path / "wide", seed=1, hidden=96, heads=3, layers=1, tie=False))
    assert check_fits(student, expert, "math") == []


def test_permuted_ids_are_refused_with_the_first_differing_id(
    student: ModelInfo, make_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    message = refusal(student, make_model_dir(tmp_path / "permuted", permute_vocab=True, layers=1))
    assert "permuted ids: id 4 is '?' in the expert and 'a' in the student" in message
    assert "tokenizer.json" in message


def test_as_many_other_tokens_are_refused(student: ModelInfo, expert_dir: Path) -> None:
    edit_tokens(expert_dir, lambda vocab: {("€" if token == "a" else token): i for token, i in vocab.items()})
    message = refusal(student, expert_dir)
    assert "as many tokens, but other ones: id 4 is '€' in the expert and 'a' in the student" in message


def test_a_smaller_vocabulary_is_refused_with_at_most_five_tokens(student: ModelInfo, expert_dir: Path) -> None:
    edit_tokens(expert_dir, lambda vocab: {token: i for token, i in vocab.items() if i < 66})
    message = refusal(student, expert_dir)
    assert "66 tokens, the student has 76; the expert lacks ' ', '+', ',', '-', '.' and 5 more" in message


def test_tokens_that_the_student_lacks_are_named(tiny_model_dir: Path, expert_dir: Path) -> None:
    edit_tokens(expert_dir, lambda vocab: {token: i for token, i in vocab.items() if token != "?"})
    message = refusal(inspect_model(expert_dir), tiny_model_dir)
    assert "76 tokens, the student has 75; the student lacks '?'" in message


def test_another_end_token_is_refused(student: ModelInfo, make_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    message = refusal(student, make_model_dir(tmp_path / "eos", eos="<unk>", layers=1))
    assert "eos_token_id" in message
    assert "3 ('<unk>')" in message
    assert "2 ('<eos>')" in message


def test_the_order_of_end_tokens_and_the_pad_token_do_not_matter(student: ModelInfo, expert_dir: Path) -> None:
    two = student.model_copy(update={"eos_token_ids": (2, 3)})
    expert = inspect_model(expert_dir).model_copy(update={"eos_token_ids": (3, 2), "pad_token_id": 2})
    assert check_fits(two, expert, "math") == []


def test_another_chat_template_is_a_warning(student: ModelInfo, expert_dir: Path) -> None:
    (expert_dir / "chat_template.jinja").write_text("other")
    (warning,) = check_fits(student, inspect_model(expert_dir), "math")
    assert "`math` has another chat template" in warning
    (expert_dir / "chat_template.jinja").unlink()
    (warning,) = check_fits(student, inspect_model(expert_dir), "math")
    assert "`math` has no chat template" in warning
