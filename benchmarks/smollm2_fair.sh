#!/usr/bin/env bash
# On-policy and off-policy distillation of the ten SmolLM2 experts on equal terms: each with every rate of a small grid and both
# ways to weight the domains, chosen on questions of their own, then asked fresh ones. After `make smollm2`, in its directory:
#
#     benchmarks/smollm2_fair.sh                 about 18 hours on two cores; what is finished is kept
#     RATES="1e-4 2e-4" METHODS=off_policy benchmarks/smollm2_fair.sh
set -euo pipefail
OPD="${OPD:-.venv/bin/opd}"
RATES="${RATES:-1e-4 2e-4 4e-4 8e-4}"
METHODS="${METHODS:-opd off_policy}" # also: mixed_sft
SHIPPED="$(dirname "$0")/../pipelines/smollm2.yaml"
ROOT=runs/smollm2-fair
PROMPTS=prompts/reasoning
DOMAINS="$(sed -n 's/^  use: \[\(.*\)\]$/\1/p' "$SHIPPED" | tr -d ' ')"
mkdir -p "$ROOT"

# The 1,700 prompts of `make smollm2` are the first of a sequence; these are the 300 after them.
"$OPD" prompts make reasoning --output "$ROOT/prompts" --train 1 --eval 2000 --domains "$DOMAINS"
for domain in ${DOMAINS//,/ }; do
    tail -n 300 "$ROOT/prompts/$domain/eval.jsonl" | head -n 100 > "$PROMPTS/$domain/tune.jsonl"
    tail -n 200 "$ROOT/prompts/$domain/eval.jsonl" > "$PROMPTS/$domain/fresh.jsonl"
done

# `gap` is the shipped pipeline, whose domains have no weights: a baseline gives all of them as many samples.
# `hand` has the weights that were once chosen by our first merge's losses.
sed 's|/eval\.jsonl|/tune.jsonl|' "$SHIPPED" > "$ROOT/gap.yaml"
awk 'BEGIN { n = split("needle 0.8 rotation 1.2 matrix 1.6 relations 0.4 kin 0.8 complex_sums 0.6 number_sorting 0.8 decimal_sums 1.6 chain_sum 1.8", w)
             for (i = 1; i < n; i += 2) hand[w[i]] = w[i + 1] }
     /^balance:/ { next } { print }
     /^  [a-z_]+:$/ { name = substr($1, 1, length($1) - 1); if (name in hand) print "    weight: " hand[name] }' "$ROOT/gap.yaml" > "$ROOT/hand.yaml"
sed -e 's|/tune\.jsonl|/fresh.jsonl|' -e 's/samples: 100/samples: 200/' "$ROOT/gap.yaml" > "$ROOT/exam.yaml"

models=()
for method in $METHODS; do
    for weights in gap hand; do
        for rate in $RATES; do
            run="$ROOT/$method-$weights-$rate"
            if [[ "$method" == opd ]]; then
                test -d "$run" || "$OPD" merge "$ROOT/$weights.yaml" --run-dir "$run" --set "trainer.lr=$rate"
                test -e "$run/report.json" || "$OPD" merge --resume "$run"
                models+=("$run/model")
            else
                # With 50 samples a step the experts' answers come to 60,000 tokens, as many as the merge trains on.
                "$OPD" baseline "$ROOT/$weights.yaml" --method "$method" --run-dir "$run" --set "trainer.lr=$rate" --keep-models
                models+=("$run/baselines/models/$method-1")
            fi
        done
    done
done

echo "Choose each method's run by the first table, and compare only these in the second."
"$OPD" evaluate "${models[@]}" --pipeline "$ROOT/gap.yaml" --compare --output "$ROOT/tune.json"
"$OPD" evaluate "${models[@]}" --pipeline "$ROOT/exam.yaml" --compare --output "$ROOT/fresh.json"
