"""An engine that guesses with a draft writes samples of the student, whatever the draft; a draft that agrees is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from opd import cluster
from opd.config.draft import DraftConfig
from opd.config.sections import ClusterConfig
from opd.draft.export import name_weights
from opd.draft.head import Windows, build_draft
from opd.draft.shape import DraftShape
from opd.rollouts.processes import ENGINE_ENV
from opd.rollouts.served_families import DRAFTED
from opd.rollouts.worker import EngineOptions, Generated, GenerateRequest, VLLMWorker, start_engine
from opd.train.companions import EMBEDDING, StudentView
from pipelines.draft import draft_shape

WIDTH, KNOWN, PADDED = 32, 30, 36
"""Width of the model, ids of its tokenizer, and rows of its head, of which the last are no token."""
PROMPT = (1, 5, 7, 9)
GUESSES = 3
SHAPE = DraftShape(
    model={
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": PADDED,
        "max_position_embeddings": 128,
    },
    kind="eagle3",
    layers=(0, 1, 2),
    vocab=tuple(range(KNOWN)),
)
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    with cluster.ray_session(ClusterConfig(), 2):
        yield


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose next tokens are neither certain nor all alike."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,  # narrower heads are not served by vLLM's CPU kernels
        vocab_size=PADDED,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=PADDED - 1,  # is never written, so that all responses have one length
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.mul_(6)
    path = tmp_path_factory.mktemp("student")
    model.save_pretrained(path)
    return path


def options(student: Path) -> EngineOptions:
    return EngineOptions(
        model_dir=student,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=256,
        gpu_memory_utilization=0.8,
        vocab_size=KNOWN,
        draft=SHAPE,
        num_speculative_tokens=GUESSES,
    )


def spawn(options: EngineOptions) -> cluster.Worker[VLLMWorker]:
    return cluster.spawn_worker(VLLMWorker, options, (), name="engine", env=cluster.worker_env(1) | ENGINE_ENV | ENV)


def generate(
    worker: cluster.Worker[VLLMWorker], num: int, *, length: int, temperature: float, first_seed: int = 0
) -> list[Generated]:
    requests = [
        GenerateRequest(
            token_ids=PROMPT, max_tokens=length, temperature=temperature, seed=first_seed + i if temperature else None
        )
        for i in range(num)
    ]
    return worker.submit(VLLMWorker.generate, requests).wait_for_result(timeout_s=300)


def true_probs(student: Path, temperature: float) -> list[Tensor]:
    """Return [KNOWN] the probability of each token at the first, second and third place after the prompt."""
    model = AutoModelForCausalLM.from_pretrained(student)

    def next_probs(prefixes_B_T: Tensor) -> Tensor:
        with torch.no_grad():
            logits = model(prefixes_B_T).logits[:, -1, :KNOWN]
        return (logits.double() / temperature).softmax(-1)

    prefixes, weight = torch.tensor([PROMPT]), torch.ones(1, dtype=torch.double)
    places = []
    for _ in range(3):
        joint = weight[:, None] * next_probs(prefixes)
        places.append(joint.sum(0))
        weight = joint.flatten()
        prefixes = torch.cat(
            [prefixes.repeat_interleave(KNOWN, 0), torch.arange(KNOWN).repeat(len(prefixes))[:, None]], 1
        )
    return places


def p_value(counts: Tensor, probs: Tensor) -> float:
    """Return the probability of a chi-square statistic at least as large; rare tokens are one class."""
    expected = probs * counts.sum()
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]]).double()
    expected = torch.cat([expected[common], expected[~common].sum()[None]]).clamp(min=1e-9)
    return float(chi2.sf(float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1))


def make_weights(student: Path, kind: str) -> dict[str, Tensor]:
    """Return the weights of a wrong draft (random), or of one that agrees with the student as far as its last states say."""
    draft = build_draft(SHAPE, seed=3)
    model = AutoModelForCausalLM.from_pretrained(student)
    with torch.no_grad():
        if kind == "random":
            for param in draft.parameters():
                param.normal_()
        else:
            draft.lm_head.weight.copy_(model.lm_head.weight[:KNOWN])
    return name_weights(draft, SHAPE)


def count_kept(answers: Sequence[Generated]) -> int:
    return sum(kept * passes for answer in answers for kept, passes in enumerate(answer.accepted))


SOME = (("blank", 1.0), ("random", 0.7), ("states", 1.0))
EVERY = tuple((kind, temperature) for kind in ("blank", "random", "states") for temperature in (1.0, 0.7))


@pytest.mark.parametrize(
    "samples, cases", [(3000, SOME), pytest.param(20_000, EVERY, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_text_and_distribution_are_the_students(
    student: Path, samples: int, cases: Sequence[tuple[str, float]]
) -> None:
    """Greedy text, log-probs and frequencies at two temperatures; with a blank, a random and a better draft, pushed in turn."""
    plain, drafting = spawn(replace(options(student), draft=None)), spawn(options(student))
    model = AutoModelForCausalLM.from_pretrained(student)
    greedy = generate(plain, 1, length=40, temperature=0.0)[0]
    plain.kill()
    for kind, temperature in cases:
        if kind != "blank":
            drafting.submit(VLLMWorker.load_draft, make_weights(student, kind)).wait_for_result(timeout_s=60)
        written = generate(drafting, 1, length=40, temperature=0.0)[0]
        assert written.token_ids == greedy.token_ids and sum(written.accepted) > 0 == sum(greedy.accepted)
        answers = generate(drafting, samples, length=3, temperature=temperature)
        tokens = torch.tensor([answer.token_ids for answer in answers])
        for place, probs in enumerate(true_probs(student, temperature)):
            counts = torch.bincount(tokens[:, place], minlength=KNOWN)
            assert p_value(counts, probs) > 1e-3, (kind, place)
        # The log-prob of a token is that of the distribution that it was drawn from.
        sample = answers[0]
        ids = torch.tensor([[*PROMPT, *sample.token_ids]])
        with torch.no_grad():
            logprobs = (model(ids).logits[0, :, :KNOWN] / temperature).log_softmax(-1)
        expected = [float(logprobs[len(PROMPT) - 1 + i, token]) for i, token in enumerate(sample.token_ids)]
        assert sample.logprobs == pytest.approx(expected, abs=1e-4)
    drafting.kill()


def test_a_response_depends_on_its_own_seed_alone(student: Path) -> None:
    """However many others are written beside it and before it; and a worker that takes its draft anew goes on as it was."""
    worker = spawn(options(student))
    worker.submit(VLLMWorker.load_draft, make_weights(student, "states")).wait_for_result(timeout_s=60)
    alone = generate(worker, 1, length=24, temperature=1.0, first_seed=7)[0]
    many = generate(worker, 40, length=24, temperature=1.0)
    assert many[7] == alone
    assert len({answer.token_ids for answer in many}) == 40
    worker.kill()


class TwinWorker:
    """An engine whose draft is the student itself, by vLLM's `draft_model`; optionally without the repairs."""

    def __init__(self, options: EngineOptions, repaired: bool) -> None:
        self._llm = start_engine(
            replace(options, draft=None),
            speculative_config={
                "method": "draft_model",
                "model": str(options.model_dir),
                "num_speculative_tokens": GUESSES,
                "draft_sample_method": "probabilistic",
            },
            per_request_spec_decode_metrics="summary",
        )
        if repaired:
            self._llm.collective_rpc("opd_repair_drafting", args=(options.vocab_size,))

    def count_guesses(self) -> tuple[int, int]:
        """Return the number of guesses that were made and of those that were kept, at temperature 1."""
        from vllm import SamplingParams

        params: Any = [SamplingParams(temperature=1.0, max_tokens=31, seed=i, detokenize=False) for i in range(20)]
        outputs = self._llm.generate([{"prompt_token_ids": list(PROMPT)}] * 20, params, use_tqdm=False)
        metrics = [output.outputs[0].spec_decode_metrics for output in outputs]
        kept = sum(n * passes for m in metrics for n, passes in enumerate(m.histogram))
        return sum(m.num_draft_tokens for m in metrics), kept


def test_a_draft_that_is_the_student_is_always_kept(student: Path) -> None:
    """And without the repair it is not: when vLLM mends its CPU build, the second half fails, and the repair can go."""
    # Padding rows of the head would be guessed by vLLM's own draft, and never be written.
    whole = replace(options(student), vocab_size=PADDED)
    rates = []
    for repaired in (True, False):
        worker = cluster.spawn_worker(
            TwinWorker, whole, repaired, name="twin", env=cluster.worker_env(1) | ENGINE_ENV | ENV
        )
        made, kept = worker.submit(TwinWorker.count_guesses).wait_for_result(timeout_s=200)
        rates.append(kept / made)
        worker.kill()
    assert rates[0] > 0.97 and rates[1] < 0.6, rates


class GuessReader(VLLMWorker):
    """Shows the probabilities of the guess after the first token."""

    def read_first_guess(self, token_ids: Sequence[int]) -> tuple[int, Tensor]:
        request = GenerateRequest(token_ids=tuple(token_ids), max_tokens=1, temperature=1.0, seed=3)
        [answer] = self.generate([request])
        core = self._llm.llm_engine.engine_core.engine_core
        probs_K_V = core.model_executor.driver_worker.worker.model_runner.drafter.take_last_draft_probs()
        return answer.token_ids[0], probs_K_V.reshape(GUESSES, -1)[0].clone()


@pytest.mark.slow
@pytest.mark.parametrize("family", DRAFTED)
def test_the_draft_reads_the_states_that_it_learned_from(tmp_path: Path, family: str) -> None:
    """The engine's guess is that of our draft on the states of transformers, for every family that may have one."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        family,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=KNOWN,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.1,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    shape = draft_shape(tmp_path, DraftConfig(), KNOWN)
    draft = build_draft(shape, seed=5)
    with torch.no_grad():
        for param in draft.parameters():
            param.normal_(std=0.2)
    worker = cluster.spawn_worker(
        GuessReader,
        replace(options(tmp_path), draft=shape),
        (),
        name="engine",
        env=cluster.worker_env(1) | ENGINE_ENV | ENV,
    )
    worker.submit(VLLMWorker.load_draft, name_weights(draft, shape)).wait_for_result(timeout_s=100)
    prompt = [1, 5, 7, 9, 11, 4, 4, 20]
    token, probs_V = worker.submit(GuessReader.read_first_guess, prompt).wait_for_result(timeout_s=100)
    worker.kill()
    view = StudentView([SimpleNamespace(layers=(*shape.layers, EMBEDDING))])
    with torch.no_grad(), view.watch_layers(model):
        model(torch.tensor([[*prompt, token]]))
        features = torch.cat([view.hidden[layer].unflatten(0, (1, -1)) for layer in shape.layers], -1)
        context = draft.read_context(features, view.hidden[EMBEDDING].unflatten(0, (1, -1)))
        start = torch.tensor([[len(prompt) - 1]])
        expected = draft.lm_head(draft.guess_tokens(context, Windows(torch.tensor([0]), start), 1).states_I_W_K_D)[
            0, 0, 0
        ].softmax(-1)
    assert probs_V.max() < 0.9
    torch.testing.assert_close(probs_V, expected, atol=1e-4, rtol=1e-3)
