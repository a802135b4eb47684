#!/usr/bin/env bash
# Jacobi Forcing in three rounds: bash force.sh BASE FORCED
# About an hour on two cores. The same command again goes on where it stopped.
set -euo pipefail
here=$(dirname "$0")
base=$1
forced=$2
work=$forced.work
pack=(--schedule random --window 4)
fit=(--batch-size 32 --ar-weight 10 --precision bfloat16)

mkdir -p "$work"
prompts() { # SEED FILE
  [ -e "$2" ] || python "$here/problems.py" --split train --seed "$1" --count 6000 --out "$2"
}
prompts 900000 "$work/prompts.jsonl"
prompts 910000 "$work/prompts-fresh.jsonl"

# 1: the base's own answers, blocks of 16.
jacobi train trajectories --model "$base" --block-size 16 --out "$work/trajectories-1" \
  --prompts "$work/prompts.jsonl" --limit 3000 --repeats 3
jacobi train pack --trajectories "$work/trajectories-1" --out "$work/packed-1" --epochs 8 --seed 1 "${pack[@]}"
jacobi train fit --model "$base" --packed "$work/packed-1" --out "$work/forced-1" --steps 500 --lr 2e-3 "${fit[@]}"

# 2: what the model of round 1 answers to the same prompts, blocks of 32.
jacobi train trajectories --model "$work/forced-1" --block-size 32 --out "$work/trajectories-2" \
  --prompts "$work/prompts.jsonl" --limit 3000 --repeats 3
jacobi train pack --trajectories "$work/trajectories-2" --out "$work/packed-2" --epochs 12 --seed 2 "${pack[@]}"
jacobi train fit --model "$work/forced-1" --packed "$work/packed-2" --out "$work/forced-2" --steps 1000 --lr 2e-3 \
  --save-dtype bfloat16 "${fit[@]}"

# 3: the base's answers again, which have fewer mistakes, to prompts that the model has not seen.
jacobi train trajectories --model "$base" --block-size 16 --out "$work/trajectories-3" \
  --prompts "$work/prompts-fresh.jsonl" --repeats 3
jacobi train pack --trajectories "$work/trajectories-3" --out "$work/packed-3" --epochs 4 --seed 3 "${pack[@]}"
jacobi train fit --model "$work/forced-2" --packed "$work/packed-3" --out "$forced" --steps 700 --lr 1e-3 \
  --save-dtype bfloat16 "${fit[@]}"
