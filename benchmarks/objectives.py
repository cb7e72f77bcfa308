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


def variants(wanted: list[str]) -> list[Variant]:
    """A variant for each setting of these kinds; a name such as `jsd 0.5` stands for that setting alone."""
    found = []
    for kind, options in OBJECTIVES.items():
        for option in options or ("",):
            settings = (f"objective.kind={kind}", *([f"objective.{option}"] if option else []))
            name = f"{kind} {option.partition('=')[2]}".strip()
            if kind in wanted or name in wanted:
                found.append(Variant(name, settings))
    return found


NAMES = [one.name for one in variants(list(OBJECTIVES))]


def main() -> None:
    parser = arguments("Objectives, compared.")
    parser.add_argument(
        "--kinds", nargs="+", choices=list(dict.fromkeys([*OBJECTIVES, *NAMES])), default=list(OBJECTIVES)
    )
    args = parser.parse_args()
    compare(args, variants(args.kinds), f"objectives on {'tiny' if args.quick else args.pipeline}")


if __name__ == "__main__":
    main()
