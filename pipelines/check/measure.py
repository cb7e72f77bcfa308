"""`opd check`: find out before a merge whether its experts know their domains, and whether one is garbled or swapped.

    inputs ─→ the student: answers ─┬─→ compare: every teacher on the student's tokens and its domain's answers
                                    └─→ each expert's answers ─→ rivals, where one does not stand out ─→ judge

This takes one rollout engine and one process with the student and a teacher: minutes, before a merge of hours.
"""

from __future__ import annotations

import difflib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from experts.adapter import open_full_model
from opd import cluster
from opd.config import PipelineConfig
from opd.config.domains import RegisteredExperts
from opd.config.evaluate import EvaluateConfig
from opd.evaluation.evaluator import BEFORE, EngineEvaluator
from opd.interfaces import Evaluator, RolloutEngine
from opd.records.types import EncodedRollout, Prompt, Rollout, Teacher
from opd.text import Tell, format_or_dash
from opd.vocabularies.spelling import Spelling
from pipelines.build import start_rollouts
from pipelines.check.comparison import Comparer, TeacherComparison, TokensComparison
from pipelines.check.judge import (
    CheckFinding,
    MeasuredTeacher,
    is_doubtful,
    is_guess,
    is_unusable,
    judge_student,
    judge_teachers,
    predicts_texts,
)
from pipelines.check.own_tokens import MeasuredTokens, judge_tokens, measure_own_tokens
from pipelines.check.text_experts import MeasuredText, measure_judges, measure_texts
from pipelines.inputs.own_tokens import find_own_tokens
from pipelines.inputs.probes import measure_missing_probes
from pipelines.inputs.read import Inputs, load_tokenizer, read_inputs, refuse_without_experts
from pipelines.inputs.transformers_engine import TRANSFORMERS_ENGINE
from pipelines.placement import place_rollouts
from pipelines.routes import text_routes
from pipelines.shared_student import open_shared_student
from pipelines.sizing.auto import choose_numbers, describe_numbers, local_machine
from pipelines.sizing.gpu_memory import refuse_crowded_gpus
from pipelines.sizing.machine import machine_bytes
from pipelines.sizing.memory import HostMemoryNeed, describe_shortage, estimate_memory, suggest_fix
from pipelines.sizing.target_log import SMALLER_LOG, describe_log, estimate_log_bytes, find_full_disk
from pipelines.specs import scorer_options

Route = tuple[str, Teacher]
"""A domain and one of its teachers."""
Compare = Callable[[Teacher, Sequence[Rollout], Sequence[Rollout]], TeacherComparison]

COMPARER = "comparing worker"
"""Name of the worker that compares student and teachers."""
COMPARED = 8
"""Number of responses, and of texts, of each domain on which student and teachers are compared."""
DIFF_LINES, DIFF_WIDTH = 4, 100
"""Lines of a difference of chat templates that a message shows, and characters of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Measurements of all teachers, and the findings."""

    vocab_size: int
    measured: tuple[MeasuredTeacher, ...]
    """Teachers in the order of the pipeline's domains; the heaviest teacher of a domain comes first."""
    findings: tuple[CheckFinding, ...]
    memory: tuple[HostMemoryNeed, ...]
    """Memory that the merge will need on this machine."""
    log: str
    """Disk that the target log takes, in words."""
    numbers: str
    """The numbers that the pipeline leaves open, as they are chosen here, in words."""
    own_tokens: tuple[MeasuredTokens, ...] = ()
    """Experts with another tokenizer, which are not among `measured`."""
    texts: tuple[MeasuredText, ...] = ()
    """Experts that only write text, which are not among `measured` either."""
    judges: tuple[str, ...] = ()
    """A line about each judge."""

    @property
    def failed(self) -> bool:
        """True if a finding says that the merge is not worth starting."""
        return any(finding.level == "fail" for finding in self.findings)

    def worst_level(self, domain: str) -> str:
        """Return the worst level of a domain's findings: fail, warn or ok."""
        levels = {finding.level for finding in self.findings if finding.domain == domain}
        return next((level for level in ("fail", "warn") if level in levels), "ok")


def check_pipeline(config: PipelineConfig, samples: int, tell: Tell) -> CheckReport:
    """Read the inputs, then measure the experts on `samples` held-out prompts per domain.

    Raises: OpdError for inputs that a merge refuses, before any compute; RunError if a worker fails.
    """
    exam = EvaluateConfig(samples=samples)  # one greedy answer to each prompt, whatever the pipeline says
    refuse_without_experts(config, "`opd check`")
    inputs = measure_missing_probes(read_inputs(config, exam), lambda line: tell(f"warning: {line}"))
    written = config
    config = choose_numbers(config, inputs, local_machine(config))
    for warning in (*inputs.warnings, *refuse_crowded_gpus(config, inputs)):
        tell(f"warning: {warning}")
    texts, judges = measure_texts(config, inputs, tell), tuple(measure_judges(inputs, tell))
    tell(f"{config.name}: starting a rollout engine and a worker that compares")
    student = inputs.student
    with (
        open_shared_student(config, inputs) as (begun, begun_inputs),
        cluster.ray_session(config.cluster, config.rollout.workers + 1),
    ):
        place_rollouts(config, scorer=COMPARER)
        engine = start_rollouts(begun, begun_inputs)
        gpus = config.cluster.teacher_gpus
        env = cluster.worker_env(1) | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})
        arguments = (begun.student.model.absolute(), scorer_options(config, student.vocab_size))
        comparer = cluster.spawn_worker(Comparer, *arguments, name=COMPARER, env=env, gpus=gpus)

        def compare(teacher: Teacher, responses: Sequence[Rollout], texts: Sequence[Rollout]) -> TeacherComparison:
            call = comparer.submit(Comparer.compare_teacher, teacher, responses, texts)
            return call.wait_for_result(timeout_s=config.cluster.phase_timeout_s)

        def compare_tokens(
            teacher: Teacher, spelling: Spelling, rollouts: Sequence[EncodedRollout]
        ) -> TokensComparison:
            call = comparer.submit(Comparer.compare_own_tokens, teacher, spelling, rollouts)
            return call.wait_for_result(timeout_s=config.cluster.phase_timeout_s)

        engine.wait_ready()
        speed = tuple(measure_speed(config, inputs, engine))
        own_tokens = measure_own_tokens(inputs, engine, compare_tokens)
        evaluator = EngineEvaluator(engine, inputs.exams, exam, inputs.tokenizer, tell, inputs.expert_exams)
        self_comparison, measured = measure_teachers(begun, begun_inputs, engine, evaluator, compare, tell)
    needs = estimate_memory(config, inputs)
    findings = (
        *speed,
        *memory_findings(config, needs, machine_bytes()),
        *disk_findings(config, inputs),
        *judge_student(self_comparison),
        *template_findings(inputs),
        *judge_teachers(measured, student.vocab_size),
        *judge_tokens(own_tokens, config.teachers.max_quarantined),
    )
    return CheckReport(
        vocab_size=student.vocab_size,
        measured=tuple(measured),
        own_tokens=tuple(own_tokens),
        texts=tuple(texts),
        judges=judges,
        findings=findings,
        memory=tuple(needs),
        numbers=describe_numbers(written, config),
        log=describe_log(config, inputs),
    )


def teacher_rows(report: CheckReport) -> list[tuple[str, ...]]:
    """Return rows of domain, expert, both accuracies, overlap, KL, share of a guess's NLL, and verdict; `-` where nothing was
    measured."""
    return [
        (
            teacher.domain,
            teacher.expert,
            format_or_dash(teacher.student_accuracy, ".2f"),
            format_or_dash(teacher.expert_accuracy, ".2f"),
            format_or_dash(teacher.compared.overlap, ".0%"),
            format_or_dash(teacher.compared.kl, ".3f"),
            format_or_dash(teacher.compared.guessing_ratio(report.vocab_size), ".2f"),
            report.worst_level(teacher.domain),
        )
        for teacher in report.measured
    ]


# Measuring


def measure_teachers(
    config: PipelineConfig, inputs: Inputs, engine: RolloutEngine, evaluator: Evaluator, compare: Compare, tell: Tell
) -> tuple[TeacherComparison, list[MeasuredTeacher]]:
    """Compare the student with itself and with every teacher of every domain, and put the leading teachers to their exams.

    The engine holds the student at first. Returns the student's comparison with itself, and the teachers in the pipeline's order.
    """
    student_accuracy = evaluator.evaluate(model=BEFORE).accuracy
    responses, texts = _sample_responses(inputs, engine), _reference_texts(config, inputs)
    own_tokens = find_own_tokens(inputs.scoring)
    # After the student's prompts these are not what they are in the merge.
    left_out = {*config.teacher_prompts, *(name for name, e in config.inline_experts.items() if e.own_dir is None)}
    left_out |= {expert for expert, _ in text_routes(config, inputs.routes).values()}
    left_out -= own_tokens
    if left_out:
        tell(
            f"not compared, because they read prompts of their own, are the student itself or only write text: {', '.join(sorted(left_out))}"
        )
    tell(f"the student answered the exams of {len(student_accuracy)} domains")
    student = Teacher(name="student", model_dir=config.student.model.absolute())
    # One response of each domain is enough to see whether trainer and scorer compute the same.
    self_comparison = compare(student, [rollout for rollouts in responses.values() for rollout in rollouts[:1]], [])
    routed = [
        (domain, weighted_teacher.teacher)
        for domain, assigned in inputs.routes.items()
        for weighted_teacher in assigned
        if weighted_teacher.teacher.name not in left_out | own_tokens
    ]
    teachers = [teacher for _, teacher in routed]
    vocab_size = inputs.student.vocab_size
    measured = {}
    # Sorted by teacher, so that each is loaded once.
    for domain, teacher in sorted(routed, key=lambda route: teachers.index(route[1])):
        compared = compare(teacher, responses[domain], texts[domain])
        # A teacher that guesses on its own domain is tried on the others: if it knows one of them, it may be swapped but is not garbled.
        other_texts = [texts[d] for d in texts if d != domain] if is_guess(compared, vocab_size) else []
        measured[domain, teacher] = MeasuredTeacher(
            domain=domain,
            expert=teacher.name,
            leads=teacher == inputs.teachers[domain],
            student_accuracy=student_accuracy.get(domain),
            expert_accuracy=None,
            compared=compared,
            frequent=_find_most_frequent(inputs, domain),
            knows_another=any(
                predicts_texts(compare(teacher, [], domain_texts), vocab_size) for domain_texts in other_texts
            ),
            registered=isinstance(config.experts, RegisteredExperts),
        )
    tell(f"{len(measured)} teachers compared with the student, token by token")
    measured |= _measure_leading_teachers(measured, engine, evaluator, tell)
    return self_comparison, [measured[route] for route in routed]


def _measure_leading_teachers(
    measured: Mapping[Route, MeasuredTeacher], engine: RolloutEngine, evaluator: Evaluator, tell: Tell
) -> dict[Route, MeasuredTeacher]:
    """Put the heaviest teacher of each domain to the domain's exam, if there is one and the teacher can take it.

    Where it has no clear gain over the student, all experts of other domains take that exam too, as rivals. Returns these teachers
    with the accuracies.
    """
    usable = [route for route, teacher in measured.items() if not is_unusable(teacher.compared)]
    leading = [route for route in usable if measured[route].leads and measured[route].student_accuracy is not None]
    own = _measure_accuracies(engine, evaluator, leading)
    doubtful = {d for d, t in leading if is_doubtful(measured[d, t].student_accuracy or 0.0, own[d, t])}
    teachers = dict.fromkeys(teacher for _, teacher in usable)
    candidates = [(d, t) for d in sorted(doubtful) for t in teachers if (d, t) not in measured]
    if candidates:
        tell(f"no clear gain on {', '.join(sorted(doubtful))}: does another expert know more?")
    rivals = _measure_accuracies(engine, evaluator, candidates)
    return {
        (domain, teacher): replace(
            measured[domain, teacher],
            expert_accuracy=own[domain, teacher],
            rivals={rival.name: value for (d, rival), value in rivals.items() if d == domain},
        )
        for domain, teacher in leading
    }


def _find_most_frequent(inputs: Inputs, domain: str) -> tuple[str, float]:
    """Return the most frequent right answer of a domain's exam and its share; ("", 0.0) if there is no exam or no answer."""
    answers = [prompt.answer for prompt in inputs.exams[domain].prompts] if domain in inputs.exams else [""]
    ((answer, count),) = Counter(answers).most_common(1)
    return (answer, count / len(answers)) if answer else ("", 0.0)  # some verifiers need no answer


def _measure_accuracies(engine: RolloutEngine, evaluator: Evaluator, routes: Iterable[Route]) -> dict[Route, float]:
    """Return the accuracy of each teacher in the exam of the domain beside it. The engine loads every teacher once."""
    domains: dict[Teacher, list[str]] = defaultdict(list)
    for domain, teacher in routes:
        domains[teacher].append(domain)
    accuracies: dict[Route, float] = {}
    for teacher, own_domains in domains.items():
        with (
            TemporaryDirectory(prefix="opd-check-") as scratch,
            open_full_model(teacher, Path(scratch) / "expert") as path,
        ):
            engine.load(path)
            accuracy = evaluator.evaluate(own_domains, model=f"expert {teacher.name}").accuracy
            accuracies |= {(domain, teacher): value for domain, value in accuracy.items()}
    return accuracies


def _held_out_prompts(inputs: Inputs, domain: str) -> Sequence[Prompt]:
    """Return the domain's held-out prompts, or its training prompts if it has none."""
    return (inputs.exams[domain].prompts if domain in inputs.exams else inputs.prompts[domain])[:COMPARED]


def _sample_responses(inputs: Inputs, engine: RolloutEngine) -> dict[str, list[Rollout]]:
    """Let the student write responses in each domain, sampled as in a merge, all in one batch."""
    prompts = [p for domain in inputs.routes for p in _held_out_prompts(inputs, domain)]
    by_domain: dict[str, list[Rollout]] = {domain: [] for domain in inputs.routes}
    for rollout in engine.generate(prompts, step=0, policy_version=0).rollouts:
        by_domain[rollout.domain].append(rollout)
    return by_domain


def measure_speed(config: PipelineConfig, inputs: Inputs, engine: RolloutEngine) -> Iterator[CheckFinding]:
    """Yield a warning with the measured speed if the engine is one that is slow."""
    if config.rollout.engine != TRANSFORMERS_ENGINE:
        return
    began = time.monotonic()
    lengths = [len(r.response_ids) for responses in _sample_responses(inputs, engine).values() for r in responses]
    rate = sum(lengths) / (time.monotonic() - began)
    step_s = config.trainer.samples_per_step * fmean(lengths) / rate if rate else 0.0
    yield CheckFinding(
        level="warn",
        domain="",
        message=f"rollout.engine transformers wrote {rate:,.0f} tokens/s: the {config.trainer.samples_per_step} responses of a step take "
        f"about {step_s:.0f} s if they are as long as here",
        fix="set rollout.engine to vllm if it serves the family, or make steps smaller and responses shorter",
    )


def _reference_texts(config: PipelineConfig, inputs: Inputs) -> dict[str, list[Rollout]]:
    """Return prompts with their right answers, in the shape of rollouts, cut to the context of rollouts."""
    max_tokens = config.rollout.max_model_len
    by_domain: dict[str, list[Rollout]] = {}
    for domain in inputs.routes:
        by_domain[domain] = []
        for prompt in _held_out_prompts(inputs, domain):
            prompt_ids = prompt.token_ids[:max_tokens]
            answer_ids = tuple(inputs.tokenizer.encode(prompt.answer, add_special_tokens=False))
            answer_ids = answer_ids[: max_tokens - len(prompt_ids)]
            by_domain[domain].append(Rollout.from_tokens(prompt.id, prompt_ids, answer_ids, domain))
    return by_domain


# Findings about the inputs


def memory_findings(config: PipelineConfig, needs: Sequence[HostMemoryNeed], limit: int) -> Iterator[CheckFinding]:
    """Yield findings about memory for which `opd merge` would refuse to start."""
    shortage = describe_shortage(config, needs, limit)
    if shortage is not None:
        yield CheckFinding(level="fail", domain="", message=f"the merge needs {shortage}", fix=suggest_fix(needs))


def disk_findings(config: PipelineConfig, inputs: Inputs) -> Iterator[CheckFinding]:
    """Yield a warning if the disk of the merge's default run directory has no room for the target log."""
    shortage = find_full_disk(estimate_log_bytes(config, inputs), Path("runs"))
    if shortage is not None:
        yield CheckFinding(level="warn", domain="", message=shortage, fix=SMALLER_LOG)


def template_findings(inputs: Inputs) -> Iterator[CheckFinding]:
    """Yield a warning for each expert whose chat template differs from the student's, unless it reads its own. Other end tokens were
    refused before."""
    student_hash, own_tokens = inputs.student.chat_template_hash, find_own_tokens(inputs.scoring)
    for domain, assigned in inputs.routes.items():
        for name in (weighted_teacher.teacher.name for weighted_teacher in assigned):
            info = inputs.experts[name].info
            if name in own_tokens:
                continue
            if None in (student_hash, info.chat_template_hash) or student_hash == info.chat_template_hash:
                continue
            expert_template = str(load_tokenizer(Path(info.path)).chat_template)
            lines = difflib.unified_diff(
                str(inputs.tokenizer.chat_template).splitlines(),
                expert_template.splitlines(),
                "student",
                name,
                n=0,
                lineterm="",
            )
            difference = [line[:DIFF_WIDTH] for line in lines if not line.startswith(("---", "+++", "@@"))]
            if difference:  # the same text may be stored in another kind of file
                yield CheckFinding(
                    level="warn",
                    domain=domain,
                    message=f"expert `{name}` has another chat template than the student: "
                    + " | ".join(difference[:DIFF_LINES]),
                    fix="it scores prompts as the student's template writes them; if that is new to it, choose the model "
                    "with the right template as student.model, or give the prompts as text",
                )
