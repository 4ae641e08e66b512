"""Benchmarks of many runs and seeds: tables, confidence intervals and learning curves."""
