"""Made histories: a sign of each iteration, all others healthy."""

from __future__ import annotations

from rl4lms_like.config.run_config import DoctorConfig
from rl4lms_like.on_policy.doctor.alerts import Context
from rl4lms_like.on_policy.doctor.diagnostics import History

HEALTHY = {
    "reward": 0.5, "reward_std": 0.2, "n_episodes": 64.0, "length": 20.0, "truncated": 0.1, "entropy": 2.0, "kl": 0.05,
    "value_loss": 0.1, "explained_variance": 0.5, "approx_kl": 0.01, "clip_fraction": 0.1, "ratio_gap": 1e-6,
    "minibatch_episodes": 16.0, "optimizer_steps": 16.0,
    "grad_norm": 0.4, "skipped_steps": None, "step_taken": None, "reward_spread": 0.8, "empty": 0.0, "duplicates": 0.0,
    "near_duplicates": 0.0, "length_correlation": 0.2, "best_reward": 0.9, "kl_reward": -0.01, "kl_reward_std": 0.01,
}  # fmt: skip


def history(*, n: int = 0, **signs) -> History:
    """Iterations whose signs are those given: a list, one number for each, or one number for all."""
    n = n or max(len(values) for values in signs.values() if isinstance(values, list))
    made = History()
    for iteration in range(n):
        own = {name: values[iteration] if isinstance(values, list) else values for name, values in signs.items()}
        made.add({"iteration": iteration + 1, **HEALTHY, **own}, keep=13)
    return made


def context(**fields) -> Context:
    """A case, whose `limits` may be given as a mapping."""
    limits = fields.pop("limits", {})
    return Context(**{"limits": DoctorConfig(**limits), "ratio_cause": "a cause", **fields})
