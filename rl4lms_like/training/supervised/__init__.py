"""Supervised fine-tuning: references learned with transformers' Trainer, evaluated as any run."""
