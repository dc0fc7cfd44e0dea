"""Optimizers that torch lacks as a single object, and parameter groups by the names of parameters."""
