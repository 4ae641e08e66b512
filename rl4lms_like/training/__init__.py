"""Train and evaluate a run from its YAML file: config, assembly, trainer, evaluation."""
