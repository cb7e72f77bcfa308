"""The experts of `benchmarks.tokenizers`, its pipelines, and what it does without TRL."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import gold, tokenizers
from benchmarks.gold import GoldOptions
from experts.suites.letters import build_tokenizer, make_rows
from opd.config import load_pipeline
from opd.vocabularies.byte_table import read_byte_table


def test_tokens_of_the_new_tokenizer_are_within_words_numbers_or_signs() -> None:
    rows = [row for domain in ("walk", "duel") for row in make_rows(domain, 300, 0)]
    trained = tokenizers.train_tokenizer([text for row in rows for text in (row["prompt"], row["completion"])], 400)
    names = ("pad", "bos", "eos", "unk")
    assert [getattr(trained, f"{name}_token_id") for name in names] == [0, 1, 2, 3]
    text = rows[0]["prompt"] + rows[0]["completion"]
    assert read_byte_table(trained).join(trained.encode(text, add_special_tokens=False)) == text.encode()
    pairs = [token for token in trained.tokenize("wlk a>>>=bcd") if len(token) > 1]
    assert pairs and all(token.isalpha() or set(token) <= set("<>") for token in pairs)
    assert len(trained.encode("bcdedcb")) < 7


def test_a_model_with_permuted_ids_says_the_same(make_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    source = make_model_dir(tmp_path / "source", tokenizer=build_tokenizer())
    permuted = tokenizers.permute_ids(source, tmp_path / "permuted")
    log_probs = []
    for directory in (source, permuted):
        model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
        ids = tokenizer("rev abc=c", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            scores_V = model(input_ids=ids).logits[0, -1].log_softmax(-1)
        log_probs.append((ids, [float(scores_V[tokenizer.convert_tokens_to_ids(c)]) for c in "abcxyz09=<"]))
    (ids, ours), (other_ids, theirs) = log_probs
    assert not torch.equal(ids, other_ids) and ours == pytest.approx(theirs, abs=1e-5)


def test_a_domain_gets_an_expert_with_own_tokens(tmp_path: Path) -> None:
    pipeline = {
        "name": "one",
        "student": {"model": "base"},
        "experts": {"walk": {"model": "walk", "domain": "walk"}},
        "domains": {"walk": {"prompts": "walk.jsonl"}},
        "trainer": {"steps": 2, "samples_per_step": 4},
    }
    file = tokenizers.write_pipeline(tmp_path / "one.yaml", pipeline)
    config = load_pipeline(file, list(tokenizers.give_own_tokens("walk", Path("other"))))
    assert config.engine_of("walk").payload == "aligned_states" and config.domains["walk"].objective is not None
    assert yaml.safe_load(file.read_text()) == pipeline


def test_headroom_is_of_one_domain() -> None:
    accuracy = {
        exam: {"walk": value, "sort": 0.0} for exam, value in (("before", 0.2), ("expert", 1.0), ("after", 0.8))
    }
    assert tokenizers.find_headroom(accuracy, "walk") == pytest.approx(0.75)
    assert tokenizers.find_headroom(accuracy, "sort") is None


def make_options(folder: Path) -> GoldOptions:
    return GoldOptions(
        student=str(folder),
        teacher=str(folder),
        prompts=str(folder / "prompts.json"),
        output=str(folder / "out"),
        settings={},
        steps=10,
        samples=4,
        lr=1e-3,
        warmup_steps=2,
        min_lr_ratio=0.1,
        max_new_tokens=6,
        seed=0,
    )


def test_the_learning_rate_of_the_other_side_is_that_of_a_merge(tmp_path: Path) -> None:
    shares = [gold.scale_rate(make_options(tmp_path), step) for step in range(11)]
    assert shares[:3] == [0.5, 1.0, 1.0] and shares[10] == pytest.approx(0.1)
    assert shares[2:] == sorted(shares[2:], reverse=True)


def test_labels_end_with_the_end_token(make_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    source = make_model_dir(tmp_path / "model", tokenizer=build_tokenizer())
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    torch.manual_seed(0)
    ids_B_T, mask_B_T, labels_B_T = gold.write_responses(model, tokenizer, ["rev abc=", "rev abcd="] * 20, 12)
    assert ids_B_T.shape == mask_B_T.shape == labels_B_T.shape
    for ids, mask, labels in zip(ids_B_T.tolist(), mask_B_T.tolist(), labels_B_T.tolist(), strict=True):
        response = [label for label in labels if label != -100]
        end = tokenizer.eos_token_id
        assert end not in response[:-1] and (response[-1] == end or len(response) == 12)
        assert [i for i, label in zip(ids, labels, strict=True) if label != -100] == response
        assert sum(mask) == len(response) + (8 if mask[0] == 0 else 9)


@pytest.mark.skipif(find_spec("trl") is not None, reason="TRL is here")
def test_without_trl_it_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"pip install trl==1\.16\.0"):
        gold.load_loss(make_options(tmp_path), None, None)


def test_results_are_written_as_they_come(tmp_path: Path) -> None:
    args = type("Args", (), {"json": tmp_path / "out.json"})()
    tokenizers.save(args, "merge", [{"variant": "as it is"}])
    assert json.loads((tmp_path / "out.json").read_text())["merge"] == [{"variant": "as it is"}]
