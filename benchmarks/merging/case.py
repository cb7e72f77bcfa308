"""Subject of a measurement: a case, the turns that both sides take at it, and what follows from them.

Needs nothing but Python, because the other side's interpreter reads it too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

OURS, TRL = "ours", "trl"
ENGINE, BODY, SHARDED = "engine", "body", "sharded"
SIDES = (OURS, TRL)
LIMITS = (ENGINE, BODY, SHARDED)

PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    OURS: {
        "rollout": ("engine",),
        "score": ("forward",),
        "train": ("forward_backward", "loss", "optimizer"),
        "sync": (),
    },
    TRL: {
        "generate": ("engine",),
        "train": ("forward", "forward_backward", "loss"),
        "optimizer": ("optimizer",),
    },
}
"""Side -> phase -> the limits whose work is inside of it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape of a step. A child process gets it as JSON."""

    responses: int
    """In a step, over all domains."""
    new_tokens: int
    """Tokens of each response: no model here has an end token."""
    prompt_tokens: int
    """Tokens of each prompt."""
    dtype: str
    experts: int
    """Each with a domain of its own."""
    warm_up: int
    """First steps of a process, which do not count."""
    steps: int
    """Steps after them, which do."""
    micro_batch_tokens: int
    """Prompt and response tokens of a micro-batch, on both sides."""
    folder: str
    """Holds `DTYPE/student`, `DTYPE/expert-00` and so on, and the prompts of each domain."""
    trl_bf16: str = "weights"
    """TRL in bfloat16: `weights` of that type, or float32 ones under `autocast`."""
    trl_compile: bool = False
    """TRL with `torch_compile`."""
    options: tuple[str, ...] = ()
    """KEY=VALUE for our pipeline."""
    lora: int = 0
    """Rank of the student's adapters in all linear modules, on both sides; 0: every weight is trained."""

    @property
    def name(self) -> str:
        experts = "" if self.experts == 1 else f", {self.experts} experts"
        lora = f", LoRA {self.lora}" if self.lora else ""
        return f"{self.responses} x {self.new_tokens} {self.dtype}{experts}{lora}"

    @property
    def adapters(self) -> dict[str, object]:
        """PEFT's settings of the adapters, those of `student.lora` with this rank."""
        return {"r": self.lora, "lora_alpha": 2 * self.lora, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}

    @property
    def compiled(self) -> bool:
        """True if our trainer compiles its layers."""
        return "trainer.compile=true" in self.options

    @property
    def response_tokens(self) -> int:
        """In a step."""
        return self.responses * self.new_tokens

    @property
    def tokens(self) -> int:
        """In a step, prompts included."""
        return self.responses * (self.prompt_tokens + self.new_tokens)

    @property
    def rows(self) -> int:
        """Responses of a padded micro-batch: the most that divide a step and fit."""
        fit = max(1, self.micro_batch_tokens // (self.prompt_tokens + self.new_tokens))
        return max(n for n in range(1, self.responses + 1) if self.responses % n == 0 and n <= fit)

    @property
    def student(self) -> Path:
        return Path(self.folder) / self.dtype / "student"

    def expert(self, index: int) -> Path:
        return Path(self.folder) / self.dtype / f"expert-{index:02}"

    def prompts(self, index: int) -> Path:
        return Path(self.folder) / "prompts" / f"domain-{index:02}.jsonl"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimiser step, from the end of the one before."""

    seconds: float
    phases: dict[str, float]
    """Seconds by the side's own phases."""
    prompt_tokens: int
    response_tokens: int
    cpu_s: float = 0.0
    """Sum over the whole process tree."""


@dataclass(kw_only=True)
class Turn:
    """One process of one side: its start, its warm-up, and the steps that count."""

    side: str
    round: int
    steps: list[Step] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    """Figures of a process that measures limits."""
    start_s: float = 0.0
    """Until the first step that counts could begin."""
    memory: dict[str, int] = field(default_factory=dict)
    """Name of a process -> its most anonymous bytes, start included."""
    start_peak_bytes: int = 0
    """Most memory of the process tree before the first step that counts, see `memory.shared` and `memory.anonymous`."""
    peak_bytes: int = 0
    """Most memory in the steps that count, or, where there are none, of all."""
    others: float = 0.0
    """Share of the machine's cores that other programs had meanwhile."""

    @property
    def seconds(self) -> float:
        """In a step."""
        return statistics.median(step.seconds for step in self.steps)

    @property
    def rate(self) -> float:
        """Response tokens a second."""
        return statistics.median(step.response_tokens / step.seconds for step in self.steps)

    def phase(self, name: str) -> float:
        """Seconds of a step."""
        return statistics.median(step.phases.get(name, 0.0) for step in self.steps)

    @property
    def outside(self) -> float:
        """Seconds of a step that no phase accounts for."""
        return statistics.median(step.seconds - sum(step.phases.values()) for step in self.steps)


def unequal(case: Case, step: Step) -> str | None:
    """Return what a step did that the case does not say; None if it did the work that was asked for."""
    wanted = (case.responses * case.prompt_tokens, case.response_tokens)
    found = (step.prompt_tokens, step.response_tokens)
    if found == wanted:
        return None
    return (
        f"a step of {found[0]} prompt and {found[1]} response tokens, where {wanted[0]} and {wanted[1]} were asked for"
    )


def by_side(turns: Sequence[Turn], side: str) -> list[Turn]:
    return [turn for turn in turns if turn.side == side]


def median(turns: Sequence[Turn], value: Callable[[Turn], float]) -> float:
    return statistics.median(value(turn) for turn in turns)


def ratio(turns: Sequence[Turn], others: Sequence[Turn]) -> float | None:
    """Median over rounds of the ratio of two rates of the same round; None if no round has both."""
    rates = {turn.round: turn.rate for turn in others}
    found = [turn.rate / rates[turn.round] for turn in turns if turn.round in rates]
    return statistics.median(found) if found else None


def limits(turns: Sequence[Turn]) -> dict[str, float]:
    """Medians over rounds of all that was measured alone."""
    names = dict.fromkeys(name for turn in turns for name in turn.figures)
    return {name: statistics.median(t.figures[name] for t in turns if name in t.figures) for name in names}


def floor(case: Case, found: Mapping[str, float]) -> dict[str, float]:
    """Seconds that a step of the case would take for each part of its work at the rate measured alone."""
    work = {
        "engine": case.response_tokens,
        "forward": case.tokens,
        "forward_backward": case.tokens,
        "loss": case.response_tokens,
    }
    seconds = {part: tokens / found[f"{part}_tokens_s"] for part, tokens in work.items() if f"{part}_tokens_s" in found}
    return seconds | ({"optimizer": found["optimizer_s"]} if "optimizer_s" in found else {})


def sharding(case: Case, found: Mapping[str, float]) -> float | None:
    """Seconds that our ZeRO engine adds to a step beyond forward, backward and AdamW alone; None if it was not measured."""
    alone = floor(case, found)
    if not {"sharded_last_s", "sharded_micro_s", "sharded_step_s"} <= set(found) or "forward_backward" not in alone:
        return None
    before = (case.responses // case.rows - 1) * found["sharded_micro_s"]
    return before + found["sharded_last_s"] + found["sharded_step_s"] - alone["forward_backward"] - alone["optimizer"]
