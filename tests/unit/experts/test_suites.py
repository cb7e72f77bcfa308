"""The prompt suites: what is asked, that the answers are right, that held-out means held out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import combinations, pairwise, permutations
from pathlib import Path
from typing import Any

import pytest

from experts.suites import DOMAINS, SUITES, rewards, write_suite
from experts.suites.letters import CHARACTERS, SPECIALS, build_tokenizer
from opd.environments import find_environment
from opd.environments.game import take_unique
from opd.errors import ConfigError
from opd.prompts import read_prompt_lines
from opd.records.environments import Action
from opd.verifiers.exact import LastLine
from opd.verifiers.reasoning_gym import ReasoningGym

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def compare(numbers: str) -> str:
    left, right = numbers.split(":")
    return ">" if int(left) > int(right) else "<"


def walk(route: str) -> str:
    start, signs = ALPHABET.index(route[0]), route[1:]
    ends = [start + signs[:i].count(">") - signs[:i].count("<") for i in range(1, len(signs) + 1)]
    return "".join((3 * ALPHABET)[26 + end] for end in ends)


# Each written another way than the suite's own rule.
SHORT: dict[str, tuple[str, Callable[[str], str]]] = {
    "reverse": ("rev", lambda word: "".join(reversed(word))),
    "sort": ("srt", lambda word: "".join(letter * word.count(letter) for letter in ALPHABET)),
    "rotate": ("rot", lambda word: (word + word)[1 : len(word) + 1]),
    "shift": ("nxt", lambda word: "".join(ALPHABET[(ALPHABET.index(letter) + 1) % 26] for letter in word)),
    "double": ("dbl", lambda word: "".join(word[i // 2] for i in range(2 * len(word)))),
    "mask": ("msk", lambda word: word.translate({ord(vowel): "." for vowel in "aeiou"})),
    "compare": ("cmp", compare),
    "walk": ("wlk", walk),
}


def is_swaps(question: str, lines: list[str]) -> bool:
    """Each line is the one before with two neighbours exchanged, the smaller of them now in front; the last is in order."""
    for before, after in pairwise([question, *lines]):
        at = [i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
        if len(at) != 2 or at[1] != at[0] + 1 or [before[at[0]], before[at[1]]] != [after[at[1]], after[at[0]]]:
            return False
        if after[at[0]] >= after[at[1]]:
            return False
    return lines[-1] == "".join(sorted(question))


def is_duels(question: str, lines: list[str]) -> bool:
    """Each line lacks one digit of the line before, next to which a larger one stood; one digit is left."""
    for before, after in pairwise([question, *lines]):
        (gone,) = set(before) - set(after)
        left, right = before.split(gone)
        if after != left + right or gone > max(left[-1:], right[:1]):
            return False
    return lines[-1] == max(question)


WORKED: dict[str, tuple[str, Callable[[str, list[str]], bool]]] = {
    "swap": ("swp", is_swaps),
    "duel": ("due", is_duels),
}


def test_every_letters_domain_has_an_independent_rule_here():
    assert SHORT.keys() | WORKED.keys() == set(DOMAINS["letters"])


@pytest.mark.parametrize("domain", SHORT)
def test_letters_answers_are_right(domain: str):
    code, rule = SHORT[domain]
    for row in SUITES["letters"].make_rows(domain, 200, 3):
        asked, question = str(row["prompt"]).removesuffix("=").split(" ")
        assert (asked, row["answer"]) == (code, rule(question))
        assert row["completion"] == row["answer"]


@pytest.mark.parametrize("domain", WORKED)
def test_every_line_of_worked_answers_is_right_and_the_last_is_the_answer(domain: str):
    code, is_right = WORKED[domain]
    for row in SUITES["letters"].make_rows(domain, 200, 3):
        asked, question = str(row["prompt"]).removesuffix("=").split(" ")
        completion = str(row["completion"])
        assert asked == code
        assert is_right(question, completion.split("\n")), row
        assert LastLine()(completion, row["answer"], row["metadata"]) == 1.0
        assert len(completion) < 24, "a token a character: with the end token, the quickstart leaves room for 24"


@pytest.mark.parametrize("domain", WORKED)
def test_several_ways_are_right_and_rows_take_different_ones(domain: str):
    """Check that an answer that may begin at several places takes now the last of them, now another."""
    taken: Counter[bool] = Counter()
    for row in SUITES["letters"].make_rows(domain, 200, 3):
        question = str(row["prompt"]).removesuffix("=").split(" ")[1]
        first = str(row["completion"]).split("\n")[0]
        places = [i for i, (a, b) in enumerate(pairwise(question)) if domain == "duel" or a > b]
        if len(places) >= 2:
            taken[first.startswith(question[: places[-1]])] += 1
    assert min(taken[True], taken[False]) > 0.2 * taken.total() > 10


@pytest.mark.parametrize("domain", DOMAINS["reasoning"])
def test_reasoning_answers_score_one_and_a_wrong_one_zero(domain: str):
    import reasoning_gym

    rows = SUITES["reasoning"].make_rows(domain, 20, 3)
    for row in json.loads(json.dumps(rows)):
        score = reasoning_gym.get_score_answer_fn(row["metadata"]["task"])
        entry = row["metadata"]["entry"]
        assert row["completion"] == [{"role": "assistant", "content": row["answer"]}]
        assert score(row["answer"], entry) == 1.0
        assert score("?", entry) < 0.1
        judge = ReasoningGym()
        assert judge.problem(row["answer"], row["metadata"]) == "", "what we write, our own verifier takes"
        assert judge(row["answer"], row["answer"], row["metadata"]) == 1.0


@pytest.mark.parametrize(
    ("suite", "domain"),
    # Where many answers are right there is no `answer`: test_no_answer_is_right_everywhere.
    [(suite, domain) for suite in DOMAINS for domain in DOMAINS[suite] if domain not in rewards.SKILLS],
)
def test_no_domain_is_answered_by_saying_the_same_to_every_question(suite: str, domain: str):
    answers = Counter(str(row["answer"]) for row in SUITES[suite].make_rows(domain, 200, 3))
    assert max(answers.values()) <= 0.6 * answers.total(), answers.most_common(2)


@pytest.mark.parametrize(("suite", "domain"), [("letters", "sort"), ("reasoning", "chain_sum")])
def test_train_and_eval_share_no_prompt_and_none_comes_twice(tmp_path: Path, suite: str, domain: str):
    paths = write_suite(suite, tmp_path, domains=[domain], train=300, eval=100, seed=0)[domain]
    prompts = {kind: [str(line.prompt) for line in read_prompt_lines(path)] for kind, path in paths.items()}
    assert {kind: len(found) for kind, found in prompts.items()} == {"train": 300, "eval": 100}
    assert len(set(prompts["train"]) | set(prompts["eval"])) == 400


def test_a_suite_depends_on_the_seed_alone(tmp_path: Path):
    def texts(name: str, **sizes: int) -> list[str]:
        paths = write_suite("letters", tmp_path / name, domains=["swap"], **sizes)["swap"]
        return [paths["train"].read_text(), paths["eval"].read_text()]

    first = texts("first", train=50, eval=10, seed=1)
    assert texts("again", train=50, eval=10, seed=1) == first
    assert texts("other", train=50, eval=10, seed=2) != first
    assert texts("more", train=90, eval=10, seed=1)[1] == first[1], "held-out rows do not depend on the train size"


def test_all_domains_of_a_suite_are_written_and_nothing_else(tmp_path: Path):
    written = write_suite("letters", tmp_path, train=3, eval=2, seed=0)
    assert list(written) == list(DOMAINS["letters"])
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {path for paths in written.values() for path in paths.values()}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"suite": "leters"}, "did you mean `letters`?"),
        ({"domains": ["revers"]}, "did you mean `reverse`?"),
        ({"eval": 0}, "at least 1"),
        ({"suite": "rewards", "domains": ["beside", "number"], "train": 20, "eval": 350}, "domain number"),
        ({"suite": "rewards", "domains": ["between"], "train": 20, "eval": 1100}, "none is left to train on"),
    ],
)
def test_what_cannot_be_made_is_refused_and_nothing_is_written(tmp_path: Path, change: dict[str, Any], says: str):
    arguments: dict[str, Any] = {"suite": "letters", "domains": None, "train": 5, "eval": 5, "seed": 0} | change
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        write_suite(arguments.pop("suite"), tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_a_domain_with_too_few_prompts_is_refused():
    row = {"prompt": "rev ab=", "completion": "ba", "answer": "ba", "metadata": {}}
    with pytest.raises(ConfigError, match="only 1 different prompts"):
        take_unique([row] * 5, 2, "here")


def test_the_tokenizer_gives_each_character_its_own_id(tmp_path: Path):
    from transformers import AutoTokenizer

    build_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = SPECIALS[2] + CHARACTERS
    assert tokenizer.encode(text) == [2, *range(4, 4 + len(CHARACTERS))]
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == CHARACTERS
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (
        0,
        1,
        2,
        3,
    )
    chat = [{"role": "user", "content": "rev ab"}]
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == "rev ab="


# Tasks with many right answers


def between(task: str, text: str) -> bool:
    low, high = task.split(":")
    return text in {str(n) for n in range(100)} and int(low) < int(text) < int(high)


def ascend(task: str, text: str) -> bool:
    return text in {"".join(sorted(chosen)) for chosen in combinations(task, 3)}


def beside(task: str, text: str) -> bool:
    around = "z" + ALPHABET + "a"
    return (
        len(text) == 1
        and any(pair in around for letter in task for pair in (letter + text, text + letter))
        and text.isalpha()
    )


def avoid(task: str, text: str) -> bool:
    return text in {"".join(chosen) for chosen in permutations([d for d in "0123456789" if d not in task], 3)}


MANY: dict[str, tuple[Callable[[str, str], bool], float, float]] = {
    "between": (between, 0.03, 0.2),
    "ascend": (ascend, 0.1, 0.25),
    "beside": (beside, 0.12, 0.35),
    "avoid": (avoid, 0.08, 0.3),
}
"""Domain -> its rule, written another way than the suite's, and how often a blind attempt is right."""
WRONG = ["", " ", "a", "zz", "12", "100", "-5", "7.5", "987", "aaaa", "rrr", "rdrdrdrd", "٣", "x y", "ABCD", "abcdefgh"]


def test_every_domain_of_one_turn_has_a_rule_here_and_the_others_are_games() -> None:
    assert set(MANY) | set(rewards.GAMES) == set(DOMAINS["rewards"])


@pytest.mark.parametrize("domain", MANY)
def test_the_judge_is_right_about_attempts_and_about_anything_else(domain: str) -> None:
    rule, least, most = MANY[domain]
    rows = SUITES["rewards"].make_rows(domain, 300, 3)
    right = 0
    for i, row in enumerate(rows):
        task = row["metadata"]["task"]
        for text in (row["completion"], rows[i - 1]["completion"], *WRONG):
            assert rewards.judge(text, "", row["metadata"]) == float(rule(task, text.strip())), (task, text)
        right += rule(task, row["completion"])
    assert least < right / len(rows) < most, "a base that learns these has a reward now and then"
    assert all(set(row["prompt"] + row["completion"]) <= set(CHARACTERS) for row in rows)


@pytest.mark.parametrize("domain", MANY)
def test_no_answer_is_right_everywhere(domain: str) -> None:
    rows = SUITES["rewards"].make_rows(domain, 300, 3)
    best = max(sum(rewards.judge(one["completion"], "", row["metadata"]) for row in rows) for one in rows[:100])
    assert best / len(rows) < 0.5, "who does not read the task must not get far"


@pytest.mark.parametrize("domain", rewards.GAMES)
def test_games_are_played_blindly_and_every_move_is_learned(domain: str) -> None:
    rows = SUITES["rewards"].make_rows(domain, 60, 3)
    moves = [turn for row in rows for turn in row["messages"] if turn["role"] == "assistant"]
    assert all(turn["weight"] == 1 for turn in moves)
    won = sum(played(domain, row) for row in rows)
    assert 0 < won < 0.45 * len(rows)


def played(domain: str, row: Any) -> bool:
    """Return True if the recorded moves win."""
    game = find_environment(domain, "test")()
    game.reset(row["metadata"], 0)
    turns = [turn["content"] for turn in row["messages"] if turn["role"] == "assistant"]
    return any(game.step(Action(text=text)).done for text in turns)
