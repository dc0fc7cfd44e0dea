"""Makes runs repeatable: seeds, determinism, and records of code, environment, data and results."""
