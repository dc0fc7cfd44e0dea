"""Decides which samples a step sees, and brings them to it."""
