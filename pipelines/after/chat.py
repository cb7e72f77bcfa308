"""Talk to a model by plain transformers: one person needs no engine for many requests, and transformers is ready in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opd.errors import ConfigError, PromptError
from opd.machine.imports import TRANSFORMERS, import_lightly
from opd.models.weights import load_causal_lm
from opd.prompts.encode import encode_prompt, mark_prompt
from opd.rollouts.decoding import end_ids
from pipelines.after.efforts import refuse_unknown_effort
from pipelines.after.models import LocalModel
from pipelines.inputs.read import load_tokenizer

NEW = "/new"
"""The line that begins another dialogue."""
Show = Callable[[str], None]
"""A function that gets the pieces of an answer as they come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Settings of the model's answers."""

    max_new_tokens: int = 512
    """Tokens of an answer at most."""
    temperature: float = 0.0
    """0: the likeliest token each time."""
    seed: int = 0
    system: str | None = None
    """First message of every dialogue."""
    plain: bool = False
    """True if each line is continued as it is, even if the model has a chat template."""
    effort: str | None = None
    """One of the pipeline's efforts, of which the prompts tell the model."""


class Chat:
    """A dialogue with a model that has a chat template; without one, each line is continued by itself."""

    def __init__(self, model: LocalModel, options: ChatOptions) -> None:
        """Load the model. Raises: ConfigError for a system message without a chat template, before any weight is read."""
        import_lightly(TRANSFORMERS)
        self._tokenizer = load_tokenizer(model.path, model.config is None or model.config.student.puts_in_front)
        self.templated = bool(self._tokenizer.chat_template) and not options.plain
        if options.system and not self.templated:
            raise ConfigError.at(
                "--system",
                found="a model that continues plain text"
                + (" (--plain)" if options.plain else ", without a chat template"),
                wanted="a chat template, which has a place for it",
                fix="leave it out, or write the text at the beginning of your lines",
            )
        refuse_unknown_effort(model, options.effort)
        self._variables = model.config.chat_template_kwargs_at(options.effort) if model.config else {}
        self._text = model.config.efforts[options.effort].text if model.config and options.effort else ""
        self._options, self._context = options, model.info.context
        self._stop_token_ids = model.info.eos_token_ids
        self._model = _load_model(model, options)
        self._turns: list[dict[str, str]] = []

    def forget_dialogue(self) -> None:
        """Begin another dialogue."""
        self._turns = []

    def answer_line(self, line: str, show: Show) -> str:
        """Return the model's answer to a line; `show` gets its pieces as they come. Ctrl-C ends the answer where it is, and
        raises KeyboardInterrupt.

        Raises: PromptError if the line does not fit into the context, or the chat template refuses the dialogue.
        """
        ids = self._encode_dialogue(line)
        pieces: list[str] = []

        def append_piece(text: str) -> None:
            pieces.append(text)
            show(text)

        try:
            self._generate(ids, append_piece)
        finally:
            if self.templated:
                self._turns += [_make_message("user", line), _make_message("assistant", "".join(pieces))]
        return "".join(pieces)

    def _encode_dialogue(self, line: str) -> tuple[int, ...]:
        """Return the token ids of the dialogue with the new line; its oldest turns are forgotten until there is room for an
        answer."""
        turns = list(self._turns)
        while True:
            ids = self._encode_turns(turns, line)
            room = None if self._context is None else self._context - len(ids)
            # A line without turns before it may also have a shorter answer than was asked for: nothing more can be forgotten.
            if room is None or room >= self._options.max_new_tokens or (room > 0 and not turns):
                self._turns = turns
                return ids
            if not turns:
                raise PromptError.at(
                    "this line",
                    found=f"{len(ids)} tokens",
                    wanted=f"fewer than {self._context}, the model's context",
                    fix="shorten it",
                )
            del turns[:2]

    def _encode_turns(self, turns: Sequence[Mapping[str, str]], line: str) -> tuple[int, ...]:
        from jinja2 import TemplateError

        if not self.templated:
            return encode_prompt(self._tokenizer, mark_prompt(line, self._text))
        system = [_make_message("system", self._options.system)] if self._options.system else []
        try:
            messages = [*system, *map(dict, turns), _make_message("user", line)]
            return encode_prompt(self._tokenizer, mark_prompt(messages, self._text), **self._variables)
        except (TemplateError, ValueError, TypeError) as error:
            raise PromptError.at(
                "chat template",
                found=f"{error}",
                wanted="a template that takes this dialogue",
                fix="leave --system out, or give --plain to do without the template",
            ) from None

    def _generate(self, ids: tuple[int, ...], show: Show) -> None:
        """Have the model write, and hand each finished piece of text to `show`. End tokens are no text."""
        import torch
        from transformers import TextStreamer

        class Pieces(TextStreamer):
            # `generate` puts the whole prompt first, which `skip_prompt` drops, then one token at a time.
            def put(self, value: torch.Tensor) -> None:
                if self.next_tokens_are_prompt or int(value) not in ends:
                    super().put(value)

            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                show(text)

        ends = end_ids(self._tokenizer, self._stop_token_ids)
        ids_B_T = torch.tensor([ids], device=self._model.device)
        room = self._options.max_new_tokens if self._context is None else self._context - len(ids)
        self._model.generate(
            ids_B_T,
            attention_mask=torch.ones_like(ids_B_T),
            max_new_tokens=min(room, self._options.max_new_tokens),
            streamer=Pieces(self._tokenizer, skip_prompt=True),
        )


def _make_message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _load_model(source: LocalModel, options: ChatOptions) -> Any:
    """Load the model onto the GPU if there is one, with the settings by which it chooses tokens."""
    import torch
    from transformers import GenerationConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    slow = device == "cpu" and source.info.dtype == "float16"  # a CPU computes in float16 far slower than in float32
    model = load_causal_lm(source.path, torch.float32 if slow else getattr(torch, source.info.dtype)).to(device).eval()
    ends = list(source.info.eos_token_ids)
    sampling = {"do_sample": True, "temperature": options.temperature} if options.temperature else {"do_sample": False}
    # Never used for one prompt alone, but without it `generate` would warn that it takes the end token.
    pad = source.info.pad_token_id if source.info.pad_token_id is not None else next(iter(ends), None)
    model.generation_config = GenerationConfig(eos_token_id=ends or None, pad_token_id=pad, **sampling)
    torch.manual_seed(options.seed)
    return model


def run_dialogue(
    chat: Chat, lines: Iterable[str], show: Show, tell: Callable[[str], None], *, keep_going: bool
) -> None:
    """Answer every line. With `keep_going`, as at a terminal, a line that is refused or Ctrl-C ends one answer and not the dialogue."""
    for line in lines:
        if line.strip() == NEW:
            chat.forget_dialogue()
        elif line.strip():
            try:
                chat.answer_line(line, show)
            except PromptError as error:
                if not keep_going:
                    raise
                tell(f"error: {error}")
            except KeyboardInterrupt:
                if not keep_going:
                    raise
            show("\n")
