"""A target stream is read whole and as written, or refused."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pyarrow as pa
import pytest
import torch

from opd.config.payloads import PAYLOADS
from opd.errors import RunError
from opd.payloads import answer_class
from opd.payloads.aligned_states import AlignedStates
from opd.payloads.none import Unscored
from opd.payloads.text import WrittenAnswer
from opd.records.types import Rollout
from opd.stream.schema import (
    VERSION,
    PartRecord,
    Stream,
    StreamError,
    TargetRow,
    make_stream_columns,
    make_stream_schema,
    read_stream,
    write_stream,
)
from tests.rows import columns_of_row, make_row

FIELDS = {payload: make_stream_columns(answer_class(payload)) for payload in PAYLOADS}

D = 3


def row(
    i: int = 0, *, prompt: int = 2, response: int = 3, width: int = D, itemsize: int = 4, **changes: Any
) -> TargetRow:
    mask = changes.get("loss_mask", [k % 2 == 0 for k in range(response)])
    values = {
        "sample_id": f"000012/reverse/{i}",
        "step": 12,
        "domain": "reverse",
        "teacher": "reverse-expert",
        "policy_version": 11,
        "prompt_ids": list(range(i, i + prompt)),
        "response_ids": [100 + i + k for k in range(response)],
        "loss_mask": mask,
        "behaviour_logprobs": [-0.5 * k for k in range(response)],
        "head": "ab" * 32,
        "hidden_size": width,
        "hidden": bytes((i + k) % 256 for k in range(sum(mask) * width * itemsize)),
    }
    return make_row(**values | changes)


ROWS = [row(0), row(1, response=1), row(2, prompt=5, response=4, width=5)]


def plain(stream: Stream) -> list[dict[str, Any]]:
    rows = [columns_of_row(r) for r in stream.rows]
    return [row | {"hidden": bytes(row["hidden"])} if "hidden" in row else row for row in rows]


def arrow_batches(stream: pa.Buffer) -> list[pa.RecordBatch]:
    with pa.ipc.open_stream(stream) as reader:
        return list(reader)


def test_rows_come_back_as_they_were_written() -> None:
    stream = read_stream(write_stream(ROWS, "float32"))
    assert (stream.dtype, stream.payload) == ("float32", "hidden_states")
    assert plain(stream) == [columns_of_row(r) for r in ROWS]


@pytest.mark.parametrize("kind", [bytes, memoryview, lambda b: pa.py_buffer(b.to_pybytes())])
def test_a_stream_is_read_from_any_kind_of_bytes(kind: Any) -> None:
    assert len(read_stream(kind(write_stream(ROWS, "float32"))).rows) == 3


def test_a_part_without_rows_is_a_whole_stream() -> None:
    assert read_stream(write_stream([], "bfloat16")) == Stream("bfloat16", "hidden_states", ())


def test_hidden_states_are_read_without_a_copy_and_bit_by_bit() -> None:
    states = torch.tensor([[1.0, -0.0, float("inf")], [1e-38, 3.14159, -65504.0]], dtype=torch.bfloat16)
    written = write_stream(
        [row(0, response=2, loss_mask=[True] * 2, hidden=states.view(torch.uint8).numpy().tobytes())], "bfloat16"
    )
    (read,) = read_stream(written).rows
    assert torch.equal(
        torch.frombuffer(bytearray(read.answer.hidden), dtype=torch.int16), states.view(torch.int16).flatten()
    )
    view = pa.py_buffer(read.answer.hidden)
    assert written.address <= view.address < written.address + written.size


def test_log_probs_lose_no_float32_digit() -> None:
    value = float(torch.tensor(-0.123456789))
    (read,) = read_stream(write_stream([row(0, response=1, behaviour_logprobs=[value])], "float32")).rows
    assert read.rollout.behaviour_logprobs == (value,)


# Other payloads


def answered(payload: str, i: int = 0, *, response: int = 3, **changes: Any) -> TargetRow:
    """A row with that payload and no hidden states."""
    trained = (response + 1) // 2
    ids = [(7 * i + k) % 76 for k in range(2 * trained)]
    answers: dict[str, dict[str, Any]] = {
        "sampled_logprobs": {"teacher_logprobs": [-0.125 * (i + k) for k in range(trained)]},
        "top_k": {"topk_ids": ids, "topk_logprobs": [-0.5 - k for k in range(2 * trained)]},
    }
    return row(i, response=response, **answers[payload] | changes)


LIGHT = ["sampled_logprobs", "top_k"]


@pytest.mark.parametrize("payload", LIGHT)
def test_other_payloads_come_back_as_they_were_written(payload: str) -> None:
    rows = [answered(payload, 0), answered(payload, 1, response=1), answered(payload, 2, response=4)]
    stream = read_stream(write_stream(rows, "bfloat16", payload))
    assert (stream.dtype, stream.payload) == ("bfloat16", payload)
    assert plain(stream) == [columns_of_row(r) for r in rows]


@pytest.mark.parametrize(
    ("payload", "changes"),
    [
        ("sampled_logprobs", {"teacher_logprobs": []}),
        ("sampled_logprobs", {"teacher_logprobs": [0.0] * 3}),
        ("sampled_logprobs", {"teacher_logprobs": [0.0] * 6}),
        ("sampled_logprobs", {"loss_mask": [True] * 3}),
        ("top_k", {"topk_ids": [], "topk_logprobs": []}),
        ("top_k", {"topk_ids": [1] * 5}),
        ("top_k", {"topk_ids": [1] * 5, "topk_logprobs": [0.0] * 5}),
        ("top_k", {"topk_logprobs": [0.0] * 3}),
    ],
)
def test_a_row_whose_payload_does_not_fit_is_refused_by_name(payload: str, changes: dict[str, Any]) -> None:
    with pytest.raises(StreamError, match=f"row 000012/reverse/7: .* payload {payload} "):
        read_stream(write_stream([answered(payload), answered(payload, 7, **changes)], "float32", payload))


@pytest.mark.parametrize("payload", LIGHT)
def test_rows_of_another_payload_are_refused(payload: str) -> None:
    with pytest.raises(AssertionError, match=payload):
        write_stream(ROWS, "float32", payload)


@pytest.mark.parametrize("payload", LIGHT)
def test_a_stream_that_says_another_payload_is_refused(payload: str) -> None:
    metadata = make_stream_schema("float32", payload).metadata
    with pytest.raises(StreamError, match=rf"columns .*'hidden'\] of {payload}, wanted "):
        read_stream(with_schema(FIELDS["hidden_states"].with_metadata(metadata)))


@pytest.mark.parametrize("payload", FIELDS)
def test_a_payload_has_no_columns_of_another(payload: str) -> None:
    mine = {
        "hidden_states": {"head", "hidden_size", "hidden"},
        "sampled_logprobs": {"teacher_logprobs"},
        "top_k": {"topk_ids", "topk_logprobs"},
        "aligned_states": {
            *("head", "hidden_size", "hidden", "student_counts", "teacher_counts", "spelt", "last_ids", "text_logprobs")
        },
        "none": set(),
        "text": set(),
    }
    found = set(FIELDS[payload].names) | {f.name for f in FIELDS[payload].field("shared").type.value_type}
    assert found & set().union(*mine.values()) == mine[payload]
    assert found - mine[payload] - {"shared"} == {"teacher", "weight", "policy_version"} | {
        f.name for f in dataclasses.fields(Rollout)
    }


def test_top_k_of_two_widths_is_refused() -> None:
    wide = answered("top_k", 7, topk_ids=[1] * 6, topk_logprobs=[0.0] * 6)
    with pytest.raises(StreamError, match=r"row 000012/reverse/7"):
        read_stream(write_stream([answered("top_k"), wide], "float32", "top_k"))


@pytest.mark.parametrize("name", ["prompt_ids", "response_ids", "topk_ids"])
def test_negative_ids_are_refused(name: str) -> None:
    num = {"prompt_ids": 2, "response_ids": 3, "topk_ids": 4}[name]
    bad = answered("top_k", 7, **{name: [*range(num - 1), -1]})
    with pytest.raises(StreamError, match=f"{name} from -1 to .*, wanted 0 to "):
        read_stream(write_stream([answered("top_k"), bad], "float32", "top_k"))


def test_teachers_ids_beyond_the_vocabulary_are_refused_where_it_is_known() -> None:
    stream = write_stream([answered("top_k"), answered("top_k", 7, topk_ids=[1, 2, 3, 76])], "float32", "top_k")
    assert len(read_stream(stream).rows) == len(read_stream(stream, vocab_size=77).rows) == 2
    with pytest.raises(StreamError, match="topk_ids from 0 to 76, wanted 0 to 75"):
        read_stream(stream, vocab_size=76)
    assert read_stream(write_stream([], "float32", "top_k"), vocab_size=76).rows == ()


# Groups


def test_rows_of_many_groups_come_back() -> None:
    rng = random.Random(3)
    rows = [
        row(
            i,
            domain=rng.choice(["reverse", "sort", "umkehr\u00fc"]),
            teacher=rng.choice(["a", "b"]),
            weight=rng.choice([0.25, 0.75]),
            head=rng.choice(["ab" * 32, "cd" * 32]),
            width=rng.choice([D, D + 1]),
        )
        for i in range(40)
    ]
    assert plain(read_stream(write_stream(rows, "float32"))) == [columns_of_row(r) for r in rows]


def test_a_group_is_sent_once() -> None:
    rows = [*(row(i) for i in range(5)), row(5, domain="sort")]
    rows.append(row(6, stop_reason="length"))
    (batch,) = arrow_batches(write_stream(rows, "float32"))
    assert [group["domain"] for group in batch.column("shared").dictionary.to_pylist()] == [
        "reverse",
        "sort",
        "reverse",
    ]


# Streams that were cut


def test_a_stream_cut_at_any_byte_is_refused() -> None:
    whole = write_stream(ROWS, "float32").to_pybytes()
    end_marker = 8  # Arrow's own; all rows and the end record lie before it
    for cut in range(len(whole) - end_marker):
        with pytest.raises(StreamError):
            read_stream(whole[:cut])
    want = plain(read_stream(whole))
    for cut in range(len(whole) - end_marker, len(whole)):
        assert plain(read_stream(whole[:cut])) == want


def rebuilt(batches: list[tuple[pa.RecordBatch, dict[str, str] | None]], schema: pa.Schema | None = None) -> pa.Buffer:
    """A well-formed Arrow stream of these batches."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema or make_stream_schema("float32", "hidden_states")) as writer:
        for batch, metadata in batches:
            writer.write_batch(batch, custom_metadata=metadata)
    return sink.getvalue()


def test_a_stream_without_its_rows_is_refused() -> None:
    with pytest.raises(StreamError, match="ends before its rows: it was cut"):
        read_stream(rebuilt([]))


NO_RECORD = '{"worker":0,"number":0,"broken":{},"teachers":null}'


def test_a_part_says_which_it_is_and_what_was_left_out() -> None:
    record = PartRecord(worker=2, number=7, broken={"a/1": 'no "finite" state'}, teachers={"rev": 3, "up": 0})
    assert read_stream(write_stream(ROWS, "float32", part=record)).part == record
    assert read_stream(write_stream(ROWS, "float32")).part == PartRecord()


@pytest.mark.parametrize(
    "text",
    [
        "1", "", "{", "null", "[]", '{"worker":"0"}', NO_RECORD.replace("0", "null", 1), NO_RECORD.replace("0", "0.5", 1),
        NO_RECORD.replace("{}", '{"a":1}'), NO_RECORD.replace("null", '{"rev":"3"}'), NO_RECORD.replace("null", "[3]"),
    ],
)  # fmt: skip
def test_a_record_of_another_form_is_refused(text: str) -> None:
    (batch,) = arrow_batches(write_stream(ROWS, "float32"))
    with pytest.raises(StreamError, match="its record of the part is broken"):
        read_stream(rebuilt([(batch, {"opd.part": text})]))


def test_rows_without_a_record_are_refused() -> None:
    (batch,) = arrow_batches(write_stream(ROWS, "float32"))
    for metadata in (None, {"opd.end": NO_RECORD}):
        with pytest.raises(StreamError, match="does not say which part of a step it is"):
            read_stream(rebuilt([(batch, metadata)]))


# Streams of another kind


def with_schema(schema: pa.Schema) -> pa.Buffer:
    return rebuilt([], schema)


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"opd.version": "5", "opd.dtype": "float32"}, "version 5, wanted 6"),
        (None, "version None"),
        ({"opd.version": VERSION, "opd.dtype": "float8"}, "dtype 'float8'"),
        ({"opd.version": VERSION}, "dtype ''"),
        ({"opd.version": VERSION, "opd.dtype": "float32"}, "payload ''"),
        (
            {"opd.version": VERSION, "opd.dtype": "float32", "opd.payload": "logits"},
            "payload 'logits', wanted one of hidden",
        ),
    ],
)
def test_another_version_or_dtype_is_refused(metadata: dict[str, str] | None, word: str) -> None:
    with pytest.raises(StreamError, match=word):
        read_stream(with_schema(FIELDS["hidden_states"].with_metadata(metadata)))


@pytest.mark.parametrize("change", ["missing", "extra", "renamed", "retyped", "reordered", "nullable", "grouped"])
def test_other_columns_are_refused(change: str) -> None:
    fields = list(FIELDS["hidden_states"])
    if change == "missing":
        fields.pop()
    elif change == "extra":
        fields.append(pa.field("note", pa.string()))
    elif change == "renamed":
        fields[0] = fields[0].with_name("id")
    elif change == "retyped":
        fields[1] = fields[1].with_type(pa.dictionary(pa.int32(), fields[1].type.value_type))
    elif change == "reordered":
        fields[0], fields[1] = fields[1], fields[0]
    elif change == "nullable":
        fields[0] = fields[0].with_nullable(True)
    else:
        constants = [f for f in fields[1].type.value_type if f.name != "head"]
        fields[1] = fields[1].with_type(pa.dictionary(pa.int16(), pa.struct(constants)))
    with pytest.raises(StreamError, match="columns"):
        read_stream(with_schema(pa.schema(fields, make_stream_schema("float32", "hidden_states").metadata)))


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_mask": [True]},
        {"behaviour_logprobs": [0.0] * 4},
        {"hidden": b"\0" * (2 * D * 4 - 1)},
        {"hidden": b"\0" * (3 * D * 4)},
        {"hidden": b""},
        {"hidden_size": D + 1},
        {"response_ids": [1, 2]},
    ],
)
def test_a_row_whose_lengths_differ_is_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(StreamError, match=r"(row|rollout) 000012/reverse/7: "):
        read_stream(write_stream([row(0), row(7, **changes)], "float32"))


def test_hidden_states_of_the_other_dtype_are_refused() -> None:
    with pytest.raises(StreamError, match=r"payload hidden_states of 12 \(hidden width 3\)"):
        read_stream(write_stream([row(0, itemsize=2)], "float32"))


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 64, b"\xff" * 64, b"PK\x03\x04", b"ARROW1\0\0", random.Random(0).randbytes(4096)]
)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(StreamError):
        read_stream(data)


def changed(column: str, values: pa.Array) -> pa.Buffer:
    """A stream of two rows whose column was replaced."""
    (batch,) = arrow_batches(write_stream([row(0), row(1)], "float32"))
    columns = [values if name == column else batch.column(name) for name in batch.schema.names]
    return rebuilt([(pa.RecordBatch.from_arrays(columns, schema=batch.schema), {"opd.part": NO_RECORD})])


def groups_of(numbers: list[int | None], entries: list[dict[str, Any] | None]) -> pa.Array:
    kind = FIELDS["hidden_states"].field("shared").type
    return pa.DictionaryArray.from_arrays(
        pa.array(numbers, kind.index_type), pa.array(entries, kind.value_type), safe=False
    )


GROUP = {
    "step": 12,
    "domain": "reverse",
    "policy_version": 11,
    "stop_reason": "stop",
    "group": None,
    "episode": None,
    "reward": None,
    "teacher": "rev",
    "weight": 1.0,
    "head": "ab",
    "hidden_size": D,
}


def test_the_changed_stream_can_be_right() -> None:
    stream = read_stream(changed("shared", groups_of([1, 0], [GROUP, GROUP | {"domain": "sort"}])))
    assert [r.rollout.domain for r in stream.rows] == ["sort", "reverse"]


@pytest.mark.parametrize("number", [1, 2, 32767, -1])
def test_a_group_that_does_not_exist_is_refused(number: int) -> None:
    with pytest.raises(StreamError, match="not a whole Arrow stream"):
        read_stream(changed("shared", groups_of([0, number], [GROUP])))


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("sample_id", pa.array(["a", None])),
        ("spans", pa.array([[(3, 0, 1)], [(3, 0, None)]], FIELDS["hidden_states"].field("spans").type)),
        ("response_ids", pa.array([[1, 2, 3], None], pa.list_(pa.int32()))),
        ("response_ids", pa.array([[1, 2, 3], [1, None, 3]], pa.list_(pa.int32()))),
        ("hidden", pa.array([b"\0" * 36, None], pa.large_binary())),
        ("shared", groups_of([0, None], [GROUP])),
        ("shared", groups_of([0, 1], [GROUP, None])),
        ("shared", groups_of([0, 0], [GROUP | {"step": None}])),
        ("shared", groups_of([0, 0], [GROUP | {"hidden_size": None}])),
    ],
)
def test_missing_values_are_refused(column: str, values: pa.Array) -> None:
    with pytest.raises(StreamError, match=f"column {column} has missing values"):
        read_stream(changed(column, values))


def test_names_that_are_not_utf8_are_refused() -> None:
    whole = write_stream([row(0, domain="RRRR")], "float32").to_pybytes()
    assert whole.count(b"RRRR") == 1
    with pytest.raises(StreamError, match=r"(?i)utf-?8"):
        read_stream(whole.replace(b"RRRR", b"RR\xffR"))


def unscored(i: int, domain: str) -> TargetRow:
    return TargetRow(rollout=row(i, domain=domain).rollout, teacher="nobody", answer=Unscored())


def written(i: int, domain: str) -> TargetRow:
    return TargetRow(rollout=row(i, domain=domain).rollout, teacher="writer", answer=WrittenAnswer())


def aligned(i: int, domain: str) -> TargetRow:
    """Two chunks, of the first trained tokens and the last one."""
    rollout = row(i, response=3 + 2 * i, domain=domain).rollout
    num = rollout.num_trained
    answer = AlignedStates(
        "head", D, bytes(3 * D * 4), [num - 1, 1], [2, 1], [False, True], [7, -1], [-1.5, *[0.0] * (num - 2), -0.25]
    )
    return TargetRow(rollout=rollout, teacher="foreign", answer=answer)


@pytest.mark.parametrize(
    "changes",
    [
        {"student_counts": [1, 1]},
        {"student_counts": [2, 0]},
        {"teacher_counts": [3]},
        {"spelt": [True]},
        {"last_ids": [-1, -1]},
        {"last_ids": [7, -2]},
        {"text_logprobs": [-1.0, -0.25]},
        {"hidden": bytes(4)},
    ],
)
def test_chunks_that_cannot_be_about_the_response_are_refused(changes: dict[str, Any]) -> None:
    whole = aligned(1, "reverse")
    (read,) = read_stream(write_stream([whole], "float32", "aligned_states")).rows
    assert read.rollout == whole.rollout and read.answer.student_counts == whole.answer.student_counts == [2, 1]
    broken = dataclasses.replace(whole, answer=dataclasses.replace(whole.answer, **changes))
    with pytest.raises(StreamError, match="3 trained tokens, payload aligned_states"):
        read_stream(write_stream([broken], "float32", "aligned_states"))


@pytest.mark.parametrize("payload", FIELDS)
def test_damaged_bytes_are_refused_or_harmless_to_the_reader(payload: str) -> None:
    made = {
        "hidden_states": lambda i, name: row(i, response=1 + i, domain=name),
        "none": unscored,
        "text": written,
        "aligned_states": aligned,
    }
    make = made.get(payload, lambda i, name: answered(payload, i, domain=name))
    rows = [make(i, name) for i, name in enumerate(["reverse", "sort", "sort", "gcd"])]
    whole, rng = write_stream(rows, "float32", payload).to_pybytes(), random.Random(1)
    refused = 0
    for _ in range(3000):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 1, 4])):
            damaged[rng.randrange(len(whole))] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        try:
            assert len(read_stream(damaged).rows) == 4
        except StreamError:
            refused += 1
    assert 1000 < refused < 2900


def test_a_stream_error_ends_a_run() -> None:
    assert issubclass(StreamError, RunError)


# Size


def realistic(num_rows: int, response: int) -> list[TargetRow]:
    """A worker's rows of one step of ten domains, each with an expert and a head of its own: bfloat16, d=576."""
    names = [
        "base_conversion", "caesar_cipher", "chain_sum", "count_bits", "gcd", "letter_counting", "number_sorting",
        "reverse", "spell_backward", "word_sorting",
    ]  # fmt: skip
    return [
        row(
            i,
            prompt=40,
            response=response,
            width=576,
            itemsize=2,
            sample_id=f"000012/{name}/{i}",
            loss_mask=[True] * response,
            domain=name,
            teacher=f"{name}-expert",
            head=f"{number:064x}",
        )
        for number, name in enumerate(names)
        for i in range(num_rows // 10)
    ]


@pytest.mark.parametrize(("num_rows", "response"), [(20, 64), (60, 40), (120, 32), (120, 64), (300, 31)])
def test_a_token_costs_its_hidden_state_and_at_most_16_bytes(num_rows: int, response: int) -> None:
    written = write_stream(realistic(num_rows, response), "bfloat16")
    assert written.size / (num_rows * response) <= 2 * 576 + 16
    assert len(read_stream(written).rows) == num_rows
