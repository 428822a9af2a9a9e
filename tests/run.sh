#!/usr/bin/env bash
# Lint and test, from nothing: `bash tests/run.sh [pytest arguments]`.
set -euo pipefail
cd "$(dirname "$0")/.."
source train_scripts/environment.sh test

ruff check .
ruff format --check .
export OMP_NUM_THREADS=1 # the tests start up to four processes of their own
side_by_side=(-n logical --maxprocesses 4 --dist worksteal)
nvidia-smi -L &>/dev/null && side_by_side=() # on GPUs they count memory
pytest "${side_by_side[@]}" "$@"

# The seam once more on the oldest transformers that setup.py admits, laid over the environment.
if (($# == 0)); then
    oldest=$VIRTUAL_ENV/oldest-transformers
    [[ -d $oldest ]] || pip install --quiet --target "$oldest" transformers==5.0.0
    PYTHONPATH=$oldest pytest "${side_by_side[@]}" -q tests/test_{seam,refusals,inputs,models,rope}.py tests/test_memory_plan.py::test_families \
        tests/test_model_shape.py::test_families_without_an_entry_are_compared_with_their_model
fi
