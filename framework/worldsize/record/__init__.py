"""Run folders, which only this package reads and writes."""
