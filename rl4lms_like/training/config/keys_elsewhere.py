"""Map keys of TRL, OpenRLHF and verl to the keys of this library's RL configs for the same setting.

    cliprange: 0.1      unknown key; the equivalent is alg.args.clip_range (docs/coming_from_trl.md)

docs/coming_from_trl.md has the same table and explains the differences.
"""

from __future__ import annotations

from rl4lms_like.core.errors import ConfigIssue
from rl4lms_like.core.schema import UNKNOWN_KEY

PAGE = "docs/coming_from_trl.md"

ELSEWHERE = {
    "alg.policy.args.model_name": "sft_model_path model_name_or_path policy_model actor_model pretrain",
    "alg.policy.args.reference_model": "ref_model ref_model_path",
    "alg.policy.args.critic_model": "value_model value_model_path critic_pretrain",
    "alg.policy.args.generation_kwargs.max_new_tokens": "response_length max_completion_length generate_max_len",
    "env.args.max_prompt_length": "max_prompt_length prompt_max_len",
    "env.n_envs": "rollout_batch_size local_rollout_forward_batch_size",
    "alg.args.learning_rate": "learning_rate actor_learning_rate",
    "alg.args.n_epochs": "ppo_epochs num_ppo_epochs num_iterations max_epochs",
    "alg.args.batch_size": "mini_batch_size num_mini_batches ppo_mini_batch_size train_batch_size",
    "alg.args.micro_batch_size": (
        "per_device_train_batch_size gradient_accumulation_steps micro_train_batch_size ppo_micro_batch_size"
    ),
    "alg.args.clip_range": "cliprange clip_ratio eps_clip epsilon",
    "alg.args.clip_range_vf": "cliprange_value value_clip",
    "alg.args.vf_coef": "vf_coef",
    "alg.args.ent_coef": "entropy_coeff entropy_coef",
    "alg.args.gamma": "gamma",
    "alg.args.gae_lambda": "lam lambd",
    "alg.kl_div.coeff": "kl_coef init_kl_coef beta",
    "alg.kl_div.target_kl": "target kl_target",
    "alg.kl_div.horizon": "horizon kl_horizon",
    "alg.kl_div.controller": "adap_kl_ctrl",
    "alg.kl_div.estimator": "kl_estimator kl_penalty",
    "alg.kl_div.norm_reward": "whiten_rewards use_score_scaling",
    "train_evaluation.n_iters": "total_episodes num_episodes max_steps num_train_epochs",
    "train_evaluation.eval_batch_size": "per_device_eval_batch_size",
    "train_evaluation.eval_every": "eval_steps",
    "train_evaluation.save_every": "save_steps",
    "train_evaluation.keep_last": "save_total_limit",
    "reward_fn": "reward_model_path reward_pretrain reward_funcs",
    "datapool": "dataset_name prompt_data",
}
"""Key of this library -> names of the same setting in other libraries."""

HERE = {name: key for key, names in ELSEWHERE.items() for name in names.split()}

_OWN_ARGUMENTS = ("reward_fn.", "datapool.", "train_evaluation.metrics.", "alg.policy.args.peft.")


def with_key_of_here(issue: ConfigIssue) -> ConfigIssue:
    """Return the mistake; for an unknown key of another library, with the equivalent key of this library."""
    here = HERE.get(issue.path.rpartition(".")[2])
    if here is None or not issue.message.startswith(UNKNOWN_KEY) or issue.path.startswith(_OWN_ARGUMENTS):
        return issue
    return ConfigIssue(issue.path, f"{UNKNOWN_KEY}; the equivalent is {here} ({PAGE})")
