#!/usr/bin/env bash
# Mistral-7B from 32K to 256K tokens on one node of eight 80 GB GPUs.
#
# The upper half of the published Danube2 progression (danube2_256k.sh), from a model that starts where that one is
# after its fourth stage: Mistral-7B v0.2 has a rotary base of 1M, 32K tokens, and no sliding window (v0.1's window of
# 4,096 tokens would make a long context pointless). Steps of a million tokens. A 7B run was never published.
#
# Elsewhere: MODEL, OUTPUT, PROCESSES, and the data sets below; without the hub each is a local path.
set -euo pipefail
source "$(dirname "$0")/common.sh"

MODEL=${MODEL:-mistral-community/Mistral-7B-v0.2}
OUTPUT=${OUTPUT:-output/mistral_7b_256k}
CONFIG=${CONFIG:-accelerate_configs/single_node.yaml}
PROCESSES=${PROCESSES:-8}

# SlimPajama with long documents upsampled, in the tokens of Mistral-7B v0.1 and v0.2, in chunks of 128K and 1M
DATA_128K=${DATA_128K:-PY007/slimpajama_mistral_tokenized_upsample_4096_chunk_128K}
DATA_1M=${DATA_1M:-PY007/slimpajama_mistral_tokenized_upsample_4096_chunk_1M}

FLAGS=(--learning-rate 2e-5 --lr-schedule constant --weight-decay 0.1 --adam-beta2 0.95 --max-grad-norm 1.0
    --gradient-accumulate-every 4 --checkpointing-steps 50 --keep auto
    --parallel_mode zigzag_ring_attn)

stage 64K_theta_5M --dataset "$DATA_128K" --seq-length 64000 --rope-theta 5000000 --max-train-steps 400 \
    --batch-size 4 --seed 2029
stage 128K_theta_10M --dataset "$DATA_128K" --seq-length 128000 --rope-theta 10000000 --max-train-steps 300 \
    --batch-size 2 --seed 2030
stage 128K_theta_30M --dataset "$DATA_128K" --seq-length 128000 --rope-theta 30000000 --max-train-steps 200 \
    --batch-size 2 --seed 2031
stage 256K_theta_100M --dataset "$DATA_1M" --seq-length 256000 --rope-theta 100000000 --max-train-steps 200 \
    --batch-size 1 --seed 2032
