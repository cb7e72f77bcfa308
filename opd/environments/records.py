"""Old place of `opd.records.environments`, from which environments written for 0.1 import."""

from opd.records.environments import Action, Outcome, Tool, ToolCall

__all__ = ["Action", "Outcome", "Tool", "ToolCall"]
