"""Names of settings in TRL, OpenRLHF and verl, and the equivalent keys of this library: one table for all.

    cliprange: 0.1      unknown key; the equivalent is alg.args.clip_range (docs/coming_from_trl.md)

Errors of YAML files and of Python arguments name the equivalent key from this table, and the tables of the page are
made from it: `python -m rl4lms_like.core.keys_elsewhere docs/coming_from_trl.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rl4lms_like.system.errors import ConfigIssue
from rl4lms_like.system.schema import UNKNOWN_KEY

PAGE = "docs/coming_from_trl.md"


class Equivalent(NamedTuple):
    """Row of a table.

    Attributes:
        key: key of this library, or option of the command line; empty if there is no equivalent.
        names: names of the same setting elsewhere, separated by spaces.
        note: what is different, or why there is no equivalent.
    """

    key: str
    names: str
    note: str = ""


_PEFT_FIELDS = "its fields have PEFT's names: `r`, `lora_alpha`, `lora_dropout`, `target_modules`"
_PEFT_NAMES = "lora lora_config peft_config use_peft lora_r lora_rank lora_alpha lora_dropout lora_target_modules"

RL_KEYS = (
    Equivalent("alg.policy.args.model_name", "sft_model_path model_name_or_path policy_model actor_model pretrain"),
    Equivalent("alg.policy.args.reference_model", "ref_model ref_model_path"),
    Equivalent("alg.policy.args.critic_model", "value_model value_model_path critic_pretrain"),
    Equivalent("alg.policy.args.peft", _PEFT_NAMES, _PEFT_FIELDS),
    Equivalent("alg.policy.args.dtype", "bf16", "`bfloat16`"),
    Equivalent("alg.policy.args.dropout", "disable_dropout", "with the opposite meaning"),
    Equivalent("alg.policy.args.gradient_checkpointing", "gradient_checkpointing"),
    Equivalent(
        "alg.policy.args.engine",
        "use_vllm vllm_mode vllm_server_base_url vllm_server_host vllm_server_port vllm_num_engines",
        "`{id: vllm, args: {url, weights_dir}}`; the server is started separately",
    ),
    Equivalent(
        "alg.policy.args.generation_kwargs.max_new_tokens",
        "response_length max_completion_length max_response_length generate_max_len",
    ),
    Equivalent(
        "alg.policy.args.generation_kwargs",
        "temperature top_p top_k min_p repetition_penalty",
        "of the sampling only: the model is trained at temperature 1",
    ),
    Equivalent("env.args.max_prompt_length", "max_prompt_length prompt_max_len"),
    Equivalent(
        "env.n_envs",
        "rollout_batch_size local_rollout_forward_batch_size",
        "responses that are generated together",
    ),
    Equivalent("alg.args.n_episodes", "generation_batch_size", "generated `env.n_envs` at a time"),
    Equivalent("alg.args.minibatch_episodes", "steps_per_generation", "a number of episodes, not of steps"),
    Equivalent("alg.args.warmup_iterations", "warmup_steps lr_warmup_steps"),
    Equivalent("datapool.sampler", "shuffle_dataset", "`{id: shuffled}`"),
    Equivalent(
        "alg.id", "adv_estimator advantage_estimator policy_loss_type", "`grpo`, `rloo`, `reinforce_pp`, `gspo` ..."
    ),
    Equivalent("alg.args.group_size", "num_generations n_samples_per_prompt", "responses to one prompt"),
    Equivalent(
        "alg.args.loss_aggregation",
        "loss_type loss_agg_mode",
        "`grpo` is `seq_mean_token_mean`, `dr_grpo` is `seq_mean_token_sum_norm`, `dapo` and `bnpo` are `token_mean`; "
        "`cispo` is `alg.id: cispo`",
    ),
    Equivalent(
        "alg.args.scale",
        "scale_rewards norm_adv_by_std_in_grpo no_advantage_std_norm normalize_advantages",
        "`group`, `batch` or `none`",
    ),
    Equivalent("alg.args.ratio_level", "importance_sampling_level", "`sequence` is `alg.id: gspo`"),
    Equivalent("alg.args.clip_range", "cliprange clip_ratio clip_ratio_low eps_clip epsilon"),
    Equivalent(
        "alg.args.clip_range_high",
        "epsilon_high clip_ratio_high eps_clip_low_high",
        "the distance from 1, also for `cispo`, where TRL's `epsilon_high` is the largest ratio",
    ),
    Equivalent("alg.args.dual_clip", "delta clip_ratio_c"),
    Equivalent(
        "alg.args.importance_correction",
        "vllm_importance_sampling_correction vllm_importance_sampling_mode enable_vllm_is_correction",
    ),
    Equivalent(
        "alg.args.correction_range",
        "vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_is_truncated_threshold tis_imp_ratio_cap",
    ),
    Equivalent("alg.args.dynamic_sampling", "filter_groups dynamic_filtering"),
    Equivalent(
        "alg.args.overlong_buffer", "overlong_buffer_len overlong_penalty_factor", "a fraction of the longest response"
    ),
    Equivalent("alg.args.reference_update_iterations", "sync_ref_model ref_model_sync_steps"),
    Equivalent("alg.args.reference_mixing", "ref_model_mixup_alpha"),
    Equivalent("alg.args.learning_rate", "learning_rate actor_learning_rate"),
    Equivalent("alg.args.learning_rate_schedule", "lr_scheduler_type"),
    Equivalent("alg.args.max_grad_norm", "max_grad_norm grad_clip"),
    Equivalent("alg.args.n_epochs", "ppo_epochs num_ppo_epochs num_iterations max_epochs"),
    Equivalent(
        "alg.args.batch_size",
        "mini_batch_size num_mini_batches ppo_mini_batch_size train_batch_size",
        "tokens of a minibatch; `alg.args.minibatch_episodes` counts episodes",
    ),
    Equivalent(
        "alg.args.micro_batch_size",
        "per_device_train_batch_size gradient_accumulation_steps micro_train_batch_size ppo_micro_batch_size "
        "ppo_micro_batch_size_per_gpu",
        "tokens of a forward pass; it changes no number",
    ),
    Equivalent("alg.args.clip_range_vf", "cliprange_value value_clip"),
    Equivalent("alg.args.vf_coef", "vf_coef"),
    Equivalent("alg.args.ent_coef", "entropy_coeff entropy_coef"),
    Equivalent("alg.args.gamma", "gamma"),
    Equivalent("alg.args.gae_lambda", "lam lambd"),
    Equivalent("alg.kl_div.coeff", "kl_coef init_kl_coef kl_loss_coef beta"),
    Equivalent("alg.kl_div.target_kl", "target kl_target"),
    Equivalent("alg.kl_div.horizon", "horizon kl_horizon"),
    Equivalent("alg.kl_div.controller", "adap_kl_ctrl"),
    Equivalent("alg.kl_div.estimator", "kl_estimator kl_penalty kl_loss_type"),
    Equivalent("alg.kl_div.placement", "use_kl_loss use_kl_in_reward", "`loss`, `reward` or `advantage`"),
    Equivalent("alg.kl_div.norm_reward", "whiten_rewards use_score_scaling"),
    Equivalent(
        "train_evaluation.n_iters",
        "total_episodes num_episodes max_steps num_train_epochs total_training_steps total_epochs",
        "an iteration is one rollout and one update",
    ),
    Equivalent("train_evaluation.eval_batch_size", "per_device_eval_batch_size"),
    Equivalent("train_evaluation.eval_every", "eval_steps test_freq", "in iterations"),
    Equivalent("train_evaluation.save_every", "save_steps save_freq", "in iterations"),
    Equivalent("train_evaluation.keep_last", "save_total_limit max_ckpt_num max_actor_ckpt_to_keep"),
    Equivalent("train_evaluation.keep_best", "load_best_model_at_end metric_for_best_model"),
    Equivalent("reward_fn", "reward_model_path reward_pretrain reward_funcs"),
    Equivalent("reward_fn", "reward_weights", "`{id: combine}`, whose parts have weights"),
    Equivalent("datapool", "dataset_name prompt_data train_files"),
    Equivalent("--experiment_name", "output_dir run_name"),
    Equivalent("--log_to_wandb", "report_to use_wandb", "`--log_to_trackio` for Trackio"),
    Equivalent(
        "",
        "vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_max_model_length",
        "options of the vLLM server, which is started separately",
    ),
    Equivalent(
        "",
        "mask_truncated_completions top_entropy_quantile off_policy_mask_threshold use_adaptive_entropy "
        "reward_clip_range use_bias_correction_kl missing_eos_penalty",
    ),
)
"""Keys of RL runs."""

OFFLINE_KEYS = (
    Equivalent("alg.model_name", "model_name_or_path pretrain"),
    Equivalent("alg.peft", _PEFT_NAMES, _PEFT_FIELDS),
    Equivalent(
        "alg.training_args",
        "learning_rate num_train_epochs max_steps per_device_train_batch_size gradient_accumulation_steps weight_decay "
        "warmup_steps lr_scheduler_type max_grad_norm bf16 gradient_checkpointing logging_steps eval_steps save_steps "
        "save_total_limit load_best_model_at_end metric_for_best_model neftune_noise_alpha",
        "arguments of transformers' Trainer have the same names in this block",
    ),
    Equivalent("alg.args.beta", "beta", "`alg.args.odds_ratio_weight` of `orpo`"),
    Equivalent(
        "alg.args.loss",
        "loss_type",
        "`sigmoid`, `hinge` or `robust`; the losses `ipo`, `kto`, `orpo` and `simpo` are values of `alg.id`",
    ),
    Equivalent("alg.args.label_smoothing", "label_smoothing"),
    Equivalent("alg.args.sft_weight", "rpo_alpha"),
    Equivalent("alg.args.gamma", "simpo_gamma"),
    Equivalent("alg.args.desirable_weight", "desirable_weight"),
    Equivalent("alg.args.undesirable_weight", "undesirable_weight"),
    Equivalent("alg.args.center_coef", "center_rewards_coefficient"),
    Equivalent("alg.args.reference_model", "ref_model ref_model_path"),
    Equivalent("alg.args.dropout", "disable_dropout", "with the opposite meaning"),
    Equivalent("alg.args.max_response_length", "max_completion_length"),
    Equivalent("alg.loss_on_prompt", "completion_only_loss", "with the opposite meaning"),
    Equivalent(
        "tokenizer.max_length", "max_prompt_length max_length max_seq_length", "tokens of the prompt, not of both texts"
    ),
    Equivalent("tokenizer.truncation_side", "truncation_mode", "`left` keeps the end of a prompt"),
    Equivalent("tokenizer.chat_template", "chat_template_path"),
    Equivalent("train_evaluation.eval_batch_size", "per_device_eval_batch_size"),
    Equivalent("datapool", "dataset_name dataset_text_field"),
    Equivalent("--experiment_name", "output_dir run_name"),
    Equivalent("--log_to_wandb", "report_to", "`--log_to_trackio` for Trackio"),
    Equivalent(
        "",
        "precompute_ref_log_probs",
        "the log-probs of the reference are always computed before the first step",
    ),
    Equivalent("", "packing padding_free reference_free dataset_num_proc"),
)
"""Keys of supervised and preference runs."""

_OF_COMPONENTS = ("reward_fn.", "datapool.", "train_evaluation.metrics.", "alg.policy.args.peft.", "alg.peft.")
"""Blocks whose keys are the arguments of components or of other libraries."""


def by_name(rows: Iterable[Equivalent]) -> dict[str, Equivalent]:
    """Return the rows by each of their names."""
    return {name: row for row in rows for name in row.names.split()}


_RL = by_name(RL_KEYS)
_OFFLINE = by_name(OFFLINE_KEYS)


def with_equivalent(
    issue: ConfigIssue, *, is_rl: bool, algorithm: str = "", settings: Collection[str] | None = None
) -> ConfigIssue:
    """Return an error of a config; for an unknown key of another library, with the equivalent key of this library.

    Args:
        issue: error of a config.
        is_rl: False for supervised and preference runs.
        algorithm: id of the run's algorithm.
        settings: its keys in `alg.args`, None if they are not known.
    """
    if not issue.message.startswith(UNKNOWN_KEY) or issue.path.startswith(_OF_COMPONENTS):
        return issue
    row = (_RL if is_rl else _OFFLINE).get(issue.path.rpartition(".")[2])

    # A key of the block that has the name elsewhere: it is another key that this block lacks.
    if row is None or (row.key and issue.path.startswith(f"{row.key}.")):
        return issue
    if settings is not None and _is_missing(row.key, "alg.args", settings):
        return ConfigIssue(issue.path, f"{UNKNOWN_KEY}; {_missing(row, algorithm)}")
    if row.key == issue.path:
        return issue
    return ConfigIssue(issue.path, f"{UNKNOWN_KEY}; {_explained(row, row.key)}")


def refuse_names_of_elsewhere(owner: str, arguments: Mapping[str, Any], known: Collection[str], block: str) -> None:
    """Raise for a Python argument that other libraries have, before Python refuses it without the equivalent.

    Args:
        owner: class that is called.
        arguments: of the call.
        known: names of the arguments that it has.
        block: of the config, whose keys are these arguments.

    Raises:
        TypeError: one of the arguments is another library's.
    """
    for name in arguments:
        row = _RL.get(name)
        if row is not None and name not in known:
            key = row.key.removeprefix(f"{block}.")
            explained = _missing(row, owner) if _is_missing(row.key, block, known) else _explained(row, key)
            raise TypeError(f"{owner} got an unexpected keyword argument {name!r}; {explained}")


def _is_missing(key: str, block: str, known: Collection[str]) -> bool:
    """Return True if a key is one of the block, which has only the known ones."""
    return key.startswith(f"{block}.") and key.removeprefix(f"{block}.").partition(".")[0] not in known


def _missing(row: Equivalent, owner: str) -> str:
    # A note may say what this algorithm has instead.
    note = f": {row.note.replace('`', '')}" if f"`{owner}`" in row.note else ""
    return f"{owner} has no such setting{note} ({PAGE})"


def _explained(row: Equivalent, key: str) -> str:
    note = row.note.replace("`", "")
    if not key:
        return f"there is no equivalent{f': {note}' if note else ''} ({PAGE})"
    return f"the equivalent is {key}{f', {note}' if note else ''} ({PAGE})"


# --- the page ---------------------------------------------------------------------------------------------------------


def with_tables(page: str) -> str:
    """Return the page with its tables made from the rows above; they are between `<!-- keys of ... -->` comments."""
    for marker, rows in (("RL runs", RL_KEYS), ("supervised and preference runs", OFFLINE_KEYS)):
        begin = f"<!-- keys of {marker} -->\n"
        end = f"<!-- end of keys of {marker} -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = before + begin + _table(rows) + end + after
    return page


def _table(rows: Iterable[Equivalent]) -> str:
    lines = ["| TRL and others | rl4lms-like |", "|---|---|"]
    for row in rows:
        names = ", ".join(f"`{name}`" for name in row.names.split())
        key = f"`{row.key}`" if row.key else "no equivalent"
        lines.append(f"| {names} | {key}{f': {row.note}' if row.note else ''} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(with_tables(file.read_text(encoding="utf-8")), encoding="utf-8")
