"""A run directory: where its files lie, its checkpoints, metrics and lineage."""
