"""Judges the facts of a cluster's examination: pure functions."""
