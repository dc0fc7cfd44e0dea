#!/usr/bin/env bash
# Collect into FOLDER what a machine with torch 2.11 or newer, numpy, rich, transformers and pytest still lacks: this source
# tree and pure-Python wheels of the locked versions. There, without a network: bash FOLDER/run.sh
#
#   bash benchmarks/gpu/collect.sh FOLDER
set -euo pipefail
folder=$(realpath -m "${1:?usage: collect.sh FOLDER}")
if [ -e "$folder" ]; then echo "$folder exists already. Name a new folder." >&2; exit 2; fi
cd "$(dirname "$0")/../.."

# all that is imported without wandb, scikit-learn, servers and certificates, which are compiled
wanted='hydra-core|omegaconf|antlr4-python3-runtime|lightning-utilities|fsspec|filelock|jinja2|packaging|typing-extensions'
wanted+='|detect-secrets|pytest-xdist|execnet|pytest-timeout'
wanted+='|lightning|torchmetrics|accelerate|schedulefree'    # peers of the benchmark, and an optimizer; psutil is compiled
mkdir -p "$folder/wheels" "$folder/source"
uv export --locked --no-hashes --no-emit-project --quiet | grep -E "^($wanted)==" > "$folder/requirements.txt"
uv run --no-project --with pip --with setuptools --with wheel python -m pip wheel --quiet --no-deps \
  --requirement "$folder/requirements.txt" --wheel-dir "$folder/wheels"
if compiled=$(ls "$folder/wheels" | grep -v -- '-none-any\.whl$'); then
  echo "these wheels are not pure Python: $compiled" >&2
  exit 1
fi
git archive HEAD | tar -x -C "$folder/source"
cp benchmarks/gpu/run.sh "$folder/run.sh"
size=$(du -sm "$folder" | cut -f1)
if [ "$size" -ge 60 ]; then echo "$folder has $size MB, and should have fewer than 60." >&2; exit 1; fi
echo "$folder has $size MB. Copy it to the machine with the GPU, and run there: bash $(basename "$folder")/run.sh"
