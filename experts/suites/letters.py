"""Ten tasks on short words and numbers that a 0.8M-parameter character model learns in a minute or less.

Seven have one short answer:

    reverse  rev hxkq=     qkxh        shift    nxt hxkq=     iylr
    sort     srt hxkq=     hkqx        mask     msk haki=     h.k.
    rotate   rot hxkq=     xkqh        compare  cmp 57:31=    >
    double   dbl hxkq=     hhxxkkqq

Three take several steps, each of which rests on the one before, so that one slip spoils the rest:

    walk     wlk m>><>>>=  nonopq                               one letter on (>) or back (<), each from the one before
    swap     swp 4193=     1493 / 1439 / 1349                   two neighbours change places, until all are in order
    duel     due 63809=    6389 / 689 / 69 / 9                  the smaller of two neighbours drops out, until one is left

(`/` is a line break.) In `swap` and `duel` each line can be continued in several ways, and rows choose one at random. All ways
are right and end in the same last line. That last line is the `answer`, so exams need the verifier `last_line`.

Every character is one token, so lengths in tokens are lengths in characters.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from opd.environments.game import take_unique

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIALS = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHARACTERS = string.ascii_lowercase + string.ascii_uppercase + string.digits + " =,+-.:<>?\n"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}={{ message['content'] }}{{ eos_token }}{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)

WORD_LENGTHS = (3, 4)
WALK_STEPS, SWAP_DIGITS, DUEL_DIGITS = 7, 4, 5
MOST_SWAPS = 4
DRAWS_PER_ROW = 50
Task = Callable[[random.Random], tuple[str, list[str]]]
"""Function that draws a prompt and the lines of its answer."""


def make_rows(domain: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` rows with different prompts, the same for the same arguments.

    Raises: ConfigError if the domain has fewer different prompts.
    """
    return take_unique(_sample_rows(domain, count * DRAWS_PER_ROW, seed), count, f"suite letters, domain {domain}")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character: ids 0 to 3 are <pad> <bos> <eos> <unk>, then come the `CHARACTERS`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate([*SPECIALS, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _sample_rows(domain: str, limit: int, seed: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(f"letters/{domain}/{seed}")
    for _ in range(limit):
        prompt, lines = DOMAINS[domain](rng)
        yield {
            "prompt": prompt,
            "completion": "\n".join(lines),
            "answer": lines[-1],
            "metadata": {"suite": "letters", "domain": domain},
        }


def _sample_word(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(*WORD_LENGTHS)))


def _build_word_task(code: str, rule: Callable[[str], str]) -> Task:
    def task(rng: random.Random) -> tuple[str, list[str]]:
        word = _sample_word(rng)
        return f"{code} {word}=", [rule(word)]

    return task


def _shift_letters(word: str) -> str:
    return word.translate(str.maketrans(string.ascii_lowercase, string.ascii_lowercase[1:] + "a"))


def _mask_vowels(word: str) -> str:
    return "".join("." if letter in "aeiou" else letter for letter in word)


def _sample_comparison(rng: random.Random) -> tuple[str, list[str]]:
    first_number, second_number = rng.sample(range(100), 2)
    return f"cmp {first_number}:{second_number}=", ["<" if first_number < second_number else ">"]


def _sample_walk(rng: random.Random) -> tuple[str, list[str]]:
    start = rng.randrange(26)
    steps = rng.choices([1, -1], k=WALK_STEPS)
    signs = "".join(">" if step > 0 else "<" for step in steps)
    visited = "".join(string.ascii_lowercase[position % 26] for position in accumulate(steps, initial=start))
    return f"wlk {visited[0]}{signs}=", [visited[1:]]


def _sample_swaps(rng: random.Random) -> tuple[str, list[str]]:
    text = "".join(sorted(rng.sample(string.digits, SWAP_DIGITS)))
    for _ in range(rng.randint(1, MOST_SWAPS)):
        in_order = [i for i in range(SWAP_DIGITS - 1) if text[i] < text[i + 1]]
        text = _swap_letters(text, rng.choice(in_order))
    return f"swp {text}=", _sample_lines(
        rng, text, lambda t: [_swap_letters(t, i) for i in range(SWAP_DIGITS - 1) if t[i] > t[i + 1]]
    )


def _swap_letters(text: str, i: int) -> str:
    return text[:i] + text[i + 1] + text[i] + text[i + 2 :]


def _sample_duel(rng: random.Random) -> tuple[str, list[str]]:
    text = "".join(rng.sample(string.digits, DUEL_DIGITS))
    return f"due {text}=", _sample_lines(
        rng, text, lambda t: [_remove_letter(t, i if t[i] < t[i + 1] else i + 1) for i in range(len(t) - 1)]
    )


def _remove_letter(text: str, i: int) -> str:
    return text[:i] + text[i + 1 :]


def _sample_lines(rng: random.Random, start: str, next_lines: Callable[[str], list[str]]) -> list[str]:
    """Return the lines after `start`. Each is chosen at random from `next_lines` of the line before, until there are none."""
    lines = [start]
    while following := next_lines(lines[-1]):
        lines.append(rng.choice(following))
    return lines[1:]


DOMAINS: dict[str, Task] = {
    "reverse": _build_word_task("rev", lambda word: word[::-1]),
    "sort": _build_word_task("srt", lambda word: "".join(sorted(word))),
    "rotate": _build_word_task("rot", lambda word: word[1:] + word[0]),
    "shift": _build_word_task("nxt", _shift_letters),
    "double": _build_word_task("dbl", lambda word: "".join(letter * 2 for letter in word)),
    "mask": _build_word_task("msk", _mask_vowels),
    "compare": _sample_comparison,
    "walk": _sample_walk,
    "swap": _sample_swaps,
    "duel": _sample_duel,
}
