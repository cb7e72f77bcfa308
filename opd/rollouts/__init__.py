"""Rollout engines: what writes with the student's weights. One file per engine."""
