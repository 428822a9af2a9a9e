#!/usr/bin/env bash
# Llama-2-13B from 4K to 1M tokens on two nodes of eight 80 GB GPUs.
#
# The rotary bases and lengths of the published 7B progression, with the last stage trained at the full 1M tokens that
# sixteen GPUs hold: a sequence is then 62,500 tokens a GPU. A step stays at about a million tokens throughout.
# The steps of the 13B run were never published; these are those of the 7B.
#
# Start it on both nodes at once, over storage that both see:
#   MACHINE_RANK=0 MAIN_PROCESS_IP=10.0.0.1 bash train_scripts/llama2_13b_1m.sh       # on 10.0.0.1
#   MACHINE_RANK=1 MAIN_PROCESS_IP=10.0.0.1 bash train_scripts/llama2_13b_1m.sh       # on the other
#
# Elsewhere: MODEL, OUTPUT, PROCESSES (of both nodes), and the data sets below; without the hub each is a local path.
set -euo pipefail
source "$(dirname "$0")/common.sh"

MODEL=${MODEL:-meta-llama/Llama-2-13b-hf}
OUTPUT=${OUTPUT:-output/llama2_13b_1m}
CONFIG=${CONFIG:-accelerate_configs/two_node.yaml}
PROCESSES=${PROCESSES:-16}
if ! $dry_run; then
    : "${MACHINE_RANK:?0 on the first node, 1 on the second}" "${MAIN_PROCESS_IP:?the address of the first node}"
    LAUNCH="--machine_rank $MACHINE_RANK --main_process_ip $MAIN_PROCESS_IP
        --main_process_port ${MAIN_PROCESS_PORT:-29500} ${LAUNCH:-}"
fi

# SlimPajama with long documents upsampled (Fu et al., 2024), tokenized, in chunks of 128K, 256K and 1M tokens
DATA_128K=${DATA_128K:-yaofu/slimpajama-per-source-length-upsample}
DATA_256K=${DATA_256K:-PY007/slimpajama_llama_tokenized_upsample_4096_chunk_256K}
DATA_1M=${DATA_1M:-PY007/slimpajama_llama_tokenized_upsample_4096_chunk_1M}

FLAGS=(--batch-size 1 --learning-rate 2e-5 --lr-schedule constant --weight-decay 0.1 --adam-beta2 0.95
    --max-grad-norm 1.0 --checkpointing-steps 50 --keep auto)

stage 32K_theta_1M --dataset "$DATA_128K" --seq-length 32768 --rope-theta 1000000 --max-train-steps 1000 \
    --gradient-accumulate-every 2 --parallel_mode data_parallel --seed 2021
stage 64K_theta_5M --dataset "$DATA_128K" --seq-length 65536 --rope-theta 5000000 --max-train-steps 1000 \
    --gradient-accumulate-every 2 --parallel_mode zigzag_ring_attn --seq-parallel-size 2 --seed 2022

# all sixteen share one sequence: the ring's longest hops cross between the nodes and hide behind attention
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

stage 1M_theta_1B --dataset "$DATA_1M" --seq-length 1000000 --rope-theta 1000000000 --max-train-steps 90 \
    --gradient-accumulate-every 1 --parallel_mode zigzag_ring_attn --seed 2028 --learning-rate 1e-5
