#!/usr/bin/env bash
# Lint and test, from nothing: `bash tests/run.sh [pytest arguments]`.
set -euo pipefail
cd "$(dirname "$0")/.."
source train_scripts/environment.sh test

ruff check .
ruff format --check .
export OMP_NUM_THREADS=1 # the tests start up to four processes of their own
pytest "$@"
