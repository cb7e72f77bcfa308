"""The commands of `opd`, a module for each name; `cli.py` puts them together.

A command reads its options, hands them on and prints what comes back. Whatever imports torch, ray or vllm is imported inside
of it, so that `opd --help` answers at once.
"""
