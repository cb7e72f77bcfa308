"""The model of a judge in this process. It gives the log-probs of the two verdicts behind a question, by transformers on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opd.models.weights import load_causal_lm
from opd.prompts.chat_templates import refuse_runaway_template
from opd.prompts.encode import encode_prompt, encode_text, load_tokenizer
from opd.prompts.untrusted_text import escape_specials, special_texts


class ModelScorer:
    """Implements `opd.guard.judge.PromptScorer`. Make it in the main thread, since transformers changes the default type of torch, for
    all threads, while it loads a model."""

    def __init__(self, model_dir: Path) -> None:
        """Load a Hugging Face directory: safetensors, its tokenizer, and its chat template if it has one."""
        import torch

        self._tokenizer: Any = load_tokenizer(model_dir)
        refuse_runaway_template(self._tokenizer, model_dir)
        self._lm = load_causal_lm(model_dir, torch.float32).eval()
        self._special = special_texts(self._tokenizer)

    def __call__(self, prompt: str, continuations: Sequence[str]) -> list[float]:
        prompt_ids = self._encode_question(prompt)
        return [self._verdict_logprob(prompt_ids, encode_text(self._tokenizer, text)) for text in continuations]

    def _encode_question(self, prompt: str) -> list[int]:
        """Return the token ids of a question. With a chat template the question is a message of the user, and the verdict begins the
        model's turn. Special tokens in the question are broken up, so that a call in it cannot forge a turn."""
        prompt = escape_specials(prompt, self._special)
        messages = prompt if self._tokenizer.chat_template is None else [{"role": "user", "content": prompt}]
        return list(encode_prompt(self._tokenizer, messages))

    def _verdict_logprob(self, prompt_ids: list[int], verdict_ids: list[int]) -> float:
        """Return the log-prob of the verdict's tokens together behind the prompt, nats."""
        import torch

        with torch.inference_mode():
            logits_T_V = self._lm(torch.tensor([[*prompt_ids, *verdict_ids]]), use_cache=False).logits[0]
            # The logits at a token are for the next one, so those of the verdict begin at the last token of the question.
            logp_T_V = logits_T_V[len(prompt_ids) - 1 : -1].float().log_softmax(-1)
        return float(logp_T_V.gather(1, torch.tensor(verdict_ids)[:, None]).sum())
