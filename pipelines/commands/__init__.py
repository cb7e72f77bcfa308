"""The commands of `opd`, one module each; `cli.py` puts them together.

A command reads its options, calls a function of `pipelines` and prints the result. Modules that import torch, ray or vllm are
imported inside the command, so that `opd --help` answers at once.
"""
