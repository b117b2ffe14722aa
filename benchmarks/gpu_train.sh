#!/usr/bin/env bash
# train.py on a host of GPUs: the quickstart, a 125M model as two logical nodes, and a resume under another strategy.
set -u
cd "$(dirname "$0")/.." || exit
out=${OUT:-benchmarks/out}
mkdir -p "$out"
run() {  # name, then arguments of train.py
  name=$1; shift
  echo "== train.py $*"
  timeout 150 python3 train.py "$@" > "$out/$name.log" 2>&1
  echo "exit $?"
  tail -22 "$out/$name.log"
}
run quickstart --gin.RUN_DIR="$out/quickstart_run"
cp "$out/quickstart_run/loss.png" "$out/quickstart.png"
half=$(($(nvidia-smi -L | wc -l) / 2))
common="--gin_file=configs/runs/llama_125m.gin --gin.RUN_DIR=$out/run125m --gin.STEPS=40 --gin.DEVICES_PER_NODE=$half"
run nodes $common --gin.STOP_AFTER=20 "--gin.STRATEGY=params=replica grads=node opt_state=full"
run resumed $common --gin.STRATEGY=zero3
tail -2 "$out/run125m/metrics.jsonl"
cp "$out/run125m/metrics.jsonl" "$out/metrics125m.jsonl"
rm -rf "$out/quickstart_run" "$out/run125m"
