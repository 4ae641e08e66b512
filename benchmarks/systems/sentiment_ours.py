"""This library's PPO on the quickstart's task, for `time_to_reward`. The reward is the library's own, on decoded text.

The quickstart packs minibatches by tokens. Here an epoch is always the shape's number of minibatches, so that all
systems take the same number of optimizer steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.systems.worker import UpdateWatch, Worker
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.vec_env import TextVecEnv
from rl4lms_like.policies.base import CausalLMActorCriticPolicy
from rl4lms_like.policies.loading import load_tokenizer
from rl4lms_like.rewards.sentiment import SentimentReward
from rl4lms_like.rollouts.kl import FixedKLController

FOREVER = 10**6


class FixedMinibatchesPPO(PPO):
    """PPO whose epochs have `n_minibatches` minibatches of whole episodes, of about equally many tokens."""

    n_minibatches: int

    def train(self) -> None:
        """One update; see `tokens_per_minibatch`."""
        assert self.rollout_buffer.episodes is not None
        self.batch_size = tokens_per_minibatch(self.rollout_buffer.episodes.lengths.tolist(), self.n_minibatches)
        super().train()


def tokens_per_minibatch(lengths: list[int], n_minibatches: int) -> int:
    """A `batch_size` with which whole episodes, in whatever order, are packed into exactly `n_minibatches`.

    All but the last minibatch are filled to within one episode of it, so n - 1 of them hold at least n - 1 n-ths of
    the tokens, and the last one the rest.

    Raises:
        ValueError: so few episodes that the last minibatch might stay empty.
    """
    equal_share, longest = -(-sum(lengths) // n_minibatches), max(lengths)
    if (n_minibatches - 1) * (equal_share + longest) >= sum(lengths):
        raise ValueError(f"{len(lengths)} episodes are too few for {n_minibatches} minibatches of about equal size")
    return equal_share + longest


def make_algorithm(worker: Worker) -> FixedMinibatchesPPO:
    """The library's PPO with the job's settings; all else is the quickstart's."""
    shape, task = worker.shape, worker.job["task"]
    prompts = json.loads(Path(worker.job["prompts"]).read_text())
    env = TextVecEnv(
        n_envs=shape.episodes,
        tokenizer=load_tokenizer(worker.model),
        reward_function=SentimentReward(),
        samples=[Sample(id=str(number), prompt_or_input_text=prompt) for number, prompt in enumerate(prompts)],
        max_episode_length=shape.response_len,
        max_prompt_length=shape.prompt_len,
        terminate_on_eos=True,
    )
    algorithm = FixedMinibatchesPPO(
        CausalLMActorCriticPolicy,
        env,
        policy_kwargs={
            "model_name": worker.model,
            "value_head_init": "zero",
            "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": shape.response_len},
        },
        kl_controller=FixedKLController(task["kl_coef"]),
        learning_rate=worker.job["learning_rate"],
        critic_learning_rate=worker.job["critic_learning_rate"],
        n_steps=1,
        n_epochs=shape.n_epochs,
        clip_range=task["clip_range"],
        vf_coef=task["vf_coef"],
        gamma=task["gamma"],
        gae_lambda=task["gae_lambda"],
        normalize_advantage="rollout",
        seed=worker.seed,
        device="cpu",
    )
    algorithm.n_minibatches = shape.episodes // shape.minibatch
    return algorithm


def main() -> None:
    """Serve the driver, then save the policy."""
    worker = Worker()
    algorithm = make_algorithm(worker)
    watch = UpdateWatch(worker, algorithm.policy.policy_model.base_model, algorithm.policy.optimizer)
    worker.ready("stable_baselines3", "rl4lms_like")
    iteration = 0
    while worker.next_iteration():
        watch.restart()
        algorithm.learn_iteration(iteration, FOREVER)
        info: dict[str, Any] = dict(algorithm.logger.name_to_value)
        algorithm.logger.dump(step=algorithm.num_timesteps)
        assert info["rollout_info/n_episodes"] == worker.shape.episodes
        worker.iteration_done(
            optimizer_steps=watch.optimizer_steps,
            response_tokens=info["rollout_info/n_tokens"],
            reward=info["rollout_info/ep_rew"],
            kl=info["rollout_info/kl_div_mean"],
        )
        iteration += 1
    algorithm.policy.save_model(worker.job["save_to"])  # with the generation config of the warm start


if __name__ == "__main__":
    main()
