#!/usr/bin/env bash
# Run the tests of one GPU, then the benchmark, from what collect.sh has collected; --tiny: its smoke test on the CPU.
set -euo pipefail
cd "$(dirname "$0")"
for wheel in wheels/*.whl; do python3 -m zipfile -e "$wheel" site; done    # pure Python: to unpack is to install
# what the machine has itself comes first: PYTHONPATH would hide it
own=$(python3 -c 'import site; print(":".join([site.getusersitepackages(), *site.getsitepackages()]))')
export PYTHONPATH="$PWD/source/framework:$PWD/source${PYTHONPATH:+:$PYTHONPATH}:$own:$PWD/site"
cd source
failed=0
python3 -W default -m pytest -W default -m gpu -n 2 -rs tests/gpu || failed=$?
if [ "$failed" = 5 ]; then failed=0; fi    # no test was chosen
python3 -W default benchmarks/gpu.py "$@"
exit "$failed"
