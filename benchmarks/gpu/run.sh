#!/usr/bin/env bash
# Run the tests of one GPU, then the benchmark, from what collect.sh has collected; --tiny: its smoke test on the CPU.
set -euo pipefail
cd "$(dirname "$0")"
for wheel in wheels/*.whl; do python3 -m zipfile -e "$wheel" site; done    # pure Python: to unpack is to install
export PYTHONPATH="$PWD/site:$PWD/source/framework:$PWD/source${PYTHONPATH:+:$PYTHONPATH}"
cd source
failed=0
python3 -m pytest -m gpu -n 2 -rs tests/gpu || failed=$?
if [ "$failed" = 5 ]; then failed=0; fi    # no test was chosen
python3 benchmarks/gpu.py "$@"
exit "$failed"
