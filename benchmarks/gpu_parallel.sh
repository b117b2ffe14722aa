#!/usr/bin/env bash
# Tensor and pipeline parallelism beside pure data parallelism on one host of GPUs, 7B width, 8 sequences of 4096 a GPU
# and step. Each line of $OUT/parallel.jsonl is one run. Usage: benchmarks/gpu_parallel.sh
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$here/out}
gpus=$(nvidia-smi -L | wc -l)
layers=${LAYERS:-16}

run() { # name, strategy, tensor, pipeline, then arguments of train_step.py: the microbatches of a step follow
  name=$1 strategy=$2 tensor=$3 pipeline=$4
  shift 4
  "$here/record.sh" "$out/parallel.jsonl" "$name" 170 python3 "$here/train_step.py" --model llama-7b \
    --overrides "{'num_layers': $layers}" --seq_len 4096 --strategy "$strategy" --tensor "$tensor" \
    --pipeline "$pipeline" --microbatch 1 --reduce_dtype bfloat16 --accumulation $((8 * tensor * pipeline)) "$@"
}

nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
for strategy in zero1 zero3; do
  run "data_$strategy" $strategy 1 1
  run "tensor2_$strategy" $strategy 2 1 --remat none
  run "pipeline2_$strategy" $strategy 1 2 --remat none
  if [ "$gpus" -ge 4 ]; then
    run "tensor4_$strategy" $strategy 4 1 --remat none
    run "pipeline4_$strategy" $strategy 1 4 --remat none
    run "pipeline4_interleaved_$strategy" $strategy 1 4 --virtual_stages 2 --remat none
    run "tensor2_pipeline2_$strategy" $strategy 2 2 --remat none
  fi
done
