#!/usr/bin/env bash
# Needle in a haystack up to a million tokens on one node of eight GPUs, on the published grid: 20 lengths x 11 depths.
#
#   MODEL=output/llama2_7b_1m/512K_theta_250M bash train_scripts/needle.sh [more flags of eval_needle.py]
#
# Each context is one forward pass that all GPUs share. The whole grid takes hours; a larger --context_interval or
# --depth_interval (flags given here come last, and win) is the way to a first look.
set -euo pipefail
cd "$(dirname "$0")/.."

MODEL=${MODEL:?a hub name or directory}
OUTPUT=${OUTPUT:-output/needle}
CONFIG=${CONFIG:-accelerate_configs/deepspeed_inference.yaml}
PROCESSES=${PROCESSES:-8}

accelerate launch --config_file "$CONFIG" --num_processes "$PROCESSES" eval_needle.py --model "$MODEL" \
    --output-dir "$OUTPUT" --min_context_length 50000 --max_context_length 1000000 --context_interval 50000 \
    --depth_interval 0.1 --num_samples 2 --rnd_number_digits 7 "$@"
