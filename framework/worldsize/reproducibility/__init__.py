"""What makes a run repeatable: seeds, determinism, and the record of code, environment, data and results."""
