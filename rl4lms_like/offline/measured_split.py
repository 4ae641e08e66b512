"""Scores of a trained model on the preferences of a split, compared with the reference of its run."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from rl4lms_like.config.run_config import PreferenceConfig
from rl4lms_like.offline.assemble_preferences import assemble_preferences
from rl4lms_like.system.ranks import Ranks


def measured_split(
    config: PreferenceConfig, trained: str | None, split: str, *, limit: int | None = None, ranks: Ranks | None = None
) -> dict[str, float]:
    """Return what the objective of a preference run measures on a split, such as `rewards/accuracies`.

    Args:
        config: of the run.
        trained: folder of the trained model; None: the initial model, before the training.
        split: `train`, `val` or `test`.
        limit: measure only the first preferences.
        ranks: the processes that measure together; default: this one alone.

    Raises:
        RL4LMsLikeError: see `assemble_preferences`.
    """
    alg = config.alg
    if trained is not None:
        # The reference is the run's: by default the model that the training began with.
        arguments = dict(alg.args)
        if alg.arguments.needs_reference and arguments.get("reference_model") is None:
            arguments["reference_model"] = alg.model_name
        alg = replace(alg, model_name=trained, args=arguments, peft=None, merge_on_save=False)
    schedule = replace(config.train_evaluation, generate=False, metrics=[], max_eval_samples=limit)
    run = assemble_preferences(replace(config, alg=alg, train_evaluation=schedule), ranks)

    # Only this split, in a folder of its own: the run's log-probs of the reference are those of all its preferences.
    pairs = run.examples[split]
    if limit is not None:
        pairs = replace(pairs, rows=pairs.rows[:limit])
    with tempfile.TemporaryDirectory() as folder:
        run.objective.prepare(Path(folder), {split: pairs})
    return run.objective.measure(pairs.rows)
