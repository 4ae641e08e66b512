"""This library's PPO or GRPO on the quickstart's task, for `time_to_reward`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.systems.worker import UpdateWatch, Worker
from rl4lms_like.algorithms.base import OnPolicyTextAlgorithm
from rl4lms_like.algorithms.policy_gradient import GRPO
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.vec_env import TextVecEnv
from rl4lms_like.policies.base import CausalLMActorCriticPolicy
from rl4lms_like.policies.loading import load_tokenizer
from rl4lms_like.rewards.sentiment import SentimentReward
from rl4lms_like.rollouts.kl import FixedKLController

FOREVER = 10**6


def make_algorithm(worker: Worker) -> OnPolicyTextAlgorithm:
    """The job's algorithm with its settings; all else is the quickstart's."""
    shape, task, is_grpo = worker.shape, worker.job["task"], worker.job["algorithm"] == "grpo"
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

    # As in TRL's GRPO, the loss is a mean over tokens. The gradient of its KL term, k3 times the ratio r, is that of
    # k2 on policy: with k3 = ref / pi - 1 - log(ref / pi),
    #     grad (r k3) = (k3 + 1 - ref / pi) grad log pi = (log pi - log ref) grad log pi
    of_algorithm: dict[str, Any] = {"group_size": worker.job["group_size"], "loss_aggregation": "token_mean"}
    kl_controller = FixedKLController(task["kl_coef"], placement="loss", estimator="k2")
    if not is_grpo:
        kl_controller = FixedKLController(task["kl_coef"])
        of_algorithm = {
            "critic_learning_rate": worker.job["critic_learning_rate"],
            "vf_coef": task["vf_coef"],
            "gamma": task["gamma"],
            "gae_lambda": task["gae_lambda"],
            "normalize_advantage": "rollout",
        }
    return (GRPO if is_grpo else PPO)(
        CausalLMActorCriticPolicy,
        env,
        policy_kwargs={
            "model_name": worker.model,
            "value_head_init": "zero",
            "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": shape.response_len},
        },
        kl_controller=kl_controller,
        learning_rate=worker.job["learning_rate"],
        n_episodes=shape.episodes,
        minibatch_episodes=shape.minibatch,
        n_epochs=shape.n_epochs,
        clip_range=task["clip_range"],
        **of_algorithm,
        seed=worker.seed,
        device="cpu",
    )


def main() -> None:
    """Serve the driver."""
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
            rollout_reward=info["rollout_info/ep_rew"],
            save=algorithm.policy.save_model,
        )
        iteration += 1


if __name__ == "__main__":
    main()
