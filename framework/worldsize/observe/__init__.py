"""Listeners and views: what is told about a run while it trains and when it has ended."""
