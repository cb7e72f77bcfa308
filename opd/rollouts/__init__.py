"""Rollout engines, which write responses with the student's weights. One file per engine."""
