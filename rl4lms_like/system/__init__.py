"""Errors, registries, checks of values, files, processes, secrets, requests: nothing about language models."""
