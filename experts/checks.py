"""Check that an expert can teach a student: same token ids, same end tokens. Sizes and architecture may differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from experts.model_dir import ModelInfo, token_map
from opd.errors import ModelError

_TRAIN_AGAIN = "fine-tune the expert from the student's family, with the student's tokenizer"
_MAX_LISTED = 5


def check_fits(student: ModelInfo, expert: ModelInfo, expert_name: str) -> list[str]:
    """Check that the expert can score the student's token ids; returns warnings, one sentence each.

    Raises: ModelError if the vocabularies (by id, not by size) or the end tokens differ.
    """
    _check_vocabulary(student, expert, expert_name)
    _check_eos(student, expert, expert_name)
    return _collect_warnings(student, expert, expert_name)


def _check_vocabulary(student: ModelInfo, expert: ModelInfo, name: str) -> None:
    if student.vocab_hash == expert.vocab_hash:
        return
    ours, theirs = token_map(Path(student.path)), token_map(Path(expert.path))
    found = _size_difference(ours, theirs) if len(ours) != len(theirs) else _id_difference(ours, theirs)
    raise ModelError.at(
        f"expert `{name}`: {Path(expert.path) / 'tokenizer.json'}",
        found=found,
        wanted=f"the id of every token as in {Path(student.path) / 'tokenizer.json'}",
        fix=_TRAIN_AGAIN,
    )


def _size_difference(ours: Mapping[int, str], theirs: Mapping[int, str]) -> str:
    sizes = f"{len(theirs)} tokens, the student has {len(ours)}"
    only_theirs = _format_list(set(theirs.values()) - set(ours.values()))
    only_ours = _format_list(set(ours.values()) - set(theirs.values()))
    parts = [sizes]
    if only_theirs:
        parts.append(f"the student lacks {only_theirs}")
    if only_ours:
        parts.append(f"the expert lacks {only_ours}")
    return "; ".join(parts)


def _id_difference(ours: Mapping[int, str], theirs: Mapping[int, str]) -> str:
    first = min(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    permuted = set(ours.values()) == set(theirs.values())
    what = "the same tokens with permuted ids" if permuted else "as many tokens, but other ones"
    return f"{what}: id {first} is {theirs.get(first)!r} in the expert and {ours.get(first)!r} in the student"


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
    how = (
        "has no chat template, unlike the student"
        if expert.chat_template_hash is None
        else "has another chat template than the student"
    )
    return [f"expert `{name}` {how}; it scores prompts as the student writes them, which may be new to it"]
