"""A draft beside a student on plain torch: what it learns from, and that it learns."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from opd.draft.companion import DraftCompanion, DraftSpec
from opd.draft.shape import DraftShape
from opd.draft.windows import choose_windows
from opd.train.batch import build_unscored_batch
from opd.train.companions import EMBEDDING, StudentView
from tests.rows import make_rollout
from tests.unit.opd.train.test_rank import rollout

WIDTH = 64
SHAPE = DraftShape(
    model={
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 76,
    },
    kind="eagle3",
    layers=(0, 1),
    vocab=tuple(range(76)),
)
HALF = dataclasses.replace(SHAPE, vocab=tuple(range(0, 76, 2)))
SPEC = DraftSpec(
    shape=SHAPE,
    steps=3,
    loss="forward_kl",
    decay=0.8,
    lr=3e-3,
    tokens=64,
    width=4,
    domains=("letters",),
)


def make_rollouts() -> list[Any]:
    """Three rollouts of the tokens that the tiny model's own greedy text may have: long enough for windows of four."""
    random = torch.Generator().manual_seed(3)
    draw = lambda n: tuple(torch.randint(4, 70, (n,), generator=random).tolist())  # noqa: E731
    return [
        dataclasses.replace(
            rollout(name),
            prompt_ids=draw(3),
            response_ids=draw(n),
            behaviour_logprobs=(0.0,) * n,
            spans=(dataclasses.replace(rollout(name).spans[0], length=n),),
            domain="letters",
        )
        for name, n in (("a", 11), ("b", 2), ("c", 6))
    ]


def load_student(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    class Student(torch.nn.Module):
        lm = AutoModelForCausalLM.from_pretrained(path)

    return Student()


def show(companion: DraftCompanion, student: Any, layout: str, rollouts: list[Any]) -> None:
    """Let the companion see one forward pass of the student, in chunks of five tokens, and add its gradients."""
    batch = build_unscored_batch(rollouts, layout)
    companion.begin_batch(batch)
    view = StudentView([companion])
    with torch.no_grad(), view.watch_layers(student.lm):
        states = student.lm.base_model(**batch.packed.inputs(torch.float32)).last_hidden_state.flatten(0, 1)
        logits = states[batch.predict_N] @ student.lm.get_output_embeddings().weight.T
    for first in range(0, len(logits), 5):
        view.show_logits(slice(first, min(first + 5, len(logits))), logits[first : first + 5])
    count = len(batch.token_N)
    companion.add_gradients(batch, view.hidden, torch.full((count,), 1 / count))


def start(student: Any, **changes: Any) -> DraftCompanion:
    options: Any = type("Options", (), {"world_size": 1})
    return dataclasses.replace(SPEC, **changes).start(options, 0, student, torch.device("cpu"))


def test_it_begins_with_the_last_norm_and_the_head_of_the_student(tiny_model_dir: Path) -> None:
    student = load_student(tiny_model_dir)
    student.lm.base_model.norm.weight.data.normal_()
    draft = start(student, shape=HALF).draft
    assert draft.norm.weight.equal(student.lm.base_model.norm.weight)
    assert draft.lm_head.weight.equal(student.lm.get_output_embeddings().weight[list(HALF.vocab)])


def test_windows_cover_all_tokens_or_as_many_as_are_asked_for() -> None:
    batch = build_unscored_batch(make_rollouts(), "packed")
    every = choose_windows(batch, 3, 4, 64, 0)
    assert every is not None
    assert sorted(every.row_I_W_K[..., 0][every.valid_I_W_K[..., 0]].tolist()) == list(range(19))
    assert every.domains == ("letters",) * 6 and every.column_S_L.shape == (3, 3 + 11 - 1 + 3)
    # The last tokens of a response have fewer guesses behind them.
    assert every.valid_I_W_K.sum() == 3 * 19 - 3 * 3
    few = [choose_windows(batch, 3, 4, 8, offset) for offset in range(6)]
    assert all(chosen is not None and len(chosen.domains) == 2 for chosen in few)
    assert {int(chosen.row_I_W_K[0, 0, 0]) for chosen in few if chosen} == {0, 4, 8, 11, 13, 17}


def test_a_message_of_the_environment_ends_the_guesses_before_it() -> None:
    sample = make_rollout(
        sample_id="a",
        step=1,
        domain="letters",
        prompt_ids=(1, 2),
        response_ids=(3, 4, 5, 6, 7, 8),
        loss_mask=(True, True, False, False, True, True),
    )
    chosen = choose_windows(build_unscored_batch([sample], "packed"), 3, 8, 64, 0)
    assert chosen is not None
    assert chosen.valid_I_W_K[0, :4].sum(-1).tolist() == [2, 1, 2, 1]
    assert chosen.windows.start_I_W[0, :4].tolist() == [0, 1, 4, 5]


@pytest.mark.parametrize("layout", ["shared", "padded"])
def test_layouts_do_not_matter(layout: str, tiny_model_dir: Path) -> None:
    student, gradients = load_student(tiny_model_dir), []
    rollouts = make_rollouts()
    rollouts[1] = dataclasses.replace(rollouts[1], prompt_ids=rollouts[0].prompt_ids)
    for name in ("packed", layout):
        companion = start(student)
        show(companion, student, name, rollouts)
        gradients.append([param.grad for param in companion.draft.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_groups_of_windows_add_up(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    student, gradients = load_student(tiny_model_dir), []
    for size in (1 << 24, 1):
        monkeypatch.setattr("opd.draft.companion.GROUP_VALUES", size)
        companion = start(student)
        show(companion, student, "packed", make_rollouts())
        gradients.append(([p.grad for p in companion.draft.parameters()], companion._sums.summarise()))
    (whole, numbers), (parts, others) = gradients
    assert numbers == pytest.approx(others, rel=1e-5) and set(numbers) >= {
        "loss",
        "accepted_length/letters",
        "acceptance_3",
    }
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other)


def test_what_it_reads_is_what_the_student_computed(tiny_model_dir: Path) -> None:
    student = load_student(tiny_model_dir)
    companion = start(student, loss="tv")
    rollouts = make_rollouts()[:1]
    show(companion, student, "packed", rollouts)
    ids = torch.tensor([[*rollouts[0].prompt_ids, *rollouts[0].response_ids]])
    with torch.no_grad():
        seen = student.lm(ids, output_hidden_states=True)
        embeds, first, last = seen.hidden_states[0], seen.hidden_states[1], None
        # transformers' last hidden state is after the norm; the layer's own output comes from a hook.
        outputs: list[Any] = []
        hook = student.lm.model.layers[1].register_forward_hook(lambda *a: outputs.append(a[2]))
        student.lm(ids)
        hook.remove()
        last = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
        from opd.draft.head import Windows

        pad = torch.zeros(1, 3, 64)
        context = companion.draft.read_context(
            torch.cat([torch.cat([first, last], -1), torch.zeros(1, 3, 128)], 1), torch.cat([embeds, pad], 1)
        )
        states = companion.draft.guess_tokens(
            context, Windows(torch.tensor([0]), torch.arange(1, 12)[None]), 1
        ).states_I_W_K_D
        q = companion.draft.lm_head(states)[0, :, 0].softmax(-1)
        # Guess 1 after position t is about token t + 2: the student's logits at t + 1.
        kept = torch.minimum(seen.logits[0, 2:13].softmax(-1), q).sum(-1)
    # The first trained token is predicted at position 2, so its guess starts at 1.
    assert companion._sums.summarise()["acceptance_1"] == pytest.approx(float(kept.mean()), rel=1e-5)
    assert EMBEDDING in companion.layers


def test_it_learns_and_goes_on_after_a_resume(tiny_model_dir: Path, tmp_path: Path) -> None:
    student, rollouts = load_student(tiny_model_dir), make_rollouts()
    companion = start(student, shape=HALF)
    losses = []

    def step(of: DraftCompanion, number: int) -> dict[str, float]:
        show(of, student, "packed", rollouts[:2])
        show(of, student, "packed", rollouts[2:])
        return of.take_step(number, 1.0)

    for number in range(1, 31):
        losses.append(step(companion, number)["loss"])
    assert losses[-1] < 0.5 * losses[0]
    companion.begin_save(tmp_path)
    expected = [step(companion, number) for number in (31, 32)]
    resumed = start(student, shape=HALF)
    resumed.load(tmp_path)
    assert [step(resumed, number) for number in (31, 32)] == expected
    companion.export(tmp_path)
    assert (tmp_path / "config.json").exists()


def test_a_gradient_that_is_no_number_changes_nothing(tiny_model_dir: Path) -> None:
    student = load_student(tiny_model_dir)
    companion = start(student)
    show(companion, student, "packed", make_rollouts())
    before = companion.serving_weights()
    next(companion.draft.parameters()).grad[0] = float("nan")  # type: ignore[index]
    companion.take_step(1, 1.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in companion.serving_weights().items())


def test_a_loss_begins_after_the_steps_of_the_warm_up(tiny_model_dir: Path) -> None:
    student, losses = load_student(tiny_model_dir), {}
    for name, changes in {
        "warm": {"loss": "end_to_end_tv", "warmup_steps": 1},
        "log": {"loss": "log_overlap"},
        "end": {"loss": "end_to_end_tv"},
    }.items():
        companion = start(student, **changes)
        show(companion, student, "packed", make_rollouts())
        first = companion.take_step(1, 1.0)["loss"]
        show(companion, student, "packed", make_rollouts())
        losses[name] = (first, companion.take_step(2, 1.0)["loss"])
    assert losses["warm"][0] == losses["log"][0] != losses["end"][0]
    assert losses["warm"][1] == pytest.approx(losses["end"][1], abs=0.05)
    assert losses["warm"][1] != pytest.approx(losses["log"][1], abs=0.05)
