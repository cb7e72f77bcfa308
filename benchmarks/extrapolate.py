"""Find how far beyond its experts a student should be trained: a merge for each factor of `objective.extrapolate`.

    python -m benchmarks.extrapolate --quick
    python -m benchmarks.extrapolate --seeds 0 1 2 --json extrapolate.json      after `make demo` has made prompts and experts

Accuracy per domain, mean headroom (1 is the experts), and in how many domains the merged model is above its expert by more than
the interval. The questions are a share of the training prompts, unless `--questions exam` asks for the exam's: a factor that was
chosen by the exam would look better than it is.
"""

from __future__ import annotations

from benchmarks.variants import Variant, arguments, compare


def main() -> None:
    parser = arguments("Factors of objective.extrapolate, compared.")
    parser.add_argument("--factors", nargs="+", type=float, default=[1.0, 1.1, 1.25, 1.5], help="1: toward the experts")
    args = parser.parse_args()
    variants = [Variant(f"extrapolate {factor:g}", (f"objective.extrapolate={factor:g}",)) for factor in args.factors]
    compare(args, variants, f"{'tiny' if args.quick else args.pipeline} beyond its experts")


if __name__ == "__main__":
    main()
