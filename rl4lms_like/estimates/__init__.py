"""Estimates of a run's tokens, steps and memory before it starts."""
