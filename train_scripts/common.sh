# What the recipes share: `stage` trains, and hands its model to the next stage. A recipe sources this file and says
# OUTPUT, MODEL, CONFIG, PROCESSES and FLAGS (of every stage); then it lists its stages.
#
#   bash train_scripts/RECIPE.sh              train; start it again after an interruption, and it goes on from there
#   bash train_scripts/RECIPE.sh --dry-run    check each stage's flags and print its plan: no GPU, weights or network
#
# Every stage trains with `--keep auto`: the planner chooses what layers keep for the backward, and where, for the GPUs
# and the host memory that it finds when the stage starts. What that will be, on these machines or others:
#
#   easy-context plan --model llama-2-7b --gpus 8 --gpu A100 --host-memory 1TB --seq-length 512000
#
# Needed: an environment with easy_context[deepspeed] (`source train_scripts/environment.sh deepspeed,flash` makes one).
# For all recipes: WANDB=PROJECT logs there; LAUNCH="..." are further arguments of `accelerate launch`.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True} # long sequences fragment memory
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=${FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED:-1} # compile once a machine

case "${1:-}" in
"") dry_run=false ;;
--dry-run) dry_run=true ;;
*) echo "usage: $0 [--dry-run]" >&2 && exit 2 ;;
esac

# stage NAME FLAG... : train.py from $MODEL to $OUTPUT/NAME, unless that is done; $MODEL is then $OUTPUT/NAME.
stage() {
    local output=$OUTPUT/$1
    local train=(train.py --model "$MODEL" --output-dir "$output" "${FLAGS[@]}" "${@:2}")
    [[ -z ${WANDB:-} ]] || train+=(--wandb "$WANDB")
    MODEL=$output

    echo "== $output"
    if $dry_run; then
        WORLD_SIZE=$PROCESSES python "${train[@]}" --dry-run
        return
    elif [[ -e $output/finished ]]; then
        return
    elif compgen -G "$output/checkpoints/step_*" >/dev/null; then
        train+=(--resume)
    elif [[ -e $output ]]; then
        train+=(--overwrite-output-dir) # stopped before its first checkpoint
    fi
    # shellcheck disable=SC2086 # LAUNCH holds several arguments
    accelerate launch --config_file "$CONFIG" --num_processes "$PROCESSES" ${LAUNCH:-} "${train[@]}"
    touch "$output/finished"
}

# set_theta THETA : raise the rotary base of $MODEL's configuration, without training.
set_theta() {
    echo "== rotary base $1 in $MODEL/config.json"
    $dry_run || python - "$MODEL" "$1" <<'PYTHON'
import sys

from transformers import AutoConfig

from easy_context.rope import set_rope

directory, theta = sys.argv[1:]
set_rope(AutoConfig.from_pretrained(directory), theta=float(theta)).save_pretrained(directory)
PYTHON
}
