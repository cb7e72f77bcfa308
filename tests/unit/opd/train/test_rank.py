"""A rank's work around DeepSpeed: picking its rows, adding up its numbers, grouping its parameters."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from opd import cluster
from opd.config import PipelineConfig
from opd.errors import RunError, StorageError
from opd.losses.chunked import TokenStats
from opd.losses.reverse_kl import ReverseKL
from opd.machine.devices import to_device
from opd.models.heads import HeadFile, HeadSource, head_key
from opd.models.logit_rule import IDENTITY, LogitRule
from opd.payloads.hidden_states import HiddenRun
from opd.payloads.sampled_logprobs import SampledBlock
from opd.records.types import DomainStats, PositionStats, Rollout
from opd.stream.schema import TargetRow, write_stream
from opd.stream.targets import StreamPart
from opd.train import deepspeed, rank, zero
from opd.train.batch import build_micro_batch, gather_samples, leave_one_out_baselines
from opd.train.components import Component
from opd.train.optimizer import split_parameters
from opd.train.rank import RankResult, RankWork
from opd.train.totals import Totals
from pipelines.specs import rank_options, trainer_spec
from tests.engines import Still
from tests.rows import changed, make_rollout, make_row, make_stream_part, spans_of
from tests.unit.conftest import InProcessWorker


def divergence(**weights: float) -> dict[str, Component]:
    return {"divergence": Component(weights=weights)}


WORK = RankWork(step=3, lr=0.1, micro_batches=(("a",), ("c",)), components=divergence(a=0.25, c=0.25))
NONE: frozenset[str] = frozenset()


def row(sample_id: str, domain: str = "d", mask: tuple[bool, ...] = (True, True)) -> TargetRow:
    return make_row(
        sample_id=sample_id, step=3, domain=domain, teacher="t", policy_version=2, prompt_ids=[1, 2],
        response_ids=list(range(len(mask))), loss_mask=list(mask), behaviour_logprobs=[-1.0] * len(mask), head="h",
        hidden_size=2, hidden=np.ones((sum(mask), 2), np.float32).tobytes(),
    )  # fmt: skip


def stream(*ids: str, dtype: str = "float32") -> np.ndarray:
    return np.frombuffer(write_stream([row(i) for i in ids], dtype), dtype=np.uint8)


def begun(work: RankWork = WORK) -> rank._StepInput:
    return rank._StepInput(work, {}, 76)


def test_a_rank_takes_its_own_rows_as_they_come() -> None:
    step = begun()
    step.keep_rows([stream("a")])
    assert step.micro_batch(["a"]).token_N.tolist() == [0, 1]
    with pytest.raises(RunError, match=r"step 3: no teacher scored \['c'\]"):
        step.micro_batch(["c"])
    step.keep_rows([stream("c", dtype="float32")])
    batch = step.micro_batch(["c"])
    assert (batch.domains, batch.trained_lengths) == (("d",), (2,))
    with pytest.raises(RunError, match="no teacher scored"):
        step.micro_batch(["c"])  # what is trained is forgotten


def test_a_rank_decodes_its_own_rows_of_a_part_alone(tmp_path: Path) -> None:
    """Take rows from both places: the part's memory, and a file of the target log."""
    part = stream("b", "a", "x", "c")
    file = tmp_path / "worker-0-part-0000.arrow"
    file.write_bytes(part)
    batches = []
    for handle in (part, file):
        step = begun()
        step.keep_rows([handle])
        assert set(step._rows) == {"a", "c"}
        batches.append(step.micro_batch(["a", "c"]))
    for batch in batches:
        (block,) = batch.blocks
        assert batch.token_N.tolist() == [0, 1, 0, 1] and block.hidden[0].tolist() == [[1.0, 1.0]] * 4


def test_streams_of_another_payload_are_taken_too() -> None:
    def part(*ids: str) -> np.ndarray:
        rows = [changed(row(i), teacher_logprobs=[-0.5, -1.5]) for i in ids]
        return np.frombuffer(write_stream(rows, "bfloat16", "sampled_logprobs"), dtype=np.uint8)

    step = begun()
    step.keep_rows([part("a"), part("c")])
    (block,) = step.micro_batch(["c"]).blocks
    assert isinstance(block, SampledBlock)
    assert block.logprob_N.tolist() == [-0.5, -1.5]


def test_a_micro_batch_may_be_empty() -> None:
    batch = begun().micro_batch([])
    assert (batch.blocks, batch.trained_lengths) == ((), ())


def test_a_row_that_came_twice_for_another_stops_the_step() -> None:
    step = begun()
    step.keep_rows([stream("a", "a")])
    with pytest.raises(RunError, match="sample a: scored by t 1, t 1; the weights of its teachers do not add up to 1"):
        step.micro_batch(["a"])


def test_sums_go_by_domain_and_count_trained_tokens_only() -> None:
    rows = [row("a", "x", (True, False)), row("b", "y"), row("c", "x")]
    batch = build_micro_batch([(r,) for r in rows], torch.float32)
    nan, totals = torch.nan, Totals()
    stats = TokenStats(
        kl_N=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]),
        logprob_N=torch.tensor([-1.5, -1.0, -1.0, -0.5, -1.0]),
        entropy_N=torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]),
        teacher_entropy_N=torch.tensor([1.1, 1.2, 1.3, 1.4, 1.5]),
        agree_N=torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0]),
        teacher_top1_N=torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0]),
        clipped_N=torch.full((5,), nan),
        student_mass_N=torch.tensor([0.5, 0.5, 0.25, 0.25, 1.0]),
        teacher_mass_N=torch.tensor([0.75, 0.5, 0.5, 0.5, 1.0]),
    )
    weights = {"divergence": torch.tensor([0.1, 0.2, 0.2, 0.1, 0.1])}
    totals.add(batch, weights, stats)
    want = {
        "x": [3, 2, 10.0, 1.0, 1.0, 4.0, 2.0, 0.0, nan, 1.75, 2.25, 0, 0.0, 0, 0, 0.0],
        "y": [2, 1, 5.0, 0.0, 0.5, 2.5, 1.0, 2.0, nan, 0.75, 1.0, 0, 0.0, 0, 0, 0.0],
    }
    assert {d: dataclasses.astuple(s) for d, s in totals.domains.items()} == {
        d: pytest.approx(values, nan_ok=True) for d, values in want.items()
    }
    assert totals.loss == pytest.approx(0.1 * (1 + 4 + 5) + 0.2 * (2 + 3))
    stale = Totals()
    stale.add(batch, weights, stats, frozenset({0, 1}))
    assert [(s.gap_sum, s.drift_sum, s.stale_tokens, s.tokens) for s in stale.domains.values()] == [
        (0.5, 0.5, 1, 3),
        (0.0, 0.0, 2, 2),
    ]
    assert stale.loss == totals.loss and stale.domains["x"].kl_sum == 10.0, "the loss does not care"


def test_weight_decay_is_for_matrices_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    groups = split_parameters(model, 0.1)
    assert [(g["weight_decay"], [p.ndim for p in g["params"]]) for g in groups] == [(0.1, [2]), (0.0, [1, 1, 1])]


def test_a_head_shared_by_body_and_loss_is_trained_once(tiny_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    from opd.train.student import Student

    lm = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    student = Student(lm, ReverseKL(), chunk=16, vocab_size=76)
    params = [p for g in split_parameters(student, 0.0) for p in g["params"]]
    assert len(params) == len({id(p) for p in params}) == len(list(lm.parameters()))
    assert student.loss_head.weight is lm.get_input_embeddings().weight


# Heads


class Owner:
    """Has the heads of teachers a, b and c; each is filled with a number of its own."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def read_head(self, key: str) -> np.ndarray:
        self.asked.append(key)
        return np.full((76, 2), "abc".index(key), np.float32)


def source_at(owner: Owner, key: str, rule: LogitRule = IDENTITY) -> HeadSource:
    return HeadSource(key=key, rule=rule, handle=InProcessWorker(owner).on_demand(1.0, Owner.read_head, key))


class Optimizer(torch.optim.SGD):
    """With what DeepSpeed's has beside it: a scale that was set stays, multiplies losses, and divides gradients."""

    custom_loss_scaler = False
    external_loss_scale: float | None = None
    divisor = 1.0
    """Of the last step."""

    def override_loss_scale(self, value: float) -> None:
        self.custom_loss_scaler, self.external_loss_scale = True, value

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.external_loss_scale if self.custom_loss_scaler else loss

    def unscale(self) -> None:
        self.divisor = self.external_loss_scale if self.custom_loss_scaler and self.external_loss_scale else 1.0
        for param in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            param.grad /= self.divisor


def take_step(made: rank.TrainerRank, work: RankWork, heads: list[HeadSource], *streams: np.ndarray) -> RankResult:
    """All parts with the first micro-batch, nothing left out."""
    made.begin_step(work, {head.key: head for head in heads})
    for index in range(len(work.micro_batches)):
        made.accumulate_micro_batch(index, NONE, *(streams if index == 0 else ()))
    return made.finish_step(1.0)


class StillEngine(Still):
    """A student on one rank without DeepSpeed, that never takes its step."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoModelForCausalLM

        from opd.train.student import Student

        self.student = Student(AutoModelForCausalLM.from_pretrained(model_dir), ReverseKL(), chunk=16, vocab_size=76)
        self.optimizer = Optimizer(self.student.parameters(), lr=0.0)
        self.seen: list[dict[str, float]] = []
        """For each micro-batch the number that fills each head."""

    def __call__(self, batch: Any, heads: dict[str, Any], *more: Any) -> Any:
        self.seen.append({key: float(head.weight_V_D.mean()) for key, head in heads.items()})
        return self.student(batch, heads, *more)


HEAD_BYTES = 76 * 2 * 4
A, B = {"a": 0.0}, {"b": 1.0}


@pytest.mark.parametrize(
    ("micro_batches", "budget", "fetched", "seen"),
    [
        ([["a0"], ["b0"], ["a1"], ["b1"]], HEAD_BYTES, "abab", [A, B, A, B]),
        ([["a0"], ["b0"], ["a1"], ["b1"]], 2 * HEAD_BYTES - 1, "abab", [A, B, A, B]),
        ([["a0"], ["b0"], ["a1"], ["b1"]], 2 * HEAD_BYTES, "ab", [A, B, A, B]),
        ([["a0"], ["a1"], ["b0"], ["b1"]], HEAD_BYTES, "ab", [A, A, B, B]),
        ([["a0", "b0", "a1"]], HEAD_BYTES, "ab", [A | B]),
        ([["a0", "b0"], ["b1"], ["a1"]], HEAD_BYTES, "aba", [A | B, B, A]),
        ([["b0", "b1"], []], 1, "b", [B, {}]),
    ],
)
def test_heads_are_fetched_when_they_are_needed_and_kept_within_the_budget(
    micro_batches: list[list[str]], budget: int, fetched: str, seen: list[Any], tiny_model_dir: Path, in_process: Any
) -> None:
    ids = [i for part in micro_batches for i in part]
    rows = [changed(row(i), head=i[0], teacher=i[0]) for i in ids]
    work = RankWork(
        step=1, lr=0.1, micro_batches=tuple(map(tuple, micro_batches)), components=divergence(**dict.fromkeys(ids, 0.1))
    )  # fmt: skip
    owner = Owner()
    heads = [source_at(owner, key) for key in "abc"]
    one = rank.TrainerRank(rank_options(config(head_memory=budget), 76), 0)
    one._engine, one._device = StillEngine(tiny_model_dir), torch.device("cpu")
    stream = np.frombuffer(write_stream(rows, "float32"), dtype=np.uint8)
    take_step(one, work, heads, stream)
    assert "".join(owner.asked) == fetched
    assert one._engine.seen == seen


def test_of_the_heads_that_stay_the_one_unused_for_longest_goes_first(in_process: Any) -> None:
    owner = Owner()
    one = rank.TrainerRank(rank_options(config(head_memory=2 * HEAD_BYTES), 76), 0)
    one._device = torch.device("cpu")
    rules = dict.fromkeys("ab", IDENTITY) | {"c": LogitRule(scale=2.0)}
    for key in "abacab":  # c drives out b, for a was used after it; b then drives out c
        head = one._fetch_head(source_at(owner, key, rules[key]))
        assert (float(head.weight_V_D.mean()), head.rule) == ("abc".index(key), rules[key])
    assert "".join(owner.asked) == "abcb"


def test_a_head_is_read_from_its_file_if_that_is_here_and_what_it_was(tmp_path: Path, in_process: Any) -> None:
    from safetensors.torch import save_file

    zeros = cluster.StoredValue(np.zeros((3, 2), np.float32))

    def read(key: str, model_dir: Path, name: str = "lm_head.weight", dtype: str = "float32") -> torch.Tensor:
        file = HeadFile(model_dir, ("tied", name), dtype)
        return HeadSource(key=key, rule=IDENTITY, file=file, handle=zeros).read()

    head_V_D = torch.arange(6.0).view(3, 2)
    save_file({"lm_head.weight": head_V_D, "other": torch.ones(1)}, tmp_path / "model.safetensors")
    for dtype in ("float32", "bfloat16"):
        typed = head_V_D.to(getattr(torch, dtype))
        assert torch.equal(read(head_key(typed, IDENTITY), tmp_path, dtype=dtype), typed)
    sent = torch.zeros(3, 2)
    key = head_key(head_V_D, IDENTITY)
    assert torch.equal(read(key, tmp_path / "elsewhere"), sent)
    assert torch.equal(read(key, tmp_path, "unknown"), sent)
    assert torch.equal(read("another hash", tmp_path), sent)
    assert torch.equal(HeadSource(key=key, rule=IDENTITY, handle=zeros).read(), sent)


# The driver's side


class FakeRank:
    """Stands for one rank; answers with numbers of its own."""

    def __init__(self, options: Any, index: int) -> None:
        self.options, self.index, self.works = options, index, []

    def open_meeting_point(self, address: str) -> tuple[str, int]:
        return ("127.0.0.1", 1)

    def start(self, address: str, port: int) -> None: ...

    def layout_error(self, layout: str) -> float:
        return {"packed": 0.5 + 3 * self.index, "packed_indexed": 2.0, "padded": 0.1}[layout]

    def use_layout(self, layout: str) -> None:
        self.layout = layout

    def begin_step(self, work: RankWork, heads: dict[str, HeadSource]) -> None:
        self.works.append((work, heads))
        self.rounds: list[Any] = []

    def accumulate_micro_batch(self, index: int, left_out: frozenset[str], *parts: Any) -> None:
        self.rounds.append((index, set(left_out), parts))

    def finish_step(self, share: float) -> RankResult:
        self.share = share
        own, shared = domain_stats(2, 1.5, gap=2.0), domain_stats(1, 1.0, gap=1.0)
        places = {0: PositionStats(tokens=2, kl_sum=1.5), self.index + 1: PositionStats(tokens=1, kl_sum=1.0)}
        return RankResult(loss=0.5, grad_norm=2.0, domains={f"d{self.index}": own, "d": shared}, positions=places)


def domain_stats(tokens: int, kl: float, *, gap: float = 0.0, samples: int = 1) -> DomainStats:
    return DomainStats(
        tokens=tokens, samples=samples, kl_sum=kl, gap_sum=gap, entropy_sum=0.25, teacher_entropy_sum=0.5,
        agree_sum=1.0, teacher_top1_sum=2.0, clipped_sum=4.0, student_mass_sum=0.5, teacher_mass_sum=0.75,
    )  # fmt: skip


def config(tolerance: float = 9.0, **trainer: Any) -> PipelineConfig:
    return PipelineConfig.model_validate(
        {
            "name": "n",
            "student": {"model": "base"},
            "experts": {"e": {"model": "m", "domain": "d"}},
            "domains": {"d": {}},
            "trainer": {"steps": 4, "samples_per_step": 2, "lr": 1.0, "warmup_steps": 2} | trainer,
            "sync": {"tolerance": tolerance},
        }
    )


def rollout(sample_id: str, trained: bool = True) -> Rollout:
    return make_rollout(
        sample_id=sample_id, step=1, domain="d", policy_version=0, prompt_ids=(1,), response_ids=(2, 3),
        behaviour_logprobs=(0.0, 0.0), loss_mask=(trained,) * 2,
    )  # fmt: skip


RULES = {"h1": LogitRule(scale=2.0), "h0": IDENTITY}


FILE = HeadFile(Path("t0"), ("lm_head.weight",), "float32")
HEADS = {
    "h0": HeadSource(key="h0", rule=RULES["h0"], file=FILE, handle=cluster.StoredValue("H0")),
    "h1": HeadSource(key="h1", rule=RULES["h1"], handle=cluster.StoredValue("H1")),
}


SAMPLED_WITH_BASELINE = {
    "objective": {"kind": "sampled", "baseline": "leave_one_out"},
    "teachers": {"payload": "sampled_logprobs"},
}


class Targets:
    """Stands for a `TargetStream` of one row a part, in the order of the ids; ids in `broken` come without a row."""

    def __init__(self, *ids: str, broken: tuple[str, ...] = (), handle: Any = "part {}".format) -> None:
        self.heads = HEADS
        self.quarantined: dict[str, str] = {}
        self.arrived = False
        self._broken = broken
        self._left = list(ids)
        self._taken: set[str] = set()
        self._handle = handle
        self.collected: list[StreamPart] = []

    def take_part(self) -> StreamPart | None:
        part = self.collected.pop(0) if self.collected else self._next_part()
        self._taken |= set(part.samples if part else ())
        return part

    def _next_part(self) -> StreamPart | None:
        if not self._left:
            self.arrived = True
            return None
        sample_id = self._left.pop(0)
        if sample_id in self._broken:
            self.quarantined[sample_id] = "not finite"
            return make_stream_part(stream())
        return make_stream_part(self._handle(sample_id), (sample_id,))

    def wait_for_parts(self) -> None:
        while (part := self._next_part()) is not None:
            self.collected.append(part)

    def read_part(self, part: StreamPart) -> Any:
        return part.handle

    def has_samples(self, ids: list[str]) -> bool:
        return set(ids) <= self._taken | set(self.quarantined)

    def wait_for_sinks(self) -> None:
        """Nobody looks at the parts."""


def test_a_step_is_the_sum_of_all_ranks(in_process: Any) -> None:
    in_process.replace = FakeRank
    trainer = deepspeed.DeepSpeedTrainer(trainer_spec(config(), 9))
    report = trainer.train_step(1, [rollout("a"), rollout("b")], Targets("a", "b"))  # type: ignore[arg-type]
    assert (report.loss, report.grad_norm, report.lr, report.skipped) == (1.0, 2.0, 0.5, False)
    assert report.logprob_gap == pytest.approx(6.0 / 6)
    assert report.domains == {
        "d": domain_stats(1, 1.0, gap=1.0) + domain_stats(1, 1.0, gap=1.0),
        "d0": domain_stats(2, 1.5, gap=2.0),
        "d1": domain_stats(2, 1.5, gap=2.0),
    }
    assert (report.domains["d"].tokens, report.domains["d"].samples, report.domains["d"].agree_sum) == (2, 2, 2.0)
    assert list(report.domains) == ["d", "d0", "d1"]
    once = PositionStats(tokens=1, kl_sum=1.0)
    assert report.positions == {0: PositionStats(tokens=4, kl_sum=3.0), 1: once, 2: once}
    works = [w.works[0] for w in in_process.workers]
    assert sorted(i for work, _ in works for part in work.micro_batches for i in part) == ["a", "b"]
    for work, heads in works:
        assert work.lr == 0.5
        assert dict(work.components["divergence"].weights) == {i: 0.25 for part in work.micro_batches for i in part}
        assert heads == HEADS
    assert [w.rounds for w in in_process.workers] == [[(0, set(), ("part a",))], [(0, set(), ("part b",))]]
    assert [w.share for w in in_process.workers] == [1.0, 1.0]


def test_the_optimiser_waits_until_the_parts_are_stored(in_process: Any) -> None:
    class Full(Targets):
        def wait_for_sinks(self) -> None:
            assert self.arrived
            raise StorageError("targets: no space left")

    in_process.replace = FakeRank
    trainer = deepspeed.DeepSpeedTrainer(trainer_spec(config(), 9))
    with pytest.raises(StorageError):
        trainer.train_step(1, [rollout("a"), rollout("b")], Full("a", "b"))  # type: ignore[arg-type]
    assert [len(w.rounds) for w in in_process.workers] == [1, 1]
    assert not any(hasattr(w, "share") for w in in_process.workers), "no rank was told to step"


def test_the_layout_is_the_first_that_is_right_on_every_rank(in_process: Any) -> None:
    chosen = {}
    in_process.replace = FakeRank
    for ranks in (1, 2):
        trainer = deepspeed.DeepSpeedTrainer(trainer_spec(config(ranks=ranks), 9))
        trainer.wait_ready()
        chosen[ranks] = trainer.layout
        assert {made.object.layout for made in trainer._ranks} == {trainer.layout.layout}  # type: ignore[attr-defined]
    assert (chosen[1].layout, dict(chosen[1].tried)) == ("packed", {"packed": 0.5})
    assert (chosen[2].layout, dict(chosen[2].tried)) == (
        "padded",
        {"packed": 3.5, "packed_indexed": 2.0, "padded": 0.1},
    )


def test_weights_are_gathered_by_all_ranks_one_bucket_ahead_of_whoever_takes_them(in_process: Any) -> None:
    class Sending(FakeRank):
        gathered = 0

        @property
        def node(self) -> str:
            return f"node of rank {self.index}"

        def begin_stream(self, nbytes: int) -> tuple[bool, int]:
            self.nbytes = nbytes
            return self.index == 0, 3  # rank 0's word counts

        def gather_bucket(self) -> None:
            self.gathered += 1

        def take_bucket(self) -> str:
            assert self.index == 0
            return f"bucket {self.gathered}"

    in_process.replace = Sending
    trainer = deepspeed.DeepSpeedTrainer(trainer_spec(config(), 9))
    stream = trainer.stream_changed(100)
    ranks = in_process.workers
    assert (stream.whole, stream.model_dir.name) == (True, "base") and stream.model_dir.is_absolute()
    assert stream.node == "node of rank 0", "where the buckets are made"
    assert [(rank.nbytes, rank.gathered) for rank in ranks] == [(100, 0)] * 2, "nothing before somebody takes it"
    ahead = [(bucket, *(rank.gathered for rank in ranks)) for bucket in stream.buckets]
    assert ahead == [("bucket 1", 2, 2), ("bucket 2", 3, 3), ("bucket 3", 3, 3)]


def test_engine_and_trainer_that_differ_on_what_was_sampled_stop_the_run(in_process: Any) -> None:
    in_process.replace = FakeRank
    for tolerance, ok in ((1.01, True), (0.99, False)):  # the rank says 3 nats over 3 tokens
        trainer = deepspeed.DeepSpeedTrainer(trainer_spec(config(tolerance=tolerance, ranks=1), 9))
        targets: Any = Targets("a", "b")
        if ok:
            assert trainer.train_step(1, [rollout("a"), rollout("b")], targets).logprob_gap == pytest.approx(1)
        else:
            with pytest.raises(RunError, match=r"^step 1: engine and trainer differ by 1\.0000 nats a sampled token"):
                trainer.train_step(1, [rollout("a"), rollout("b")], targets)


def test_the_ranks_hear_which_of_their_samples_are_stale(in_process: Any) -> None:
    in_process.replace = FakeRank
    trainer = deepspeed.DeepSpeedTrainer(trainer_spec(config(), 9))
    trainer.train_step(1, [rollout("a"), rollout("b")], Targets("a", "b"), frozenset({"b"}))  # type: ignore[arg-type]
    works = [w.works[0][0] for w in in_process.workers]
    assert {i: work.stale for work in works for part in work.micro_batches for i in part} == {
        "a": frozenset(),
        "b": {"b"},
    }


def test_the_losses_of_shown_episodes_come_back_from_all_ranks(in_process: Any) -> None:
    class Telling(FakeRank):
        def finish_step(self, share: float) -> RankResult:
            work = self.works[-1][0]
            mine = {i for part in work.micro_batches for i in part} & work.watched
            return dataclasses.replace(super().finish_step(share), token_losses=dict.fromkeys(mine, (0.5, 0.25)))

    in_process.replace = Telling
    trainer = deepspeed.DeepSpeedTrainer(trainer_spec(config(), 9))
    episodes = [dataclasses.replace(rollout(i), stop_reason="done") for i in "ab"]
    report = trainer.train_step(1, [*episodes, rollout("c")], Targets(*"abc"))  # type: ignore[arg-type]
    assert report.token_losses == {"a": (0.5, 0.25)}, "b is no other than a, c is no episode"
    report = trainer.train_step(1, [rollout("c")], Targets("c"))  # type: ignore[arg-type]
    assert report.token_losses == {}


@pytest.mark.parametrize(("kind", "stops"), [("reverse_kl", True), ("sampled", False)])
def test_a_mean_below_zero_stops_a_divergence_and_no_estimate(kind: str, stops: bool, in_process: Any) -> None:
    class Negative(FakeRank):
        def finish_step(self, share: float) -> RankResult:
            return dataclasses.replace(super().finish_step(share), domains={"d": domain_stats(1, -3.0, gap=1.0)})

    in_process.replace = Negative
    data = config().model_dump(mode="json") | {"objective": {"kind": kind}}
    trainer = deepspeed.DeepSpeedTrainer(trainer_spec(PipelineConfig.model_validate(data), 9))
    if stops:
        with pytest.raises(RunError, match="step 1: reverse_kl of domain d is -3 nats a token"):
            trainer.train_step(1, [rollout("a"), rollout("b")], Targets("a", "b"))  # type: ignore[arg-type]
    else:
        trainer.train_step(1, [rollout("a"), rollout("b")], Targets("a", "b"))  # type: ignore[arg-type]


def test_micro_batches_begin_before_the_last_row_is_scored(in_process: Any) -> None:
    in_process.replace = FakeRank
    trainer = deepspeed.DeepSpeedTrainer(trainer_spec(config(ranks=1, micro_batch_tokens=16), 9))
    rollouts = [dataclasses.replace(rollout(i), prompt_ids=(1,) * 14) for i in "abcd"]
    report = trainer.train_step(1, rollouts, Targets("a", "c", "b", "d"))  # type: ignore[arg-type]
    (fake,) = in_process.workers
    assert [(index, parts) for index, _, parts in fake.rounds] == [
        (0, ("part a",)), (1, ("part c", "part b")), (2, ()), (3, ("part d",)),
    ]  # fmt: skip
    assert report.early_micro_batches == 3


def test_what_cannot_be_scored_is_left_out_of_the_mean(in_process: Any) -> None:
    in_process.replace = FakeRank
    trainer = deepspeed.DeepSpeedTrainer(trainer_spec(config(ranks=1, micro_batch_tokens=16), 9))
    rollouts = [dataclasses.replace(rollout(i), prompt_ids=(1,) * 14) for i in "abcd"]
    trainer.train_step(1, rollouts, Targets("a", "b", "c", "d", broken=("b",)))  # type: ignore[arg-type]
    (fake,) = in_process.workers
    assert [left_out for _, left_out, _ in fake.rounds] == [set(), {"b"}, {"b"}, {"b"}]
    assert fake.share == pytest.approx(3 / 4)


def test_a_step_of_which_nothing_could_be_scored_is_skipped(in_process: Any) -> None:
    in_process.replace = FakeRank
    trainer = deepspeed.DeepSpeedTrainer(trainer_spec(config(ranks=1), 9))
    report = trainer.train_step(1, [rollout("a")], Targets("a", broken=("a",)))  # type: ignore[arg-type]
    assert report.skipped and in_process.workers[0].rounds == []


def test_with_a_baseline_no_round_begins_before_every_row_is_there(in_process: Any) -> None:
    in_process.replace = FakeRank
    data = config(ranks=1, micro_batch_tokens=16).model_dump(mode="json") | SAMPLED_WITH_BASELINE
    trainer = deepspeed.DeepSpeedTrainer(trainer_spec(PipelineConfig.model_validate(data), 9))
    rollouts = [dataclasses.replace(rollout(i), prompt_ids=(1,) * 14) for i in "ab"]
    targets = Targets("a", "b", handle=lambda i: logprob_part(i, [-1.0, -2.0]))
    report = trainer.train_step(1, rollouts, targets)  # type: ignore[arg-type]
    assert [len(parts) for _, _, parts in in_process.workers[0].rounds] == [1, 1]
    assert targets.arrived
    assert report.early_micro_batches == 0


def test_the_weights_follow_the_objective_and_the_domains(in_process: Any) -> None:
    in_process.replace = FakeRank
    data = config().model_dump(mode="json")
    data["domains"] = {"d": {}, "e": {"loss_weight": 3.0}}
    data["objective"]["normalize"] = "sequence_mean"
    trainer = deepspeed.DeepSpeedTrainer(trainer_spec(PipelineConfig.model_validate(data), 9))
    rollouts = [rollout("a"), dataclasses.replace(rollout("b"), domain="e")]
    trainer.train_step(1, rollouts, Targets("a", "b"))  # type: ignore[arg-type]
    weights = {
        i: w
        for fake in in_process.workers
        for work, _ in fake.works
        for i, w in work.components["divergence"].weights.items()
    }
    assert weights == pytest.approx({"a": 1 / 4 / 2, "b": 3 / 4 / 2})


def test_a_sampled_tokens_weight_does_not_hold_its_own_responses_length(in_process: Any) -> None:
    in_process.replace = FakeRank
    data = config().model_dump(mode="json") | {"objective": {"kind": "sampled"}}
    trainer = deepspeed.DeepSpeedTrainer(trainer_spec(PipelineConfig.model_validate(data), 9))
    short, long = rollout("a"), rollout("b")
    num = len(short.response_ids)
    long = dataclasses.replace(
        long, response_ids=(1,) * 5 * num, behaviour_logprobs=(-1.0,) * 5 * num, spans=spans_of((True,) * 5 * num),
    )  # fmt: skip
    trainer.train_step(1, [short, long], Targets("a", "b"))  # type: ignore[arg-type]
    weights = {
        i: w
        for fake in in_process.workers
        for work, _ in fake.works
        for i, w in work.components["divergence"].weights.items()
    }
    assert weights == pytest.approx({"a": 1 / (10 * num), "b": 1 / (2 * num)})


@pytest.mark.parametrize("rollouts", [[], [rollout("a", trained=False)]])
def test_a_step_without_trained_tokens_is_skipped_and_says_so(rollouts: list[Rollout], in_process: Any) -> None:
    in_process.replace = FakeRank
    targets: Any = Targets(*(r.sample_id for r in rollouts))
    report = deepspeed.DeepSpeedTrainer(trainer_spec(config(), 9)).train_step(3, rollouts, targets)
    assert report.skipped
    assert targets.arrived, "the log wants them all the same"
    assert report.step == 3
    assert all(not w.works for w in in_process.workers)


@pytest.mark.parametrize(
    ("address", "met_at"), [("local", "127.0.0.1"), ("10.0.0.1:6379", "10.0.0.7")], ids=["one machine", "a cluster"]
)
def test_ranks_meet_where_the_cluster_reaches_rank_0(
    in_process: Any, monkeypatch: pytest.MonkeyPatch, address: str, met_at: str
) -> None:
    """Not where the machine's own name leads, which Debian resolves to 127.0.1.1: a port that is free there is no use."""
    started: list[str] = []

    class Rank(FakeRank):
        def open_meeting_point(self, address: str) -> tuple[str, int]:
            return rank.TrainerRank.open_meeting_point(self, address)  # type: ignore[arg-type]

        def node_address(self) -> str:
            return "10.0.0.7"

        def start(self, address: str, port: int) -> None:
            started.append(address)

    def listening(address: str) -> Any:
        assert address == met_at
        return SimpleNamespace(getsockname=lambda: (met_at, 4711))

    monkeypatch.setattr(zero, "open_listener", listening)
    in_process.replace = Rank
    two = config(ranks=2)
    elsewhere = two.model_copy(update={"cluster": two.cluster.model_copy(update={"address": address})})
    deepspeed.DeepSpeedTrainer(trainer_spec(elsewhere, 9))
    assert started == [met_at, met_at]


def test_numbers_come_back_from_the_device() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():  # tensors that only say that they are on a GPU
        there = TokenStats(*(torch.zeros(2, device="cuda") for _ in TokenStats.__slots__))
        here = to_device(there, torch.device("cpu"))
        assert {getattr(here, name).device.type for name in TokenStats.__slots__} == {"cpu"}


def test_every_tensor_of_a_micro_batch_goes_to_the_device() -> None:
    batch = to_device(build_micro_batch([(row("a"),)], torch.float32), torch.device("meta"))
    (run,) = batch.blocks
    assert isinstance(run, HiddenRun)
    tensors = [batch.packed.input_ids_B_T, batch.packed.position_ids_B_T, batch.predict_N, batch.token_N]
    tensors += [batch.place_N, batch.behaviour_N, run.hidden[0]]
    assert {t.device.type for t in tensors} == {"meta"}
    assert (batch.domains, batch.trained_lengths, run.heads) == (("d",), (2,), ("h",))


# Several teachers for a sample


def by_teachers(*parts: tuple[str, str, float], **changes: Any) -> np.ndarray:
    """A stream of one row for each (sample, teacher, weight)."""
    rows = [changed(row(i), teacher=t, weight=w, **changes) for i, t, w in parts]
    payload = "sampled_logprobs" if "teacher_logprobs" in changes else "hidden_states"
    return np.frombuffer(write_stream(rows, "float32", payload), dtype=np.uint8)


def test_rows_of_all_teachers_are_gathered() -> None:
    step = begun()
    step.keep_rows([by_teachers(("a", "t", 0.25), ("c", "t", 0.5)), by_teachers(("a", "s", 0.75))])
    (run,) = step.micro_batch(["a"]).blocks
    assert isinstance(run, HiddenRun)
    assert run.weights == (0.75, 0.25), "in the order of their names"
    with pytest.raises(RunError, match=r"sample c: scored by t 0\.5; the weights"):
        step.micro_batch(["c"])


def logprob_part(sample_id: str, said: list[float]) -> np.ndarray:
    return by_teachers((sample_id, "t", 1.0), teacher_logprobs=said)


def test_baselines_are_over_the_whole_step_and_not_over_the_ranks_part(in_process: Any) -> None:
    in_process.replace = FakeRank
    said = {"a": [-2.0, -4.0], "b": [-1.0, -2.0], "c": [-6.0, -1.0], "x": [-90.0, -90.0]}
    # The engine said -1 each time; x is left out.
    want = {"a": -(0 + 1 + 5 + 0) / 4, "b": -(1 + 3 + 5 + 0) / 4, "c": -(1 + 3 + 0 + 1) / 4}
    for ranks in (1, 2, 3):
        in_process.workers.clear()
        data = config(ranks=ranks).model_dump(mode="json") | SAMPLED_WITH_BASELINE
        trainer = deepspeed.DeepSpeedTrainer(trainer_spec(PipelineConfig.model_validate(data), 9))
        targets = Targets("x", "c", "a", "b", broken=("x",), handle=lambda i: logprob_part(i, said[i]))
        trainer.train_step(1, [rollout(i) for i in said], targets)  # type: ignore[arg-type]
        found = [work.baselines for fake in in_process.workers for work, _ in fake.works]
        assert all(
            set(part) <= {i for ids in work.micro_batches for i in ids}
            for part, fake in zip(found, in_process.workers, strict=True)
            for work, _ in fake.works
        )
        assert {i: value for part in found for i, value in part.items()} == pytest.approx(want)


class PlainEngine:
    """Stands for DeepSpeed on one rank: the module, its gradients, and no step."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.device = module, torch.device("cpu")
        self.optimizer = Optimizer(module.parameters(), lr=1.0)

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def set_gradient_accumulation_boundary(self, last: bool) -> None: ...

    def backward(self, loss: torch.Tensor) -> None:
        self.optimizer.scaled(loss).backward()

    def step(self) -> None:
        self.optimizer.unscale()

    def get_global_grad_norm(self) -> float:
        return float(torch.cat([p.grad.flatten() for p in self.module.parameters()]).norm())


def one_rank(model_dir: Path, objective: dict[str, Any], payload: str = "hidden_states") -> rank.TrainerRank:
    from transformers import AutoModelForCausalLM

    from opd.train.student import Student

    data = config().model_dump(mode="json") | {"objective": objective, "teachers": {"payload": payload}}
    options = rank_options(PipelineConfig.model_validate(data), 76)
    lm = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    made = rank.TrainerRank(dataclasses.replace(options, world_size=1), 0)
    made._engine = PlainEngine(Student(lm, options.objective.build(), chunk=4, vocab_size=76))
    made._device = made._engine.device
    return made


def gradient(made: rank.TrainerRank) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in made._engine.module.parameters()])


def test_a_step_with_two_teachers_a_sample_is_the_weighted_sum_of_two_steps(
    tiny_model_dir: Path, in_process: Any
) -> None:
    gen = torch.Generator().manual_seed(0)
    heads = {name: torch.randn(76, 2, generator=gen).numpy() for name in ("hs", "ht")}
    states = {name: torch.randn(2, 2, generator=gen).numpy().tobytes() for name in ("s", "t")}

    def step(**shares: float) -> tuple[float, torch.Tensor]:
        streams = [by_teachers(*((i, t, w) for i in "ac"), hidden=states[t], head=f"h{t}") for t, w in shares.items()]
        made = one_rank(tiny_model_dir, {"kind": "reverse_kl"})
        needed = [HeadSource(key=f"h{t}", rule=IDENTITY, handle=cluster.StoredValue(heads[f"h{t}"])) for t in shares]
        result = take_step(made, WORK, needed, *streams)
        return result.loss, gradient(made)

    (loss_s, grad_s), (loss_t, grad_t), (loss, grad) = step(s=1.0), step(t=1.0), step(s=0.25, t=0.75)
    assert float((grad_s - grad_t).norm()) > 0.1 * float(grad_s.norm())
    assert loss == pytest.approx(0.25 * loss_s + 0.75 * loss_t, rel=1e-5)
    torch.testing.assert_close(grad, 0.25 * grad_s + 0.75 * grad_t, rtol=1e-4, atol=1e-5)


def test_the_losses_of_watched_samples_come_token_by_token(tiny_model_dir: Path, in_process: Any) -> None:
    states = torch.randn(2, 2, generator=torch.Generator().manual_seed(0)).numpy()
    head = HeadSource(key="h", rule=IDENTITY, handle=cluster.StoredValue(np.eye(76, 2, dtype=np.float32)))

    def step(*watched: str) -> RankResult:
        streams = by_teachers(*((i, "t", 1.0) for i in "ac"), hidden=states.tobytes(), head="h")
        work = dataclasses.replace(WORK, watched=frozenset(watched))
        return take_step(one_rank(tiny_model_dir, {"kind": "reverse_kl"}), work, [head], streams)

    nothing, one, both = step(), step("c", "elsewhere"), step("a", "c")
    assert nothing.token_losses == {} and set(one.token_losses) == {"c"} and set(both.token_losses) == {"a", "c"}
    assert one.token_losses["c"] == both.token_losses["c"] and len(one.token_losses["c"]) == 2
    assert sum(map(sum, both.token_losses.values())) == pytest.approx(both.domains["d"].kl_sum)
    assert nothing.loss == both.loss


def test_a_share_that_is_left_divides_the_gradient(tiny_model_dir: Path) -> None:
    """It goes to DeepSpeed, whose own arithmetic the tests with two real ranks check."""
    made = one_rank(tiny_model_dir, {"kind": "sampled"}, "sampled_logprobs")
    rows = [changed(row(i), teacher_logprobs=[-0.5, -1.5]) for i in "ac"]
    part = np.frombuffer(write_stream(rows, "float32", "sampled_logprobs"), dtype=np.uint8)
    losses, norms, shares = [], [], (1.0, 0.5, 1.0, 0.5, 0.25, 1.0)
    for share in shares:
        made.begin_step(WORK, {})
        made.accumulate_micro_batch(0, NONE, part)
        made.accumulate_micro_batch(1, NONE)
        result = made.finish_step(share)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        assert made._engine.optimizer.divisor == share
        made._engine.module.zero_grad()
    assert losses == pytest.approx([losses[0] / share for share in shares])
    assert norms[0] > 1e-3
    assert norms == pytest.approx([norms[0] / share for share in shares]), "a step after such a step is like any other"


def test_the_baseline_reaches_the_gradient_only_where_it_is_wanted(tiny_model_dir: Path) -> None:
    # With equal advantages everywhere the baseline takes all of them away.
    def step(baseline: str, said: list[float]) -> float:
        objective = {"kind": "sampled", "baseline": baseline}
        made = one_rank(tiny_model_dir, objective, "sampled_logprobs")
        with torch.no_grad():
            student = made.logprobs([[1, 2, 0, 1]])[0][1:]
        rows = [
            changed(
                row(i), behaviour_logprobs=student, teacher_logprobs=[p + x for p, x in zip(student, said, strict=True)]
            )
            for i in "ac"
        ]
        stream = np.frombuffer(write_stream(rows, "float32", "sampled_logprobs"), dtype=np.uint8)
        baselines = leave_one_out_baselines(gather_samples(rows)) if baseline == "leave_one_out" else None
        take_step(made, dataclasses.replace(WORK, baselines=baselines), [], stream)
        return float(gradient(made).norm())

    assert step("none", [-2.0, -2.0]) > 0.1
    assert step("leave_one_out", [-2.0, -2.0]) < 1e-3 * step("none", [-2.0, -2.0])
    assert step("leave_one_out", [-2.0, -1.0]) > 0.1
