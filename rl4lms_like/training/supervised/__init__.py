"""Supervised fine-tuning on references with transformers' Trainer."""
