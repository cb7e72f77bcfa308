"""Responses in a teacher's tokens: texts in many scripts, characters that are cut, special tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from opd.vocabularies.byte_table import read_byte_table
from opd.vocabularies.response_encoder import ResponseEncoder, UnreadableResponseError
from tests.conftest import build_tokenizer
from tests.rows import make_rollout
from tests.tokenizers import train_byte_level, train_sentencepiece

SCRIPTS = (
    "abc xyz",
    "äöüß éè",
    "日本語你好",
    "שלום",
    "مرحبا",
    "हिन्दी",
    "🙂👩‍👧🏽",
    "012345",
    " \n\t",
    "<s></s><end>▁Ġ",
)
KINDS = {
    "byte level": lambda: train_byte_level(320),
    "byte level with a prefix": lambda: train_byte_level(400, prefix=True),
    "sentencepiece": lambda: train_sentencepiece(340),
}


def make_encoder(student: Any, teacher: Any) -> ResponseEncoder:
    return ResponseEncoder(student, teacher, {student.eos_token_id: teacher.eos_token_id})


def encode_plain(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text in which no special token is meant."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return ids


@pytest.mark.parametrize("teacher", KINDS)
@pytest.mark.parametrize("student", KINDS)
def test_every_byte_of_a_response_is_covered_whatever_its_script(student: str, teacher: str) -> None:
    own, other = KINDS[student](), KINDS[teacher]()
    encoder = make_encoder(own, other)
    own_table, other_table = read_byte_table(own), read_byte_table(other)
    rng = random.Random(f"{student} {teacher}")
    for _ in range(60):
        text = "".join(rng.choice(rng.choice(SCRIPTS)) for _ in range(rng.randint(1, 40)))
        ids = encode_plain(own, text)
        ids = ids[: rng.randint(1, len(ids))]  # it may end within a character, as a response at the token limit does
        encoded = encoder.encode_response([*ids, own.eos_token_id])
        assert encoded.token_ids[-1] == other.eos_token_id
        assert other_table.join(encoded.token_ids) == own_table.join(ids)
        assert sum(encoded.alignment.student_counts) == len(ids) + 1
        assert sum(encoded.alignment.teacher_counts) == len(encoded.token_ids)
        place = [0, 0]
        for counts in zip(encoded.alignment.student_counts, encoded.alignment.teacher_counts, strict=True):
            stops = [start + count for start, count in zip(place, counts, strict=True)]
            parts = [own_table.join(ids[place[0] : stops[0]]), other_table.join(encoded.token_ids[place[1] : stops[1]])]
            assert parts[0] == parts[1]
            place = stops


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_spells_a_special_token_stays_text(kind: str) -> None:
    own, other = train_byte_level(300), KINDS[kind]()
    encoded = make_encoder(own, other).encode_response(encode_plain(own, "a</s><end>b"))
    assert not set(encoded.token_ids) & set(other.all_special_ids)


def test_bytes_within_a_response_that_are_no_text_become_tokens_for_bytes() -> None:
    own, other = train_byte_level(300), train_sentencepiece(340)
    ids = encode_plain(own, "日")
    encoded = make_encoder(own, other).encode_response([*ids[1:], *ids])
    names = [f"<0x{byte:02X}>" for byte in "日".encode()]
    assert other.convert_ids_to_tokens(list(encoded.token_ids)) == [*names[1:], *names]
    with pytest.raises(UnreadableResponseError, match="no tokens for"):
        make_encoder(own, train_sentencepiece(90, fallback=False)).encode_response([ids[0]])


def test_what_a_teacher_cannot_read_is_refused() -> None:
    own, other = train_byte_level(300), train_sentencepiece(90, fallback=False)
    encoder = make_encoder(own, other)
    with pytest.raises(UnreadableResponseError, match="no tokens for"):
        encoder.encode_response(encode_plain(own, "日本"))
    assert encoder.encode_response([own.bos_token_id]).token_ids == (other.bos_token_id,)  # <s> is in both
    with pytest.raises(UnreadableResponseError, match=r"special token '<unk>'"):
        make_encoder(other, own).encode_response([other.unk_token_id])


def test_other_ends_than_that_of_a_turn_keep_their_name_if_there_is_one() -> None:
    own = train_byte_level(300)
    own.add_special_tokens({"additional_special_tokens": ["<turn>", "<stop>"]})
    other = train_sentencepiece(340, more_specials=["</s>"])
    ids = own.convert_tokens_to_ids(["<turn>", "</s>", "<stop>"])
    encoder = ResponseEncoder(own, other, dict.fromkeys(ids, other.eos_token_id))
    encoded = encoder.encode_response(ids)
    assert other.convert_ids_to_tokens(list(encoded.token_ids)) == ["<end>", "</s>", "<end>"]
    assert encoder.shared.teacher_ids[ids].tolist() == [*encoded.token_ids[:2], -1]


def test_shared_tokens_have_the_same_bytes_and_one_counterpart() -> None:
    own, other = train_sentencepiece(340), train_byte_level(400)
    shared = make_encoder(own, other).shared
    own_table, other_table = read_byte_table(own), read_byte_table(other)
    pairs = [(i, int(j)) for i, j in enumerate(shared.teacher_ids) if j >= 0]
    assert len({j for _, j in pairs}) == len(pairs) > 60
    special = {own.bos_token_id: other.bos_token_id, own.eos_token_id: other.eos_token_id}
    for i, j in pairs:
        assert special.get(i) == j or own_table.token_bytes[i] == other_table.token_bytes[j] != b""
    letter = own.convert_tokens_to_ids("a")
    assert shared.teacher_ids[letter] == other.convert_tokens_to_ids("a")  # and not that of <0x61>
    assert shared.teacher_ids[own.convert_tokens_to_ids("<0x61>")] == -1


def test_permuted_ids_are_all_shared() -> None:
    own, other = build_tokenizer(), build_tokenizer(permute_vocab=True)
    encoder = make_encoder(own, other)
    names = own.convert_ids_to_tokens(range(len(own)))
    assert encoder.shared.teacher_ids.tolist() == other.convert_tokens_to_ids(names)
    ids = [*encode_plain(own, "rev hxkq=qkxh"), own.eos_token_id]
    encoded = encoder.encode_response(ids)
    assert encoded.token_ids == tuple(encoder.shared.teacher_ids[ids])
    assert set(encoded.alignment.student_counts) == set(encoded.alignment.teacher_counts) == {1}


def test_a_rollout_comes_back_as_it_was() -> None:
    own, other = train_byte_level(300), train_sentencepiece(340)
    ids = encode_plain(own, "the fox")
    rollout = make_rollout(
        sample_id="a", step=3, domain="d", prompt_ids=(1, 2), response_ids=ids, behaviour_logprobs=[-1.0] * len(ids)
    )
    encoder = make_encoder(own, other)
    encoded = encoder.encode_rollout(rollout, (5, 6, 7))
    assert encoded.prompt_ids == (5, 6, 7)
    assert encoded.num_trained == len(encoded.response_ids)
    assert encoded.as_sampled() is rollout
    short = ResponseEncoder(own, other, {own.eos_token_id: other.eos_token_id}, context=4)
    with pytest.raises(UnreadableResponseError, match="context of 4"):
        short.encode_rollout(rollout, (5, 6, 7))
    mask = [False, *[True] * (len(ids) - 1)]
    part = make_rollout(sample_id="a", step=3, domain="d", prompt_ids=(1,), response_ids=ids, loss_mask=mask)
    with pytest.raises(UnreadableResponseError, match="without loss"):
        encoder.encode_rollout(part, (5,))


def test_a_tokenizer_whose_tokens_have_no_bytes_is_refused() -> None:
    backend = Tokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        read_byte_table(PreTrainedTokenizerFast(tokenizer_object=backend))
