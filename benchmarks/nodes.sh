#!/usr/bin/env bash
# Runs a command in one process a GPU, with the GPUs of this host as two nodes: NCCL is told that the halves are
# different hosts, so that traffic between them goes through sockets on loopback. Each process has CPUs of its own.
#   benchmarks/nodes.sh SECONDS LOG command [argument ...]
# The arguments that join the processes are added. What process I prints is in LOG.I; process 0's last lines are shown.
#   NODES=1: one node, NVLink throughout.
#   SOCKETS=1: threads of a connection between nodes, and sockets of each, instead of 4: a slower network.
#   RANKS=4: so many processes; more than there are GPUs share them through MPS, each with its part of the multiprocessors
#   and of the memory. A node's are spread over the GPUs; those of one node that share a GPU need NCCL 2.30 or newer.
#   CHANNELS=8: NCCL's, each a multiprocessor, where GPUs are shared; the part of 32 that a process has.
#   JAX_PLATFORMS=cpu GPUS=2: two simulated devices, to try the command.
set -u
limit=$1 log=$2
shift 2
gpus=${GPUS:-$(nvidia-smi -L | wc -l)}
nodes=${NODES:-2}
ranks=${RANKS:-$gpus}
per_node=$((ranks / nodes)) cpus=$(($(nproc) / ranks))
grid=(--devices-per-node "$per_node")
[ "${JAX_PLATFORMS:-}" = cpu ] && grid=(--simulated-nodes "$nodes" --simulated-devices-per-node "$per_node")
sockets=${SOCKETS:-4}
export NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_NVLS_ENABLE=0
export NCCL_SOCKET_NTHREADS=$sockets NCCL_NSOCKS_PERTHREAD=$sockets
mkdir -p "$(dirname "$log")"
trap 'kill $(jobs -p) 2>/dev/null' EXIT
if [ "$ranks" -gt "$gpus" ] && [ "${JAX_PLATFORMS:-}" != cpu ]; then
  nvidia-cuda-mps-control -d || exit
  trap 'kill $(jobs -p) 2>/dev/null; echo quit -t 5 | nvidia-cuda-mps-control' EXIT
  part=$((100 * gpus / ranks))
  export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$part XLA_PYTHON_CLIENT_MEM_FRACTION=$(printf "0.%04d" $((88 * part)))
  # Of few work queues a process, as MPS has them, streams may wait for one another. NCCL connects at once, not while
  # collectives run: a possible reason why two of six runs did not end; three since did.
  export CUDA_DEVICE_MAX_CONNECTIONS=16 NCCL_RUNTIME_CONNECT=0
  export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_NCHANNELS=${CHANNELS:-$((32 * gpus / ranks))}
fi

port=$((20000 + RANDOM % 10000)) pids=() status=0
for ((p = 0; p < ranks; p++)); do
  # The driver stops reading at -1; what follows tells the processes' lists apart.
  [ "$ranks" -gt "$gpus" ] && export CUDA_VISIBLE_DEVICES=$((p % gpus)),-1,$p
  NCCL_HOSTID=node$((p / per_node)) timeout -k 5 "$limit" taskset -c "$((p * cpus))-$((p * cpus + cpus - 1))" \
    "$@" --coordinator "127.0.0.1:$port" --num-processes "$ranks" --process-id $p "${grid[@]}" > "$log.$p" 2>&1 &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
tail -60 "$log.0"
for ((p = 1; p < ranks; p++)); do grep -E '^(error: |[a-zA-Z_.]*(Error|Exception))' "$log.$p" | cut -c1-300; done
exit $status
