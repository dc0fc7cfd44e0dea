"""Authenticated channels between a run's processes, for strategies with custom roles."""
