"""Create a plugin outside of any project: a logger that records the location it was imported from."""

from __future__ import annotations

from pathlib import Path

_LOGGER = """
class Witness:
    def __init__(self, *, folder, **_):
        (folder / "witness.txt").write_text(__file__)
    def __call__(self, event):
        pass
"""


def witness(root: Path) -> str:
    """Write the plugin below ``root``, a folder for ``WORLDSIZE_PLUGINS``, and return its option for ``logger=``."""
    folder = root / "plugins" / "witness"
    (folder / "conf" / "logger").mkdir(parents=True)
    (folder / "logger.py").write_text(_LOGGER)
    yaml = "# Says where it is\n_target_: plugins.witness.logger.Witness\n_partial_: true\n"
    (folder / "conf" / "logger" / "witness.yaml").write_text(yaml)
    return "witness"
