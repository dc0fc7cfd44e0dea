# just: list the recipes
default:
    @just --list

# the light tests, or those given
test *arguments:
    uv run --group dev pytest {{arguments}}

# everything a change must pass
gate:
    bash .ci/run

# lint, format and check types
lint:
    uv run --group dev ruff check --fix .
    uv run --group dev ruff format .
    uv run --group dev mypy

# the documentation at http://127.0.0.1:8000
docs:
    uv run --group docs mkdocs serve

# write the golden configurations and the list of the public API again
golden:
    uv run --group dev python tests/config/golden.py
    uv run --group dev python tests/api.py

# build and check the wheel, and train with it in a bare environment
wheel:
    bash .ci/wheel
