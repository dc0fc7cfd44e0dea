"""``worldsize schema``: print a JSON Schema of the configuration, for editors that complete and check YAML files."""

from __future__ import annotations

import argparse
import json

from worldsize.config.json_schema import build_config_schema


def main() -> None:
    argparse.ArgumentParser(prog="worldsize schema", description=__doc__).parse_args()
    print(json.dumps(build_config_schema(), indent=2))
