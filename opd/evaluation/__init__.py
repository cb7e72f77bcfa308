"""Accuracy per domain: greedy answers from the rollout engine, judged by the domain's verifier."""
