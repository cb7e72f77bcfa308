"""Ten tasks on short words and numbers that a 0.9M-parameter character model learns in seconds.

    reverse  rev hxkq=     qkxh        double   dbl hxkq=     hhxxkkqq
    sort     srt hxkq=     hkqx        ends     end hxkq=     hq
    upper    upr hxkq=     HXKQ        odd      odd hxkq=     hk
    rotate   rot hxkq=     xkqh        mask     msk haki=     h.k.
    shift    nxt hxkq=     iylr        compare  cmp 57:31=    >

Every character is one token, so lengths in tokens are lengths in characters.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from experts.suites.rows import Row, take_unique

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIALS = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHARACTERS = string.ascii_lowercase + string.ascii_uppercase + string.digits + " =,+-.:<>?"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}={{ message['content'] }}{{ eos_token }}{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)

WORD_LENGTHS = (3, 4)
DRAWS_PER_ROW = 50
Task = Callable[[random.Random], tuple[str, str]]


def make_rows(domain: str, count: int, seed: int) -> list[Row]:
    """`count` rows with different prompts, the same for the same arguments.

    Raises: ConfigError if the domain has fewer different prompts.
    """
    return take_unique(_draw(domain, count * DRAWS_PER_ROW, seed), count, f"suite letters, domain {domain}")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; ids 0-3 are <pad> <bos> <eos> <unk>, then `CHARACTERS` in order."""
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


def _draw(domain: str, limit: int, seed: int) -> Iterator[Row]:
    rng = random.Random(f"letters/{domain}/{seed}")
    for _ in range(limit):
        prompt, answer = DOMAINS[domain](rng)
        yield {
            "prompt": prompt,
            "completion": answer,
            "answer": answer,
            "metadata": {"suite": "letters", "domain": domain},
        }


def _word(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(*WORD_LENGTHS)))


def _on_word(code: str, rule: Callable[[str], str]) -> Task:
    def task(rng: random.Random) -> tuple[str, str]:
        word = _word(rng)
        return f"{code} {word}=", rule(word)

    return task


def _shift(word: str) -> str:
    return word.translate(str.maketrans(string.ascii_lowercase, string.ascii_lowercase[1:] + "a"))


def _mask(word: str) -> str:
    return "".join("." if letter in "aeiou" else letter for letter in word)


def _compare(rng: random.Random) -> tuple[str, str]:
    left, right = rng.sample(range(100), 2)
    return f"cmp {left}:{right}=", "<" if left < right else ">"


DOMAINS: dict[str, Task] = {
    "reverse": _on_word("rev", lambda word: word[::-1]),
    "sort": _on_word("srt", lambda word: "".join(sorted(word))),
    "upper": _on_word("upr", str.upper),
    "rotate": _on_word("rot", lambda word: word[1:] + word[0]),
    "shift": _on_word("nxt", _shift),
    "double": _on_word("dbl", lambda word: "".join(letter * 2 for letter in word)),
    "ends": _on_word("end", lambda word: word[0] + word[-1]),
    "odd": _on_word("odd", lambda word: word[::2]),
    "mask": _on_word("msk", _mask),
    "compare": _compare,
}
