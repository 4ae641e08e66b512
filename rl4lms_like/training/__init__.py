"""Parts that runs of all kinds share: components, inputs, evaluation, alerts, checkpoints."""
