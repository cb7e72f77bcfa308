"""Every family of models that a merge should be right for, tried on tiny random ones: `python -m tests.models`."""
