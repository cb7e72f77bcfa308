"""Bytes per response token on the wire, for every payload that a teacher can send.

    python benchmarks/payload.py
    python benchmarks/payload.py --driver

Rows go through `TargetRow` and `write_parts`, as in a run; what is counted are all Arrow streams of one worker and step
with prompts, ids, log-probs, spans, names, offsets, padding and Arrow's headers. Nothing is compressed, so the
values do not matter. The last column is the shortest response from which a token costs its payload and at most 16 bytes.
`--scorer` also lets a `TeacherWorker` with tiny randomly initialised Llamas score the same rows, and checks that its
stream is as long as the fabricated one. `--driver` counts something else, with a real target log: the bytes of a step that go through
the driver, which gets summaries of parts and writes the rollouts, beside those of the parts, which the workers write. No figure
depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import score

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from opd.payloads import answer_class  # noqa: E402
from opd.payloads.answer import Answer  # noqa: E402
from opd.records.types import Rollout, Span, Teacher  # noqa: E402
from opd.settings.strict import DTYPE_BYTES  # noqa: E402 - found without an installation
from opd.stream.schema import TargetRow, write_parts  # noqa: E402

SMALL_VOCAB = 256
"""Vocabulary of the tiny model. Its size does not matter: an id always takes 4 bytes."""
DENSE_VOCAB = (49152, 151936)
TOKEN_BYTES = 16
"""Allowed per token beside the payload: its id, the student's log-prob, its share of prompt, spans and names."""
LONGEST = 256
"""Responses beyond this are not tried in search of the bound."""
DOMAINS = (
    "base_conversion", "caesar_cipher", "chain_sum", "count_bits", "gcd", "letter_counting", "number_sorting",
    "reverse", "spell_backward", "word_sorting",
)  # fmt: skip


@dataclass(frozen=True)
class Payload:
    """One way to send what a teacher thinks of a token."""

    name: str
    width: int = 0
    """d of `hidden_states`, K of `top_k`."""
    dtype: str = "float32"
    """Type of the hidden states; log-probs are float32."""

    @property
    def token_bytes(self) -> int:
        """The payload alone."""
        return answer_class(self.name).token_bytes(
            hidden_size=self.width, itemsize=DTYPE_BYTES[self.dtype], top_k=self.width
        )

    @property
    def label(self) -> str:
        detail = {"hidden_states": f" {self.dtype}, d={self.width}", "top_k": f", K={self.width}"}
        return self.name + detail.get(self.name, "")

    @property
    def limit(self) -> int:
        """Payload and `TOKEN_BYTES`; for bfloat16 hidden states 2·d + 16."""
        return self.token_bytes + TOKEN_BYTES


@dataclass(frozen=True)
class Measured:
    payload: Payload
    rows: int
    response: int
    stream_bytes: int

    @property
    def bytes_per_token(self) -> float:
        return self.stream_bytes / (self.rows * self.response)

    @property
    def holds(self) -> bool:
        return self.bytes_per_token <= self.payload.limit


Measure = Callable[[Payload, int], Measured]
"""Function that measures a payload, with the same length of all responses."""


def payloads(widths: Sequence[int], ks: Sequence[int]) -> Iterator[Payload]:
    for width in widths:
        yield Payload("hidden_states", width, "float32")
        yield Payload("hidden_states", width, "bfloat16")
    yield Payload("sampled_logprobs")
    for k in ks:
        yield Payload("top_k", k)


def make_rollouts(rows: int, prompt: int, response: int) -> dict[str, list[Rollout]]:
    """Domain -> rollouts, spread as evenly as possible."""
    rng = random.Random(0)
    rollouts: dict[str, list[Rollout]] = {domain: [] for domain in DOMAINS[:rows]}
    for i in range(rows):
        domain = DOMAINS[i % len(DOMAINS)]
        sample_id = f"000012/{domain}/{i // len(DOMAINS)}"
        rollouts[domain].append(
            Rollout(
                sample_id=sample_id,
                group=sample_id,
                episode=sample_id,
                step=12,
                domain=domain,
                prompt_ids=tuple(rng.choices(range(SMALL_VOCAB), k=prompt)),
                response_ids=tuple(rng.choices(range(SMALL_VOCAB), k=response)),
                behaviour_logprobs=tuple(rng.uniform(-3, 0) for _ in range(response)),
                spans=(Span(length=response, origin="policy", policy_version=11),),
                stop_reason="stop",
            )
        )
    return rollouts


def answer(payload: Payload, response: int, domain: str) -> Answer:
    """Return what a scorer fills in for one row."""
    num = response * payload.width
    columns: dict[str, dict[str, Any]] = {
        "hidden_states": {
            "head": f"{DOMAINS.index(domain):064x}",
            "hidden_size": payload.width,
            "hidden": bytes(response * payload.token_bytes),
        },
        "sampled_logprobs": {"teacher_logprobs": [-1.5] * response},
        "top_k": {"topk_ids": list(range(num)), "topk_logprobs": [-1.5] * num},
    }
    return answer_class(payload.name)(**columns[payload.name])


def fabricate(rollout: Rollout, answered: Answer) -> TargetRow:
    return TargetRow(rollout=rollout, teacher=f"{rollout.domain}-expert", answer=answered)


def fabricated(rows: int, prompt: int) -> Measure:
    """Streams of rows that no teacher has seen, one batch for each domain."""

    def measure(payload: Payload, response: int) -> Measured:
        answered = {domain: answer(payload, response, domain) for domain in DOMAINS}
        batches = [
            [fabricate(r, answered[r.domain]) for r in part] for part in make_rollouts(rows, prompt, response).values()
        ]
        names = [f"{domain}-expert" for domain in DOMAINS]
        parts = write_parts(batches, payload.dtype, payload.name, worker=0, broken={}, teachers=names)
        return Measured(payload, rows, response, sum(part.size for part in parts))

    return measure


def holds_from(measure: Measure, payload: Payload) -> int | None:
    """The shortest response within the limit; None if `LONGEST` is over it. What a row costs is shared by its tokens."""
    if not measure(payload, LONGEST).holds:
        return None
    over, within = 0, LONGEST
    while within - over > 1:
        middle = (over + within) // 2
        over, within = (over, middle) if measure(payload, middle).holds else (middle, within)
    return within


def check_worker(rows: int, prompt: int, responses: Sequence[int], ks: Sequence[int]) -> list[str]:
    """Streams of a real worker beside fabricated ones, one line each."""
    width = 128
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        scored = _scored(_tiny_teachers(Path(folder), width), rows, prompt)
        for payload in payloads([width], ks):
            for response in responses:
                real, wanted = scored(payload, response), fabricated(rows, prompt)(payload, response)
                verdict = (
                    "as fabricated" if real.stream_bytes == wanted.stream_bytes else f"not {wanted.stream_bytes:,}"
                )
                lines.append(
                    f"scored {payload.label}, R={response}: {real.stream_bytes:,} bytes, {verdict}: "
                    f"{real.bytes_per_token:,.1f} a token{'' if real.holds else ' (over)'}, limit {payload.limit:,}"
                )
            first = holds_from(scored, payload)
            lines.append(f"scored {payload.label}: within the limit from {_shortest(first)}")
    return lines


def _tiny_teachers(folder: Path, width: int) -> dict[str, Teacher]:
    """One for each domain, each with a head of its own."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=SMALL_VOCAB,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
    )
    teachers = {}
    for seed, domain in enumerate(DOMAINS):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder / domain)
        teachers[domain] = Teacher(name=f"{domain}-expert", model_dir=folder / domain)
    return teachers


def _scored(teachers: dict[str, Teacher], rows: int, prompt: int) -> Measure:
    """Streams as a worker returns them."""
    from teachers.scorers import ScorerOptions
    from teachers.worker import TeacherWorker

    def measure(payload: Payload, response: int) -> Measured:
        rollouts = make_rollouts(rows, prompt, response)
        options = ScorerOptions(
            dtype=payload.dtype, payload=payload.name, top_k=payload.width, vocab_size=SMALL_VOCAB, memory_bytes=1 << 30
        )
        worker = TeacherWorker("transformers", options)
        parts = score(worker, [(teachers[domain], 1.0, tuple(part)) for domain, part in rollouts.items()])
        return Measured(payload, rows, response, sum(part.nbytes for part in parts))

    return measure


def count_driver_bytes(rows: int, prompt: int, response: int, payload: Payload) -> tuple[int, int]:
    """Bytes of a step that the driver receives and writes, and bytes of the step's parts. The scoring is left out."""
    from opd.records.types import Prompt, RolloutBatch
    from opd.stream.log import MANIFEST, ROLLOUTS, ArrowTargetLog
    from opd.stream.part_summaries import make_summary, parse_summary
    from opd.stream.schema import cut_parts, write_stream
    from opd.stream.targets import ExpectedRow, StreamPart, TargetStream, TeacherRequest

    by_domain = make_rollouts(rows, prompt, response)
    rollouts = [r for part in by_domain.values() for r in part]
    answers = {domain: answer(payload, response, domain) for domain in by_domain}
    kind = (payload.dtype, payload.name)
    teachers = {d: {f"{d}-expert": ExpectedRow(weight=1.0, head=a.head_key())} for d, a in answers.items()}
    with tempfile.TemporaryDirectory() as folder:
        log = ArrowTargetLog(Path(folder), None, SMALL_VOCAB, print)  # type: ignore[arg-type] # nothing is replayed
        directory = log.begin(12)
        assert directory is not None

        def score_rows() -> Iterator[StreamPart]:
            batches = ([fabricate(r, answers[r.domain])] for r in rollouts)
            names = [f"{domain}-expert" for domain in by_domain]
            for part, record in cut_parts(batches, worker=0, broken={}, teachers=names):
                raw = memoryview(write_stream(part, *kind, record))
                text = make_summary(part, record, kind, raw.nbytes, directory.write_part(record, raw)).to_json()
                yield StreamPart(handle=None, summary=parse_summary(text), driver_bytes=len(text))

        request = TeacherRequest(rollouts=rollouts, teachers=teachers, kind=kind, max_quarantined=0)
        targets = TargetStream(score_rows(), request, heads={})
        prompts = [Prompt(id=r.sample_id, domain=r.domain, token_ids=r.prompt_ids) for r in rollouts]
        log.record(12, 11, prompts, RolloutBatch(rollouts=tuple(rollouts), quarantined=()), targets)
        while targets.take_part() is not None:
            pass
        targets.wait_for_sinks()
        written = sum((Path(folder) / "step-000012" / name).stat().st_size for name in (ROLLOUTS, MANIFEST))
    return targets.driver_bytes + written, targets.nbytes


def show_driver(rows: int, prompt: int, responses: Sequence[int], widths: Sequence[int]) -> list[dict[str, Any]]:
    """Print and return the driver's share for hidden states in bfloat16."""
    lines = []
    for width in widths:
        for response in responses:
            seen, total = count_driver_bytes(rows, prompt, response, Payload("hidden_states", width, "bfloat16"))
            print(
                f"bfloat16 states, d={width:,}, {rows} rows of {prompt:,} + {response:,} tokens: driver {seen:,} of "
                f"{total:,} bytes, {seen / total:.3%}"
            )
            lines.append({"width": width, "response": response, "driver_bytes": seen, "part_bytes": total})
    return lines


def _shortest(first: int | None) -> str:
    return f"over R={LONGEST}" if first is None else f"R={first}"


def show(measured: Sequence[Measured], first: dict[Payload, int | None], responses: Sequence[int], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("payload", title=title)
    for name in (*(f"R={r}" for r in responses), "payload alone", f"limit: + {TOKEN_BYTES}", "exact", "within from"):
        table.add_column(name, justify="right")
    for payload in dict.fromkeys(m.payload for m in measured):
        exact = {"hidden_states": "yes", "sampled_logprobs": "in expectation", "top_k": "no"}[payload.name]
        figures = [f"{m.bytes_per_token:,.1f}{'' if m.holds else ' (over)'}" for m in measured if m.payload == payload]
        table.add_row(
            payload.label, *figures, f"{payload.token_bytes:,}", f"{payload.limit:,}", exact, _shortest(first[payload])
        )
    table.add_section()
    for vocab in DENSE_VOCAB:
        empty = [""] * len(responses)
        table.add_row(f"dense bfloat16 logits, V={vocab:,} (not sent)", *empty, f"{2 * vocab:,}", "", "yes", "")
    Console(width=None if sys.stdout.isatty() else 170).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Bytes per response token on the wire.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=120, help="responses in a stream, of ten domains")
    parser.add_argument("--prompt", type=int, default=40, help="prompt tokens of a row")
    parser.add_argument(
        "--response", nargs="+", type=int, default=[16, 32, 64, 128], help="response tokens of a row, R"
    )
    parser.add_argument("--width", nargs="+", type=int, default=[128, 576, 2048, 4096], help="hidden widths, d")
    parser.add_argument("--k", nargs="+", type=int, default=[64, 128], help="K of top_k")
    parser.add_argument("--scorer", action="store_true", help="score with tiny Llamas too (needs torch, transformers)")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument(
        "--driver", action="store_true", help="count the bytes that go through the driver, and no others"
    )
    args = parser.parse_args()
    if args.driver:
        lines = show_driver(args.rows, args.prompt, args.response, args.width)
        if args.json:
            args.json.write_text(
                json.dumps({"rows": args.rows, "prompt": args.prompt, "driver": lines}, indent=2) + "\n"
            )
        return
    measure = fabricated(args.rows, args.prompt)
    chosen = list(payloads(args.width, args.k))
    measured = [measure(payload, response) for payload in chosen for response in args.response]
    first = {payload: holds_from(measure, payload) for payload in chosen}
    title = f"Bytes per response token: one stream of {args.rows} rows, {args.prompt} prompt tokens each"
    show(measured, first, args.response, title)
    checked = check_worker(args.rows, args.prompt, args.response, args.k) if args.scorer else []
    print("\n".join(checked), end="\n" if checked else "")
    if args.json:
        figures = {
            "rows": args.rows,
            "prompt": args.prompt,
            "measured": [
                asdict(m) | {"label": m.payload.label, "bytes_per_token": m.bytes_per_token, "limit": m.payload.limit}
                for m in measured
            ],
            "within_from": {payload.label: response for payload, response in first.items()},
            "dense_bfloat16_logits": {str(v): 2 * v for v in DENSE_VOCAB},
            "scored": checked,
        }
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
