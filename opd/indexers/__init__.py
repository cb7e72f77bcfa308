"""Sparse indexers that several layers share: which layers keep theirs, and how an indexer learns to choose for all layers that it serves."""
