"""Authenticated channels between a run's processes, for strategies that have roles of their own."""
