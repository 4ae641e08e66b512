"""Output of `check --reward`: the audit of a config's reward on a few samples of its data pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl4lms_like.core.errors import ConfigError, ConfigIssue, RewardError
from rl4lms_like.core.observation import TextLayout
from rl4lms_like.envs.arguments import EnvArguments
from rl4lms_like.envs.env import length_limit
from rl4lms_like.rewards import REWARDS
from rl4lms_like.rewards.audit import AuditedReward, audit_reward, n_calls
from rl4lms_like.rewards.probes import Probes
from rl4lms_like.training.assemble import build_datapool, build_tokenizer
from rl4lms_like.training.config.binding import build_component
from rl4lms_like.training.config.run_config import AnyConfig, RunConfig
from rl4lms_like.training.small_models.embedded import with_embedded_models


def reward_audit(config: AnyConfig, *, remote: bool = False) -> Iterator[str]:
    """Yield the number of calls, and after them the results.

    Args:
        config: the run's config. Its policy is not loaded.
        remote: call a reward on a server, too.

    Raises:
        ConfigError: the run is supervised, or the reward is on a server and `remote` is False.
        RewardError: the reward failed for a text; raised after all other output.
        RL4LMsLikeError: reward, data pool or tokenizer cannot be built.
    """
    if not isinstance(config, RunConfig):
        raise ConfigError([ConfigIssue("--reward", "a supervised run has no reward")], "the command line")
    config = with_embedded_models(config)
    reward = build_component(REWARDS, config.reward_fn, "reward")
    pool = build_datapool(config.datapool, "train")
    tokenizer, env = build_tokenizer(config.tokenizer), EnvArguments(**config.env.args)
    layout = TextLayout(
        tokenizer,
        env.max_prompt_length or length_limit(tokenizer),
        env.max_episode_length,
        env.context_start_token,
        env.prompt_truncation_side,
    )
    probes = Probes([sample for sample, _ in pool], layout)
    size = f"{len(probes)} texts from {len(probes.samples)} samples of 'train', at most {n_calls(reward, probes)} calls"
    if not remote and _is_remote({"id": config.reward_fn.id, "args": config.reward_fn.args}):
        text = f"the reward sends texts to a server ({size}); to call it, add --remote"
        raise ConfigError([ConfigIssue("--reward", text)], "the command line")
    yield f"# reward\n{size}\n"
    results = audit_reward(reward, probes)
    yield _table(results) + "\n" + _findings(results)
    if any(finding.kind == "failure" for finding in results[0].findings):
        raise RewardError(results[0].errors[0])


def _is_remote(block: Any) -> bool:
    """Return True if a block of a config, or one inside it, is the reward `http` or `llm_judge`."""
    if isinstance(block, Mapping):
        id = block.get("id")
        is_class = str(id).endswith((":HttpReward", ":LLMJudgeReward"))
        return id in ("http", "llm_judge") or is_class or any(map(_is_remote, block.values()))
    return isinstance(block, list | tuple) and any(map(_is_remote, block))


def _table(results: Sequence[AuditedReward]) -> str:
    """Return the mean reward of each text and the times, with a column for each part."""
    rows = [["text", *(result.name or "reward" for result in results)]]
    rows += [[name, *(f"{result.rewards[name]:.3g}" for result in results)] for name in results[0].rewards]
    rows.append(["ms alone", *(f"{result.ms_alone:.2f}" for result in results)])
    rows.append(["ms per text together", *(f"{result.ms_together:.2f}" for result in results)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines) + "\n"


def _findings(results: Sequence[AuditedReward]) -> str:
    lines = [
        f"{result.name or 'reward'}: {finding.kind}: {finding.message}"
        for result in results
        for finding in result.findings
    ]
    return "\n".join(lines or ["no findings"]) + "\n"
