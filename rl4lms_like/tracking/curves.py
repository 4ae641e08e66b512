"""Charts of the report, by logged key. The keys are explained in `docs/metrics_explained.md`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Curve:
    """Chart over iterations; drawn if the run logged any of its keys.

    Args:
        group: heading of its section.
        title: caption.
        note: one-line description with the unit.
        lines: label -> keys; the first key that was logged is used.
        band: shade one standard deviation around the line (`<key>_std`).
        target: path in the config of the target value.
        log: logarithmic axis.
        from_zero: the axis includes zero.
    """

    group: str
    title: str
    note: str
    lines: Mapping[str, tuple[str, ...]]
    band: bool = False
    target: tuple[str, ...] = field(default=())
    log: bool = False
    from_zero: bool = False


LEARNING = "Learning curves"
PARTS = "Reward components"
EVALUATIONS = "Evaluations"
UPDATE = "Policy updates"
COST = "Throughput and time"

CURVES = (
    Curve(LEARNING, "Loss", "of the references, nats per token",
          {"train": ("supervised/loss",), "val": ("supervised/val_loss",)}, from_zero=True),
    Curve(LEARNING, "Reward", "task reward of an episode; band: ± one std",
          {"reward": ("rollout_info/ep_rew", "rollout/ep_rew_mean")}, band=True),
    Curve(LEARNING, "KL to the reference", "nats per token",
          {"KL": ("rollout_info/kl_div_mean",)}, target=("alg", "kl_div", "target_kl"), from_zero=True),
    Curve(LEARNING, "KL coefficient", "weight of the KL penalty in the reward",
          {"coefficient": ("rollout_info/kl_coeff",)}, from_zero=True),
    Curve(LEARNING, "Entropy", "nats per token; falls as the policy becomes more deterministic",
          {"entropy": ("rollout_info/entropy",)}),
    Curve(LEARNING, "KL penalty", "contribution to an episode's reward",
          {"penalty": ("rollout_info/ep_kl_rew",)}),
    Curve(LEARNING, "Response length", "tokens; band: ± one std",
          {"tokens": ("rollout_info/ep_lens", "rollout/ep_len_mean")}, band=True),
    Curve(LEARNING, "Truncated responses", "fraction that reached the length limit without an end token",
          {"fraction": ("rollout_info/truncated_share",)}, from_zero=True),
    Curve(UPDATE, "Value loss", "mean squared error of the critic",
          {"loss": ("ppo/value_loss", "train/value_loss")}, from_zero=True),
    Curve(UPDATE, "Explained variance", "of the returns; 1 is perfect, 0 is a constant prediction",
          {"explained variance": ("ppo/explained_variance", "train/explained_variance")}),
    Curve(UPDATE, "Ratio-one gap", "largest |ratio − 1| in the first minibatch; 0 is exact",
          {"gap": ("train/ratio_gap",)}, log=True),
    Curve(UPDATE, "Policy loss", "the surrogate that is minimised",
          {"loss": ("ppo/policy_gradient_loss", "train/policy_gradient_loss", "train/policy_loss")}),
    Curve(UPDATE, "Approximate KL", "from the rollout's policy; nats per token",
          {"KL": ("ppo/approx_kl", "train/approx_kl")}, from_zero=True),
    Curve(UPDATE, "Clip fraction", "fraction of tokens with a ratio outside the clip range",
          {"fraction": ("ppo/clip_fraction", "train/clip_fraction")}, from_zero=True),
    Curve(UPDATE, "Gradient norm", "before clipping, actor and critic together",
          {"norm": ("train/grad_norm",)}, from_zero=True),
    Curve(UPDATE, "Learning rate", "of the policy",
          {"learning rate": ("train/learning_rate",)}, from_zero=True),
    Curve(COST, "Throughput", "tokens per second, rollout and update together",
          {"tokens/s": ("time/tokens_per_s", "time/fps")}, from_zero=True),
    Curve(COST, "Optimizer steps", "per second, without evaluations",
          {"steps/s": ("time/steps_per_s",)}, from_zero=True),
    Curve(COST, "Time", "seconds per iteration",
          {"update": ("time/update_s",), "rollout": ("time/rollout_s",)}, from_zero=True),
)  # fmt: skip

PART = "rollout_info/reward/"
"""Prefix of the keys of a combined reward's parts."""


def part_curves(keys: Iterable[str]) -> list[Curve]:
    """Return a chart for each part of a combined reward among the logged keys, in their order."""
    parts = [key for key in dict.fromkeys(keys) if key.startswith(PART)]
    note = "contribution to an episode's reward; band: ± one std"
    return [
        Curve(PARTS, key.removeprefix(PART), note, {"reward": (key,)}, band=True)
        for key in parts
        if not (key.endswith("_std") and key.removesuffix("_std") in parts)
    ]
