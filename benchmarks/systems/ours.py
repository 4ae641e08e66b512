"""This library: `PPO` or `GRPO` on a `TextVecEnv`, one `learn_iteration` at a time, with all features on.

The reward is the library's own `increasing_numbers`, on decoded text as always, or the function for a model of natural
language. It clips gradients, measures entropies and first ratios, and keeps statistics; all of that is in its time.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from benchmarks import workload
from benchmarks.systems.profiling import operators, watch_parts
from benchmarks.systems.worker import UpdateWatch, Worker
from rl4lms_like.algorithms.base import OnPolicyTextAlgorithm
from rl4lms_like.algorithms.policy_gradient import GRPO
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.vec_env import TextVecEnv
from rl4lms_like.policies.base import CausalLMActorCriticPolicy
from rl4lms_like.rewards.synthetic import RewardIncreasingNumbers
from rl4lms_like.rollouts.kl import FixedKLController

FOREVER = 10**6
GROUP_SIZE = 8  # as in `trl_grpo`


def vowels(responses: list[str]) -> list[float]:
    """The workload's reward for a model of natural language, as this library calls it."""
    return workload.share_of_vowels(responses)


def make_algorithm(worker: Worker) -> OnPolicyTextAlgorithm:
    """The library's PPO for the worker's shape, or its GRPO if the job says so."""
    shape, is_grpo = worker.shape, worker.job.get("algorithm") == "grpo"
    own: dict[str, Any] = {"vf_coef": workload.VF_COEF, "gamma": workload.GAMMA, "gae_lambda": workload.GAE_LAMBDA}
    if is_grpo:
        own = {"group_size": GROUP_SIZE}
    tokenizer: Any = AutoTokenizer.from_pretrained(worker.model)
    words = worker.job.get("words")  # of a model of natural language
    texts = [
        tokenizer.decode(row) for k in range(8) for row in workload.prompts(shape, k, seed=worker.seed, words=words)
    ]
    adapters = {"peft": worker.job["lora"]} if "lora" in worker.job else {}
    policy = worker.job.get("policy", {})  # further arguments of the policy
    env = TextVecEnv(
        n_envs=shape.episodes,
        tokenizer=tokenizer,
        reward_function=RewardIncreasingNumbers(min_tokens=shape.response_len) if words is None else vowels,
        samples=[Sample(id=str(number), prompt_or_input_text=text) for number, text in enumerate(texts)],
        max_episode_length=shape.response_len,
        max_prompt_length=shape.prompt_len,
        vocab_size=shape.vocab_size,
    )
    return (GRPO if is_grpo else PPO)(
        CausalLMActorCriticPolicy,
        env,
        policy_kwargs={
            "model_name": worker.model,
            "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": shape.response_len},
            **adapters,
            **policy,
        },
        kl_controller=FixedKLController(workload.KL_COEF, placement="loss" if is_grpo else "reward"),
        learning_rate=workload.LEARNING_RATE,
        n_steps=shape.response_len,
        batch_size=shape.minibatch * shape.response_len,
        n_epochs=shape.n_epochs,
        clip_range=workload.CLIP_RANGE,
        **own,
        seed=worker.seed,
        device=worker.device,
    )


def main() -> None:
    """Serve the driver."""
    worker = Worker()
    algorithm = make_algorithm(worker)
    watch = UpdateWatch(worker, algorithm.policy.policy_model.base_model, algorithm.policy.optimizer)
    is_profiled = worker.job.get("profile", False)
    parts = watch_parts(algorithm) if is_profiled or worker.job.get("parts") else None
    worker.ready("stable_baselines3", "rl4lms_like")
    iteration = 0
    while worker.next_iteration():
        watch.restart()
        tokens_before = algorithm.num_timesteps
        with operators(wanted=is_profiled and iteration == 0) as extras:
            algorithm.learn_iteration(iteration, FOREVER)
            algorithm.logger.dump(step=algorithm.num_timesteps)
        if parts is not None:
            extras["parts"] = parts.take()
        worker.iteration_done(
            optimizer_steps=watch.optimizer_steps, response_tokens=algorithm.num_timesteps - tokens_before, **extras
        )
        iteration += 1


if __name__ == "__main__":
    main()
