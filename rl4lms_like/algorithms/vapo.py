"""Value-augmented proximal policy optimisation (VAPO, Yue et al., arXiv 2504.05118)."""

from __future__ import annotations

from rl4lms_like.algorithms.arguments import VAPOArguments
from rl4lms_like.algorithms.ppo import PPO


class VAPO(PPO):
    """PPO with a pretrained critic, separate lambdas, a wider upper clipping distance and imitation of good episodes.

    All of its techniques are arguments of PPO; only the defaults differ.
    """

    arguments_class = VAPOArguments
