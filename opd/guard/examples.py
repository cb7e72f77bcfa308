"""Tries the rules of a user's own files on the examples in them before they are used, since most broken patterns show there."""

from __future__ import annotations

from opd.errors import ConfigError
from opd.guard.build import GuardSpec
from opd.guard.guard import Guard, GuardFinding
from opd.guard.rules import SHIPPED, RuleFile, RuleSet
from opd.records.environments import ToolCall


def refuse_wrong_rules(spec: GuardSpec) -> None:
    """Try the rules of each file of a spec but our own, whose examples run as tests. Raises: ConfigError as `refuse_wrong_examples`."""
    for name, rules in zip(spec.config.rules, spec.rules, strict=True):
        if name != SHIPPED:
            refuse_wrong_examples(name, rules)


def refuse_wrong_examples(name: str, rules: RuleFile) -> None:
    """Try each rule of the file `name` alone on the commands under its `hit`, and all rules of the file together on those under each
    `miss`. Raises: ConfigError for the first command that is not hit, or is hit and should not be."""
    file_guard = Guard(RuleSet([rules]))
    for rule in rules.rules:
        rule_guard = Guard(RuleSet([rules.model_copy(update={"rules": [rule]})]))
        unhit = next((command for command in rule.hit if _check_example(rule_guard, command).hit is None), None)
        caught = next((command for command in rule.miss if _check_example(file_guard, command).hit is not None), None)
        if unhit is not None or caught is not None:
            raise ConfigError.at(
                f"{name}: rule {rule.id}",
                found=f"`{unhit or caught}` is {'not hit' if unhit else 'hit'}",
                wanted="a rule that hits every command under `hit`, and no rule of the file that hits one under `miss`",
                fix="correct the rule's patterns or its examples; `opd guard check` shows how a command is read",
            )


def _check_example(guard: Guard, command: str) -> GuardFinding:
    """Return what the rules find about a command of a shell, as the first call of an episode."""
    return guard.check_rules(ToolCall(name="bash", arguments={"command": command}), guard.session())
