"""`opd init`: look at a student, experts and prompts, and write the pipeline that merges them.

    given ── models ── columns ── domains ── sizes ──→ data ── text ──→ pipeline.yaml, pipeline.schema.json
    flags    config,    what the   rows,      lengths,   keys and values,
    or       adapter,   prompts    exam,      machine,   with a comment
    asked    tokens     are called verifier   memory     for each

Nothing is written before the whole file has been loaded as `opd merge` will load it.
"""
