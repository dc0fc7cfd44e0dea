"""``worldsize agent RUN``: one host's part of a run; a launcher starts one on every host."""

from worldsize.driver.agent import main

__all__ = ["main"]
