"""Sparse indexers that several layers share: what uniform, searched and trained patterns cost, and what they save.

    python -m benchmarks.indexers --quick
    python -m benchmarks.indexers --seeds 0 1 2 --json indexers.json
    python -m benchmarks.indexers --merge --json merged.json
    python -m benchmarks.indexers --costs --json costs.json

A tiny `glm_moe_dsa` learns two tasks in which a token has to be found: `copy` (write a random string again) and `needle` (four values of four
kinds lie in noise; write the one of each kind). Sequences are eight times as long as an indexer's choice. The body learns
with attention to all tokens, then each layer's indexer learns its own attention, then the body learns to live with the choice: that is
the model with all indexers. Of it half and a quarter are kept, by a uniform and by a searched pattern, each without training and trained.
`--merge` distils the model with all indexers into itself with a quarter of them, by the trainer's loss on texts of the tasks, with
`student.indexers.loss_weight` 0 and the default. `--costs` counts and times what the sizes of GLM-5.2 take, against the context.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.machine import machine

LENGTH, TOPK, LAYERS = 64, 8, 8
NOISE = range(3, 35)
"""Ids of noise, and of the strings that are copied."""
KEYS, VALUES = range(35, 39), range(39, 55)
COPY, ASK = 1, 2
VOCABULARY = 55
NEEDLES = len(KEYS)
COPIED = (LENGTH - 2) // 2
SHARES = (0.5, 0.25)
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Number of seeds -> 97.5 % quantile of Student's distribution."""
CONTEXTS = (1024, 4096, 16384, 65536)
MILLION = 1_000_000
PUBLISHED = 2.9
GLM_5_2 = {"index_topk_freq": 4, "index_skip_topk_offset": 3}


@dataclass(frozen=True)
class Size:
    """Amount of everything."""

    dense: int
    """Steps of the body with attention to all."""
    warm_up: int
    """Dense steps of all indexers."""
    adapt: int
    """Steps of the body with attention to the chosen tokens."""
    trained: int
    """Dense steps of the indexers that are kept."""
    sparse: int
    """Sparse steps after each dense stage of indexers."""
    batch: int
    calibration: int
    test: int
    merged: int
    """Steps of a merge."""


FULL = Size(dense=400, warm_up=150, adapt=200, trained=150, sparse=50, batch=40, calibration=160, test=512, merged=100)
QUICK = Size(dense=3, warm_up=2, adapt=2, trained=2, sparse=1, batch=4, calibration=8, test=8, merged=2)
MERGE_LR = 1e-3


def draw_copy(rng: random.Random) -> list[int]:
    """A string, a sign, and the string again."""
    text = rng.choices(NOISE, k=COPIED)
    return [ASK, *text, COPY, *text]


def draw_needle(rng: random.Random) -> list[int]:
    """Values in noise, one of each kind, then the keys of the kinds in another order, each with its value."""
    kinds = len(VALUES) // NEEDLES
    values = [rng.choice(VALUES[kinds * index : kinds * (index + 1)]) for index in range(NEEDLES)]
    ids = rng.choices(NOISE, k=LENGTH - 3 * NEEDLES)
    for value, place in zip(values, rng.sample(range(len(ids)), NEEDLES), strict=True):
        ids[place] = value
    for index in rng.sample(range(NEEDLES), NEEDLES):
        ids += [ASK, KEYS[index], values[index]]
    return ids


TASKS: dict[str, Callable[[random.Random], list[int]]] = {"copy": draw_copy, "needle": draw_needle}


def draw_rows(task: str, count: int, seed: str) -> list[Any]:
    """Draw rows of a task."""
    from opd.indexers.layers import TextRow

    rng = random.Random(f"{seed}/{task}")
    return [TextRow(token_ids=tuple(TASKS[task](rng)), num_prompt=COPIED + 2) for _ in range(count)]


def draw_mixture(count: int, seed: str) -> list[Any]:
    """Draw as many rows of each task."""
    return [row for task in TASKS for row in draw_rows(task, count // 2, seed)]


def make_batch(rows: Sequence[Any]) -> Any:
    """Return a batch in which the copied tokens and the values that are asked for are counted."""
    import torch

    from opd.indexers.layers import TextBatch

    batch = TextBatch.of_rows(rows, torch.device("cpu"))
    is_copy = (batch.ids_B_T[:, COPIED + 1] == COPY)[:, None]
    is_value = (batch.ids_B_T >= VALUES.start) & (torch.arange(LENGTH) >= LENGTH - 3 * NEEDLES)
    return replace(batch, counted_B_T=torch.where(is_copy, batch.counted_B_T, is_value))


def make_model(seed: int) -> Any:
    """Return a model with random weights."""
    import torch
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    width = 64
    torch.manual_seed(seed)
    config = GlmMoeDsaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, moe_intermediate_size=width,
        num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2,
        mlp_layer_types=["dense"] * (LAYERS - 1) + ["sparse"], q_lora_rank=48, kv_lora_rank=48, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=32, index_topk=TOPK, index_head_dim=32, index_n_heads=8,
        max_position_embeddings=LENGTH, initializer_range=width**-0.5, pad_token_id=0, bos_token_id=None,
        eos_token_id=None, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip
    return GlmMoeDsaForCausalLM(config)


def train_body(runner: Any, lm: Any, steps: int, size: Size, seed: str, *, dense: bool, lr: float) -> None:
    """Train all weights but the indexers on the tasks, with attention to all tokens or to the chosen ones."""
    import torch

    from opd.train.schedule import LearningRate

    body = [p for name, p in lm.named_parameters() if ".indexer." not in name]
    optimizer = torch.optim.AdamW(body, lr=lr, weight_decay=0.01)
    rate = LearningRate(peak=lr, steps=steps, warmup_steps=min(50, steps // 4), decay="cosine")
    # Nobody reads the choice in dense steps, so one layer makes it for all.
    pattern = "F" + "S" * (LAYERS - 1) if dense else "F" * LAYERS
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate.rate_at_step(step)
        batch = make_batch(draw_mixture(size.batch, f"{seed}/{step}"))
        state = runner.embed(batch.ids_B_T)
        for index in range(LAYERS):
            state = runner.run_layer(index, state, pattern[index], attend_to_all=dense)
        counted = batch.counted_B_T[:, 1:]
        targets = batch.ids_B_T[:, 1:].masked_fill(~counted, -100)
        logits = runner.compute_logits(state)[:, :-1].transpose(1, 2)
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        loss = (losses.sum(1) / counted.sum(1)).mean()  # a copy counts as much as a needle
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(body, 1.0)
        optimizer.step()
        if step % max(1, steps // 8) == 0:
            print(f"  {'dense' if dense else 'sparse'} step {step}/{steps} loss {loss.item():.4f}", flush=True)


def train_indexers(runner: Any, pattern: str, dense: int, size: Size, seed: str) -> None:
    """Train the indexers of a pattern."""
    from opd.indexers.training import IndexerTraining, IndexerTrainingSpec

    spec = IndexerTrainingSpec(
        steps=dense, sparse_steps=size.sparse, batch_size=size.batch, lr=3e-3, sparse_lr=1e-3, chunk=LENGTH
    )
    rows = draw_mixture((dense + size.sparse) * size.batch, seed)
    losses = [
        fmean(one.loss / one.num_queries for one in sums.values())
        for sums in IndexerTraining(runner, pattern, spec).train(rows)
    ]
    if losses:
        print(f"  indexers of {pattern}: KL {losses[0]:.3f} to {losses[dense - 1]:.3f}", flush=True)


def measure(runner: Any, pattern: str, tests: dict[str, list[Any]]) -> dict[str, float]:
    """Return, for each task, loss in nats and accuracy of the tokens that are not given."""
    import torch

    numbers = {}
    for task, batches in tests.items():
        loss = right = total = 0.0
        for batch in batches:
            with torch.no_grad():
                state = runner.run_layers(0, runner.embed(batch.ids_B_T), pattern)
                counted = batch.counted_B_T[:, 1:]
                written = runner.compute_logits(state)[:, :-1].argmax(-1)
                loss += runner.sum_loss(state, batch)
            right += float((written == batch.ids_B_T[:, 1:])[counted].sum())
            total += float(counted.sum())
        numbers |= {f"{task} loss": loss / total, f"{task} right": right / total}
    numbers["loss"] = fmean(numbers[f"{task} loss"] for task in TASKS)
    numbers["right"] = fmean(numbers[f"{task} right"] for task in TASKS)
    return numbers


def make_batches(rows: list[Any]) -> list[Any]:
    """Put 64 rows side by side."""
    return [make_batch(rows[i : i + 64]) for i in range(0, len(rows), 64)]


def draw_tests(seed: int, size: Size) -> dict[str, list[Any]]:
    """Return task -> batches on which models are measured."""
    return {task: make_batches(draw_rows(task, size.test, f"test {seed}")) for task in TASKS}


def train_full_model(seed: int, size: Size) -> tuple[Any, Any]:
    """Return a model that has learned the tasks with an indexer in every layer, and its runner."""
    from opd.indexers.layers import LayerRunner

    lm = make_model(seed)
    runner, full = LayerRunner(lm), "F" * LAYERS
    train_body(runner, lm, size.dense, size, f"body {seed}", dense=True, lr=3e-3)
    train_indexers(runner, full, size.warm_up, size, f"indexers {seed}")
    train_body(runner, lm, size.adapt, size, f"adapt {seed}", dense=False, lr=1e-3)
    train_indexers(runner, full, size.warm_up, size, f"indexers again {seed}")
    return lm, runner


def run_seed(seed: int, size: Size) -> dict[str, Any]:
    """Train a model and return what every pattern makes of it."""

    from opd.indexers.patterns import count_full, spread_pattern
    from opd.indexers.search import SearchState, measure_overlaps, search_pattern

    tests, full = draw_tests(seed, size), "F" * LAYERS
    few, many = size.calibration // 8, size.calibration
    # A copy has eight times as many counted tokens as a needle.
    calibration = make_batches(draw_rows("copy", few, f"calibration {seed}")) + make_batches(
        draw_rows("needle", many, f"calibration {seed}")
    )
    lm, runner = train_full_model(seed, size)
    results: dict[str, Any] = {"all": {"pattern": full, **measure(runner, full, tests)}}
    weights = copy.deepcopy(lm.state_dict())
    state = SearchState(pattern=full)
    for share in SHARES:  # the search for a quarter goes on from the one for a half
        num = count_full(share, LAYERS)
        state = search_pattern(runner, calibration, num, state, lambda _: None)
        for name, pattern in {"uniform": spread_pattern(LAYERS, num), "searched": state.pattern}.items():
            lm.load_state_dict(weights)
            results[f"{name} {share:g}"] = {"pattern": pattern, **measure(runner, pattern, tests)}
            train_indexers(runner, pattern, size.trained, size, f"{name} {share} {seed}")
            results[f"{name} {share:g}, trained"] = {"pattern": pattern, **measure(runner, pattern, tests)}
    lm.load_state_dict(weights)
    return {"seed": seed, "patterns": results, "overlaps": measure_overlaps(runner, calibration)}


def run_merges(seed: int, size: Size) -> dict[str, Any]:
    """Train a model, and return what merges make of it that keep a quarter of its indexers."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    from opd.config.domains import StudentIndexers
    from opd.indexers.layers import LayerRunner
    from opd.indexers.patterns import count_full, set_pattern, spread_pattern

    tests, full = draw_tests(seed, size), "F" * LAYERS
    lm, runner = train_full_model(seed, size)
    pattern = spread_pattern(LAYERS, count_full(min(SHARES), LAYERS))
    results: dict[str, Any] = {
        "all": {"pattern": full, **measure(runner, full, tests)},
        "a quarter": {"pattern": pattern, **measure(runner, pattern, tests)},
    }
    for loss_weight in (0.0, StudentIndexers().loss_weight):
        student = GlmMoeDsaForCausalLM(GlmMoeDsaConfig.from_dict(set_pattern(lm.config.to_dict(), pattern)))
        student.load_state_dict(lm.state_dict(), strict=False)
        losses = merge_student(student, lm, loss_weight, size, f"merge {seed}")
        name = f"a quarter, merged, loss_weight {loss_weight:g}"
        results[name] = {"pattern": pattern, **measure(LayerRunner(student), pattern, tests), "losses": losses}
    return {"seed": seed, "patterns": results}


def merge_student(lm: Any, expert: Any, loss_weight: float, size: Size, seed: str) -> list[float]:
    """Distil an expert into a student by the trainer's default objective and optimiser. Returns the objective's mean in each step."""
    import torch

    from opd.config.objectives import build_default_objective
    from opd.indexers.student import LearningIndexersSpec
    from opd.models.heads import Head
    from opd.models.logit_rule import IDENTITY
    from opd.train.batch import build_micro_batch
    from opd.train.optimizer import AdamWOptions, build_adamw
    from opd.train.schedule import LearningRate
    from opd.train.student import Student
    from opd.train.totals import token_weights, weigh_rows

    spec = LearningIndexersSpec(loss_weight=loss_weight) if loss_weight else None
    student = Student(lm.eval(), build_default_objective().build(), chunk=1024, vocab_size=VOCABULARY, indexers=spec)
    optimizer = build_adamw(student, AdamWOptions(betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.0), lr=0.0)
    rate = LearningRate(peak=MERGE_LR, steps=size.merged, warmup_steps=size.merged // 10, decay="cosine")
    head, losses = Head(expert.lm_head.weight.detach(), IDENTITY), []
    for step in range(1, size.merged + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate.rate_at_step(step)
        scored = score_texts(expert, draw_mixture(size.batch, f"{seed}/{step}"))
        rollouts = [row.rollout for row in scored]
        weights = weigh_rows(rollouts, "sequence_mean", {})  # a copy counts as much as a needle
        batch = build_micro_batch([(row,) for row in scored], torch.float32)
        weight_N = token_weights(batch, [weights[rollout.sample_id] for rollout in rollouts])
        loss, stats = student(batch, {"expert": head}, {"divergence": weight_N})
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        losses.append(float((stats.kl_N * weight_N).sum()))
        if step % max(1, size.merged // 5) == 0:
            indexers = f" indexers {student.indexers.take_sum():.3f}" if spec else ""
            print(f"  merge step {step}/{size.merged} loss {losses[-1]:.4f}{indexers}", flush=True)
    return losses


def score_texts(expert: Any, rows: Sequence[Any]) -> list[Any]:
    """Return the expert's answers about the tokens of a task's texts that are counted."""
    import torch

    from opd.payloads.hidden_states import HiddenStates
    from opd.records.types import Rollout, Span
    from opd.stream.schema import TargetRow

    batch = make_batch(rows)
    with torch.no_grad():
        hidden_B_T_D = expert.model(batch.ids_B_T).last_hidden_state
    scored = []
    for number, (row, counted_T) in enumerate(zip(rows, batch.counted_B_T.tolist(), strict=True)):
        ids, start = row.token_ids, row.num_prompt
        rollout = Rollout.from_tokens(f"text-{number}", ids[:start], ids[start:], "tasks")
        spans = [Span(length=1, origin="policy" if c else "environment", policy_version=0) for c in counted_T[start:]]
        states_N_D = hidden_B_T_D[number, :-1][torch.tensor(counted_T[1:])]
        answer = HiddenStates(head="expert", hidden_size=states_N_D.shape[1], hidden=states_N_D.numpy().tobytes())
        scored.append(TargetRow(rollout=replace(rollout, spans=tuple(spans)), teacher="expert", answer=answer))
    return scored


def format_interval(values: Sequence[float]) -> str:
    """Return mean and half width of the 95 % interval over seeds."""
    if len(values) not in T_95:
        return f"{fmean(values):.3f}"
    return f"{fmean(values):.3f} ± {T_95[len(values)] * stdev(values) / sqrt(len(values)):.3f}"


def show_patterns(runs: Sequence[dict[str, Any]]) -> None:
    """Print a row for each way to choose a pattern."""
    columns = ("loss", "right", *(f"{task} right" for task in TASKS))
    print(f"| indexers kept | {' | '.join(columns)} | patterns |\n| --- |{' ---: |' * len(columns)} --- |")
    for name in runs[0]["patterns"]:
        rows = [run["patterns"][name] for run in runs]
        patterns = ", ".join(dict.fromkeys(row["pattern"] for row in rows))
        print(f"| {name} | {' | '.join(format_interval([row[c] for row in rows]) for c in columns)} | {patterns} |")


def count_flops(config: Any, pattern: str, context: int) -> dict[str, float]:
    """Return FLOPs of one token at the end of a context: two a weight that it uses, and two for each product of two numbers.

    Attention is in its absorbed form: of the chosen tokens each head reads the compressed keys and values.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    used = config.num_experts_per_tok / config.n_routed_experts
    full, layers = pattern.count("F"), config.num_hidden_layers
    weights = projections = 0.0
    for name, param in lm.named_parameters():
        if ".indexer." in name:
            projections += param.numel()
        elif "embed_tokens" not in name:
            weights += param.numel() * (used if ".experts." in name else 1)
    chosen = min(context, config.index_topk)
    latent = config.kv_lora_rank
    return {
        "weights": 2 * weights,
        "attention": 2.0 * layers * config.num_attention_heads * chosen * (2 * latent + config.qk_rope_head_dim),
        "indexer projections": 2 * projections * full / layers,
        "index scores": 2.0 * full * config.index_n_heads * config.index_head_dim * context,
    }


def show_costs() -> dict[str, Any]:
    """Count and time with the sizes of GLM-5.2."""
    from transformers import GlmMoeDsaConfig

    from opd.indexers.patterns import derive_pattern

    config = GlmMoeDsaConfig()
    full = "F" * config.num_hidden_layers
    shared = derive_pattern(config.num_hidden_layers, GLM_5_2["index_topk_freq"], GLM_5_2["index_skip_topk_offset"])
    counted = []
    print("| context | weights | attention | projections | scores, all / shared | ratio |\n| ---: |" + " ---: |" * 5)
    for context in (*CONTEXTS, MILLION):
        every, some = (count_flops(config, pattern, context) for pattern in (full, shared))
        ratio = sum(every.values()) / sum(some.values())
        counted.append({"context": context, "all": every, "shared": some, "ratio": ratio})
        giga = {key: value / 1e9 for key, value in every.items()}
        print(
            f"| {context:,} | {giga['weights']:.1f} | {giga['attention']:.1f} | {giga['indexer projections']:.1f} / "
            f"{some['indexer projections'] / 1e9:.1f} | {giga['index scores']:.1f} / {some['index scores'] / 1e9:.1f} | {ratio:.2f} |"
        )
    print(
        f"{shared.count('F')} of {len(shared)} layers with an indexer; GFLOPs a token; published at a million: {PUBLISHED}"
    )
    timed = [time_layer(config, context) for context in CONTEXTS]
    print("| context | choice, ms | attention, ms | four layers, all / shared |\n| ---: | ---: | ---: | ---: |")
    for row in timed:
        choice, attention = row["choice_ms"], row["attention_ms"]
        print(
            f"| {row['context']:,} | {choice:.1f} | {attention:.1f} | {4 * (choice + attention) / (choice + 4 * attention):.2f} |"
        )
    return {"flops": counted, "times": timed}


def time_layer(config: Any, context: int, rounds: int = 31) -> dict[str, Any]:
    """Return milliseconds a token of one layer's choice and of its attention, medians in turns, in float32: one token at the end of a
    context, without the projections of both, which do not grow with it. With one thread processor time is the time on a quiet machine."""
    import torch

    heads, width = config.index_n_heads, config.index_head_dim
    latent, rotary = config.kv_lora_rank, config.qk_rope_head_dim
    keys_S_E, query_H_E, weight_H = torch.randn(context, width), torch.randn(heads, width), torch.randn(heads)
    cache_S_E = torch.randn(context, latent + rotary)
    absorbed_H_E = torch.randn(config.num_attention_heads, latent + rotary) * 0.05

    def choose() -> Any:
        scores_S = weight_H @ torch.relu(query_H_E @ keys_S_E.T)
        return scores_S.topk(min(config.index_topk, context)).indices

    def attend(chosen_K: Any) -> Any:
        chosen_K_E = cache_S_E[chosen_K]
        return (absorbed_H_E @ chosen_K_E.T).softmax(-1) @ chosen_K_E[:, :latent]

    seconds: dict[str, list[float]] = {"choice_ms": [], "attention_ms": []}
    for _ in range(rounds + 1):  # the first round warms up
        begun = time.process_time()
        chosen_K = choose()
        between = time.process_time()
        attend(chosen_K)
        seconds["choice_ms"].append(between - begun)
        seconds["attention_ms"].append(time.process_time() - between)
    return {"context": context} | {key: 1e3 * sorted(times[1:])[rounds // 2] for key, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Uniform, searched and trained patterns of shared indexers.")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--merge", action="store_true", help="merge models into themselves with a quarter of the indexers"
    )
    parser.add_argument("--costs", action="store_true", help="count and time the sizes of GLM-5.2, and train nothing")
    parser.add_argument("--json", type=Path, help="write all figures here, after every seed")
    parser.add_argument("--quick", action="store_true", help="a few steps: does everything run?")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(args.threads)
    data: dict[str, Any] = {"machine": machine(args.threads, "torch", "transformers"), "runs": []}
    if args.costs:
        data |= show_costs()
    for seed in [] if args.costs else args.seeds:
        begun = time.monotonic(), time.process_time()
        run = (run_merges if args.merge else run_seed)(seed, QUICK if args.quick else FULL)
        data["runs"].append(
            run
            | {"wall_s": time.monotonic() - begun[0], "cpu_s": time.process_time() - begun[1], "load": os.getloadavg()}
        )
        show_patterns(data["runs"])
        if args.json:
            args.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
