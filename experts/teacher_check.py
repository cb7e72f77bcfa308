"""Check that an expert can teach a student: token ids and end tokens have to be equal; sizes and architecture may differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from experts.model_dir import ModelInfo, token_map
from opd.errors import ModelError

_OTHER_TOKENS = (
    "fine-tune the expert from the student's family, with the student's tokenizer, or let it read its own tokens: give it "
    "`engine: {kind: transformers, payload: aligned_states}` and its domain `objective: {kind: aligned_kl}`"
)
_MAX_LISTED = 5


def check_fits(student: ModelInfo, expert: ModelInfo, expert_name: str, *, own_tokens: bool = False) -> list[str]:
    """Check that the expert can score the student's token ids. Returns warnings, one sentence each.

    With `own_tokens` it reads tokens and a chat template of its own, and nothing has to be equal.

    Raises: ModelError if a token id means another token in the two vocabularies, or if the end tokens differ.
    """
    if own_tokens:
        return []
    _check_vocabulary(student, expert, expert_name)
    _check_eos(student, expert, expert_name)
    return _collect_warnings(student, expert, expert_name)


def _check_vocabulary(student: ModelInfo, expert: ModelInfo, name: str) -> None:
    if student.vocab_hash == expert.vocab_hash:
        return
    student_tokens, expert_tokens = token_map(Path(student.path)), token_map(Path(expert.path))
    difference = (
        _size_difference(student_tokens, expert_tokens)
        if len(student_tokens) != len(expert_tokens)
        else _id_difference(student_tokens, expert_tokens)
    )
    raise ModelError.at(
        f"expert `{name}`: {Path(expert.path) / 'tokenizer.json'}",
        found=difference,
        wanted=f"the id of every token as in {Path(student.path) / 'tokenizer.json'}",
        fix=_OTHER_TOKENS,
    )


def _size_difference(student_tokens: Mapping[int, str], expert_tokens: Mapping[int, str]) -> str:
    sizes = f"{len(expert_tokens)} tokens, the student has {len(student_tokens)}"
    only_expert = _format_list(set(expert_tokens.values()) - set(student_tokens.values()))
    only_student = _format_list(set(student_tokens.values()) - set(expert_tokens.values()))
    parts = [sizes]
    if only_expert:
        parts.append(f"the student lacks {only_expert}")
    if only_student:
        parts.append(f"the expert lacks {only_student}")
    return "; ".join(parts)


def _id_difference(student_tokens: Mapping[int, str], expert_tokens: Mapping[int, str]) -> str:
    lowest_id = min(
        i for i in student_tokens.keys() | expert_tokens.keys() if student_tokens.get(i) != expert_tokens.get(i)
    )
    permuted = set(student_tokens.values()) == set(expert_tokens.values())
    kind = "the same tokens with permuted ids" if permuted else "as many tokens, but other ones"
    return f"{kind}: id {lowest_id} is {expert_tokens.get(lowest_id)!r} in the expert and {student_tokens.get(lowest_id)!r} in the student"


def _format_list(tokens: set[str]) -> str:
    shown = ", ".join(repr(token) for token in sorted(tokens)[:_MAX_LISTED])
    return shown + (f" and {len(tokens) - _MAX_LISTED} more" if len(tokens) > _MAX_LISTED else "")


def _check_eos(student: ModelInfo, expert: ModelInfo, name: str) -> None:
    if set(student.eos_token_ids) == set(expert.eos_token_ids):
        return
    raise ModelError.at(
        f"expert `{name}`: eos_token_id in {expert.path} (generation_config.json, config.json, tokenizer_config.json)",
        found=_named_ids(expert),
        wanted=f"{_named_ids(student)} as in {student.path}",
        fix="correct `eos_token_id` where it is wrong; an expert that learned another end has to be trained again",
    )


def _named_ids(info: ModelInfo) -> str:
    tokens = token_map(Path(info.path))
    return ", ".join(f"{i} ({tokens.get(i)!r})" for i in sorted(info.eos_token_ids)) or "no end token"


def _collect_warnings(student: ModelInfo, expert: ModelInfo, name: str) -> list[str]:
    if student.chat_template_hash == expert.chat_template_hash:
        return []
    difference = (
        "has no chat template, unlike the student"
        if expert.chat_template_hash is None
        else "has another chat template than the student"
    )
    return [f"expert `{name}` {difference}; it scores prompts as the student writes them, which may be new to it"]
