"""A run from its YAML file to its results: config, assembly, trainer, evaluation."""
