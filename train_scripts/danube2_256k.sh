#!/usr/bin/env bash
# H2O-Danube2-1.8B from 8K to 256K tokens on one node of eight GPUs: the published EasyContext progression.
#
# Nine stages, each from the one before, with small steps of the rotary base: 30K at 16K tokens to 100M at 256K.
# A step is about a million tokens. Danube2 is a Mistral without a sliding window.
#
# Elsewhere: MODEL, OUTPUT, PROCESSES, and the data sets below; without the hub each is a local path.
set -euo pipefail
source "$(dirname "$0")/common.sh"

MODEL=${MODEL:-h2oai/h2o-danube2-1.8b-base}
OUTPUT=${OUTPUT:-output/danube2_256k}
CONFIG=${CONFIG:-accelerate_configs/single_node.yaml}
PROCESSES=${PROCESSES:-8}

# SlimPajama with long documents upsampled, in the tokens of Mistral-7B v0.1, in chunks of 128K and 1M
DATA_128K=${DATA_128K:-PY007/slimpajama_mistral_tokenized_upsample_4096_chunk_128K}
DATA_1M=${DATA_1M:-PY007/slimpajama_mistral_tokenized_upsample_4096_chunk_1M}

FLAGS=(--learning-rate 2e-5 --lr-schedule constant --weight-decay 0.1 --adam-beta2 0.95 --max-grad-norm 1.0
    --gradient-accumulate-every 4 --checkpointing-steps 50 --keep auto)

# each GPU its own sequences
stage 16K_theta_30K --dataset "$DATA_128K" --seq-length 16000 --rope-theta 30000 --max-train-steps 400 \
    --batch-size 2 --parallel_mode data_parallel --seed 2024
stage 32K_theta_100K --dataset "$DATA_128K" --seq-length 32000 --rope-theta 100000 --max-train-steps 400 \
    --batch-size 1 --parallel_mode data_parallel --seed 2025
stage 32K_theta_300K --dataset "$DATA_128K" --seq-length 32000 --rope-theta 300000 --max-train-steps 400 \
    --batch-size 1 --parallel_mode data_parallel --seed 2026

# all GPUs share a batch
stage 64K_theta_1M --dataset "$DATA_128K" --seq-length 64000 --rope-theta 1000000 --max-train-steps 400 \
    --batch-size 4 --parallel_mode zigzag_ring_attn --seed 2027
stage 64K_theta_2.5M --dataset "$DATA_128K" --seq-length 64000 --rope-theta 2500000 --max-train-steps 400 \
    --batch-size 4 --parallel_mode zigzag_ring_attn --seed 2028
stage 64K_theta_5M --dataset "$DATA_128K" --seq-length 64000 --rope-theta 5000000 --max-train-steps 400 \
    --batch-size 4 --parallel_mode zigzag_ring_attn --seed 2029
stage 128K_theta_10M --dataset "$DATA_128K" --seq-length 128000 --rope-theta 10000000 --max-train-steps 300 \
    --batch-size 2 --parallel_mode zigzag_ring_attn --seed 2030
stage 128K_theta_30M --dataset "$DATA_128K" --seq-length 128000 --rope-theta 30000000 --max-train-steps 200 \
    --batch-size 2 --parallel_mode zigzag_ring_attn --seed 2031
stage 256K_theta_100M --dataset "$DATA_1M" --seq-length 256000 --rope-theta 100000000 --max-train-steps 200 \
    --batch-size 1 --parallel_mode zigzag_ring_attn --seed 2032
