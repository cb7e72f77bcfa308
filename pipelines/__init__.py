"""Pipelines: the shipped YAML files, and what turns one into a running merge."""
