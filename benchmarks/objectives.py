"""Find the divergence that merges best: a merge for each objective and setting, all else equal.

    python -m benchmarks.objectives --quick
    python -m benchmarks.objectives --seeds 0 1 2 --json objectives.json        after `make demo` has made prompts and experts

Accuracy per domain and mean headroom on questions that are a share of the training prompts, unless `--questions exam` asks for the
exam's. Losses are not compared: each kind's is another number.
"""

from __future__ import annotations

from benchmarks.variants import Variant, arguments, compare

VARIANTS: dict[str, tuple[str, ...]] = {
    "reverse_kl": (),
    "forward_kl": (),
    "skew 0.1": ("objective.alpha=0.1",),
    "jsd 0.5": ("objective.beta=0.5",),
    "adaptive_kl 0.1": ("objective.bound=0.1",),
    "adaptive_kl 0.2": ("objective.bound=0.2",),
    "adaptive_kl 0.5": ("objective.bound=0.5",),
}
"""A kind, with its setting where it has one -> that setting's key. Each is a merge."""


def kind_of(name: str) -> str:
    """The kind of a variant."""
    return name.partition(" ")[0]


KINDS = list(dict.fromkeys(map(kind_of, VARIANTS)))


def variants(wanted: list[str]) -> list[Variant]:
    """All of these kinds; a name such as `jsd 0.5` stands for that setting alone."""
    return [
        Variant(name, (f"objective.kind={kind_of(name)}", *settings))
        for name, settings in VARIANTS.items()
        if name in wanted or kind_of(name) in wanted
    ]


def main() -> None:
    parser = arguments("Objectives, compared.")
    parser.add_argument("--kinds", nargs="+", choices=list(dict.fromkeys([*KINDS, *VARIANTS])), default=KINDS)
    args = parser.parse_args()
    compare(args, variants(args.kinds), f"objectives on {'tiny' if args.quick else args.pipeline}")


if __name__ == "__main__":
    main()
