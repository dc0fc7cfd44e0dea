"""Optimizers beyond torch's own, and parameter groups chosen by parameter names."""
