"""Training on preferences: objectives, encoding of pairs, log-probs of the reference.

OBJECTIVES    every objective by id; `alg.id` in a config selects one
"""

from __future__ import annotations

from rl4lms_like.core.registry import Entry, Registry, derived_from

OBJECTIVES = Registry(
    "objective",
    group="rl4lms_like.objectives",
    misfit=derived_from("rl4lms_like.training.preferences.objectives:PreferenceObjective"),
    table={
        id: Entry(
            f"rl4lms_like.training.preferences.objectives:{name}",
            summary,
            arguments=f"rl4lms_like.training.preferences.arguments:{name}Arguments",
        )
        for id, name, summary in (
            ("reward_model", "RewardModel", "a model whose output is larger for the better response of a pair"),
            ("dpo", "DPO", "log-ratios to a reference model, larger for the better response"),
            ("ipo", "IPO", "log-ratios to a reference model that differ by a given number"),
            ("kto", "KTO", "labelled responses, compared with the KL to a reference model"),
            ("orpo", "ORPO", "likelihood of the better response, and the ratio of odds; no reference model"),
            ("simpo", "SimPO", "mean log-probs that differ by a margin; no reference model"),
        )
    },
)
"""Objectives of preference training by id (`alg.id`)."""

__all__ = ["OBJECTIVES"]
