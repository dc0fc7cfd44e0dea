"""Data sources, the order of their samples, and the loading of batches."""
