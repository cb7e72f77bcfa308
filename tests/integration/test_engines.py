"""Trainer, teachers and engine against each other and against a plain transformers forward."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from opd import cluster
from opd.records.types import Prompt, Rollout
from opd.rollouts.vllm import VLLMRolloutEngine
from opd.rollouts.worker import VLLMWorker
from tests.integration.parts import (
    EOS,
    PROBE,
    VOCABULARY,
    Shared,
    begun_alike,
    break_weights,
    config,
    make_gpt2,
    mean_gap,
    moved,
    plain_logprobs,
    rollouts,
    save,
    start_engine,
    start_pool,
    start_sync,
    start_trainer,
    stop,
    weights,
    with_rollout,
    with_teachers,
)
from tests.integration.test_padded import assert_says_what_it_drew

Make = Callable[..., Path]


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    from opd.config.sections import ClusterConfig

    # Two pools of scoring workers, an engine, and the ranks of every trainer that `Shared` keeps.
    with cluster.ray_session(ClusterConfig(), 20):
        yield


def responses(n: int) -> list[Rollout]:
    """48 made-up responses, `n` to each prompt."""
    made = rollouts(48)
    # The domain alternates, so a prompt goes on to rows of its own domain: two apart.
    prompts = [made[i % 2 + 2 * n * (i // (2 * n))].prompt_ids * 5 for i in range(48)]
    return [dataclasses.replace(r, prompt_ids=p) for r, p in zip(made, prompts, strict=True)]


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory, make_model_dir: Make, tiny_tokenizer: Any) -> dict[str, Path]:
    """Domain -> its teacher. `left` and `right` have the same one, `same` has the student itself."""
    root = tmp_path_factory.mktemp("teachers")
    expert = make_model_dir(root / "expert", seed=1)
    return {
        "left": expert,
        "right": expert,
        "same": make_model_dir(root / "student"),
        "wide": make_model_dir(root / "wide", seed=2, hidden=96, heads=3),
        "broken": break_weights(make_model_dir(root / "broken", seed=2)),
        "gpt2": make_gpt2(root / "gpt2", tiny_tokenizer),
    }


@pytest.fixture(scope="module")
def shared(ray: None, tmp_path_factory: pytest.TempPathFactory, teachers: dict[str, Path]) -> Iterator[Shared]:
    student = teachers["same"]
    pool = start_pool(with_teachers(config(student), workers=2), teachers)
    parts = Shared(student, teachers["left"], pool, tmp_path_factory.mktemp("begun"))
    yield parts
    stop(pool, *parts.trainers)


@pytest.fixture(scope="module")
def shared_engine(ray: None, tiny_model_dir: Path, tiny_tokenizer: Any) -> Iterator[VLLMRolloutEngine]:
    engine = start_engine(config(tiny_model_dir), tiny_model_dir, tiny_tokenizer)
    yield engine
    stop(engine)


@pytest.fixture
def engine(shared_engine: VLLMRolloutEngine, tiny_model_dir: Path) -> VLLMRolloutEngine:
    """One engine for all tests; each begins with the weights of `tiny_model_dir`."""
    shared_engine.load(tiny_model_dir)
    return shared_engine


@pytest.mark.parametrize("tie", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["tied", "untied"])
def test_a_push_reaches_the_engine(
    shared: Shared, tmp_path: Path, make_model_dir: Make, engine: VLLMRolloutEngine, tie: bool
) -> None:
    """After a training step and a push, 80 probe tokens agree within 0.02 nats; before the push they do not. Both ways in turn."""
    student = shared.student if tie else make_model_dir(tmp_path / "student", tie=False)
    engine.load(student)
    trainer, rows = shared.trainer(config(student, lr=3e-2, adam_epsilon=1e-3)), rollouts()
    for step, kind in enumerate(("shared_memory", "network", "shared_memory"), 1):
        sync = start_sync(kind, trainer, engine, tolerance=0.02)
        assert sync.measure_gap() < (1e-4 if step == 1 else 0.02)
        trainer.train_step(step, rows, shared.pool.score(rows))
        assert sync.measure_gap() > 0.1, "the step was too small to show anything"
        assert sync.push(step).gap < 0.02
    exported = tmp_path / "exported"
    weights(trainer, exported)
    assert mean_gap(trainer.logprobs(PROBE), plain_logprobs(exported, PROBE)) < 1e-4


@pytest.mark.slow
def test_without_the_head_repair_a_tied_model_is_stale(tmp_path: Path, make_model_dir: Make) -> None:
    """The repair is what makes the push arrive: without it the same probe sees the old head."""
    from opd.rollouts import worker_extension

    class WithoutRepair(VLLMWorker):
        def load(self, model_dir: Path) -> None:
            worker_extension.repack_output_head = lambda model: None
            super().load(model_dir)

    from opd.rollouts.processes import ENGINE_ENV
    from opd.rollouts.worker import EngineOptions

    old, new = make_model_dir(tmp_path / "old", seed=0), make_model_dir(tmp_path / "new", seed=1)
    options = EngineOptions(
        model_dir=old,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=8,
        gpu_memory_utilization=0.8,
        vocab_size=VOCABULARY,
    )
    env = cluster.worker_env(2) | ENGINE_ENV | {"VLLM_CPU_KVCACHE_SPACE": "1", "CUDA_VISIBLE_DEVICES": ""}
    truth = plain_logprobs(new, PROBE)
    gaps = {}
    for cls in (VLLMWorker, WithoutRepair):
        worker = cluster.spawn_worker(cls, options, (EOS,), name=cls.__name__, env=env)
        worker.submit(VLLMWorker.load, new).wait_for_result(timeout_s=200)
        scored = worker.submit(VLLMWorker.logprobs, PROBE).wait_for_result(timeout_s=200)
        gaps[cls.__name__] = mean_gap(scored, truth)
        worker.kill()
    assert gaps["VLLMWorker"] < 1e-4
    assert gaps["WithoutRepair"] > 0.02


def test_an_engine_takes_weights_of_another_architecture(
    engine: VLLMRolloutEngine, tmp_path: Path, make_model_dir: Make, tiny_model_dir: Path
) -> None:
    for model_dir in (make_model_dir(tmp_path / "large", hidden=96, heads=3, seed=3), tiny_model_dir):
        engine.load(model_dir)
        assert mean_gap(engine.logprobs(PROBE)[0], plain_logprobs(model_dir, PROBE)) < 1e-4


@pytest.mark.parametrize("hidden", [96, 64], ids=["a new engine", "in place"])
def test_an_engine_reads_the_files_that_the_index_names(
    engine: VLLMRolloutEngine, tmp_path: Path, make_model_dir: Make, hidden: int
) -> None:
    """Laid out as Mistral publishes its models: the same weights again under other names, in `consolidated.safetensors`."""
    model = make_model_dir(tmp_path / "model", hidden=hidden, heads=hidden // 32, seed=4)
    shard = "model-00001-of-00001.safetensors"
    state = load_file(model / "model.safetensors")
    (model / "model.safetensors").rename(model / shard)
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(state, shard)})
    )
    save_file({name: tensor * 0 for name, tensor in state.items()}, model / "consolidated.safetensors")
    (model / "params.json").write_text(json.dumps({"dim": hidden, "n_layers": 2, "vocab_size": VOCABULARY}))
    engine.load(model)
    assert mean_gap(engine.logprobs(PROBE)[0], plain_logprobs(model, PROBE)) < 1e-4


def test_rollouts_report_the_log_probs_of_what_they_sampled(engine: VLLMRolloutEngine, tiny_model_dir: Path) -> None:
    prompts = [Prompt(id=f"left/{i}", domain="left", token_ids=tuple(range(5 + i, 11 + i))) for i in range(6)]
    too_long = Prompt(id="left/long", domain="left", token_ids=(5,) * 64)
    batch = engine.generate([*prompts, too_long], step=1, policy_version=7)
    assert [q.prompt_id for q in batch.quarantined] == ["left/long"]
    assert [r.sample_id for r in batch.rollouts] == [f"000001/left/{i}" for i in range(6)]
    assert {r.policy_version for r in batch.rollouts} == {7}
    whole = plain_logprobs(tiny_model_dir, [(*r.prompt_ids, *r.response_ids) for r in batch.rollouts])
    for rollout, logprobs in zip(batch.rollouts, whole, strict=True):
        assert 1 <= len(rollout.response_ids) <= 8
        assert rollout.truncated == (rollout.response_ids[-1] != EOS)
        assert rollout.behaviour_logprobs == pytest.approx(logprobs[len(rollout.prompt_ids) - 1 :], abs=1e-4)
    again = engine.generate(prompts, step=1, policy_version=7)
    assert [r.response_ids for r in again.rollouts] == [r.response_ids for r in batch.rollouts], "seeds decide"
    other = engine.generate(prompts, step=2, policy_version=7)
    assert [r.response_ids for r in other.rollouts] != [r.response_ids for r in batch.rollouts]
    many = [
        Prompt(id=f"left/{i}", domain="left", token_ids=tuple(5 + i * k % 60 for k in range(55))) for i in range(90)
    ]
    together = engine.generate(many, step=1, policy_version=7)  # more tokens than vLLM takes at a time on a CPU, 4096
    alone = engine.generate(many[-2:], step=1, policy_version=7)
    assert [r.response_ids for r in together.rollouts[-2:]] == [r.response_ids for r in alone.rollouts]


def test_behaviour_log_probs_are_those_of_the_temperature(
    engine: VLLMRolloutEngine, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = dataclasses.replace(engine._spec, temperature=0.7, max_new_tokens=16)
    monkeypatch.setattr(engine, "_spec", spec)
    assert assert_says_what_it_drew(engine, tiny_model_dir, 0.7, 24) > 100


def test_teachers_score_each_row_with_its_own_expert(shared: Shared, teachers: dict[str, Path], rows_of: Any) -> None:
    """Hidden state times head equals the expert's own logits, for experts of different width, on two workers."""
    from opd.models.heads import head_tensor

    rows = moved(rollouts(), right="wide")
    targets = shared.pool.score(rows)
    assert targets.rows == len(rows) and len(targets.heads) == 2
    heads = {key: head_tensor(head.handle.fetch()) for key, head in targets.heads.items()}
    scored = {row.rollout.sample_id: row for row in rows_of(targets)}
    assert targets.num_parts == 2
    assert set(scored) == {r.sample_id for r in rows}
    for rollout in rows:
        row = scored[rollout.sample_id]
        assert row.teacher == f"{rollout.domain}-expert"
        hidden_R_D = torch.frombuffer(bytearray(row.answer.hidden), dtype=torch.float32).view(
            -1, row.answer.hidden_size
        )
        logp_R_V = (hidden_R_D @ heads[row.answer.head].T).log_softmax(-1)
        ours = logp_R_V.gather(1, torch.tensor(rollout.response_ids)[:, None])[:, 0].tolist()
        (truth,) = plain_logprobs(teachers[rollout.domain], [(*rollout.prompt_ids, *rollout.response_ids)])
        assert ours == pytest.approx(truth[len(rollout.prompt_ids) - 1 :], abs=1e-4)


def test_an_equal_teacher_changes_nothing(shared: Shared, tmp_path: Path) -> None:
    """Teacher = student: loss below 1e-4, weights stay."""
    # The usual epsilon of 1e-8 would turn rounding noise in the gradient into full steps of size lr; with this one a weight moves by
    # its gradient at most. How large the noise is depends on the processor.
    trainer = shared.trainer(config(shared.student, lr=1e-3, adam_epsilon=1e-3))
    before = weights(trainer, tmp_path / "before")
    rows = moved(rollouts(), left="same", right="same")
    for step in (1, 2, 3):
        report = trainer.train_step(step, rows, shared.pool.score(rows))
        assert abs(report.loss) < 1e-4
        assert report.grad_norm < 1e-4
    after = weights(trainer, tmp_path / "after")
    for name, weight in before.items():
        assert torch.allclose(weight, after[name], rtol=0, atol=1e-5), name


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({}, id="small"),
        # Ranks cut its weights among them (`opd.train.gathered_layers`).
        pytest.param({"hidden": 320, "heads": 10}, id="wide"),
        pytest.param({"tie": False}, id="untied", marks=pytest.mark.slow),
    ],
)
def test_two_accumulating_ranks_equal_one(
    shared: Shared, tmp_path: Path, make_model_dir: Make, shape: dict[str, Any]
) -> None:
    """The global token mean does not depend on how rows are cut into ranks and micro-batches.

    Adam's usual epsilon would blow rounding noise in near-zero gradients up to full steps; a large one compares gradients.
    """
    student = make_model_dir(tmp_path / "s", **shape) if shape else shared.student
    rows = rollouts(48)
    results = {}
    for ranks, micro_batch_tokens in ((1, 100_000), (2, 128)):
        cfg = config(student, lr=1e-2, adam_epsilon=1e-3, ranks=ranks, micro_batch_tokens=micro_batch_tokens)
        trainer = shared.trainer(cfg)
        reports = [trainer.train_step(step, rows, shared.pool.score(rows)) for step in (1, 2)]
        results[ranks] = reports, weights(trainer, tmp_path / f"ranks-{ranks}")
    (one, weights_one), (two, weights_two) = results[1], results[2]
    for a, b in zip(one, two, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-4)
        assert {d: s.tokens for d, s in a.domains.items()} == {d: s.tokens for d, s in b.domains.items()}
    from safetensors.torch import load_file

    start = load_file(student / "model.safetensors")
    for name, weight in weights_one.items():
        assert (weight - start[name]).abs().max() > 1e-4, f"{name} was not trained"
        assert torch.allclose(weight, weights_two[name], rtol=0, atol=1e-5), name


@pytest.mark.parametrize(
    ("rows", "share"),
    [(responses(4), {"n": 4}), (begun_alike(rollouts(24)), {"share_prefixes": True})],
    ids=["prompts", "prefixes"],
)
def test_a_step_is_the_same_with_shared_beginnings_and_on_any_number_of_ranks(
    shared: Shared, tmp_path: Path, rows: list[Rollout], share: dict[str, Any]
) -> None:
    """Adam's usual epsilon would blow rounding noise up to full steps; a large one compares gradients."""
    found = {}
    sharing = start_pool(with_rollout(config(shared.student), **share), {"left": shared.expert, "right": shared.expert})
    for name, shares, ranks, tokens in (
        ("separate", False, 1, 100_000),
        ("shared", True, 1, 100_000),
        ("ranks", True, 2, 128),
    ):
        cfg = config(shared.student, lr=1e-2, adam_epsilon=1e-3, ranks=ranks, micro_batch_tokens=tokens)
        trainer = shared.trainer(with_rollout(cfg, **share) if shares else cfg)
        pool = sharing if shares else shared.pool
        # Teachers of equal weights are one, and have the last one's name.
        assert {trainer.layout.layout, pool.layouts["right-expert"].layout} == {"shared" if shares else "packed"}
        reports = [trainer.train_step(step, rows, pool.score(rows)) for step in (1, 2)]
        found[name] = reports, weights(trainer, tmp_path / name)
    stop(sharing)
    slow, weights_slow = found.pop("separate")
    for reports, trained in found.values():
        for a, b in zip(slow, reports, strict=True):
            assert a.loss == pytest.approx(b.loss, rel=1e-5)
            assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-4)
            for domain, stats in a.domains.items():
                other = dataclasses.asdict(b.domains[domain])
                assert dataclasses.asdict(stats) == pytest.approx(other, rel=1e-5, abs=1e-4, nan_ok=True)
        for name, weight in weights_slow.items():
            assert torch.allclose(weight, trained[name], rtol=0, atol=1e-5), name


def test_training_begins_while_teachers_score_and_ends_with_the_same_weights(shared: Shared, tmp_path: Path) -> None:
    """More rows than one part holds, more micro-batches than one, and a queue that is soon full."""
    from safetensors.torch import load_file

    rows = moved(rollouts(560), right="wide")  # on two workers; a part leaves with 256 of them
    cfg = with_teachers(config(shared.student, lr=1e-2, adam_epsilon=1e-3, micro_batch_tokens=1024), queue=1)
    after = []
    for overlap in (False, True):
        trainer, targets = shared.trainer(cfg), shared.pool.score(rows)
        if not overlap:
            targets.wait_for_parts()
        report = trainer.train_step(1, rows, targets)
        assert targets.num_parts >= 4
        assert report.peak_bytes < targets.nbytes
        after.append((report.loss, report.early_micro_batches, weights(trainer, tmp_path / f"after-{overlap}")))
    (loss, none_early, apart), (loss_overlapped, early, overlapped) = after
    assert early > none_early == 0 and loss == loss_overlapped > 0.1
    start = load_file(shared.student / "model.safetensors")
    assert any((apart[name] - start[name]).abs().max() > 1e-4 for name in start), "nothing was trained"
    for name, weight in apart.items():
        assert torch.equal(weight, overlapped[name]), name


def test_a_checkpoint_goes_on_with_another_number_of_ranks(shared: Shared, tmp_path: Path) -> None:
    """2 -> 1 and 1 -> 2: the step after a load has the loss that it has without one, and leaves the same weights."""
    pool, rows = shared.pool, rollouts(32)
    # Vocabulary 76 and odd widths: at two ranks some parts are shorter than others.
    cfgs = (config(shared.student, lr=1e-2, adam_epsilon=1e-3, ranks=ranks) for ranks in (1, 2))
    one, two = map(shared.trainer, cfgs)
    for step in (1, 2):
        two.train_step(step, rows, pool.score(rows))
    first = save(two, tmp_path / "two")
    assert sorted(p.name for p in first.iterdir()) == ["rank-0.safetensors", "rank-1.safetensors", "trainer.json"]
    undisturbed = two.train_step(3, rows, pool.score(rows))
    one.load(first)
    assert one.train_step(3, rows, pool.score(rows)).loss == pytest.approx(undisturbed.loss, abs=1e-3)
    ours, theirs = weights(one, tmp_path / "one-3"), weights(two, tmp_path / "two-3")
    for name, weight in theirs.items():
        assert torch.allclose(weight, ours[name], rtol=0, atol=1e-5), name

    second = save(one, tmp_path / "one")
    for step in (4, 5):  # `two` goes astray, and comes back by the checkpoint
        two.train_step(step, rows[:8], pool.score(rows[:8]))
    two.load(second)
    back = weights(two, tmp_path / "back")
    assert all(torch.equal(back[name], weight) for name, weight in ours.items()), "a load rounds nothing"
    assert two.train_step(4, rows, pool.score(rows)).loss == pytest.approx(
        one.train_step(4, rows, pool.score(rows)).loss, abs=1e-3
    )


def test_a_missing_row_stops_the_step(shared: Shared) -> None:
    from opd.errors import RunError

    trainer, rows = shared.trainer(config(shared.student, adam_epsilon=1e-3)), rollouts()
    short = shared.pool.score(rows[:-1])
    with pytest.raises(RunError, match=r"no teacher scored \["):
        trainer.train_step(1, rows, short)


@pytest.mark.parametrize(
    ("payload", "objective"),
    [
        pytest.param("sampled_logprobs", {"kind": "sampled", "baseline": "leave_one_out"}, marks=pytest.mark.slow),
        ("top_k", {"kind": "top_k", "k": 8}),
        ("hidden_states", {"kind": "jsd", "beta": 0.5, "normalize": "sequence_mean", "compile": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else value["kind"],
)
def test_every_payload_trains(shared: Shared, rows_of: Any, payload: str, objective: dict[str, Any]) -> None:
    """Through real workers: the numbers of the stream are the teacher's own, and the student moves toward it."""
    student, expert, pool = shared.student, shared.expert, shared.pool
    cfg = config(student, objective=objective, payload=payload, lr=3e-3)
    if payload != "hidden_states":  # what the shared one sends
        pool = start_pool(cfg, {"left": expert, "right": expert})
    trainer, rows = start_trainer(cfg), rollouts()
    truth = plain_logprobs(student, [(*r.prompt_ids, *r.response_ids) for r in rows])
    rows = [
        dataclasses.replace(r, behaviour_logprobs=tuple(t[len(r.prompt_ids) - 1 :]))
        for r, t in zip(rows, truth, strict=True)
    ]
    targets = pool.score(rows)
    assert bool(targets.heads) == (payload == "hidden_states")
    if payload == "sampled_logprobs":
        scored = {row.rollout.sample_id: row for row in rows_of(targets)}
        for rollout in rows:
            (own,) = plain_logprobs(expert, [(*rollout.prompt_ids, *rollout.response_ids)])
            assert scored[rollout.sample_id].answer.teacher_logprobs == pytest.approx(
                own[len(rollout.prompt_ids) - 1 :], abs=1e-4
            )
    reports = [trainer.train_step(step, rows, pool.score(rows)) for step in range(1, 13)]
    assert reports[0].logprob_gap < 1e-4
    assert reports[-1].logprob_gap > 1e-3, "the student moved away from where it sampled"
    if payload != "sampled_logprobs":  # on fixed samples k1 itself need not fall
        assert reports[-1].loss < 0.9 * reports[0].loss
    stop(trainer, *([] if pool is shared.pool else [pool]))


def test_a_teacher_with_broken_weights_is_quarantined_up_to_a_budget(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opd.errors import RunError

    rows = moved(rollouts(), right="broken")
    with pytest.raises(RunError, match=r"8 of 16 responses could not be scored.*max_quarantined is 0.001"):
        shared.pool.score(rows).wait_for_parts()
    monkeypatch.setattr(shared.pool, "_max_quarantined", 0.5)
    reports, after = [], []
    for given in ([r for r in rows if r.domain == "left"], rows):
        trainer = shared.trainer(config(shared.student, lr=1e-3, adam_epsilon=1e-3))
        for step in (1, 2):
            targets = shared.pool.score(given)
            reports.append(trainer.train_step(step, given, targets))
            assert set(targets.quarantined) == {r.sample_id for r in given if r.domain == "broken"}
        after.append(weights(trainer, tmp_path / f"after-{len(after)}"))
    assert all(set(report.domains) == {"left"} and report.loss > 0.01 for report in reports)
    # As if the rest had never been asked: the mean is over what was scored, and so is the norm that is clipped.
    for without, with_broken in zip(reports[:2], reports[2:4], strict=True):
        assert with_broken.loss == pytest.approx(without.loss, rel=1e-5)
        assert with_broken.grad_norm == pytest.approx(without.grad_norm, rel=1e-4)
    for name, weight in after[0].items():
        assert torch.allclose(weight, after[1][name], rtol=0, atol=1e-6), name


def test_steps_at_rate_zero_move_nothing_and_a_quarantined_response_leaves_no_trace(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights stay bit for bit, decay or not, so equal rows give equal gradients: also after a step with quarantined responses.

    DeepSpeed keeps a loss scale that was set: the steps after such a one would be scaled by the share that was scored.
    """
    monkeypatch.setattr(shared.pool, "_max_quarantined", 0.5)
    trainer = start_trainer(config(shared.student, lr=0.0, weight_decay=0.1))
    before = weights(trainer, tmp_path / "before")
    whole = rollouts()
    half = moved(whole, right="broken")
    steps = [whole, half, whole, half, half, whole]
    reports = [trainer.train_step(step, rows, shared.pool.score(rows)) for step, rows in enumerate(steps, 1)]
    assert all(report.loss > 0.1 for report in reports)
    norms = [report.grad_norm for report in reports]
    assert norms[0] > 0.01 and abs(norms[1] - norms[0]) > 0.01 * norms[0], "the rows that are left say something else"
    assert norms == pytest.approx([norms[0] if rows is whole else norms[1] for rows in steps], rel=1e-5)
    unmoved = weights(trainer, tmp_path / "unmoved")
    for name, weight in before.items():
        assert torch.equal(weight, unmoved[name]), name
    stop(trainer)


@pytest.mark.slow
def test_gradients_are_summed_in_float32_by_a_bfloat16_trainer(tmp_path: Path, make_model_dir: Make) -> None:
    """128 equal rows have the gradient of 16; summed in bfloat16 even its norm is off by a part in a thousand.

    Not that of one: its micro-batch has another shape, which on some cores changes the last bits of products in bfloat16.
    """
    student, expert = make_model_dir(tmp_path / "s", seed=0), make_model_dir(tmp_path / "e", seed=1)
    (row,) = rollouts(1)
    many = [dataclasses.replace(row, sample_id=f"{row.sample_id}#{i:03d}") for i in range(128)]
    off = {}
    for dtype in ("float32", "bfloat16"):
        cfg = config(student, lr=0.0, ranks=1, dtype="bfloat16", grad_accum_dtype=dtype, micro_batch_tokens=16)
        trainer, pool = start_trainer(cfg), start_pool(cfg, {"left": expert, "right": expert})
        norms = [
            trainer.train_step(step, rows, pool.score(rows)).grad_norm for step, rows in enumerate((many[:16], many), 1)
        ]
        off[dtype] = abs(norms[1] / norms[0] - 1)
        stop(trainer, pool)
    assert off["float32"] < 1e-5 < 1e-3 < off["bfloat16"], off


def test_dropout_of_a_student_is_off(shared: Shared, teachers: dict[str, Path]) -> None:
    """The engine that writes has none, so a trainer with dropout would train, and probe, another policy."""
    student = teachers["gpt2"]
    for checkpointing in (False, True):
        trainer = start_trainer(config(student, lr=0.0, ranks=1, gradient_checkpointing=checkpointing))
        assert mean_gap(trainer.logprobs(PROBE), plain_logprobs(student, PROBE)) < 1e-5
        said = trainer.logprobs([[*r.prompt_ids, *r.response_ids] for r in rollouts()])
        rows = [
            dataclasses.replace(r, behaviour_logprobs=tuple(said[i][len(r.prompt_ids) - 1 :]))
            for i, r in enumerate(moved(rollouts(), left="gpt2", right="gpt2"))
        ]
        report = trainer.train_step(1, rows, shared.pool.score(rows))
        assert report.logprob_gap < 1e-5, "the step itself"
        assert abs(report.loss) < 1e-5, "a student that is its own teacher"
        stop(trainer)
