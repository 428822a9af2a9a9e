#!/usr/bin/env bash
# Llama-2-7B from 4K to 1M tokens on one node of eight 80 GB GPUs: the published EasyContext progression.
#
# Seven stages, each from the one before. The rotary base grows with the length and, at the same length, past it: from
# 1M at 32K to 250M at 512K. A last rise to 1B needs no training; the model then holds to nearly 1M tokens, although it
# was never trained on more than 512K. Each step is about a million tokens, so AdamW's settings can stay.
#
# Sequences of up to 64K fit on a single GPU: plain data parallelism. From 256K on, all eight share one sequence.
# Published throughput on eight A100: 10.2K tokens a second at 64K, 2.1K at 512K, which is 8 minutes a step.
#
# Elsewhere: MODEL, OUTPUT, PROCESSES, and the data sets below; without the hub each is a local path.
set -euo pipefail
source "$(dirname "$0")/common.sh"

MODEL=${MODEL:-meta-llama/Llama-2-7b-hf}
OUTPUT=${OUTPUT:-output/llama2_7b_1m}
CONFIG=${CONFIG:-accelerate_configs/single_node.yaml}
PROCESSES=${PROCESSES:-8}

# SlimPajama with long documents upsampled (Fu et al., 2024), tokenized, in chunks of 128K, 256K and 1M tokens
DATA_128K=${DATA_128K:-yaofu/slimpajama-per-source-length-upsample}
DATA_256K=${DATA_256K:-PY007/slimpajama_llama_tokenized_upsample_4096_chunk_256K}
DATA_1M=${DATA_1M:-PY007/slimpajama_llama_tokenized_upsample_4096_chunk_1M}

FLAGS=(--batch-size 1 --learning-rate 2e-5 --lr-schedule constant --weight-decay 0.1 --adam-beta2 0.95
    --max-grad-norm 1.0 --checkpointing-steps 50 --keep auto)

stage 32K_theta_1M --dataset "$DATA_128K" --seq-length 32768 --rope-theta 1000000 --max-train-steps 1000 \
    --gradient-accumulate-every 4 --parallel_mode data_parallel --seed 2021
stage 64K_theta_5M --dataset "$DATA_128K" --seq-length 65536 --rope-theta 5000000 --max-train-steps 1000 \
    --gradient-accumulate-every 2 --parallel_mode data_parallel --seed 2022

stage 256K_theta_10M --dataset "$DATA_256K" --seq-length 256000 --rope-theta 10000000 --max-train-steps 500 \
    --gradient-accumulate-every 4 --parallel_mode zigzag_ring_attn --seed 2023
stage 256K_theta_25M --dataset "$DATA_256K" --seq-length 256000 --rope-theta 25000000 --max-train-steps 500 \
    --gradient-accumulate-every 4 --parallel_mode zigzag_ring_attn --seed 2024
stage 256K_theta_50M --dataset "$DATA_256K" --seq-length 256000 --rope-theta 50000000 --max-train-steps 150 \
    --gradient-accumulate-every 4 --parallel_mode zigzag_ring_attn --seed 2025

stage 512K_theta_100M --dataset "$DATA_1M" --seq-length 512000 --rope-theta 100000000 --max-train-steps 300 \
    --gradient-accumulate-every 2 --parallel_mode zigzag_ring_attn --seed 2026
stage 512K_theta_250M --dataset "$DATA_1M" --seq-length 512000 --rope-theta 250000000 --max-train-steps 90 \
    --gradient-accumulate-every 2 --parallel_mode zigzag_ring_attn --seed 2027 --learning-rate 1e-5
set_theta 1000000000

# Then: MODEL=output/llama2_7b_1m/512K_theta_250M bash train_scripts/needle.sh   (and perplexity.sh)
