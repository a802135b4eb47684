#!/usr/bin/env bash
# Jacobi Forcing in two rounds: bash force.sh BASE FORCED
# About 30 minutes on two cores. The same command again goes on where it stopped.
set -euo pipefail
here=$(dirname "$0")
base=$1
forced=$2
work=$forced.work
fit=(--batch-size 32 --lr 2e-3 --ar-weight 10 --precision bfloat16)
pack=(--schedule random --window 4)
answers=(--prompts "$work/prompts.jsonl" --limit 3000 --repeats 3)

mkdir -p "$work"
[ -e "$work/prompts.jsonl" ] ||
  python "$here/problems.py" --split train --seed 900000 --count 6000 --out "$work/prompts.jsonl"

jacobi train trajectories --model "$base" --block-size 16 --out "$work/trajectories-16" "${answers[@]}"
jacobi train pack --trajectories "$work/trajectories-16" --out "$work/packed-16" --epochs 8 --seed 1 "${pack[@]}"
jacobi train fit --model "$base" --packed "$work/packed-16" --out "$work/forced-16" --steps 500 "${fit[@]}"

jacobi train trajectories --model "$work/forced-16" --block-size 32 --out "$work/trajectories-32" "${answers[@]}"
jacobi train pack --trajectories "$work/trajectories-32" --out "$work/packed-32" --epochs 12 --seed 2 "${pack[@]}"
jacobi train fit --model "$work/forced-16" --packed "$work/packed-32" --out "$forced" --steps 1000 \
  --save-dtype bfloat16 "${fit[@]}"
