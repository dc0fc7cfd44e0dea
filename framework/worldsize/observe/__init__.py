"""Listeners and views: reports about a run while it trains and after it has ended."""
