"""A finished merge's files, looked at from outside: `python -m tests.models.check ROOT`, one JSON object a line.

`ROOT` has `student`, `whole`, `adapter` and the run directory `run`. The trainer is what its last checkpoint says: those
parameters in a student that plain transformers loads, so that whatever an export loses shows. Every reference is one
sequence alone through plain transformers. vLLM comes last: it changes transformers classes for which it has no own code.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Logprobs = list[Tensor]
"""[T - 1] log-prob of every token after the first, for each sequence."""

LENGTHS = (30, 21, 27, 12)
PROMPT = 6


def sequences(vocab_size: int) -> list[list[int]]:
    """The same for every family; no special tokens."""
    gen = torch.Generator().manual_seed(7)
    return [torch.randint(4, vocab_size, (length,), generator=gen).tolist() for length in LENGTHS]


@torch.no_grad()
def alone(model: Any, given: list[list[int]], vocab_size: int) -> Logprobs:
    """Each sequence by itself, over the ids that the tokenizer knows."""
    found = []
    for ids in given:
        logits_T_V = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1, :vocab_size]
        found.append(logits_T_V.float().log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    return found


def gap(ours: Logprobs, theirs: Logprobs) -> float:
    """Largest difference, nats; NaN if there is one."""
    return float(torch.cat([(a - b).abs() for a, b in zip(ours, theirs, strict=True)]).max())


def load(directory: Path, attention: str | None = "eager") -> Any:
    """The model as its authors wrote it down: the faster kinds of attention leave out what they cannot do, such as a bound
    on the scores. Raises: ValueError if a weight is missing, left over or of another shape."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation=attention, output_loading_info=True
    )
    wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if wrong:
        raise ValueError(f"{directory.name}: {wrong}")
    return model.eval()


def restored(root: Path, attention: str | None = "eager") -> Any:
    """The trainer's parameters, from its last checkpoint, in the student as it was given to it."""
    from opd.train.shards import Shards

    model = load(root / "student", attention)
    last = max((root / "run" / "checkpoints").glob("step-*"))
    with torch.no_grad(), Shards(last) as shards:
        for name, param in model.named_parameters():
            param.copy_(shards.read_slice(f"param/{name}", param.numel(), 0, param.numel()).view_as(param))
    return model


def packing(model: Any, layout: str, vocab_size: int) -> float:
    """Largest relative difference of hidden states, laid out together against alone."""
    from opd.models.layouts import Packed, measure_layout_differences

    def body(laid_out: Packed) -> Tensor:
        states: Tensor = model.base_model(**laid_out.inputs()).last_hidden_state
        return states.flatten(0, 1)

    return measure_layout_differences(body, layout, vocab_size)[0]


def scored(root: Path, name: str, given: list[list[int]], vocab_size: int) -> Logprobs:
    """Ask the product's scorer about the tokens after the prompt, all sequences in one call."""
    from opd.records.types import Rollout, Teacher
    from teachers.scorers import ScorerOptions
    from teachers.scorers.transformers import TransformersScorer

    scorer = TransformersScorer(
        ScorerOptions(
            dtype="float32", payload="sampled_logprobs", top_k=0, vocab_size=vocab_size, memory_bytes=1 << 30
        ),
        "cpu",
    )
    adapter = root / "adapter" if name == "adapter" else None
    teacher = Teacher(name=name, model_dir=root / ("student" if adapter else name), adapter_dir=adapter)
    rollouts = [
        Rollout.from_tokens(str(i), tuple(ids[:PROMPT]), tuple(ids[PROMPT:]), "d") for i, ids in enumerate(given)
    ]
    rows = {row.rollout.sample_id: row for batch in scorer.score(teacher, rollouts, {}) for row in batch}
    return [torch.tensor(rows[str(i)].answer.teacher_logprobs) for i in range(len(given))]


def scorer_gap(root: Path, name: str, given: list[list[int]], vocab_size: int) -> float:
    """Scorer against plain transformers, for an adapter against PEFT; nats."""
    if name == "adapter":
        from peft import PeftModel

        model = PeftModel.from_pretrained(load(root / "student"), root / "adapter").eval()
    else:
        model = load(root / name)
    wanted = [part[PROMPT - 1 :] for part in alone(model, given, vocab_size)]
    return gap(scored(root, name, given, vocab_size), wanted)


def engine_logprobs(root: Path, given: list[list[int]], engine: str, dtype: str, vocab_size: int) -> Logprobs:
    """A new engine on the exported model."""
    from opd.rollouts.worker import EngineOptions
    from pipelines.build import ROLLOUT_ENGINES

    options = EngineOptions(
        model_dir=root / "run" / "model",
        dtype=dtype,
        max_model_len=64,
        max_num_seqs=16,
        gpu_memory_utilization=0.5,
        vocab_size=vocab_size,
    )
    return [torch.tensor(part) for part in ROLLOUT_ENGINES[engine].WORKER(options, []).logprobs(given)]


def findings(root: Path) -> Iterator[dict[str, Any]]:
    """One by one, so that what was found before an error is not lost."""
    from transformers import AutoTokenizer

    known = json.loads((root / "check.json").read_text())
    vocab_size = len(AutoTokenizer.from_pretrained(root / "student"))
    given = sequences(vocab_size)
    wanted = alone(restored(root), given, vocab_size)
    fastest = restored(root, attention=None)  # eager attention proves nothing of how the others build their mask
    yield {"trainer_packing": packing(fastest, known["layout"], vocab_size)}
    yield {"export_transformers": gap(alone(load(root / "run" / "model"), given, vocab_size), wanted)}
    for name in known["experts"]:
        yield {f"scorer_{name}": scorer_gap(root, name, given, vocab_size)}
    yield {"export_vllm": gap(engine_logprobs(root, given, known["engine"], known["engine_dtype"], vocab_size), wanted)}


if __name__ == "__main__":
    from opd.rollouts.processes import ENGINE_ENV

    os.environ |= ENGINE_ENV | {"VLLM_CPU_KVCACHE_SPACE": "1", "CUDA_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)
    for finding in findings(Path(sys.argv[1])):
        print(json.dumps(finding), flush=True)
