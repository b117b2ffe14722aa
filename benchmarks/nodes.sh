#!/usr/bin/env bash
# Runs a command in one process a GPU, with the GPUs of this host as two nodes: NCCL is told that the halves are
# different hosts, so that traffic between them goes through sockets on loopback. Each process has CPUs of its own.
#   benchmarks/nodes.sh SECONDS LOG command [argument ...]
# The arguments that join the processes are added. What process I prints is in LOG.I; process 0's last lines are shown.
#   NODES=1: one node, NVLink throughout.
#   JAX_PLATFORMS=cpu GPUS=2: two simulated devices, to try the command.
set -u
limit=$1 log=$2
shift 2
gpus=${GPUS:-$(nvidia-smi -L | wc -l)}
nodes=${NODES:-2}
per_node=$((gpus / nodes)) cpus=$(($(nproc) / gpus))
grid=(--devices-per-node "$per_node")
[ "${JAX_PLATFORMS:-}" = cpu ] && grid=(--simulated-nodes "$nodes" --simulated-devices-per-node "$per_node")
export NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4 NCCL_NVLS_ENABLE=0
mkdir -p "$(dirname "$log")"
trap 'kill $(jobs -p) 2>/dev/null' EXIT

port=$((20000 + RANDOM % 10000)) pids=() status=0
for ((p = 0; p < gpus; p++)); do
  NCCL_HOSTID=node$((p / per_node)) timeout -k 5 "$limit" taskset -c "$((p * cpus))-$((p * cpus + cpus - 1))" \
    "$@" --coordinator "127.0.0.1:$port" --num-processes "$gpus" --process-id $p "${grid[@]}" > "$log.$p" 2>&1 &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
tail -60 "$log.0"
for ((p = 1; p < gpus; p++)); do grep -E '^(error: |[a-zA-Z_.]*(Error|Exception))' "$log.$p" | cut -c1-300; done
exit $status
