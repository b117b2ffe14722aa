#!/usr/bin/env bash
# This engine and the PyTorch FSDP2 peer on one host of GPUs, one run after the other in one sitting. Each run adds a
# line to $OUT/results.jsonl; one that has a line there is passed over.
#   MODEL=llama-7b LAYERS=16 benchmarks/gpu_peer.sh ours_bf16 peer_bf16 peer_bf16_zero2_mb4
# A run's name says what it is, words joined by _:
#   ours, peer       which of the two
#   bf16, fp32       the dtype of the gradients' reduction
#   zero3, zero2     zero2 for the peer: parameters stay gathered from forward to backward. ours: any named strategy
#   mb4              sequences of a microbatch, on each GPU
#   acc4             microbatches of a step
#   save, every2     keep the results of all matrix products (ours: projections); of every second one (peer alone)
#   nothing, all     keep each block's input alone; recompute nothing
#   auto, flash      the peer's attention in place of cuDNN's: torch's choice, FlashAttention
#   again...         nothing: another run of the same
# MODEL, LAYERS, MICROBATCH, STRATEGY: what a name does not say. OURS, PEER: more arguments. LIMIT_S: of one run.
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$here/out}
model=${MODEL:-llama-7b}
layers=${LAYERS:-}
gpus=${GPUS:-$(nvidia-smi -L | wc -l)}

run() {  # name
  local side reduce=bf16 strategy=${STRATEGY:-zero3} microbatch=${MICROBATCH:-2} microbatches=1 keep=save attention=cudnn
  for word in ${1//_/ }; do
    case $word in
      ours | peer) side=$word ;;
      bf16 | fp32) reduce=$word ;;
      mb[0-9]*) microbatch=${word#mb} ;;
      acc[0-9]*) microbatches=${word#acc} ;;
      save | every2 | nothing | all) keep=$word ;;
      auto | flash) attention=$word ;;
      again*) ;;
      *) strategy=$word ;;
    esac
  done
  "$side"
}

ours() {
  local -A dtypes=([bf16]=bfloat16 [fp32]=float32) remat=([save]=projections [nothing]=full [all]=none)
  python3 "$here/train_step.py" --model "$model" ${layers:+--overrides "{'num_layers': $layers}"} \
    --strategy "$strategy" --microbatch "$microbatch" --accumulation "$microbatches" \
    --reduce_dtype "${dtypes[$reduce]}" --remat "${remat[$keep]}" ${OURS:-}
}

peer() {
  local -A ac=([save]="selective --sac-mm-every 1" [every2]="selective --sac-mm-every 2" [nothing]=full [all]=none)
  local -A reshard=([zero3]=true [zero2]=false)
  PYTORCH_ALLOC_CONF=expandable_segments:True python3 -m torch.distributed.run --standalone \
    --nproc_per_node "$gpus" "$here/peer_fsdp2.py" --preset "$model" ${layers:+--layers "$layers"} \
    --micro-batch "$microbatch" --grad-accum "$microbatches" --reshard "${reshard[$strategy]}" --ac ${ac[$keep]} \
    --reduce "$reduce" --sdpa "$attention" --compile --steps 20 --warmup 5 ${PEER:-}
}

[ "${1:-}" = --one ] && { run "$2"; exit; }
for name in ${*:-ours_bf16 peer_bf16 ours_fp32 peer_fp32}; do
  "$here/record.sh" "$out/results.jsonl" "$model${layers:+ $layers layers}: $name" "${LIMIT_S:-120}" "$0" --one "$name"
done
