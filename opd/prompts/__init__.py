"""Prompts: from a file, directory or hub data set to the prompts of each step.

    sources ─ readers ─→ line by line, checked ─ rows ─→ Arrow ─ encode ─→ table ─ mix ─→ the prompts of a step

Column names are TRL's. `prompt` is text or a list of chat messages. `completion`, of the same kind, is used only when an
expert is trained on the file; `answer` and `metadata` are used only by the verifier. A row of any format becomes one line of
canonical JSON (`line.py`), so the same rows are the same prompts, whatever file they come from.
"""

from opd.prompts.balance import Balance, samples_by_weight
from opd.prompts.conversation import Messages
from opd.prompts.encode import encode_prompt, load_tokenizer, render_prompt
from opd.prompts.line import PromptLine
from opd.prompts.mix import BalancedPrompts, MixedPrompts
from opd.prompts.notices import collect_notices
from opd.prompts.rows import Rows, open_rows, read_prompt_lines
from opd.prompts.sources import Source, find_source, is_here, is_hub_name
from opd.prompts.table import PromptTable, is_held_out, load_prompts

__all__ = [
    "Balance",
    "BalancedPrompts",
    "Messages",
    "MixedPrompts",
    "PromptLine",
    "PromptTable",
    "Rows",
    "Source",
    "collect_notices",
    "encode_prompt",
    "find_source",
    "is_held_out",
    "is_here",
    "is_hub_name",
    "load_prompts",
    "load_tokenizer",
    "open_rows",
    "read_prompt_lines",
    "render_prompt",
    "samples_by_weight",
]
