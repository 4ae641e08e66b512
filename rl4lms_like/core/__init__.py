"""Data types and pure functions, independent of models, environments and configs.

`errors`, `registry`, `schema`, `sample` and `observation` do not import torch. `episodes`, `advantages`, `losses` and
`token_scores` work on tensors.
"""
