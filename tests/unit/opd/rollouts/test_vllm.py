"""The surroundings of vLLM: which prompts go to it, with which limits and seeds, and whose answer is whose."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opd import cluster
from opd.config import PipelineConfig, load_pipeline
from opd.errors import RunError
from opd.records.episodes import EpisodeResult
from opd.records.types import Prompt, SampledTurn, Span, StopReason
from opd.rollouts.episodes.dialogue import PlainDialogue
from opd.rollouts.episodes.drift import Curriculum, DriftOptions, Guide, TeacherTurns
from opd.rollouts.episodes.spec import EpisodeOptions, EpisodeRequest
from opd.rollouts.episodes.sub_agents import SubAgentOptions, SubAgentsOptions
from opd.rollouts.episodes.trace import Trace
from opd.rollouts.responses import _make_spans, derive_response_seed, make_sample_ids
from opd.rollouts.vllm import VLLMRolloutEngine
from opd.rollouts.worker import Generated, GenerateRequest, VLLMWorker, _read_output
from pipelines.specs import TrainingFeatures, rollout_spec
from tests.chatml import chat_tokenizer
from tests.conftest import build_tokenizer, put_in_front

ROOM, LIMIT = 16, 6
VOCABULARY = 100


class FakeWorker:
    """Stands for a vLLM process: writes the prompt's first token as often as it may."""

    def __init__(self, options: Any, stop: Sequence[int]) -> None:
        self.options, self.stop = options, stop
        self.requests: list[GenerateRequest] = []

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        self.requests += requests
        return [
            Generated(token_ids=(r.token_ids[0],) * r.max_tokens, logprobs=(-1.0,) * r.max_tokens, stop_reason="length")
            for r in requests
        ]

    def episodes(
        self, requests: Sequence[EpisodeRequest], temperature: float, policy_version: int
    ) -> list[EpisodeResult]:
        """Two turns of one token, the prompt's first; an episode whose metadata say so breaks before."""
        self.played = [*getattr(self, "played", []), *requests]
        self.temperature = temperature
        return [_episode(r, policy_version) for r in requests]

    def load(self, model_dir: Path, base: Path | None = None) -> None:
        self.model_dir, self.base = model_dir, base

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[-1.0] * (len(s) - 1) for s in sequences]


def _episode(request: EpisodeRequest, version: int) -> EpisodeResult:
    token, trace = request.prompt.token_ids[0], Trace(version, request.masked)
    breaks = "breaks" in request.prompt.metadata
    if not breaks:
        segment = trace.begin_segment(request.prompt.token_ids)
        for _ in range(2):
            segment.append_policy_turn(
                SampledTurn(token_ids=(token,), logprobs=(-1.0,), stop_reason="stop", policy_version=version)
            )
            segment.append_observation([9])
    reason: StopReason = "raised" if breaks else "done"
    return EpisodeResult(
        rollouts=tuple(trace.to_rollouts(request.sample, reason, 0.5)), stop_reason=reason, reward=0.5, audit=trace.audit,
        error="reset: KeyError" if breaks else "", text="policy: n",
    )  # fmt: skip


class Letters:
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(chr(97 + t) for t in token_ids)


def engine(
    in_process: Any, workers: int = 2, seed: int = 0, untrained: dict[str, frozenset[int]] | None = None, **rollout: Any
) -> VLLMRolloutEngine:
    in_process.replace = FakeWorker
    config = PipelineConfig.model_validate(
        {
            "name": "n",
            "seed": seed,
            "student": {"model": "base"},
            "experts": {"e": {"model": "m", "domain": "d"}},
            "domains": {"d": {}},
            "trainer": {"steps": 1, "samples_per_step": 4},
            "rollout": {"workers": workers, "max_model_len": ROOM, "max_new_tokens": LIMIT} | rollout,
        }
    )
    known = TrainingFeatures(untrained=untrained or {})
    return VLLMRolloutEngine(rollout_spec(config, Path("base"), VOCABULARY, (2,), known), Letters())


def agents(in_process: Any, **environment: Any) -> VLLMRolloutEngine:
    """Two workers, a domain `d` whose prompts are answered, and a domain `e` whose prompts are episodes."""
    return acting(engine(in_process, untrained={"e": frozenset({3})}), **environment)


def acting(made: VLLMRolloutEngine, **environment: Any) -> VLLMRolloutEngine:
    """The same engine, in which the prompts of the domain `e` are episodes."""
    known = {"max_turns": 3, "max_turn_tokens": LIMIT, "step_timeout_s": 1.0, "max_broken": 0.5}
    options = EpisodeOptions(environment="world:Maze", **known | environment)
    made._spec = replace(made._spec, episodes={"e": options})
    return made


def task(i: int, length: int = 3, **metadata: Any) -> Prompt:
    return Prompt(id=f"e/{i}", domain="e", token_ids=tuple(range(i, i + length)), metadata=metadata)


def test_domains_with_an_environment_are_played_and_the_others_answered(in_process: Any) -> None:
    batch = agents(in_process).generate([task(1), prompt(0), task(2), task(3), task(4, ROOM)], step=7, policy_version=6)
    assert [r.sample_id for r in batch.rollouts] == ["000007/d/0", "000007/e/1", "000007/e/2", "000007/e/3"]
    episode = batch.rollouts[2]
    assert (episode.response_ids, episode.loss_mask, episode.policy_version) == ((2, 9, 2), (True, False, True), 6)
    assert batch.rollouts[3].loss_mask == (False,) * 3, "teachers.mask_tokens holds in episodes too"
    assert [q.prompt_id for q in batch.quarantined] == ["e/4"] and "rollout.max_model_len" in batch.quarantined[
        0
    ].reason
    stats = batch.episodes["e"]
    assert set(batch.episodes) == {"e"} and (stats.episodes, stats.audit.turns, stats.stop_reasons) == (
        3,
        6,
        {"done": 3},
    )
    assert (stats.audit.sampled, stats.audit.trained, stats.rewarded, stats.reward_sum) == (6, 4, 3, 1.5)
    assert sorted(len(w.played) for w in in_process.workers) == [1, 2]


def test_what_is_done_about_drift_is_done_in_training_and_not_in_exams(in_process: Any) -> None:
    made = agents(in_process)
    turns = TeacherTurns(model_dir=Path("expert"), share=0.5, over_steps=4, train=True)
    drift = DriftOptions(curriculum=Curriculum(first=1, over_steps=4), teacher_turns=turns)
    made._spec = replace(made._spec, drift={"e": drift})

    def played(step: int) -> EpisodeRequest:
        made.generate([task(1)], step=step, policy_version=0)
        return in_process.workers[0].played[-1]

    first, later, last = played(1), played(3), played(5)
    assert [r.cut_after for r in (first, later, last)] == [1, 2, 3], "max_turns is 3"
    assert first.guide == Guide(model_dir=Path("expert"), probability=0.5, train=True)
    assert later.guide is not None and later.guide.probability == 0.25 and last.guide is None
    made.answer([task(1)])
    exam = in_process.workers[0].played[-1]
    assert (exam.cut_after, exam.guide) == (None, None)


def test_a_replayed_domain_is_answered_once_and_examined_in_episodes(in_process: Any) -> None:
    made = agents(in_process)
    made._spec = replace(made._spec, drift={"e": DriftOptions(replay=True)})
    batch = made.generate([task(1), prompt(0)], step=1, policy_version=0)
    assert sorted(r.sample_id for r in batch.rollouts) == ["000001/d/0", "000001/e/1"] and not batch.episodes
    (turn,) = (r for r in batch.rollouts if r.domain == "e")
    assert len(turn.response_ids) == LIMIT and turn.stop_reason == "length"
    (done,) = made.answer([task(1)])
    assert done.episode is not None


def test_an_episode_that_broke_before_its_first_turn_is_quarantined(in_process: Any) -> None:
    batch = agents(in_process).generate([task(1), task(2, breaks=True)], step=1, policy_version=0)
    assert [r.sample_id for r in batch.rollouts] == ["000001/e/1"]
    (left_out,) = batch.quarantined
    assert left_out.prompt_id == "e/2" and "raised" in left_out.reason and "reset: KeyError" in left_out.reason
    assert batch.episodes["e"].broken == 1


def test_too_many_broken_episodes_stop_the_run(in_process: Any) -> None:
    tasks = [task(i, **({"breaks": True} if i < 2 else {})) for i in range(3)]
    with pytest.raises(RunError, match=r"domain e: 2 of 3 episodes broke \(2 raised\)"):
        agents(in_process).generate(tasks, step=1, policy_version=0)


def test_a_sub_agent_has_the_masked_tokens_of_the_domain_that_scores_it(in_process: Any) -> None:
    kinds = {"ask": SubAgentOptions(description="Asks.", domain="d"), "own": SubAgentOptions(description="Does.")}
    made = agents(in_process, sub_agents=SubAgentsOptions(kinds=kinds, at_most=2))
    made._spec = replace(made._spec, untrained={"d": frozenset({1}), "e": frozenset({3}), "f": frozenset({4})})
    made.generate([task(1)], step=1, policy_version=0)
    (asked,) = [r for w in in_process.workers for r in getattr(w, "played", ())]
    assert (asked.masked, asked.masked_by_domain) == (frozenset({3}), {"d": frozenset({1})})


def test_an_exam_of_agents_plays_at_its_own_temperature(in_process: Any) -> None:
    made = agents(in_process)
    found = made.answer([task(1), prompt(0), task(2, ROOM), task(3)], n=2)
    assert [(c.prompt.id, c.episode is not None) for c in found] == [
        ("e/1", True), ("e/1", True), ("d/0", False), ("d/0", False), ("e/2", False), ("e/2", False), ("e/3", True), ("e/3", True),
    ]  # fmt: skip
    assert found[0].episode is not None and found[0].episode.reward == 0.5
    assert (found[0].num_tokens, found[0].text, found[4].text, found[4].num_tokens) == (2, "policy: n", "", 0)
    assert {w.temperature for w in in_process.workers if hasattr(w, "played")} == {0.0}
    samples = [r.sample.sample_id for w in in_process.workers for r in w.played]
    assert sorted(samples) == ["answer/e/1#0", "answer/e/1#1", "answer/e/3#0", "answer/e/3#1"]


def prompt(i: int, length: int = 3) -> Prompt:
    return Prompt(id=f"d/{i}", domain="d", token_ids=tuple(range(i, i + length)))


def test_every_prompt_gets_its_own_answer_whoever_wrote_it(in_process: Any) -> None:
    prompts = [prompt(i) for i in range(7)]
    for workers in (1, 2, 3, 10):
        batch = engine(in_process, workers).generate(prompts, step=12, policy_version=11)
        assert [r.prompt_ids for r in batch.rollouts] == [p.token_ids for p in prompts]
        assert [r.response_ids for r in batch.rollouts] == [(i,) * LIMIT for i in range(7)]
        assert [r.sample_id for r in batch.rollouts] == [f"000012/d/{i}" for i in range(7)]
        assert {(r.step, r.policy_version, r.domain, r.truncated) for r in batch.rollouts} == {(12, 11, "d", True)}
        assert all(r.loss_mask == (True,) * LIMIT for r in batch.rollouts)
        assert all(len(r.behaviour_logprobs) == LIMIT for r in batch.rollouts)
        assert batch.quarantined == ()


def test_masked_tokens_of_a_domain_carry_no_loss(in_process: Any) -> None:
    elsewhere = Prompt(id="e/1", domain="e", token_ids=(1, 2, 3))
    made = engine(in_process, untrained={"d": frozenset({1})})
    batch = made.generate([prompt(0), prompt(1), elsewhere], step=1, policy_version=0)
    assert [r.loss_mask for r in batch.rollouts] == [(True,) * LIMIT, (False,) * LIMIT, (True,) * LIMIT]


def test_spans_are_the_runs_of_trained_and_of_masked_tokens() -> None:
    found = _make_spans((7, 1, 1, 2, 7, 1), frozenset({1, 2}), 5)
    assert [(s.length, s.origin) for s in found] == [(1, "policy"), (3, "masked"), (1, "policy"), (1, "masked")]
    assert {s.policy_version for s in found} == {5}
    assert _make_spans((), frozenset({1}), 5) == (Span(length=0, origin="policy", policy_version=5),)


def test_requests_are_spread_evenly(in_process: Any) -> None:
    engine(in_process, 3).generate([prompt(i) for i in range(8)], step=1, policy_version=0)
    assert sorted(len(w.requests) for w in in_process.workers) == [2, 3, 3]


@pytest.mark.parametrize("length", [0, ROOM, ROOM + 1, 500])
def test_a_prompt_that_leaves_no_room_is_quarantined_with_the_reason(length: int, in_process: Any) -> None:
    batch = engine(in_process).generate([prompt(0), prompt(1, length), prompt(2)], step=1, policy_version=0)
    assert [r.sample_id for r in batch.rollouts] == ["000001/d/0", "000001/d/2"]
    (left_out,) = batch.quarantined
    assert (left_out.prompt_id, left_out.domain) == ("d/1", "d")
    assert (f"{length} tokens" if length else "no tokens") in left_out.reason
    assert length == 0 or f"rollout.max_model_len is {ROOM}" in left_out.reason
    assert all(len(r.token_ids) < ROOM for w in in_process.workers for r in w.requests)


@pytest.mark.parametrize(
    ("length", "limit"), [(1, LIMIT), (ROOM - LIMIT, LIMIT), (ROOM - LIMIT + 1, LIMIT - 1), (ROOM - 1, 1)]
)
def test_the_answer_ends_where_the_context_does(length: int, limit: int, in_process: Any) -> None:
    (rollout,) = engine(in_process).generate([prompt(0, length)], step=1, policy_version=0).rollouts
    assert len(rollout.response_ids) == limit


def test_a_batch_of_nothing_but_over_long_prompts(in_process: Any) -> None:
    batch = engine(in_process).generate([prompt(0, ROOM)], step=1, policy_version=0)
    assert batch.rollouts == ()
    assert len(batch.quarantined) == 1


def test_a_prompt_that_comes_twice_gives_two_samples(in_process: Any) -> None:
    prompts = [prompt(0), prompt(1), prompt(0), prompt(0)]
    assert make_sample_ids(prompts, 7) == ["000007/d/0", "000007/d/1", "000007/d/0#2", "000007/d/0#3"]
    batch = engine(in_process, 1).generate(prompts, step=7, policy_version=0)
    assert len({r.sample_id for r in batch.rollouts}) == 4
    assert [r.group for r in batch.rollouts] == ["000007/d/0", "000007/d/1", "000007/d/0", "000007/d/0"]
    assert [r.episode for r in batch.rollouts] == [r.sample_id for r in batch.rollouts], "of one turn each"
    assert len({r.seed for r in in_process.workers[-1].requests}) == 4


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_one_engine_writes_all_responses_to_a_prompt_with_seeds_of_their_own(workers: int, in_process: Any) -> None:
    prompts = [prompt(i, ROOM if i == 2 else 3) for i in range(6) for _ in range(4)]  # the third one does not fit
    made = engine(in_process, workers, n=4)
    batch = made.generate(prompts, step=3, policy_version=0)
    kept = [p for p in prompts if p.id != "d/2"]
    assert [r.prompt_ids for r in batch.rollouts] == [p.token_ids for p in kept]
    assert [r.response_ids for r in batch.rollouts] == [(p.token_ids[0],) * LIMIT for p in kept]
    assert [r.group for r in batch.rollouts] == [f"000003/{p.id}" for p in kept]
    assert len({r.sample_id for r in batch.rollouts}) == 20
    asked = [[(r.token_ids, r.seed) for r in worker.requests] for worker in in_process.workers]
    for mine in asked:
        assert [ids for ids, _ in mine] == [ids for ids, _ in mine[::4] for _ in range(4)], "side by side"
    assert len({seed for mine in asked for _, seed in mine}) == 20
    assert max(map(len, asked)) - min(map(len, asked)) <= 4
    assert {worker.options.share_prompts for worker in in_process.workers} == {True}
    assert engine(in_process, workers)._spec.engine.share_prompts is False


def test_a_samples_seed_depends_on_run_seed_step_and_prompt_alone(in_process: Any) -> None:
    def seeds(
        prompts: list[Prompt], step: int = 1, workers: int = 1, seed: int = 0
    ) -> dict[tuple[int, ...], int | None]:
        in_process.workers.clear()
        engine(in_process, workers, seed).generate(prompts, step=step, policy_version=0)
        return {r.token_ids: r.seed for w in in_process.workers for r in w.requests}

    prompts = [prompt(i) for i in range(6)]
    want = seeds(prompts)
    assert len(set(want.values())) == 6
    assert seeds(prompts[::-1], workers=3) == want
    assert seeds([*prompts[:3], prompt(9, ROOM), *prompts[3:]]) == want
    assert not set(seeds(prompts, step=2).values()) & set(want.values())
    assert not set(seeds(prompts, seed=1).values()) & set(want.values())


def test_seeds_are_the_same_in_every_release() -> None:
    # A resumed run must sample what the first run would have sampled.
    assert derive_response_seed(0, "000001/reverse/17") == 1134780518
    assert 0 <= derive_response_seed(3, "x") < 2**32


def test_sampling_is_the_pipelines(in_process: Any) -> None:
    engine(in_process, temperature=0.7).generate([prompt(0)], step=1, policy_version=0)
    engine(in_process, temperature=0.7).answer([prompt(0)])
    sampled, greedy = (r for w in in_process.workers for r in w.requests)
    assert (sampled.temperature, greedy.temperature, greedy.seed) == (0.7, 0.0, None)
    assert all(tuple(w.stop) == (2,) and w.options.model_dir.is_absolute() for w in in_process.workers)


def test_answers_have_their_tags(in_process: Any) -> None:
    """A worker of this file repeats the first token of the prompt."""
    tokenizer = chat_tokenizer(None, ("<answer>",))
    made = VLLMRolloutEngine(engine(in_process)._spec, tokenizer)
    tag = tokenizer.convert_tokens_to_ids("<answer>")
    found = made.answer([prompt(tag), prompt(tokenizer.eos_token_id), prompt(tokenizer.pad_token_id)])
    assert [answer.text for answer in found] == ["<answer>" * LIMIT, "", ""]


@pytest.mark.parametrize(("says", "begin"), [(None, "<bos>"), (True, "<bos>"), (False, "")])
def test_episodes_in_plain_text_begin_as_the_pipeline_says(says: bool | None, begin: str, world: Any) -> None:
    put_in_front(build_tokenizer()).save_pretrained(world.root / "base")
    world.data["student"]["add_special_tokens"] = says
    config = load_pipeline(world.write())
    worker = VLLMWorker.__new__(VLLMWorker)  # its engine is not needed
    worker._options, worker._stop = rollout_spec(config, world.root / "base", VOCABULARY, (2,)).engine, [2]
    tokenizer = worker._dialogues.tokenizer
    assert tokenizer.decode(PlainDialogue(tokenizer, ()).encode_opening("go: ", "left?")) == f"{begin}go: left?"


def test_greedy_answers_come_in_order_and_an_over_long_prompt_gets_none(in_process: Any) -> None:
    prompts = [prompt(3), prompt(1, ROOM), prompt(4)]
    answers = engine(in_process).answer(prompts)
    assert [a.prompt for a in answers] == prompts
    assert [a.text for a in answers] == ["d" * LIMIT, "", "e" * LIMIT]
    assert [a.num_tokens for a in answers] == [LIMIT, 0, LIMIT]


def test_several_answers_lie_side_by_side_each_with_a_seed_of_its_own(in_process: Any) -> None:
    prompts = [prompt(3), prompt(1, ROOM), prompt(2)]

    def seeds(prompts: list[Prompt], workers: int = 1, seed: int = 0) -> dict[tuple[int, ...], list[int | None]]:
        in_process.workers.clear()
        answers = engine(in_process, workers, seed).answer(prompts, n=3, temperature=0.7)
        assert [a.prompt for a in answers] == [p for p in prompts for _ in range(3)]
        assert [a.truncated for a in answers] == [len(p.token_ids) < ROOM for p in prompts for _ in range(3)]
        requests = [r for w in in_process.workers for r in w.requests]
        assert {r.temperature for r in requests} == {0.7}
        return {p.token_ids: sorted(r.seed for r in requests if r.token_ids == p.token_ids) for p in prompts}

    want = seeds(prompts)
    assert [len(set(s)) for s in want.values()] == [3, 0, 3]
    assert len({seed for s in want.values() for seed in s}) == 6
    assert seeds(prompts[::-1], workers=2) == want
    other = seeds(prompts, seed=1)
    assert not {s for each in want.values() for s in each} & {s for each in other.values() for s in each}


def test_every_worker_loads_and_scores(in_process: Any) -> None:
    engines = engine(in_process, 3)
    engines.load(Path("new"))
    assert {w.model_dir for w in in_process.workers} == {Path("new").absolute()}
    assert engines.logprobs([[1, 2, 3]]) == [[[-1.0, -1.0]]] * 3
    engines.wait_ready()


# The worker's own reading of vLLM's answers


class Output:
    spec_decode_metrics = None  # without a draft

    def __init__(self, logprobs: list[float], finish_reason: str = "stop") -> None:
        class Logprob:
            def __init__(self, value: float) -> None:
                self.logprob = value

        self.token_ids = list(range(len(logprobs)))
        self.logprobs = [{i: Logprob(x), 999: Logprob(-9.0)} for i, x in enumerate(logprobs)]
        self.finish_reason = finish_reason


def test_the_sampled_tokens_own_log_prob_is_read() -> None:
    assert _read_output(Output([-0.5, -1.5])) == Generated(token_ids=(0, 1), logprobs=(-0.5, -1.5), stop_reason="stop")
    assert _read_output(Output([-0.5], "length")).stop_reason == "length"


def test_a_request_that_the_engine_gave_up_stops_the_run() -> None:
    with pytest.raises(RunError, match="gave up on a request: vLLM says 'abort'"):
        _read_output(Output([-0.5], "abort"))


def test_nan_log_probs_stop_the_run() -> None:
    with pytest.raises(RunError, match="NaN log-probs"):
        _read_output(Output([-0.5, float("nan")]))


# A worker that dies


class Mortal(FakeWorker):
    """Dies when it is asked for what a test names, with all that it held."""

    dies_in = ""
    loads: list[Path]

    def __init__(self, options: Any, stop: Sequence[int]) -> None:
        super().__init__(options, stop)
        self.loads = []

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        self._may_die("generate")
        return super().generate(requests)

    def episodes(
        self, requests: Sequence[EpisodeRequest], temperature: float, policy_version: int
    ) -> list[EpisodeResult]:
        self._may_die("episodes")
        return super().episodes(requests, temperature, policy_version)

    def load(self, model_dir: Path, base: Path | None = None) -> None:
        self._may_die("load")
        self.loads.append(model_dir)
        self.base = base

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        self._may_die("logprobs")
        return super().logprobs(sequences)

    def _may_die(self, method: str) -> None:
        if method == self.dies_in:
            raise cluster.WorkerDied(f"died in {method}", self)


@pytest.fixture
def mortal(in_process: Any) -> Any:
    """An engine of two workers and its workers, those that are started again last."""
    made = engine(in_process)
    in_process.workers.clear()
    in_process.replace = Mortal
    made._workers = [made._spawn(0), made._spawn(1)]
    return made, in_process.workers


PROMPTS = [prompt(i) for i in range(5)]


@pytest.mark.parametrize("index", [0, 1])
def test_a_worker_that_dies_gets_the_weights_and_does_its_part_again(index: int, mortal: Any, in_process: Any) -> None:
    made, workers = mortal
    wanted = made.generate(PROMPTS, step=1, policy_version=0).rollouts
    made.load(Path("pushed"), restart_weights=lambda: nullcontext(Path("pushed-again")))
    asked = len(workers[1 - index].requests)
    workers[index].dies_in = "generate"
    batch = made.generate(PROMPTS, step=1, policy_version=0)
    assert batch.rollouts == wanted and batch.restarted == (f"rollout worker {index}",)
    assert len(workers) == 3 and workers[2].loads == [Path("pushed-again").absolute()]
    assert len(workers[1 - index].requests) == 2 * asked, "the other wrote its part once"
    assert made.generate(PROMPTS, step=1, policy_version=0).restarted == ()


def test_a_worker_that_dies_under_its_episodes_plays_them_again_and_no_others(mortal: Any) -> None:
    made, workers = acting(mortal[0]), mortal[1]
    tasks = [task(i) for i in range(5)]
    wanted = made.generate(tasks, step=3, policy_version=2)
    workers[0].dies_in = "episodes"
    found = made.generate(tasks, step=3, policy_version=2)
    assert (found.rollouts, found.episodes) == (wanted.rollouts, wanted.episodes)
    assert found.restarted == ("rollout worker 0",) and wanted.restarted == ()
    assert [len(worker.played) for worker in workers] == [3, 4, 3], "the second worker's two were played once"


def test_before_the_first_push_it_gets_the_student(mortal: Any) -> None:
    made, workers = mortal
    workers[0].dies_in = "generate"
    made.generate(PROMPTS, step=1, policy_version=0)
    assert workers[2].loads == [Path("base").absolute()]


def test_a_worker_that_dies_in_a_push_gets_what_is_pushed(mortal: Any) -> None:
    made, workers = mortal
    made.load(Path("old"), restart_weights=lambda: nullcontext(Path("old-again")))
    workers[1].dies_in = "load"
    made.load(Path("new"), restart_weights=lambda: nullcontext(Path("new-again")))
    assert workers[2].loads == [Path("new").absolute()] * 2  # as a worker that starts, and as the push it missed
    workers[0].dies_in = "logprobs"
    made.logprobs([[1, 2]])
    assert workers[3].loads == [Path("new-again").absolute()]
    assert made.generate(PROMPTS, step=1, policy_version=0).restarted == ("rollout worker 1", "rollout worker 0")


def test_a_worker_that_starts_again_gets_the_base_under_what_was_pushed(mortal: Any) -> None:
    made, workers = mortal
    made.load(Path("some"), restart_weights=lambda: nullcontext(Path("some-again")), base=Path("base"))
    assert {worker.base for worker in workers} == {Path("base").absolute()}
    workers[0].dies_in = "generate"
    made.generate(PROMPTS, step=1, policy_version=0)
    assert (workers[2].loads, workers[2].base) == ([Path("some-again").absolute()], Path("base").absolute())
    made.load(Path("whole"))
    assert workers[2].base is None


def test_a_worker_that_dies_twice_in_a_call_ends_it(mortal: Any, in_process: Any) -> None:
    made, workers = mortal
    workers[0].dies_in = "generate"
    spawn = made._spawn

    def spawn_mortal(index: int) -> Any:
        worker = spawn(index)
        worker.object.dies_in = "generate"
        return worker

    made._spawn = spawn_mortal
    with pytest.raises(cluster.WorkerDied, match="died in generate"):
        made.generate(PROMPTS, step=1, policy_version=0)
    assert len(workers) == 3


def test_the_death_of_another_kind_of_worker_is_passed_on(mortal: Any) -> None:
    made, workers = mortal
    stranger = FakeWorker(None, ())

    def dies(requests: Any) -> Any:
        raise cluster.WorkerDied("trainer rank 0: no sign of life", stranger)

    workers[0].generate = dies
    with pytest.raises(cluster.WorkerDied, match="trainer rank 0"):
        made.generate(PROMPTS, step=1, policy_version=0)
    assert len(workers) == 2


def test_an_id_that_is_no_token_is_refused_before_it_becomes_a_rollout(in_process: Any) -> None:
    made = engine(in_process)
    assert made.generate([prompt(VOCABULARY - 1)], step=3, policy_version=2).rollouts[0].response_ids[0] == 99
    with pytest.raises(RunError, match=r"sample 000003/d/100: .* wrote token id 100, the tokenizer knows 0 to 99"):
        made.generate([prompt(1), prompt(VOCABULARY)], step=3, policy_version=2)


def test_engines_are_told_how_many_ids_there_are(in_process: Any) -> None:
    engine(in_process, 2)
    assert [w.options.vocab_size for w in in_process.workers] == [VOCABULARY] * 2
