"""Judges the facts about a cluster that its examination collected: pure functions."""
