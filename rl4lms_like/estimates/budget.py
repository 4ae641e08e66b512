"""Compute the tokens, episodes, minibatches and optimizer steps of a config before it runs.

    iteration   n_steps * n_envs tokens at least,     collected in generation batches of n_envs whole episodes
                or n_episodes
    update      n_epochs passes over them             in minibatches of whole episodes, about batch_size tokens each,
                                                      or of minibatch_episodes

All numbers are for episodes of one length, by default the longest. With shorter episodes, the same number of tokens
needs more of them, each with its prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rl4lms_like.config.binding import with_defaults
from rl4lms_like.config.run_config import RunConfig
from rl4lms_like.engines.arguments import longest_response
from rl4lms_like.envs.arguments import EnvArguments

# Size of kept rollouts in bytes, besides the tensors.
TEXT_BYTES = 4  # of a token's text
EPISODE_BYTES = 200  # of an episode's other values in JSON
HEADER_BYTES = 25_000  # of the states of the random generators


@dataclass(frozen=True)
class BatchPlan:
    """Batch sizes and step counts of a run, for episodes of one length."""

    is_in_episodes: bool  # the size of a rollout is a number of episodes, otherwise of tokens
    tokens_per_rollout: int  # minimum; with a number of episodes, the maximum
    response_tokens: int  # of a response; of a dialogue, of its turns and answers together
    actions: int  # tokens of an episode that the policy writes; those of the answers of a dialogue are not counted
    prompt_tokens: int | None  # maximum of a prompt; None if the tokenizer's limit is used
    prompts_per_batch: int  # per `generate` call, each with one response
    group_size: int  # responses to the same prompt
    generation_batches: int  # `generate` calls per rollout
    episodes: int  # per rollout
    minibatch_episodes: int
    micro_batch_size: int | None  # tokens of prompts and responses per forward pass
    shares_prompts: bool  # a forward pass computes a prompt once for all of its responses
    minibatches: int  # per epoch
    n_epochs: int  # passes over a rollout; only of the critic, if it is updated separately
    n_iters: int
    rl4lms_steps_per_iteration: int | None  # of RL4LMs with the same values; its minibatches are single tokens

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps of one update."""
        return self.n_epochs * self.minibatches

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return self.n_iters * self.steps_per_iteration

    @property
    def tokens(self) -> int:
        """Number of tokens that the run generates for training: the minimum; with `is_in_episodes`, the maximum."""
        return self.n_iters * self.tokens_per_rollout

    @property
    def _prompts(self) -> str:
        n = self.prompts_per_batch // self.group_size
        return f"{n} prompts" if self.group_size == 1 else f"{n} prompts with {self.group_size} responses each"

    @property
    def _forward_passes(self) -> str:
        # How many episodes are in a pass depends on the length of their prompts.
        if self.micro_batch_size is None:
            return f"of {_episodes(self.minibatch_episodes)} in the update"
        limit = f"at most {self.micro_batch_size:,} tokens of prompts and responses"
        if self.prompt_tokens is None:
            return f"of {limit} in the update"
        return f"of {_episodes(self.micro_batch_episodes)} in the update ({limit})"

    def of_process(self, n_processes: int) -> BatchPlan:
        """Return the plan with the batch sizes of one of several processes."""
        # The environments are divided evenly; a minibatch may not be, and the largest part counts.
        return replace(
            self,
            prompts_per_batch=self.prompts_per_batch // n_processes,
            minibatch_episodes=math.ceil(self.minibatch_episodes / n_processes),
        )

    @property
    def micro_batch_episodes(self) -> int:
        """Episodes per forward pass of the update."""
        return self.episodes_per_pass(self.minibatch_episodes)

    def episodes_per_pass(self, most: int) -> int:
        """Return the largest number of episodes in a forward pass over `most` episodes; prompts are of full length."""
        if self.micro_batch_size is None:
            return most
        prompt = self.prompt_tokens or 0
        if not self.shares_prompts:
            return _fitting(self.micro_batch_size, prompt + self.response_tokens, most)

        # As in `core.episodes.pack_passes`: whole groups, or some responses of one that does not fit.
        group_tokens = prompt + self.group_size * self.response_tokens
        if group_tokens <= self.micro_batch_size:
            return min(self.micro_batch_size // group_tokens * self.group_size, most)
        return _fitting(max(self.micro_batch_size - prompt, 0), self.response_tokens, most)

    def prompts_of(self, n_episodes: int) -> int:
        """Return the number of prompts that a forward pass of so many episodes computes."""
        return math.ceil(n_episodes / self.group_size) if self.shares_prompts else n_episodes

    def rollout_bytes(self, prompt_tokens: int, mask_bytes: int = 0) -> int:
        """Return the size of a kept rollout in bytes, for prompts of this many tokens.

        Args:
            prompt_tokens: of a prompt.
            mask_bytes: size of the mask of one action; 0 if there are no masks.
        """
        # int64 ids and a mask for each position of prompt and response, and their text.
        n_positions = prompt_tokens + self.response_tokens
        per_episode = (8 + 1 + TEXT_BYTES) * n_positions
        per_token = 6 * 4 + mask_bytes  # reward and five scores, float32
        return self.episodes * (per_episode + EPISODE_BYTES + self.actions * per_token) + HEADER_BYTES

    def lines(self) -> list[tuple[str, str]]:
        """Return the name and the amount of each quantity, as `check` prints them."""
        # For comparison: with equal values, RL4LMs takes one step per `batch_size` tokens, not episodes.
        n_theirs = self.rl4lms_steps_per_iteration
        theirs = "" if n_theirs is None else f" (RL4LMs: {n_theirs:,})"

        # A size in tokens is a minimum, since episodes are whole. A size in episodes is exact.
        if self.is_in_episodes:
            rollout = [
                ("episodes per rollout", f"{self.episodes:,}"),
                ("tokens per rollout", f"at most {self.tokens_per_rollout:,}, {self.actions:,} per episode"),
            ]
            total = f"{self.n_iters * self.episodes:,} in {self.n_iters:,} iterations"
            in_all = ("episodes in all", total)
        else:
            rollout = [
                ("tokens per rollout", f"at least {self.tokens_per_rollout:,}"),
                ("episodes per rollout", f"{self.episodes:,} at the full {self.actions} tokens"),
            ]
            in_all = ("tokens in all", f"at least {self.tokens:,} in {self.n_iters:,} iterations")

        return [
            *rollout,
            ("generation batches", f"{self.generation_batches:,} of {self._prompts}"),
            ("minibatches per epoch", f"{self.minibatches:,} of {_episodes(self.minibatch_episodes)}"),
            ("forward passes", self._forward_passes),
            ("epochs per iteration", f"{self.n_epochs:,}"),
            ("optimizer steps", f"{self.steps_per_iteration:,} per iteration{theirs}, {self.steps:,} in all"),
            in_all,
        ]


def plan_batches(
    config: RunConfig, *, shortest: bool = False, prompt_tokens: int | None = None, shares_prompts: bool | None = None
) -> BatchPlan:
    """Return the batch sizes and step counts of a config.

    Args:
        config: of the run.
        shortest: for responses that are as short as the config allows; default: of full length.
        prompt_tokens: of each prompt; default: `max_prompt_length`.
        shares_prompts: prompts are computed once for all of their responses; default: if the config has groups, and no
            setting by which each response gets its own.
    """
    blocks = with_defaults(config.to_dict())
    args: dict[str, Any] = blocks["alg"]["args"]
    env = EnvArguments(**blocks["env"]["args"])

    n_envs = config.env.n_envs
    kwargs = blocks["alg"]["policy"]["args"].get("generation_kwargs") or {}
    response = min(env.max_episode_length, longest_response(kwargs, is_causal=config.is_causal))
    if config.env.dialogue is not None:
        response = env.max_episode_length
    if shortest:
        response = min(_shortest_response(kwargs, env, is_causal=config.is_causal), response)

    # Sizes of rollouts count what the policy writes, those of minibatches and passes what is read.
    actions = response if config.env.max_actions is None else min(config.env.max_actions, response)

    # A rollout: generation batches of `n_envs` whole episodes, until there are `n_episodes`, or `n_steps` tokens for
    # each environment.
    n_episodes = args.get("n_episodes")
    if n_episodes is not None:
        generations = math.ceil(n_episodes / n_envs)
        tokens = n_episodes * actions
    else:
        tokens = int(args.get("n_steps") or 1) * n_envs
        generations = math.ceil(tokens / (n_envs * actions))
    episodes = generations * n_envs

    # An update: passes over minibatches of whole episodes. TRPO updates only the critic in several passes.
    batch_size = args.get("batch_size")
    n_epochs = int(args.get("n_epochs") or args.get("n_critic_updates") or 1)
    minibatch = _fitting(batch_size, response, episodes)
    if args.get("minibatch_episodes") is not None:
        minibatch = min(args["minibatch_episodes"], episodes)

    # RL4LMs' sizes are in tokens.
    rl4lms_steps = None
    if n_episodes is None and batch_size:
        rl4lms_steps = n_epochs * math.ceil(tokens / int(batch_size))

    group_size = int(args.get("group_size") or 1)
    if shares_prompts is None:
        policy_args = blocks["alg"]["policy"]["args"]
        in_training_mode = policy_args.get("dropout") or policy_args.get("gradient_checkpointing")
        shares_prompts = not in_training_mode and config.distributed.strategy != "fsdp"
    return BatchPlan(
        is_in_episodes=n_episodes is not None,
        tokens_per_rollout=tokens,
        response_tokens=response,
        actions=actions,
        prompt_tokens=env.max_prompt_length if prompt_tokens is None else prompt_tokens,
        prompts_per_batch=n_envs,
        group_size=group_size,
        generation_batches=generations,
        episodes=episodes,
        minibatch_episodes=minibatch,
        micro_batch_size=args.get("micro_batch_size"),
        shares_prompts=shares_prompts and group_size > 1,
        minibatches=math.ceil(episodes / minibatch),
        n_epochs=n_epochs,
        n_iters=config.train_evaluation.n_iters,
        rl4lms_steps_per_iteration=rl4lms_steps,
    )


def _shortest_response(kwargs: Mapping[str, Any], env: EnvArguments, *, is_causal: bool) -> int:
    """Return the smallest number of tokens of a response, without the limits of its length."""
    if not env.terminate_on_eos and not kwargs.get("stop_strings"):
        return env.max_episode_length

    # RL4LMs' `min_length` counts the decoder's start token.
    minimum = kwargs.get("min_new_tokens") or 0
    if kwargs.get("min_length"):
        minimum = int(kwargs["min_length"]) - (0 if is_causal else 1)
    return max(int(minimum), 1)


def _fitting(tokens: int | None, length: int, most: int) -> int:
    """Return how many episodes of a length fit into `tokens`; at least 1, and `most` if there is no limit."""
    return most if tokens is None else min(max(int(tokens) // length, 1), most)


def _episodes(n: int) -> str:
    return f"{n:,} episode" if n == 1 else f"{n:,} episodes"
