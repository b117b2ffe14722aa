#!/usr/bin/env bash
# Runs a command in one process a GPU, with the GPUs of this host as two nodes: NCCL is told that the halves are
# different hosts, so that traffic between them goes through sockets on loopback. Each process has CPUs of its own.
#   benchmarks/nodes.sh SECONDS LOG command [argument ...]
# The arguments that join the processes are added. What process I prints is in LOG.I; process 0's last lines are shown.
#   NODES=1: one node, NVLink throughout.
#   SHARED=4: so many processes on each GPU, each with its share of the multiprocessors and of the memory, through CUDA's
#   MPS, which is started and ended here. Wants NCCL 2.31 or newer.
#   JAX_PLATFORMS=cpu GPUS=2: two simulated devices, to try the command.
set -u
limit=$1 log=$2
shift 2
gpus=${GPUS:-$(nvidia-smi -L | wc -l)}
nodes=${NODES:-2} shared=${SHARED:-1}
ranks=$((gpus * shared))
per_node=$((ranks / nodes)) cpus=$(($(nproc) / ranks))
grid=(--devices-per-node "$per_node")
[ "${JAX_PLATFORMS:-}" = cpu ] && grid=(--simulated-nodes "$nodes" --simulated-devices-per-node "$per_node")
export NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4 NCCL_NVLS_ENABLE=0
mkdir -p "$(dirname "$log")"
end() {
  kill $(jobs -p) 2>/dev/null
  if [ "$shared" -gt 1 ]; then
    echo quit | nvidia-cuda-mps-control
    rm -r "$CUDA_MPS_PIPE_DIRECTORY"
  fi
}
trap end EXIT
if [ "$shared" -gt 1 ]; then
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
  export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$((100 / shared)) NCCL_MULTI_RANK_GPU_ENABLE=1
  export XLA_PYTHON_CLIENT_MEM_FRACTION=0.$((92 / shared))
  nvidia-cuda-mps-control -d
fi

port=$((20000 + RANDOM % 10000)) pids=() status=0
for ((p = 0; p < ranks; p++)); do
  # A driver stops reading at a number that is no GPU: processes whose lists differ do not share their GPUs out.
  [ "$shared" -gt 1 ] && export CUDA_VISIBLE_DEVICES=$((p / shared)),-$((p + 1))
  NCCL_HOSTID=node$((p / per_node)) timeout -k 5 "$limit" taskset -c "$((p * cpus))-$((p * cpus + cpus - 1))" \
    "$@" --coordinator "127.0.0.1:$port" --num-processes "$ranks" --process-id $p "${grid[@]}" > "$log.$p" 2>&1 &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
tail -60 "$log.0"
for ((p = 1; p < ranks; p++)); do grep -E '^(error: |[a-zA-Z_.]*(Error|Exception))' "$log.$p" | cut -c1-300; done
exit $status
