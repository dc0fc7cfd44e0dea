"""Pure functions that evaluate the facts collected about a cluster."""
