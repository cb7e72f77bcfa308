"""Bytes per response token on the wire, for every payload that a teacher can send.

    python benchmarks/payload.py

Rows go through `TargetRow` and `write_stream`, as in a run; what is counted is the finished Arrow stream with prompts,
ids, log-probs, masks, names, offsets and padding. Values are random: nothing is compressed, so they do not matter.
`--scorer` also lets a tiny randomly initialised Llama score the same rows through `teachers.scorer` and checks that its
stream is as long as the fabricated one. No figure depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from opd.stream.schema import DTYPE_BYTES, TargetRow, write_stream  # noqa: E402 - found without an installation
from opd.types import Rollout, Segment, Teacher  # noqa: E402

SMALL_VOCAB = 256
"""Of the tiny model; ids are 4 bytes whatever the vocabulary."""
DENSE_VOCAB = (49152, 151936)
ROW_BYTES = 16
"""Allowed per token beside the payload: its id, the student's log-prob, the mask, its share of prompt and names."""


@dataclass(frozen=True)
class Payload:
    """One way to send what a teacher thinks of a token."""

    name: str
    width: int = 0
    """d of `hidden_states`, K of `top_k`."""
    dtype: str = "float32"
    """Of the hidden states; log-probs are float32."""

    @property
    def token_bytes(self) -> int:
        """The payload alone."""
        return {
            "hidden_states": DTYPE_BYTES[self.dtype] * self.width,
            "sampled_logprobs": 4,
            "top_k": 8 * self.width,
        }[self.name]

    @property
    def label(self) -> str:
        detail = {"hidden_states": f" {self.dtype}, d={self.width}", "top_k": f", K={self.width}"}
        return self.name + detail.get(self.name, "")


@dataclass(frozen=True)
class Measured:
    payload: Payload
    response: int
    stream_bytes: int
    bytes_per_token: float
    limit: int
    """Payload and `ROW_BYTES`; for bfloat16 hidden states 2·d + 16."""


def payloads(widths: Sequence[int], ks: Sequence[int]) -> Iterator[Payload]:
    for width in widths:
        yield Payload("hidden_states", width, "float32")
        yield Payload("hidden_states", width, "bfloat16")
    yield Payload("sampled_logprobs")
    for k in ks:
        yield Payload("top_k", k)


def make_rollouts(rows: int, prompt: int, response: int) -> list[Rollout]:
    rng = random.Random(0)
    return [
        Rollout(
            sample_id=f"000012/chain_sum/{i:04d}",
            step=12,
            domain="chain_sum",
            policy_version=11,
            prompt_ids=tuple(rng.choices(range(SMALL_VOCAB), k=prompt)),
            response_ids=tuple(rng.choices(range(SMALL_VOCAB), k=response)),
            behaviour_logprobs=tuple(rng.uniform(-3, 0) for _ in range(response)),
            segments=(Segment(length=response, trained=True),),
            truncated=False,
        )
        for i in range(rows)
    ]


def answer(payload: Payload, response: int) -> dict[str, Any]:
    """The payload columns of one row, as a scorer fills them."""
    if payload.name == "hidden_states":
        return {"hidden_size": payload.width, "hidden": random.Random(0).randbytes(response * payload.token_bytes)}
    if payload.name == "sampled_logprobs":
        return {"hidden_size": 0, "teacher_logprobs": [-1.5] * response}
    num = response * payload.width
    return {"hidden_size": 0, "topk_ids": list(range(num)), "topk_logprobs": [-1.5] * num}


def fabricate(rollout: Rollout, payload: Payload) -> TargetRow:
    return TargetRow(
        sample_id=rollout.sample_id,
        step=rollout.step,
        domain=rollout.domain,
        teacher="chain_sum-expert",
        policy_version=rollout.policy_version,
        prompt_ids=rollout.prompt_ids,
        response_ids=rollout.response_ids,
        loss_mask=rollout.loss_mask,
        behaviour_logprobs=rollout.behaviour_logprobs,
        head="0" * 64,
        **answer(payload, len(rollout.response_ids)),
    )


def measure(payload: Payload, rows: int, prompt: int, response: int) -> Measured:
    """One batch of rows as one stream."""
    batch = [fabricate(r, payload) for r in make_rollouts(rows, prompt, response)]
    size = write_stream([batch], payload.dtype, payload.name).size
    return Measured(payload, response, size, size / (rows * response), payload.token_bytes + ROW_BYTES)


def check_scorer(rows: int, prompt: int, responses: Sequence[int], ks: Sequence[int]) -> list[str]:
    """Stream sizes of real scored rows beside fabricated ones, one line each."""
    width = 128
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        teacher = _tiny_teacher(Path(folder), width)
        for payload in payloads([width], ks):
            for response in responses:
                scored = _scored_bytes(teacher, payload, make_rollouts(rows, prompt, response))
                fabricated = measure(payload, rows, prompt, response).stream_bytes
                verdict = "as fabricated" if scored == fabricated else f"fabricated {fabricated:,}"
                lines.append(f"scored {payload.label}, R={response}: {scored:,} bytes, {verdict}")
    return lines


def _tiny_teacher(folder: Path, width: int) -> Teacher:
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
    LlamaForCausalLM(config).save_pretrained(folder)
    return Teacher(name="chain_sum-expert", model_dir=folder)


def _scored_bytes(teacher: Teacher, payload: Payload, rollouts: Sequence[Rollout]) -> int:
    """All rows in one batch: the scorer cuts by tokens, and every batch has its own 1 to 2 kB of headers."""
    from teachers.scorers import ScorerOptions
    from teachers.scorers.transformers import TransformersScorer

    scorer = TransformersScorer(
        ScorerOptions(
            dtype=payload.dtype, payload=payload.name, top_k=payload.width, vocab_size=SMALL_VOCAB, memory_bytes=1 << 30
        )
    )
    rows = [row for batch in scorer.score(teacher, rollouts, {}) for row in batch]
    return write_stream([rows], payload.dtype, payload.name).size


def show(measured: Sequence[Measured], responses: Sequence[int], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("payload", title=title)
    for name in (*(f"R={r}" for r in responses), "payload alone", f"limit: payload + {ROW_BYTES}", "exact"):
        table.add_column(name, justify="right")
    for payload in dict.fromkeys(m.payload for m in measured):
        mine = [m for m in measured if m.payload == payload]
        exact = {"hidden_states": "yes", "sampled_logprobs": "in expectation", "top_k": "no"}[payload.name]
        figures = [f"{m.bytes_per_token:,.1f}{'' if m.bytes_per_token <= m.limit else ' (over)'}" for m in mine]
        table.add_row(payload.label, *figures, f"{payload.token_bytes:,}", f"{mine[0].limit:,}", exact)
    table.add_section()
    for vocab in DENSE_VOCAB:
        empty = [""] * len(responses)
        table.add_row(f"dense bfloat16 logits, V={vocab:,} (not sent)", *empty, f"{2 * vocab:,}", "", "yes")
    Console(width=None if sys.stdout.isatty() else 130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Bytes per response token on the wire.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=32, help="responses in a stream")
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens of a row")
    parser.add_argument("--response", nargs="+", type=int, default=[16, 64, 256], help="response tokens of a row, R")
    parser.add_argument("--width", nargs="+", type=int, default=[128, 576, 2048, 4096], help="hidden widths, d")
    parser.add_argument("--k", nargs="+", type=int, default=[64, 128], help="K of top_k")
    parser.add_argument("--scorer", action="store_true", help="score with a tiny Llama too (needs torch, transformers)")
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    grid = [(p, r) for p in payloads(args.width, args.k) for r in args.response]
    measured = [measure(payload, args.rows, args.prompt, response) for payload, response in grid]
    title = f"Bytes per response token: one stream of {args.rows} rows, {args.prompt} prompt tokens each"
    show(measured, args.response, title)
    checked = check_scorer(args.rows, args.prompt, args.response, args.k) if args.scorer else []
    print("\n".join(checked), end="\n" if checked else "")
    if args.json:
        figures = {
            "rows": args.rows,
            "prompt": args.prompt,
            "measured": [asdict(m) | {"label": m.payload.label} for m in measured],
            "dense_bfloat16_logits": {str(v): 2 * v for v in DENSE_VOCAB},
            "scored": checked,
        }
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
