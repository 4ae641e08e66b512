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

from rl4lms_like.core import not_included
from rl4lms_like.core.marked_parts import with_part
from rl4lms_like.core.not_included import NOT_INCLUDED
from rl4lms_like.system.errors import ConfigIssue
from rl4lms_like.system.schema import UNKNOWN_KEY

PAGE = "docs/coming_from_trl.md"


class Equivalent(NamedTuple):
    """Row of a table.

    Attributes:
        key: key of this library, or option of the command line; empty if there is no equivalent.
        names: names of the same setting elsewhere, separated by spaces.
        note: what is different, or why there is no equivalent.
        page: page with the row.
    """

    key: str
    names: str
    note: str = ""
    page: str = PAGE


_PEFT_FIELDS = "its fields have PEFT's names: `r`, `lora_alpha`, `lora_dropout`, `target_modules`"
_PEFT_NAMES = (
    "lora lora_config peft_config use_peft lora_r lora_rank lora_alpha lora_dropout lora_target_modules lora.rank "
    "lora.alpha lora.dropout lora.target_modules"
)
_QUANTIZATION = "`{id: nf4}` has 4 bits, `{id: int8}` 8 bits; `double: true` quantizes the scales too; with `peft`"
_QUANTIZATION_NAMES = "load_in_4bit load_in_8bit use_bnb_nested_quant bnb_4bit_quant_type quantization_config"

_BLOCKS_OF_OPENRLHF = "the page has each option of OpenRLHF by its whole name, such as `actor.eps_clip`"

_OF_EVERY_RUN = (
    Equivalent(
        "",
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision",
        "`rl4lms-like push RUN REPO` uploads the model of a run",
    ),
    Equivalent(
        "",
        "accelerator_config local_rank ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters "
        "ddp_static_graph average_tokens_across_devices",
        "`torchrun` starts several processes, which compute what one would",
    ),
    Equivalent("", "router_aux_loss_coef aux_loss_coef experts_implementation", "it is that of the model's config"),
    Equivalent("", "pad_to_multiple_of", "padding changes numbers by rounding only and has no setting"),
    Equivalent("", "chat_template_kwargs", "a template gets no arguments; write them into `tokenizer.chat_template`"),
    Equivalent("", "input_template", "`prompt_prefix` and `prompt_suffix` of a data pool are put around each prompt"),
    Equivalent("", "dataset_probs prompt_probs", "one data pool gives all prompts; join the files before"),
    Equivalent("", "disable_fast_tokenizer", "tokenizers are fast ones if the model has one"),
    Equivalent("", "max_mem", "`keep_last` and `save_total_limit` limit the checkpoints by their number"),
    Equivalent("", "wandb.group wandb.run_name", "the project and the name of a run are those of its folder"),
    Equivalent("", "use_ms", "models are names on the Hugging Face Hub, or folders"),
    Equivalent(
        "",
        "ignore_data_skip restore_callback_states_from_checkpoint save_only_model save_on_each_node "
        "enable_jit_checkpoint",
        "a resumed run continues where it was, byte for byte",
    ),
)
"""Keys without an equivalent in runs of any kind."""

_OF_THE_TRAINER = (
    Equivalent(
        "",
        "logging_steps logging_strategy logging_first_step log_level log_level_replica log_on_each_node disable_tqdm "
        "logger.logging_steps include_num_input_tokens_seen",
        "each iteration is logged, and printed as a line",
    ),
    Equivalent("", "logging_nan_inf_filter", "a loss that is not finite ends a run, unless `non_finite` is `skip`"),
    Equivalent("", "eval_on_start eval_delay", "the initial model is always evaluated"),
    Equivalent(
        "",
        "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object include_for_metrics batch_eval_metrics "
        "prediction_loss_only",
        "evaluations generate texts, which `train_evaluation.metrics` score",
    ),
    Equivalent(
        "",
        "dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers "
        "dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor train_sampling_strategy "
        "length_column_name",
        "prompts are drawn by `datapool.sampler`",
    ),
    Equivalent("", "remove_unused_columns label_names", "a reward gets the columns that it names"),
    Equivalent("", "do_train do_eval do_predict", "`train` and `evaluate` are commands"),
    Equivalent(
        "",
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs gradient_checkpointing_reentrant",
        "`gradient_checkpointing` has no settings",
    ),
    Equivalent("", "debug skip_memory_metrics tf32 torch_empty_cache_steps", "these are torch's own settings"),
)
"""Keys of transformers' Trainer without an equivalent in RL runs."""

RL_KEYS = (
    Equivalent("alg.policy.args.model_name", "sft_model_path model_name_or_path policy_model actor_model pretrain"),
    Equivalent("alg.policy.args.reference_model", "ref_model ref_model_path ref.model_name_or_path"),
    Equivalent(
        "alg.policy.args.critic_model", "value_model value_model_path critic_pretrain critic.model_name_or_path"
    ),
    Equivalent("alg.policy.args.peft", _PEFT_NAMES, _PEFT_FIELDS),
    Equivalent("alg.policy.args.quantization", _QUANTIZATION_NAMES, _QUANTIZATION),
    Equivalent("alg.policy.args.dtype", "bf16 fp16 bf16_full_eval fp16_full_eval ds.param_dtype", "`bfloat16`"),
    Equivalent("alg.policy.args.trust_remote_code", "trust_remote_code"),
    Equivalent("alg.policy.args.attn_implementation", "attn_implementation"),
    Equivalent("alg.policy.args.compile", "torch_compile"),
    Equivalent("alg.policy.args.weight_decay", "weight_decay adam.weight_decay"),
    Equivalent(
        "alg.policy.args.optimizer_kwargs",
        "adam_beta1 adam_beta2 adam_epsilon optim_args adam.betas adam.eps",
        "`betas` and `eps` of AdamW",
    ),
    Equivalent(
        "alg.policy.args.activation_offload", "activation_offloading enable_activation_offload offload_activations"
    ),
    Equivalent(
        "alg.policy.args.offload",
        "optimizer_offload offload_optimizer deepspeed_enable_sleep ds.enable_sleep",
        "`moments`; weights stay on the GPU",
    ),
    Equivalent("alg.policy.args.dropout", "disable_dropout", "with the opposite meaning"),
    Equivalent(
        "alg.policy.args.gradient_checkpointing",
        "gradient_checkpointing gradient_checkpointing_enable activation_checkpointing",
    ),
    Equivalent(
        "alg.policy.args.engine",
        "use_vllm vllm_mode vllm_server_base_url vllm_server_host vllm_server_port vllm_num_engines "
        "vllm.num_engines vllm_server_timeout",
        "`{id: vllm, args: {url, weights_dir}}`; the server is started separately",
    ),
    Equivalent(
        "alg.policy.args.generation_kwargs.max_new_tokens",
        "response_length max_completion_length max_response_length generate_max_len rollout.max_new_tokens",
    ),
    Equivalent(
        "alg.policy.args.generation_kwargs",
        "temperature top_p top_k min_p repetition_penalty generation_kwargs",
        "of the sampling only: the model is trained at temperature 1",
    ),
    Equivalent("alg.policy.args.generation_kwargs.cache_implementation", "cache_implementation"),
    Equivalent("env.args.max_prompt_length", "max_prompt_length prompt_max_len"),
    Equivalent(
        "env.n_envs",
        "rollout_batch_size local_rollout_forward_batch_size rollout.micro_batch_size",
        "responses that are generated together",
    ),
    Equivalent("env.dialogue", "environment_factory rollout_func agent_func_path", "a class with `reset` and `step`"),
    Equivalent("env.dialogue.max_turns", "max_tool_calling_iterations", "the final answer is a turn, too"),
    Equivalent("alg.args.n_episodes", "generation_batch_size", "generated `env.n_envs` at a time"),
    Equivalent("alg.args.n_episodes", "rollout.batch_size", "responses, not prompts"),
    Equivalent("alg.args.minibatch_episodes", "steps_per_generation", "a number of episodes, not of steps"),
    Equivalent("alg.args.warmup_iterations", "warmup_steps lr_warmup_steps lr_warmup_ratio", "in iterations"),
    Equivalent("datapool.sampler", "shuffle_dataset", "`{id: shuffled}`"),
    Equivalent(
        "alg.id",
        "adv_estimator advantage_estimator policy_loss_type algo.advantage.estimator",
        "`grpo`, `rloo`, `reinforce_pp`, `gspo` ...",
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
        "scale_rewards norm_adv_by_std_in_grpo no_advantage_std_norm normalize_advantages no_std_norm",
        "`group`, `batch` or `none`",
    ),
    Equivalent("alg.args.ratio_level", "importance_sampling_level", "`sequence` is `alg.id: gspo`"),
    Equivalent("alg.args.clip_range", "cliprange clip_ratio clip_ratio_low eps_clip epsilon"),
    Equivalent(
        "alg.args.clip_range_high",
        "epsilon_high clip_ratio_high eps_clip_low_high",
        "the distance from 1, also for `cispo`, where TRL's `epsilon_high` is the largest ratio",
    ),
    Equivalent("alg.args.dual_clip", "delta clip_ratio_c actor.dual_clip"),
    Equivalent(
        "alg.args.importance_correction",
        "vllm_importance_sampling_correction vllm_importance_sampling_mode enable_vllm_is_correction "
        "is_correction_enable is_correction_type",
    ),
    Equivalent(
        "alg.args.correction_range",
        "vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_is_truncated_threshold "
        "tis_imp_ratio_cap vllm_importance_sampling_clip_min is_correction_threshold",
    ),
    Equivalent("alg.args.dynamic_sampling", "filter_groups dynamic_filtering dynamic_filtering_enable"),
    Equivalent(
        "alg.args.overlong_buffer", "overlong_buffer_len overlong_penalty_factor", "a fraction of the longest response"
    ),
    Equivalent("alg.args.reference_update_iterations", "sync_ref_model ref_model_sync_steps"),
    Equivalent("alg.args.reference_mixing", "ref_model_mixup_alpha"),
    Equivalent("alg.args.learning_rate", "learning_rate actor_learning_rate actor.adam.lr"),
    Equivalent("alg.args.critic_learning_rate", "critic.adam.lr"),
    Equivalent("alg.args.critic_only_iterations", "freezing_steps", "a number of iterations"),
    Equivalent("alg.args.learning_rate_schedule", "lr_scheduler_type lr_scheduler"),
    Equivalent("alg.args.max_grad_norm", "max_grad_norm grad_clip max_norm"),
    Equivalent("alg.args.n_epochs", "ppo_epochs num_ppo_epochs num_iterations max_epochs"),
    Equivalent(
        "alg.args.batch_size",
        "mini_batch_size num_mini_batches ppo_mini_batch_size train_batch_size train.batch_size",
        "tokens of a minibatch; `alg.args.minibatch_episodes` counts episodes",
    ),
    Equivalent(
        "alg.args.micro_batch_size",
        "per_device_train_batch_size gradient_accumulation_steps micro_train_batch_size ppo_micro_batch_size "
        "train.micro_batch_size train.max_tokens_per_gpu rollout.max_tokens_per_gpu auto_find_batch_size "
        "ppo_micro_batch_size_per_gpu",
        "tokens of a forward pass; it changes numbers by rounding only",
    ),
    Equivalent("alg.args.clip_range_vf", "cliprange_value value_clip"),
    Equivalent("alg.args.vf_coef", "vf_coef"),
    Equivalent("alg.args.ent_coef", "entropy_coeff entropy_coef"),
    Equivalent("alg.args.gamma", "gamma"),
    Equivalent("alg.args.gae_lambda", "lam lambd"),
    Equivalent("alg.kl_div.coeff", "kl_coef init_kl_coef kl_loss_coef beta init_coef"),
    Equivalent("alg.kl_div.target_kl", "target kl_target"),
    Equivalent("alg.kl_div.horizon", "horizon kl_horizon"),
    Equivalent("alg.kl_div.controller", "adap_kl_ctrl"),
    Equivalent("alg.kl_div.estimator", "kl_estimator kl_penalty kl_loss_type algo.kl.estimator"),
    Equivalent(
        "alg.kl_div.placement", "use_kl_loss use_kl_in_reward algo.kl.use_loss", "`loss`, `reward` or `advantage`"
    ),
    Equivalent("alg.kl_div.norm_reward", "whiten_rewards use_score_scaling reward.normalize_enable"),
    Equivalent(
        "train_evaluation.n_iters",
        "total_episodes num_episodes max_steps num_train_epochs total_training_steps total_epochs",
        "an iteration is one rollout and one update",
    ),
    Equivalent("train_evaluation.eval_batch_size", "per_device_eval_batch_size"),
    Equivalent("train_evaluation.eval_every", "eval_steps test_freq eval_strategy eval.steps", "in iterations"),
    Equivalent("train_evaluation.save_every", "save_steps save_freq save_strategy", "in iterations"),
    Equivalent("train_evaluation.keep_last", "save_total_limit max_ckpt_num max_actor_ckpt_to_keep ckpt.max_num"),
    Equivalent(
        "train_evaluation.keep_best", "load_best_model_at_end metric_for_best_model greater_is_better best_metric_key"
    ),
    Equivalent("reward_fn", "reward_model_path reward_pretrain reward_funcs reward.model_name_or_path"),
    Equivalent("reward_fn", "reward_weights", "`{id: combine}`, whose parts have weights"),
    Equivalent("datapool", "dataset_name prompt_data train_files prompt_dataset eval.dataset"),
    Equivalent("--experiment_name", "output_dir run_name ckpt.output_dir"),
    Equivalent("--log_to_wandb", "report_to use_wandb logger.wandb.key", "`--log_to_trackio` for Trackio"),
    Equivalent("--log_to_trackio", "trackio_space_id trackio_bucket_id trackio_static_space_id", "to a local folder"),
    Equivalent("--project_name", "project wandb.project"),
    Equivalent("--entity_name", "wandb.org"),
    Equivalent("--resume", "resume_from_checkpoint load_enable ckpt.path", "or the same command once more"),
    Equivalent("seed", "data_seed train.seed seed"),
    Equivalent("deterministic", "full_determinism full_determinism_enable"),
    Equivalent("device", "use_cpu", "`cpu`"),
    Equivalent("distributed.strategy", "fsdp fsdp_config", "`fsdp`"),
    Equivalent("distributed.timeout", "ddp_timeout", "seconds"),
    Equivalent("tokenizer.chat_template", "apply_chat_template"),
    Equivalent("train_evaluation.generation_kwargs", "eval.temperature", "of the sampling in evaluations"),
    Equivalent("train_evaluation.save_model", "save_hf", "the model is saved for transformers in any case"),
    Equivalent(
        "train_evaluation.save_rollouts",
        "log_completions num_completions_to_print log_unique_prompts log_completions_hub_repo log_multimodal",
        "keeps all responses; each evaluation writes those of its prompts",
    ),
    Equivalent("alg.args.tensorboard_log", "tensorboard_dir"),
    Equivalent("reward_fn", "remote_url", "`{id: http}` asks a server, `FILE.py:NAME` is a function"),
    Equivalent("datapool", "prompt_split eval.split", "`data_files` and other arguments of a pool give the splits"),
    Equivalent(
        "datapool",
        "input_key label_key image_key",
        "`prompt_column`, `reference_column`, `image_column` and `meta_columns` name columns",
    ),
    Equivalent("datapool", "data.max_samples", "`max_size`, an argument of every pool"),
    *_OF_EVERY_RUN,
    *_OF_THE_TRAINER,
    Equivalent("", "algo actor ckpt ds logger rollout", _BLOCKS_OF_OPENRLHF),
    Equivalent(
        "",
        "optim optim_target_modules muon.lr muon.momentum muon.nesterov muon.no_nesterov muon.ns_steps",
        "`alg.policy.args.optimizer` has AdamW in float32 or with moments in 8 bits, and `a2c` RMSprop",
    ),
    Equivalent("", "torch_compile_backend torch_compile_mode", "`compile` has torch's defaults"),
    Equivalent("", "lr_scheduler_kwargs min_lr_ratio", "the schedules `linear` and `cosine` end at 0"),
    Equivalent("", "model_init_kwargs", "`alg.policy.args` has `dtype`, `attn_implementation` and `trust_remote_code`"),
    Equivalent("", "data.max_len", "`env.args.max_prompt_length` and `max_new_tokens` limit prompt and response"),
    Equivalent("", "cast_lm_head_to_fp32", "log-probs are always computed in float32"),
    Equivalent("", "liger_kernel_config use_liger_kernel", "Liger's losses are for supervised and preference runs"),
    Equivalent("", "neftune_noise_alpha label_smoothing_factor", "of supervised runs only"),
    Equivalent(
        "",
        "num_generations_eval eval.n_samples_per_prompt",
        "an evaluation writes one response to each prompt, and as many as the metrics `pass_at_k` and `maj_at_k` need",
    ),
    Equivalent("", "multi_objective_aggregation", "several rewards are added with their weights (`combine`)"),
    Equivalent(
        "",
        "use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
        "the coefficient of the entropy is constant",
    ),
    Equivalent(
        "",
        "sapo_temperature_neg sapo_temperature_pos vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos",
        "the losses `sapo` and `vespo` are not included",
    ),
    Equivalent(
        "",
        "mask_truncated_completions missing_eos_penalty stop_properly_penalty_coef",
        "`overlong_buffer` lowers the reward of long responses; a reward of your own may lower that of truncated ones",
    ),
    Equivalent("", "reward.clip_range reward_clip_range", "a reward function may clip its values"),
    Equivalent("", "dynamic_filtering_range", "`dynamic_sampling` replaces groups whose rewards are all equal"),
    Equivalent("", "top_entropy_quantile off_policy_mask_threshold", "all tokens of a response are learned"),
    Equivalent("", "use_bias_correction_kl", "the KL term of the loss is not multiplied by the ratio"),
    Equivalent("", "vllm_structured_outputs_regex", "responses have no given form; the reward `regex` scores it"),
    Equivalent(
        "",
        "use_cache use_transformers_paged use_transformers_continuous_batching transformers_continuous_batching_config",
        "rollouts have transformers' usual cache; an `engine` batches continuously",
    ),
    Equivalent(
        "",
        "async_enable async_queue_size partial_rollout_enable",
        "`engine: {id: vllm, ahead: k}` generates each rollout during the `k` updates before it",
    ),
    Equivalent("train_evaluation.average", "enable_ema ema_beta", "a block: `{decay: 0.99}`"),
    Equivalent("alg.ptx", "ptx_coef pretrain_data", "a block with the texts and the coefficient"),
    Equivalent(
        "", "critic.save_value_network", "`pretrain-critic` saves a critic; that of a run is in its checkpoints"
    ),
    Equivalent("alg.policy.args.train_vision", "freeze_visual_encoder", "`none`, the default, freezes it"),
    Equivalent("", "max_images_per_prompt", "a prompt may have any number of images within `max_prompt_length`"),
    Equivalent("", "dynamic_batch_enable", "micro-batches have a number of tokens, `micro_batch_size`"),
    Equivalent("alg.policy.args.packing", "packing_samples use_remove_padding", "`auto`"),
)
"""Keys of RL runs."""

OFFLINE_KEYS = (
    Equivalent("alg.model_name", "model_name_or_path pretrain"),
    Equivalent("alg.peft", _PEFT_NAMES, _PEFT_FIELDS),
    Equivalent("alg.quantization", _QUANTIZATION_NAMES, _QUANTIZATION),
    Equivalent(
        "alg.training_args",
        "learning_rate num_train_epochs max_steps per_device_train_batch_size gradient_accumulation_steps weight_decay "
        "warmup_steps lr_scheduler_type max_grad_norm bf16 gradient_checkpointing logging_steps eval_steps save_steps "
        "save_total_limit load_best_model_at_end metric_for_best_model neftune_noise_alpha",
        "arguments of transformers' Trainer have the same names in this block",
    ),
    Equivalent(
        "alg.training_args",
        "adam.lr adam.betas adam.eps adam.weight_decay optim lr_scheduler lr_warmup_ratio min_lr_ratio max_norm",
        "`learning_rate`, `adam_beta1`, `adam_beta2`, `adam_epsilon`, `weight_decay`, `optim`, `lr_scheduler_type`, "
        "`warmup_steps`, `lr_scheduler_kwargs`, `max_grad_norm`",
    ),
    Equivalent(
        "alg.training_args",
        "train.batch_size train.micro_batch_size max_epochs eval.steps ckpt.max_num ds.param_dtype",
        "`per_device_train_batch_size` and `gradient_accumulation_steps`, `num_train_epochs`, `eval_steps`, "
        "`save_total_limit`, `bf16`",
    ),
    Equivalent(
        "alg.training_args",
        "gradient_checkpointing_enable gradient_checkpointing_reentrant use_liger_kernel dataloader_num_workers",
        "`gradient_checkpointing` and `gradient_checkpointing_kwargs`; the others have the same names",
    ),
    Equivalent("alg.args.beta", "beta model.beta", "`alg.args.odds_ratio_weight` of `orpo`"),
    Equivalent(
        "alg.args.loss",
        "loss_type ipo_enable",
        "`sigmoid`, `hinge` or `robust`; the losses `ipo`, `kto`, `orpo` and `simpo` are values of `alg.id`",
    ),
    Equivalent("alg.args.label_smoothing", "label_smoothing model.label_smoothing"),
    Equivalent("alg.args.sft_weight", "rpo_alpha nll_loss_coef"),
    Equivalent("alg.args.gamma", "simpo_gamma"),
    Equivalent("alg.args.desirable_weight", "desirable_weight"),
    Equivalent("alg.args.undesirable_weight", "undesirable_weight"),
    Equivalent("alg.args.center_coef", "center_rewards_coefficient"),
    Equivalent("alg.args.reference_model", "ref_model ref_model_path ref.model_name_or_path"),
    Equivalent("alg.args.dropout", "disable_dropout", "with the opposite meaning"),
    Equivalent("alg.args.max_response_length", "max_completion_length"),
    Equivalent("alg.loss_on_prompt", "completion_only_loss pretrain_mode_enable", "with the opposite meaning"),
    Equivalent(
        "tokenizer.max_length",
        "max_prompt_length max_length max_seq_length data.max_len",
        "tokens of the prompt, not of both texts",
    ),
    Equivalent("tokenizer.truncation_side", "truncation_mode", "`left` keeps the end of a prompt"),
    Equivalent("tokenizer.chat_template", "chat_template_path apply_chat_template tokenizer_chat_template"),
    Equivalent("train_evaluation.eval_batch_size", "per_device_eval_batch_size"),
    Equivalent("datapool", "dataset_name dataset_text_field data.dataset eval.dataset dataset_split eval.split"),
    Equivalent("--experiment_name", "output_dir run_name ckpt.output_dir"),
    Equivalent("--log_to_wandb", "report_to logger.wandb.key", "`--log_to_trackio` for Trackio"),
    Equivalent("--log_to_trackio", "trackio_space_id trackio_bucket_id trackio_static_space_id", "to a local folder"),
    Equivalent("--project_name", "project wandb.project"),
    Equivalent("--entity_name", "wandb.org"),
    Equivalent("--resume", "resume_from_checkpoint load_enable ckpt.path", "or the same command once more"),
    Equivalent("seed", "data_seed train.seed seed"),
    Equivalent("deterministic", "full_determinism full_determinism_enable"),
    Equivalent("tokenizer.trust_remote_code", "trust_remote_code"),
    Equivalent("", "margin_loss_enable", "`reward_model` reads margins with `datapool.args.margin_column`"),
    Equivalent(
        "alg.packing",
        "packing packing_strategy eval_packing packing_samples padding_free",
        "`auto` packs the rows of each batch; batches stay the same, and numbers change by rounding only",
    ),
    Equivalent(
        "datapool",
        "input_key output_key prompt_key chosen_key rejected_key multiturn",
        "its columns are named by `prompt_column`, `reference_column`, `chosen_column` and `rejected_column`",
    ),
    Equivalent("datapool", "data.max_samples", "`max_size`, an argument of every pool"),
    *_OF_EVERY_RUN,
    Equivalent("", "ckpt ds logger", _BLOCKS_OF_OPENRLHF),
    Equivalent(
        "",
        "precompute_ref_log_probs precompute_ref_batch_size reference_free",
        "the log-probs of the reference are always computed before the first step; of one that moves, in each step",
    ),
    Equivalent(
        "alg.args.reference_update_iterations", "sync_ref_model ref_model_sync_steps", "of `dpo`, `ipo` and `kto`"
    ),
    Equivalent("alg.args.reference_mixing", "ref_model_mixup_alpha", "of `dpo`, `ipo` and `kto`"),
    Equivalent("", "dataset_num_proc", "texts are encoded in the main process"),
    Equivalent("", "dataset_kwargs shuffle_dataset", "examples are shuffled in each epoch, with the run's seed"),
    Equivalent("", "assistant_only_loss", "of conversations, the turns of the assistant are learned in any case"),
    Equivalent("", "eos_token pad_token", "the tokenizer's own; `pad_token_as_eos_token` adds a missing pad token"),
    Equivalent("alg.activation_offload", "activation_offloading enable_activation_offload offload_activations"),
    Equivalent("alg.attn_implementation", "attn_implementation"),
    Equivalent("", "model_init_kwargs", "the model is loaded with the settings of its folder"),
    Equivalent(
        "",
        "loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef use_weighting discopop_tau",
        "`dpo` has the losses `sigmoid`, `hinge` and `robust`, and `sft_weight`",
    ),
    Equivalent("", "compute_fp32_loss_enable", "losses are always computed in float32"),
    Equivalent("", "tensorboard_dir", "numbers are in the files and in the report of a run's folder"),
    Equivalent(
        "",
        "muon.lr muon.momentum muon.nesterov muon.no_nesterov muon.ns_steps",
        "`optim` in `alg.training_args` has the optimizers of transformers' Trainer",
    ),
    Equivalent("", "save_hf", "the model is saved for transformers in any case"),
)
"""Keys of supervised and preference runs."""

_OF_COMPONENTS = (
    *("reward_fn.", "datapool.", "alg.ptx.data.", "train_evaluation.metrics.", "train_evaluation.callbacks."),
    *("alg.policy.args.peft.", "alg.peft."),
)
"""Blocks whose keys are the arguments of components or of other libraries."""


_NOT_INCLUDED = tuple(Equivalent("", row.keys, row.sentence, not_included.PAGE) for row in NOT_INCLUDED)


def by_name(rows: Iterable[Equivalent]) -> dict[str, Equivalent]:
    """Return the rows by each of their names."""
    return {name: row for row in rows for name in row.names.split()}


_RL = by_name((*RL_KEYS, *_NOT_INCLUDED))
_OFFLINE = by_name((*OFFLINE_KEYS, *_NOT_INCLUDED))


def row_of(path: str, *, is_rl: bool) -> Equivalent | None:
    """Return the row for a key of another library, by the longest of the names that its path ends with.

    Args:
        path: path of the key; OpenRLHF's options have dots in their names.
        is_rl: False for supervised and preference runs.

    Examples:
        >>> [row_of(path, is_rl=True).key for path in ("critic.adam.lr", "actor.adam.lr", "alg.args.lam")]
        ['alg.args.critic_learning_rate', 'alg.args.learning_rate', 'alg.args.gae_lambda']
    """
    rows = _RL if is_rl else _OFFLINE
    names = path.split(".")
    for start in range(len(names)):
        row = rows.get(".".join(names[start:]))
        if row is not None:
            return row
    return None


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
    row = row_of(issue.path, is_rl=is_rl)

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
    return f"{owner} has no such setting{note} ({row.page})"


def _explained(row: Equivalent, key: str) -> str:
    note = row.note.replace("`", "")
    if row.page != PAGE:
        return f"{note} ({row.page})"
    if not key:
        return f"there is no equivalent{f': {note}' if note else ''} ({PAGE})"
    return f"the equivalent is {key}{f', {note}' if note else ''} ({PAGE})"


# --- the page ---------------------------------------------------------------------------------------------------------


def with_tables(page: str) -> str:
    """Return the page with its tables made from the rows above; they are between `<!-- keys of ... -->` comments."""
    page = with_part(page, "keys of RL runs", _table(RL_KEYS))
    return with_part(page, "keys of supervised and preference runs", _table(OFFLINE_KEYS))


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
