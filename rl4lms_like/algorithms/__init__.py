"""Reinforcement-learning algorithms, one file per loss; ids of the objectives of preference training.

from rl4lms_like.algorithms import ALGORITHMS
ALGORITHMS.resolve("ppo")     imports torch; the import of the table does not
"""

from __future__ import annotations

from rl4lms_like.rollouts.supported import unsupported
from rl4lms_like.system.registry import Entry, Registry, derived_from

_ALGORITHMS = {
    "ppo": Entry(
        "rl4lms_like.algorithms.ppo:PPO",
        "proximal policy optimisation: clipped ratios, several epochs over a rollout",
        arguments="rl4lms_like.algorithms.arguments:PPOArguments",
    ),
    "nlpo": Entry(
        "rl4lms_like.algorithms.nlpo:NLPO",
        "PPO over the tokens allowed by a lagging copy of the policy; needs a maskable policy",
        arguments="rl4lms_like.algorithms.arguments:NLPOArguments",
    ),
    "vapo": Entry(
        "rl4lms_like.algorithms.vapo:VAPO",
        "PPO with a pretrained critic, length-adaptive lambda and imitation of good episodes",
        arguments="rl4lms_like.algorithms.arguments:VAPOArguments",
    ),
    "sao": Entry(
        "rl4lms_like.algorithms.sao:SAO",
        "PPO that masks actions outside a band of ratios; one pass of the policy, two of a partly frozen critic",
        arguments="rl4lms_like.algorithms.arguments:SAOArguments",
    ),
    "a2c": Entry(
        "rl4lms_like.algorithms.a2c:A2C",
        "advantage actor-critic: one gradient step on the whole rollout",
        arguments="rl4lms_like.algorithms.arguments:A2CArguments",
    ),
    "trpo": Entry(
        "rl4lms_like.algorithms.trpo:TRPO",
        "trust region policy optimisation: one step limited by the KL; the critic is trained separately",
        arguments="rl4lms_like.algorithms.arguments:TRPOArguments",
    ),
}

# One module, and one class for each id: `policy_gradient:GRPO` with the arguments
# `critic_free_arguments:GRPOArguments`.
_CRITIC_FREE = {
    "grpo": ("GRPO", "no critic: rewards relative to those of other responses to the same prompt"),
    "dr_grpo": ("DrGRPO", "GRPO without division by standard deviations and response lengths"),
    "dapo": ("DAPO", "GRPO that replaces groups with equal rewards, and penalizes long responses"),
    "gspo": ("GSPO", "GRPO with one clipped ratio for each response"),
    "gmpo": ("GMPO", "GRPO with the geometric mean of clipped ratios"),
    "cpgd": ("CPGD", "clipped log-ratios, with a penalty for drift from the rollout's policy"),
    "cispo": ("CISPO", "log-probs weighted with limited ratios, so that every token has a gradient"),
    "rloo": ("RLOO", "rewards relative to the mean of the other responses to the same prompt"),
    "reinforce_pp": ("ReinforcePP", "REINFORCE++: one response per prompt, whitened returns"),
    "reinforce_pp_baseline": ("ReinforcePPBaseline", "REINFORCE++ with the group's mean as baseline"),
    "opo": ("OPO", "rewards relative to the group's mean, weighted by response lengths"),
    "maxrl": ("MaxRL", "rewards of 0 and 1, divided by the success rate of their group"),
    "online_dpo": ("OnlineDPO", "the loss of DPO for the best and the worst response to the same prompt"),
    "opd": ("OPD", "on-policy distillation: the KL to a teacher model, with or without the task's reward"),
}
for _id, (_class, _summary) in _CRITIC_FREE.items():
    _ALGORITHMS[_id] = Entry(
        f"rl4lms_like.algorithms.policy_gradient:{_class}",
        _summary,
        arguments=f"rl4lms_like.algorithms.critic_free_arguments:{_class}Arguments",
    )

ALGORITHMS = Registry("algorithm", group="rl4lms_like.algorithms", misfit=unsupported, table=_ALGORITHMS)
"""Algorithms by id (`alg.id`)."""

# The loop over the data is the same for all of them: an objective is only a loss, so it is no class of an algorithm.
_PREFERENCE_OBJECTIVES = {
    "reward_model": ("RewardModel", "a model whose output is larger for the better response of a pair"),
    "dpo": ("DPO", "log-ratios to a reference model, larger for the better response"),
    "ipo": ("IPO", "log-ratios to a reference model that differ by a given number"),
    "kto": ("KTO", "labelled responses, compared with the KL to a reference model"),
    "orpo": ("ORPO", "likelihood of the better response, and the ratio of odds; no reference model"),
    "simpo": ("SimPO", "mean log-probs that differ by a margin; no reference model"),
}
_OBJECTIVES = {}
for _id, (_class, _summary) in _PREFERENCE_OBJECTIVES.items():
    _OBJECTIVES[_id] = Entry(
        f"rl4lms_like.offline.preference_objectives:{_class}",
        _summary,
        arguments=f"rl4lms_like.algorithms.preference_arguments:{_class}Arguments",
    )

OBJECTIVES = Registry(
    "objective",
    group="rl4lms_like.objectives",
    misfit=derived_from("rl4lms_like.offline.preference_objectives:PreferenceObjective"),
    table=_OBJECTIVES,
)
"""Objectives of preference training by id (`alg.id`)."""

__all__ = ["ALGORITHMS", "OBJECTIVES"]
