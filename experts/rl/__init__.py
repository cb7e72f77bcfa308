"""Experts by reinforcement: a recipe that makes a pipeline without teachers, of which `pipelines.reinforce` makes an expert."""
