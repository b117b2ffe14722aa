#!/usr/bin/env bash
# A host of GPUs as two nodes, as nodes.sh has it. Calibrates and asks the planner unless OUT has the answers, then
# measures one setting after the other, and goes on where an earlier call ended.
#   benchmarks/regret.sh OUT [arguments of regret.py measure]
#   BUDGET_S: of everything, seconds. LOGS: a folder for them. NODES=1: one node, NVLink throughout.
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=$1; shift
budget=${BUDGET_S:-3600}
logs=${LOGS:-$(mktemp -d)}
mkdir -p "$out"

processes() {  # seconds, then arguments of regret.py
  limit=$1 what=$2; shift 2
  "$here/nodes.sh" "$limit" "$logs/$what" python3 "$here/regret.py" "$what" --out "$out" "$@"
}

[ -s "$out/cluster.json" ] || processes 160 calibrate
[ -s "$out/picks.json" ] || JAX_PLATFORMS=cpu python3 "$here/regret.py" picks --out "$out"
left=$((budget - SECONDS))
processes "$left" measure --budget-s $((left - 10)) "$@"
