"""A teacher's tokens spelt in the student's."""

from __future__ import annotations

import pickle

import numpy as np

from opd.vocabularies.byte_table import read_byte_table
from opd.vocabularies.response_encoder import ResponseEncoder
from opd.vocabularies.spelling import Spelling, build_tables
from tests.conftest import build_tokenizer
from tests.tokenizers import train_byte_level, train_sentencepiece


def test_every_token_is_spelt_with_its_own_bytes() -> None:
    own, other = train_byte_level(280), train_sentencepiece(360)
    encoder = ResponseEncoder(own, other, {own.eos_token_id: other.eos_token_id})
    student, teacher = read_byte_table(own), read_byte_table(other)
    spelling = encoder.spelling
    assert len(spelling.tokens) == len(teacher.token_bytes) and spelling.student_size == len(student.token_bytes)
    assert spelling.tokens[other.eos_token_id] == (own.eos_token_id,)
    assert spelling.tokens[other.unk_token_id] == ()
    counterparts = {int(u): (v,) for v, u in enumerate(encoder.shared.teacher_ids) if u >= 0}
    texts = set(teacher.token_bytes) - {teacher.token_bytes[i] for i in teacher.fallback}
    for i, written in enumerate(teacher.token_bytes):
        if i in counterparts:
            assert spelling.tokens[i] == counterparts[i]
        elif i in teacher.fallback and written in texts:
            assert spelling.tokens[i] == ()  # <0x61> stands beside `a`
        elif i not in teacher.special and i not in teacher.fallback:
            assert student.join(spelling.tokens[i]) == written and len(spelling.tokens[i]) > 1


def test_tokens_are_found_by_how_their_spelling_begins() -> None:
    spelt = [(2,), (), (0,), (0, 3), (6,), (0, 3, 1), (1,), (0, 3), (3, 0)]
    spelling = pickle.loads(pickle.dumps(Spelling(spelt, 7)))
    for start in [(0,), (0, 3), (0, 3, 1), (1,), (3,), (4,), (6,)]:
        wanted = {i for i, own in enumerate(spelt) if own[: len(start)] == start}
        assert set(spelling.find_tokens(start).tolist()) == wanted
    assert [i for i in range(9) if spelling.has_extensions(i)] == [2, 3, 7]
    tables = build_tables(spelling)
    assert tables.single_ids.tolist() == [2, 6, 0, -1, -1, -1, 4]
    assert dict(zip(tables.other_ids.tolist(), tables.other_firsts.tolist(), strict=True)) == {3: 0, 5: 0, 7: 0, 8: 3}
    extensions = {
        i: list(
            zip(tables.extension_ids[start:stop].tolist(), tables.extension_nexts[start:stop].tolist(), strict=True)
        )
        for i, (start, stop) in enumerate(zip(tables.extension_starts, tables.extension_starts[1:], strict=False))
        if start < stop
    }
    assert extensions == {2: [(3, 3), (5, 3), (7, 3)], 3: [(5, 1)], 7: [(5, 1)]}
    packed = tables.pack()
    assert packed.dtype == np.int32 and packed[:6].tolist() == [7, 4, 4, 10, 5, 5] and len(packed) == 6 + 35


def test_permuted_ids_have_no_longer_tokens() -> None:
    own, other = build_tokenizer(), build_tokenizer(permute_vocab=True)
    tables = build_tables(ResponseEncoder(own, other, {own.eos_token_id: other.eos_token_id}).spelling)
    assert not len(tables.extension_ids) and not len(tables.other_ids)
    names = own.convert_ids_to_tokens(range(len(own)))
    assert tables.single_ids.tolist() == other.convert_tokens_to_ids(names)
