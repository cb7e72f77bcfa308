"""Input of a person to `opd init`: flags, and answers to questions where a flag is missing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from experts.adapter import is_adapter
from opd.errors import ConfigError, OpdError
from opd.settings.strict import NAME_PATTERN
from opd.text import Tell, expand_home
from pipelines.propose.efforts import EFFORTS, ExpertEffort, find_efforts

Ask = Callable[[str, str], str]
"""Takes a question and a proposed answer, and returns the answer. With an empty proposal an empty answer is allowed."""

EXAMPLE = "opd init --student models/base --expert math=models/math --prompts math=math.csv"
VAGUE = re.compile(r"model|final|best|last|merged|output|adapter|checkpoint|checkpoint-\d+|snapshot", re.IGNORECASE)
"""Names of directories that say nothing about what an expert knows; the name of a directory above is taken instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The options as they were typed. `student` to `bases` are those of the command line, each still as `NAME=VALUE` or `VALUE`."""

    student: Path | None = None
    experts: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    exams: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    verifiers: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()
    keep: Path | None = None
    """General prompts, on which the student is to stay as it is."""
    chat: bool | None = None
    """True if texts are what a user says; None: it follows from the student's chat template."""
    efforts: bool | None = None
    """True if experts called DOMAIN-EFFORT are one domain's; None: it is asked, or not so."""
    lora: bool = False
    """Train adapters in place of all weights."""
    probe: bool = False
    """Have the experts answer a few prompts, to choose the objective."""

    @property
    def incomplete(self) -> bool:
        """True if something has to be asked."""
        return self.student is None or not self.experts or len(self.prompts) < len(self.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertAnswer:
    """One expert, and what was said about its domain, which has the same name."""

    model: Path
    prompts: Path
    exam: Path | None = None
    columns: tuple[str, ...] = ()
    """Columns of the prompts' file with the prompt and the answer; what is not given is guessed."""
    verifier: str = ""
    """The verifier's name, or a mapping as YAML; empty: one is proposed."""
    base: Path | None = None
    """The base of an adapter; None: not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitAnswers:
    """Everything that a proposal starts from."""

    student: Path
    experts: Mapping[str, ExpertAnswer]
    keep: Path | None = None
    """General prompts, on which the student is to stay as it is; None: there are none."""
    efforts: Mapping[str, ExpertEffort] = field(default_factory=dict)
    """Expert -> domain and effort, if experts differ in their effort; empty if every expert has a domain of its own."""


def complete_flags(flags: Flags, ask: Ask | None, tell: Tell) -> InitAnswers:
    """Parse the flags, and ask for the values that are missing. `ask` is None if nobody can be asked. Raises: ConfigError for a wrong
    value, and for a missing one that nobody can be asked for."""
    if ask is None:
        _refuse_missing(flags)
    else:
        flags = _ask_for_models(flags, ask, tell)
    assert flags.student is not None
    models = parse_experts(flags.experts)
    efforts = _choose_efforts(flags.efforts, models, ask, tell)
    # Experts of one domain have its files in common.
    owners = {name: efforts[name].domain if name in efforts else name for name in models}
    domains = {owners[name]: model for name, model in models.items()}
    prompts = assign_to_experts("--prompts", flags.prompts, domains)
    missing = [name for name in domains if name not in prompts]
    if missing and ask is None:
        raise ConfigError.at(
            "--prompts",
            found=f"no file for {', '.join(missing)}",
            wanted="prompts of each expert's domain, in CSV, Parquet or JSONL",
            fix=f"add --prompts {missing[0]}=FILE",
        )
    for name in missing:
        assert ask is not None
        question = f"Prompts of {name} (CSV, Parquet, JSONL or a saved data set)"
        prompts[name] = ask_until_valid(ask, tell, question, _check_file)
    columns = assign_to_experts("--columns", flags.columns, domains, files=False)
    verifiers = assign_to_experts("--verifier", flags.verifiers, domains, files=False)
    exams, bases = assign_to_experts("--eval", flags.exams, domains), _parse_bases(flags.bases, models)
    experts = {
        name: ExpertAnswer(
            model=model,
            prompts=_check_file(prompts[owners[name]]),
            exam=_check_file(exams[owners[name]]) if owners[name] in exams else None,
            columns=tuple(part.strip() for part in columns[owners[name]].split(",")) if owners[name] in columns else (),
            verifier=verifiers.get(owners[name], ""),
            base=Path(expand_home(bases[name])) if name in bases else None,
        )
        for name, model in models.items()
    }
    keep = "" if flags.keep is None else str(flags.keep)
    if ask is not None and not keep:
        question = (
            "General prompts on which the student stays as it is (empty: none; what is not trained may be forgotten)"
        )
        keep = ask_until_valid(ask, tell, question, lambda text: text and _check_file(text))
    return InitAnswers(
        student=flags.student, experts=experts, keep=_check_file(keep) if keep else None, efforts=efforts
    )


def _choose_efforts(
    wish: bool | None, models: Mapping[str, Path], ask: Ask | None, tell: Tell
) -> dict[str, ExpertEffort]:
    """Return expert -> domain and effort if experts differ in their effort, as the flag, or the answer to a question, says; else nothing.

    Raises: ConfigError if the flag says so, and the names of the experts do not.
    """
    efforts = find_efforts(models)
    if wish and not efforts:
        raise ConfigError.at(
            "--efforts",
            found=f"experts called {', '.join(models)}",
            wanted="experts called DOMAIN-EFFORT, the same efforts for each domain",
            fix=f"name them: --expert math-low=DIR --expert math-high=DIR; efforts: {', '.join(EFFORTS)}",
        )
    if not efforts or wish is False:
        return {}
    names = ", ".join(efforts)
    if wish is None and ask is None:
        tell(
            f"note: {names} get domains of their own; with --efforts one prompt has them all, and a tag tells the student which"
        )
        return {}
    if wish is None and ask is not None:
        question = f"Are {names} efforts of one domain, of which a tag in the prompt tells the student (yes or no)"
        wish = ask_until_valid(ask, tell, question, _check_yes_or_no, "yes") in YES
    return efforts if wish else {}


YES, NO = ("yes", "y"), ("no", "n")


def _check_yes_or_no(text: str) -> None:
    """Raises: ConfigError for an answer that is neither."""
    if text not in YES + NO:
        raise ConfigError.at("the answer", found=repr(text), wanted="yes or no", fix="type one of the two")


def _refuse_missing(flags: Flags) -> None:
    """Refuse flags that lack one of the three that every proposal needs. Raises: ConfigError."""
    named = {"--student": flags.student, "--expert": flags.experts, "--prompts": flags.prompts}
    missing = [name for name, value in named.items() if not value]
    if missing:
        raise ConfigError.at(
            "opd init",
            found=f"no {' and no '.join(missing)}, and no terminal to ask at",
            wanted="the student, one or more experts, and prompts for each",
            fix=f"for example: {EXAMPLE}; or `opd init --from quickstart`",
        )


def _ask_for_models(flags: Flags, ask: Ask, tell: Tell) -> Flags:
    """Return the flags with a student and at least one expert, asked for if they are missing."""
    if flags.student is None:
        question = "Student, the model that learns (a directory; usually what the experts were trained from)"
        flags = replace(flags, student=Path(ask_until_valid(ask, tell, question, _check_directory)))
    experts = list(flags.experts)
    while not flags.experts:
        hint = "" if not experts else "; empty: no more"
        question = f"Expert {len(experts) + 1} (a model or adapter, DIR or NAME=DIR{hint})"
        text = ask_until_valid(ask, tell, question, _make_expert_check(experts))
        if not text:
            break
        experts.append(text)
    return replace(flags, experts=tuple(experts))


def _make_expert_check(experts: list[str]) -> Callable[[str], str]:
    """Return a check of the answer for a further expert. An empty answer ends the questions, but not before the first expert."""

    def check(text: str) -> str:
        if text or not experts:
            parse_experts([*experts, text])
        return text

    return check


def ask_until_valid(ask: Ask, tell: Tell, question: str, check: Callable[[str], object], proposal: str = "") -> str:
    """Ask until an answer passes, and return it. `check` raises an OpdError for a wrong answer, which the user is told."""
    while True:
        text = ask(question, proposal).strip()
        try:
            check(text)
        except OpdError as error:
            tell(f"error: {error}")
        else:
            return text


def _check_directory(text: str) -> Path:
    """Return the path of a directory. Raises: ConfigError if there is none."""
    text = expand_home(text)  # a shell leaves the `~` of NAME=~/DIR
    if not text or not Path(text).is_dir():
        raise ConfigError.at(
            text or "a model",
            found="a file" if text and Path(text).is_file() else "no such directory",
            wanted="a directory with a model: config.json, tokenizer.json, safetensors",
            fix="correct the path; it is relative to the current directory",
        )
    return Path(text)


def _check_file(text: str | Path) -> Path:
    """Return the path of a file or a directory with prompts. Raises: ConfigError if there is none."""
    text = expand_home(str(text))
    if not text or not Path(text).exists():
        raise ConfigError.at(
            text or "prompts",
            found="no such file",
            wanted="a file of prompts (CSV, Parquet, JSONL) or a directory that the library `datasets` saved",
            fix="correct the path; it is relative to the current directory",
        )
    return Path(text)


def parse_experts(texts: Iterable[str]) -> dict[str, Path]:
    """Return name -> directory for texts that are `NAME=DIR` or `DIR`. Raises: ConfigError for a missing directory, or a name that comes
    twice."""
    pairs = [_parse_name_value(text, path=True) for text in texts]
    named = [(name or make_expert_name(Path(value)), _check_directory(value)) for name, value in pairs]
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        paths = [str(path) for name, path in named if name == twice[0]]
        raise ConfigError.at(
            "--expert",
            found=f"two experts named {twice[0]}: {', '.join(paths)}",
            wanted="a name of its own for each",
            fix=f"name them: --expert NAME={paths[-1]}",
        )
    return dict(named)


def make_expert_name(path: Path) -> str:
    """Make a name for the expert in this directory, and for its domain: the directory's own, or if that is vague, the nearest name above
    that is not."""
    parts = [part for part in path.absolute().parts[1:] if part not in (".", "..")]
    telling = next((part for part in reversed(parts) if not VAGUE.fullmatch(part)), "expert")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", telling).strip("-._")[:64] or "expert"


def _parse_name_value(text: str, *, path: bool) -> tuple[str, str]:
    """Return name and value of `NAME=VALUE`. The name is empty if there is none; also, with `path`, if the whole text is a path that
    exists."""
    name, equals, value = text.partition("=")
    if equals and re.fullmatch(NAME_PATTERN, name) and not (path and Path(text).exists()):
        return name, value
    return "", text


def assign_to_experts(
    option: str, texts: Iterable[str], experts: Mapping[str, Path], *, files: bool = True
) -> dict[str, str]:
    """Return expert -> value of an option that is `[EXPERT=]VALUE`.

    With `files` the values are files, and one without an expert's name goes to the expert that `_find_expert_of_file` finds. Otherwise
    a value without a name goes to all experts that have none of their own; the last such value counts. Raises: ConfigError.
    """
    values: dict[str, str] = {}
    for_all: list[str] = []
    for text in texts:
        name, value = _parse_name_value(text, path=files)
        if not name and not files:
            for_all.append(value)
            continue
        name = name or _find_expert_of_file(option, value, list(experts))
        if name not in experts or name in values:
            raise ConfigError.at(
                f"{option} {text}",
                found=f"a second value for {name}" if name in values else f"{name}, which is no expert",
                wanted=f"one for each expert: {', '.join(experts)}",
                fix="correct the name, or name the expert: --expert NAME=DIR",
            )
        values[name] = value
    return dict.fromkeys(experts, for_all[-1]) | values if for_all else values


def _parse_bases(texts: tuple[str, ...], experts: Mapping[str, Path]) -> dict[str, str]:
    """Return expert -> base. A base without an expert's name is meant for the adapters alone, not for full models. Raises:
    ConfigError."""
    named = {_parse_name_value(text, path=False)[0] for text in texts}
    bases = assign_to_experts("--base", texts, experts, files=False)
    return {name: base for name, base in bases.items() if name in named or is_adapter(experts[name])}


def _find_expert_of_file(option: str, file: str, experts: list[str]) -> str:
    """Return the expert to which a file belongs by its name: the only expert there is; else the expert whose name is a part of the
    file's name or of its directory's (of `math` and `math-hard` the longer one that fits); else the expert whose name has the file's name
    in it, as `math-lora` has that of math.csv. Raises: ConfigError if no expert fits, or several do."""
    if len(experts) == 1:
        return experts[0]
    for part in (Path(file).stem, Path(file).absolute().parent.name):
        fitting = [name for name in experts if _is_word_of(name, part)]
        longest = max(fitting, key=len, default="")
        if longest and all(name in longest for name in fitting):
            return longest
    containing = [name for name in experts if _is_word_of(Path(file).stem, name)]
    if len(containing) == 1:
        return containing[0]
    raise ConfigError.at(
        f"{option} {file}",
        found="a file whose name tells no expert",
        wanted=f"the expert that it belongs to: {', '.join(experts)}",
        fix=f"name the expert: {option} EXPERT={file}",
    )


def _is_word_of(word: str, text: str) -> bool:
    """Return True if the text has the word in it, in whatever case, with no letter or digit beside it."""
    return re.search(rf"(?<![a-z0-9]){re.escape(word)}(?![a-z0-9])", text, re.IGNORECASE) is not None
