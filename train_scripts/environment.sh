# One Python environment for the quickstart and the tests; the recipes can use it too.
#
#   source train_scripts/environment.sh EXTRAS      # for example: deepspeed,quickstart
#
# EXTRAS (required) names optional dependencies of setup.py, separated by commas. Afterwards `python`,
# `accelerate` and `pytest` are those of a virtual environment that holds easy_context (editable), these
# extras, and the versions that requirements.txt records as tested; what DeepSpeed compiles is compiled.
# Nothing is done twice: a second call takes a second. A failure prints one line and returns 1, which ends
# a caller that runs under `set -e`.
#
#   EASY_CONTEXT_VENV=DIR       where the environment lives (default: .venv beside setup.py)
#   EASY_CONTEXT_VENV=current   use the python on PATH as it is and install nothing: for clusters, containers
#                               and machines without a network, with whatever torch they have
#   PYTHON=python3.12           the interpreter to build it from (default: python3)
#
# On a machine without a GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu spares the download of
# torch's CUDA libraries.

easy_context_fail() {
    echo "environment.sh: $*" >&2
    return 1
}

# The interpreter needs venv; DeepSpeed compiles its CPU Adam on first use and needs g++ and Python's headers.
easy_context_prerequisites() {
    local python=$1 missing=()
    "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
    command -v g++ >/dev/null || missing+=(g++)
    "$python" -c 'import os, sysconfig as s; open(os.path.join(s.get_path("include"), "Python.h"))' 2>/dev/null ||
        missing+=(python3-dev)
    ((${#missing[@]})) || return 0
    if [[ $EUID -eq 0 ]] && command -v apt-get >/dev/null; then
        echo "Installing ${missing[*]} (apt-get)"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
    else
        easy_context_fail "run this first: sudo apt-get install ${missing[*]}"
    fi
}

# DeepSpeed compiles its CPU Adam (and, without a GPU, its communication) when first used: better here than in the
# middle of a run, where an interruption leaves a lock file behind that every later run waits for.
easy_context_compile() {
    mkdir -p "$TORCH_EXTENSIONS_DIR"
    rm -f "$TORCH_EXTENSIONS_DIR"/*/lock
    echo "Compiling DeepSpeed's CPU Adam: one to three minutes, once"
    if ! python >"$TORCH_EXTENSIONS_DIR/log" 2>&1 <<'PYTHON'; then
from deepspeed.accelerator import get_accelerator

for name in ("CPUAdamBuilder", "ShareMemCommBuilder"):
    builder = get_accelerator().create_op_builder(name)
    if builder is not None:  # the second is for machines without a GPU
        builder.load()
PYTHON
        echo "environment.sh: DeepSpeed's CPU Adam does not compile, ZeRO offload will not run:" \
            "see $TORCH_EXTENSIONS_DIR/log (with a GPU it needs nvcc)" >&2
    fi
}

easy_context_environment() {
    local extras=$1 root python=${PYTHON:-python3} venv stamp wanted
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    venv=${EASY_CONTEXT_VENV:-$root/.venv}
    if [[ $venv == current ]]; then
        export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
        return 0
    fi

    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
        easy_context_fail "needs Python 3.10 or newer; PYTHON=... names one (now: $python)" || return 1
    if [[ ! -x $venv/bin/pip ]]; then
        easy_context_prerequisites "$python" || return 1
        "$python" -m venv "$venv" || return 1
    fi
    source "$venv/bin/activate"
    export TORCH_EXTENSIONS_DIR=$venv/torch_extensions

    stamp=$venv/installed-${extras//,/-}
    wanted=$(cd "$root" && cksum setup.py requirements.txt)
    if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
        echo "Installing easy_context[$extras] into $venv: a few minutes, once"
        pip install -c "$root/requirements.txt" -e "$root[$extras]" || easy_context_fail "pip failed" || return 1
        if python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("deepspeed") is None)'; then
            easy_context_compile
        fi
        echo "$wanted" >"$stamp"
    fi
}

if [[ -z ${1:-} ]]; then
    easy_context_fail "say which extras: source train_scripts/environment.sh deepspeed,quickstart"
else
    easy_context_environment "$1"
fi
