"""Which divergence merges best? A merge for each objective and setting, all else equal.

    python -m benchmarks.objectives --quick
    python -m benchmarks.objectives --seeds 0 1 2 --json objectives.json        after `make demo` has made prompts and experts

Accuracy per domain and mean headroom on questions that are a share of the training prompts, unless `--questions exam` asks for the
exam's. Losses are not compared: each kind's is another number.
"""

from __future__ import annotations

from benchmarks.variants import Variant, arguments, compare

OBJECTIVES: dict[str, tuple[str, ...]] = {
    "reverse_kl": (),
    "forward_kl": (),
    "skew": ("alpha=0.1",),
    "jsd": ("beta=0.5",),
    "adaptive_kl": ("bound=0.1", "bound=0.2", "bound=0.5"),
}
"""Kind -> its settings, one merge each; none: one merge."""


def variants(kinds: list[str]) -> list[Variant]:
    """A variant for each setting of these kinds."""
    found = []
    for kind in kinds:
        for option in OBJECTIVES[kind] or ("",):
            settings = (f"objective.kind={kind}", *([f"objective.{option}"] if option else []))
            found.append(Variant(f"{kind} {option.partition('=')[2]}".strip(), settings))
    return found


def main() -> None:
    parser = arguments("Objectives, compared.")
    parser.add_argument("--kinds", nargs="+", choices=list(OBJECTIVES), default=list(OBJECTIVES))
    args = parser.parse_args()
    compare(args, variants(args.kinds), f"objectives on {'tiny' if args.quick else args.pipeline}")


if __name__ == "__main__":
    main()
