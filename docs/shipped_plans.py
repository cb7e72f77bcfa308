"""The pipelines that are shipped for `opd plan` alone, each with the shipped cluster on which docs/plan.md shows it."""

SHIPPED_PLANS = {"merge-7b": "8-gpus", "merge-70b": "32-gpus", "merge-744b": "256-gpus"}
