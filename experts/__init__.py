"""Experts: the registry, checks of model directories and adapters, and the training of experts."""
