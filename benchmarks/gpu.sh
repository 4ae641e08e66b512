#!/bin/sh
# Measure the entries of benchmarks/gpu.py on this machine; options are passed on, for example --quick.
# Makes an environment with the extras that the entries need, and one with TRL, if they are not there. vLLM needs a
# certain torch: to measure with it, install it into the environment beforehand.
set -eu
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
if [ ! -x "$python" ]; then
    python3 -m venv .venv
fi
if ! "$python" -c "import rl4lms_like, peft, bitsandbytes, torchao" 2>/dev/null; then
    "$python" -m pip install --quiet -c constraints.txt -e '.[peft,bitsandbytes,torchao]'
fi
exec "$python" -m benchmarks.gpu --trl "$@"
