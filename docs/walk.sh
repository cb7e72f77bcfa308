#!/usr/bin/env bash
# From three experts and their prompts to a served model, as docs/walk.md shows it: docs/walk.sh [EMPTY_DIRECTORY]
# It needs nothing but the environment of docs/install.md, and takes five to ten minutes on two cores.
set -euo pipefail

docs=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PATH="$docs/../.venv/bin:$PATH"
PORT=${PORT:-8000}
place=${1:-$(mktemp -d)}
mkdir -p "$place"
cd "$place"

# Says what a command is and how long it took.
step() {
    local began=$SECONDS
    printf '\n$ %s\n' "$*"
    "$@"
    printf '(%s s)\n' $((SECONDS - began))
}

# Waits until the server answers; fails if it ends before, or takes more than three minutes.
wait_for_server() {
    for _ in {1..180}; do
        curl --silent --fail --output /dev/null "http://127.0.0.1:$PORT/health" && return
        kill -0 "$server" || return
        sleep 1
    done
    return 1
}

# Stands for what a user has already: a student, three experts, prompts. The walk begins after it.
printf 'in %s, making models and prompts\n' "$PWD"
python "$docs/walk_ingredients.py" . > ingredients.log
printf '(%s s)\n' "$SECONDS"

step opd init --output letters.yaml --student models/base \
    --expert models/reverse --expert models/sort --expert rotate=models/rotate-lora \
    --prompts data/reverse.csv --prompts data/sort.parquet --prompts data/rotate.jsonl
step opd check letters.yaml
step opd merge letters.yaml
step opd report runs/letters

printf '\n$ opd serve runs/letters --port %s\n' "$PORT"
opd serve runs/letters --port "$PORT" > serve.log 2>&1 &
server=$!
trap 'kill "$server" 2> /dev/null || true' EXIT
step wait_for_server
step curl --silent --fail --write-out '\n' "http://127.0.0.1:$PORT/v1/chat/completions" --header 'Content-Type: application/json' \
    --data '{"model": "letters", "messages": [{"role": "user", "content": "rev walk"}], "temperature": 0}'
kill "$server"
trap - EXIT
wait "$server"
printf '\nthe server has ended\n'
