"""On-policy distillation that merges many expert models into one."""

__version__ = "0.1.0"
