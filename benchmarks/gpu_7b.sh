#!/usr/bin/env bash
# The 7B-shape comparison on one host of GPUs: this engine and the PyTorch FSDP2 peer, one after the other, in one
# sitting. Each line of $OUT/results.jsonl is one run. Usage: benchmarks/gpu_7b.sh [run ...], the runs named below.
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$here/out}
mkdir -p "$out"
gpus=$(nvidia-smi -L | wc -l)
layers=${LAYERS:-32}

ours() {  # name, then arguments of train_step.py
  name=$1; shift
  timeout 170 python3 "$here/train_step.py" --model llama-7b --overrides "{'num_layers': $layers}" --strategy zero3 \
    --microbatch 2 "$@" > "$out/$name.txt" 2> "$out/$name.err"
  tail -1 "$out/$name.txt" | sed "s/^{/{\"name\": \"$name\", /" | tee -a "$out/results.jsonl" | cut -c1-900
  [ -s "$out/$name.txt" ] || tail -5 "$out/$name.err"
}

peer() {  # name, then arguments of peer_fsdp2.py
  name=$1; shift
  PYTORCH_ALLOC_CONF=expandable_segments:True timeout 170 python3 -m torch.distributed.run --standalone \
    --nproc_per_node "$gpus" "$here/peer_fsdp2.py" --preset 7b --layers "$layers" --micro-batch 2 --compile \
    --steps 20 --warmup 5 "$@" > "$out/$name.txt" 2> "$out/$name.err"
  grep '^{' "$out/$name.txt" | tail -1 | sed "s/^{/{\"name\": \"$name\", /" | tee -a "$out/results.jsonl" | cut -c1-1500
  grep -q '^{' "$out/$name.txt" || tail -5 "$out/$name.err"
}

nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
for what in ${*:-ours_bf16 peer_bf16 ours_fp32 peer_fp32}; do
  case $what in
    ours_bf16) ours "$what" --reduce_dtype bfloat16 ;;
    ours_fp32) ours "$what" --reduce_dtype float32 ;;
    peer_bf16) peer "$what" --reduce bf16 --ac selective --sac-mm-every 1 --sdpa cudnn ;;
    peer_fp32) peer "$what" --reduce fp32 --ac selective --sac-mm-every 1 --sdpa cudnn ;;
    peer_bf16_auto) peer "$what" --reduce bf16 --ac selective --sac-mm-every 1 ;;
    thresholds) # the flags of the figures of 2026-11-28, for a reduction over all GPUs
      ours "$what" --reduce_dtype bfloat16 --no_default_flags "--xla_flags=--xla_gpu_all_gather_combine_threshold_bytes=404766720 --xla_gpu_reduce_scatter_combine_threshold_bytes=$((404766720 / gpus)) --xla_gpu_all_reduce_combine_threshold_bytes=404766720" ;;
    symmetric) ours "$what" --reduce_dtype bfloat16 --xla_flags=--xla_gpu_experimental_enable_nccl_symmetric_buffers=true ;;
    channels8) ours "$what" --reduce_dtype bfloat16 --xla_flags=--xla_gpu_nccl_collective_max_nchannels=8 ;;
  esac
done
rm -f "$out"/*.txt; find "$out" -name '*.err' -empty -delete
