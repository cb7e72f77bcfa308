"""Memory of a merge: what its roles need, what a machine has, and whether the one fits the other.

    config.json ─ formulas ─ shape ─┐
    headers of weights ─────────────┴─ models ─┬─ memory, cache, parts ─┐
    machine: memory, cores, GPUs ──────────────┴─ gpu_memory ───────────┴─ fits_machine ─┬─ shrink
                                                                                         └─ auto

`opd check` and `opd merge` refuse by these sums, `opd plan` prints them, and `opd init` makes a pipeline smaller until they fit. `auto` is
the largest number that fits. So no other package has a formula for bytes that stay, or reads what a machine has.
"""
