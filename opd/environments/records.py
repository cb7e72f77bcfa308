"""The records that an environment of yours imports; they are defined in `opd.records.environments`."""

from opd.records.environments import Action, Outcome, Tool, ToolCall

__all__ = ["Action", "Outcome", "Tool", "ToolCall"]
