"""A model's text is all that is neither end nor padding."""

from __future__ import annotations

from opd.rollouts.decoding import end_ids, written_text
from tests.chatml import chat_tokenizer


def test_only_what_ends_or_pads_is_left_out() -> None:
    tokenizer = chat_tokenizer(None, ("<answer>", "</answer>"))
    ids = tokenizer("abc<answer>cba</answer><|endoftext|><|im_end|><pad>")["input_ids"]
    pad, eos, other = tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert len(ids) == 11 and end_ids(tokenizer, []) == {pad, eos}
    assert written_text(tokenizer, ids, end_ids(tokenizer, [other])) == "abc<answer>cba</answer>"
    assert written_text(tokenizer, ids, end_ids(tokenizer, [])) == "abc<answer>cba</answer><|endoftext|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "abccba", "which is what no verifier should read"


def test_a_tokenizer_without_padding_has_none() -> None:
    tokenizer = chat_tokenizer(None)
    tokenizer.pad_token = None
    assert end_ids(tokenizer, [7]) == {7, tokenizer.eos_token_id}
