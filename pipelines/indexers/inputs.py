"""The model and the texts of `opd indexers`, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experts.model_dir import ModelInfo, inspect_model
from opd.errors import ModelError, PromptError
from opd.files import blake3_json
from opd.indexers.patterns import FAMILIES, FULL, read_pattern
from pipelines.after.models import find_model

if TYPE_CHECKING:
    from opd.indexers.layers import LayerRunner, TextBatch, TextRow

CONTEXTS = 8
"""Default of the longest row: this many times the tokens that an indexer chooses. Of shorter rows most tokens are chosen, whichever layer
chooses."""
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedModel:
    """A model whose layers can share indexers."""

    path: Path
    info: ModelInfo
    pattern: str
    """Its own pattern."""
    topk: int
    """Tokens that an indexer chooses."""

    def load(self) -> LayerRunner:
        """Load the model in the type of its files, on the GPU if there is one. Raises: ModelError."""
        import torch

        from opd.indexers.layers import LayerRunner
        from opd.models.weights import load_causal_lm

        lm = load_causal_lm(self.path, getattr(torch, self.info.dtype)).requires_grad_(False)
        return LayerRunner(lm.to("cuda" if torch.cuda.is_available() else "cpu"))


def inspect_indexed_model(directory: Path, tell: Tell) -> IndexedModel:
    """Read the headers of a model, or of the model that a run left. `tell` gets a warning if that run is not finished.

    Raises: ModelError for a family whose layers cannot share indexers; what `find_model` and `inspect_model` raise.
    """
    path = find_model(directory, tell).path
    info = inspect_model(path)
    if info.model_type not in FAMILIES:
        raise ModelError.at(
            f"{path / 'config.json'}: model_type",
            found=info.model_type,
            wanted=f"{' or '.join(FAMILIES)}: in transformers and in vLLM layers of other families share no indexer",
            fix="take a model of this family",
        )
    from opd.models.weights import load_config

    config = load_config(path)
    return IndexedModel(path=path, info=info, pattern=read_pattern(config), topk=config.index_topk)


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """The rows of a calibration stream."""

    rows: Sequence[TextRow]
    digest: str
    """Hash of the token ids."""
    choosing: float
    """Share of the counted tokens that are predicted where an indexer has to choose."""


def read_texts(prompts: Path, model: IndexedModel, max_length: int | None, tell: Tell) -> Texts:
    """Read and encode rows. One with a completion is counted on that alone, any other on all of its tokens; what is longer than `max_length`
    tokens is cut. `tell` gets a warning if most counted tokens see no more than an indexer chooses.

    Raises: PromptError for broken rows, and if no counted token has more to read than is chosen.
    """
    import torch

    from experts.sft import IGNORED, encode_line
    from opd.indexers.layers import TextBatch, TextRow
    from opd.indexers.search import count_choosing, count_tokens
    from opd.prompts import encode_prompt, load_tokenizer, read_prompt_lines

    tokenizer = load_tokenizer(model.path)
    length = max_length or min(CONTEXTS * model.topk, model.info.context or CONTEXTS * model.topk)
    rows = []
    for line in read_prompt_lines(prompts):
        if line.completion is None:
            ids, num_prompt = list(encode_prompt(tokenizer, line.prompt)), 1
        else:
            example = encode_line(tokenizer, line, model.info.eos_token_ids)
            ids, num_prompt = example["input_ids"], max(1, example["labels"].count(IGNORED))
        if num_prompt < len(ids[:length]):
            rows.append(TextRow(token_ids=tuple(ids[:length]), num_prompt=num_prompt))
    batches = [TextBatch.of_rows([row], torch.device("cpu")) for row in rows]
    choosing = count_choosing(batches, model.topk)
    if not choosing:
        raise PromptError.at(
            prompts,
            found=f"{len(rows)} rows of at most {length} tokens, in which no counted token has more than {model.topk} to read",
            wanted=f"rows much longer than {model.topk} tokens, index_topk of {model.path / 'config.json'}: in shorter ones every "
            "token is chosen, and all patterns are equal",
            fix="join short texts, or raise --max-length",
        )
    share = choosing / count_tokens(batches)
    if share < 0.5:
        tell(
            f"warning: only {100 * share:.0f} % of the counted tokens have more than {model.topk} tokens to read; on the others all "
            "patterns are equal: longer rows say more"
        )
    return Texts(rows=rows, digest=blake3_json([[row.token_ids, row.num_prompt] for row in rows]), choosing=share)


def make_batches(rows: Sequence[TextRow], size: int, device: Any) -> list[TextBatch]:
    """Put rows of like length side by side."""
    from opd.indexers.layers import TextBatch

    by_length = sorted(rows, key=lambda row: len(row.token_ids))
    return [TextBatch.of_rows(by_length[i : i + size], device) for i in range(0, len(by_length), size)]


def count_indexers(pattern: str) -> str:
    """Describe a pattern for people."""
    return f"{pattern} ({pattern.count(FULL)} of {len(pattern)} layers with an indexer)"
