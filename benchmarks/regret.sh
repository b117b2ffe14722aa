#!/usr/bin/env bash
# A host of GPUs as two nodes, one process a GPU: NCCL is told that the halves are different hosts, so that traffic
# between them goes through sockets on loopback. Each process has CPUs of its own. Calibrates and asks the planner
# unless OUT has the answers, then measures one setting after the other, and goes on where an earlier call ended.
#   benchmarks/regret.sh OUT [arguments of regret.py measure]
#   BUDGET_S: of everything, seconds. LOGS: a folder for them. NODES=1: one node, NVLink throughout.
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=$1; shift
gpus=$(nvidia-smi -L | wc -l)
cpus=$(($(nproc) / gpus))
per_node=$((gpus / ${NODES:-2}))
budget=${BUDGET_S:-3600}
logs=${LOGS:-$(mktemp -d)}
mkdir -p "$out" "$logs"
export NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4 NCCL_NVLS_ENABLE=0
trap 'kill $(jobs -p) 2>/dev/null' EXIT

processes() {  # seconds, then arguments of regret.py
  limit=$1 what=$2; shift 2
  port=$((20000 + RANDOM % 10000))
  for ((p = 0; p < gpus; p++)); do
    NCCL_HOSTID=node$((p / per_node)) timeout -k 5 "$limit" \
      taskset -c "$((p * cpus))-$((p * cpus + cpus - 1))" python3 "$here/regret.py" "$what" \
      --out "$out" --coordinator "127.0.0.1:$port" --num-processes "$gpus" --process-id $p \
      --devices-per-node "$per_node" "$@" > "$logs/$what.$p.log" 2>&1 &
  done
  wait
  tail -60 "$logs/$what.0.log"
  grep -hE '^[a-zA-Z_.]*(Error|Exception)' "$logs/$what".[1-9]*.log | cut -c1-300
}

[ -s "$out/cluster.json" ] || processes 160 calibrate
[ -s "$out/picks.json" ] || JAX_PLATFORMS=cpu python3 "$here/regret.py" picks --out "$out"
left=$((budget - SECONDS))
processes "$left" measure --budget-s $((left - 10)) "$@"
