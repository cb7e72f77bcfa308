"""Experts by reinforcement: a recipe for a pipeline without teachers, which `pipelines.reinforce` runs to make an expert."""
