#!/usr/bin/env bash
# Perplexity at 50K to 500K tokens on one node of eight GPUs, on the two documents of proof-pile's test set that are
# longer than 500K tokens, as published.
#
#   MODEL=output/llama2_7b_1m/512K_theta_250M bash train_scripts/perplexity.sh [more flags of eval_ppl.py]
set -euo pipefail
cd "$(dirname "$0")/.."

MODEL=${MODEL:?a hub name or directory}
OUTPUT=${OUTPUT:-output/perplexity.csv}
TOKENIZED=${TOKENIZED:-emozilla/proofpile-test-tokenized} # of the Llama tokenizer; --dataset takes text for others
CONFIG=${CONFIG:-accelerate_configs/deepspeed_inference.yaml}
PROCESSES=${PROCESSES:-8}

accelerate launch --config_file "$CONFIG" --num_processes "$PROCESSES" eval_ppl.py -m "$MODEL" \
    --tokenized "$TOKENIZED" --dataset-min-tokens 500000 --samples 2 --min-tokens 50000 --max-tokens 500000 \
    --tokens-step 50000 --truncate --aggressive-memory --output-file "$OUTPUT" "$@"
python plot.py "$OUTPUT"
