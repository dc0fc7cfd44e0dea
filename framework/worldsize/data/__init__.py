"""Which samples a step sees, and how they reach it."""
