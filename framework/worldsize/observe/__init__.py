"""Listeners and views that report on a run during and after training."""
