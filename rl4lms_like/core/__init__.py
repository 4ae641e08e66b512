"""Data and pure functions. Knows no model, no environment and no config.

`errors`, `registry`, `schema`, `sample` and `observation` load no torch; `episodes`, `advantages`, `losses` and
`token_scores` are tensors.
"""
