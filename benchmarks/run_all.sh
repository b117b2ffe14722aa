#!/usr/bin/env bash
# The measurements of README.md on the GPUs of this host, one part after the other. What OUT has is not measured again,
# so that a call that was cut off goes on.
#   OUT=benchmarks/out benchmarks/run_all.sh [part ...]
# Parts, all if none is named; those of the network want an even number of GPUs, or RANKS=4 that share one (nodes.sh):
#   peer_7b peer_1b     MFU beside PyTorch FSDP2; 32 layers of 7B from 4 GPUs on, 16 on 2, 8 on one
#   compile             32 layers, of 7B from 4 GPUs on, else of 1B: seconds to trace and compile, and again from the cache
#   calibrate           the links of the GPUs as two nodes, for the planner
#   strategies ablation the named strategies, and overlap part by part, on that network
#   groups              some of them there, depth-first and in groups of microbatches
#   loss_curve          200 steps with overlap and without
#   equivalence         every strategy against one GPU
#   plot                pictures, in OUT
set -u
here=$(cd "$(dirname "$0")" && pwd)
export OUT=${OUT:-$here/out}
gpus=${GPUS:-$(nvidia-smi -L | wc -l)}
network=$OUT/network

peer_7b() {
  local layers=32
  [ "$gpus" -lt 4 ] && layers=$((8 * gpus))
  MODEL=llama-7b LAYERS=$layers "$here/gpu_peer.sh" \
    ours_bf16 peer_bf16 ours_fp32 peer_fp32 ours_bf16_mb4 peer_bf16_mb4 peer_bf16_auto ours_bf16_again
}

peer_1b() {
  MODEL=llama-1b "$here/gpu_peer.sh" ours_bf16_zero2_mb16 peer_bf16_zero2_mb16_all peer_bf16_zero2_mb16 \
    ours_bf16_zero2_mb4 peer_bf16_zero2_mb4 ours_bf16_mb4 peer_bf16_mb4 ours_fp32_zero2_mb16 peer_fp32_zero2_mb16
}

compile() {
  local microbatches start model=(--model llama-7b)
  [ "$gpus" -lt 4 ] && model=(--model llama-1b --overrides "{'num_layers': 32}")
  for microbatches in 1 4; do
    for start in first second; do
      local name="32 layers x$microbatches, $start start" cache="$OUT/cache_x$microbatches"
      [ $start = first ] && ! grep -qF "$name" "$OUT/compile.jsonl" 2>/dev/null && rm -rf "$cache"
      "$here/record.sh" "$OUT/compile.jsonl" "$name" 170 python3 "$here/train_step.py" "${model[@]}" \
        --microbatch 1 --accumulation $microbatches --steps 1 --warmup 1 --cache "$cache"
    done
  done
}

on_nodes() {  # seconds, name, command
  [ $((${RANKS:-gpus} % 2)) = 0 ] || { echo "$2: $gpus GPU, which is not two nodes"; return; }
  "$here/nodes.sh" "$1" "$OUT/logs/$2" python3 "${@:3}"
}

calibrate() {
  [ -s "$network/cluster.json" ] || on_nodes 150 calibrate "$here/regret.py" calibrate --out "$network" --budget-s 40
}

compare() {  # name, seconds, other arguments: strategies, with the planner's choice where the network is calibrated
  local cluster=()
  [ -s "$network/cluster.json" ] && cluster=(--cluster "$network/cluster.json")
  on_nodes $(($2 + 60)) "$1" "$here/strategies.py" --out "$OUT/$1.jsonl" --budget-s "$2" \
    ${cluster[@]+"${cluster[@]}"} "${@:3}"
}

strategies() {
  compare strategies "${STRATEGIES_S:-240}"
}

groups() {
  compare groups "${GROUPS_S:-240}" --accumulation 4 8 --microbatch-group 1 4 8 \
    --strategy "params=replica grads=node opt_state=full" mics hpz zero1 zero3
}

ablation() {
  local budget=${ABLATION_S:-240}
  on_nodes $((budget + 60)) ablation "$here/ablation.py" --out "$OUT/ablation.jsonl" --budget-s "$budget"
}

loss_curve() {
  local per_node=$((gpus > 1 ? gpus / 2 : 1))
  [ -s "$OUT/loss_curve.json" ] && return
  if [ -n "${RANKS:-}" ]; then
    on_nodes 240 loss_curve "$here/loss_curve.py" --out "$OUT"
  else
    timeout 240 python3 "$here/loss_curve.py" --out "$OUT" --devices-per-node $per_node 2> "$OUT/loss_curve.err"
  fi
}

equivalence() {
  [ -s "$OUT/equivalence.jsonl" ] ||
    timeout 300 python3 "$here/equivalence.py" 2> "$OUT/equivalence.err" | tee "$OUT/equivalence.jsonl"
}

plot() {
  python3 "$here/plot.py" --in "$OUT" --out "$OUT"
}

mkdir -p "$OUT/logs"
cd "$here/.." || exit
for part in ${*:-peer_7b peer_1b compile calibrate strategies groups ablation loss_curve equivalence plot}; do
  echo "== $part, after $SECONDS s"
  "$part"
done
