"""Checkpoints of runs: saving, resuming and ownership."""
