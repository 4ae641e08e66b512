"""What the command line starts: train from a YAML file, evaluate a model, write texts with one."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl4lms_like.core.errors import ConfigError, Mistake, RL4LMsLikeError
from rl4lms_like.training.config import AnyConfig, RunConfig, load_config, parse_config

logger = logging.getLogger(__name__)


def train(
    config_path: str | Path,
    *,
    project_name: str = "rl4lm_exps",
    experiment_name: str = "rl4lm_experiment",
    entity_name: str | None = None,
    base_path_to_store_results: str | Path = ".",
    log_to_wandb: bool = False,
    overrides: Sequence[str] = (),
) -> Path:
    """Trains as a YAML file says.

    Returns:
        The run folder.

    Raises:
        RL4LMsLikeError: whatever went wrong, by name; what was logged before stays.
    """
    return train_config(
        load_config(config_path, overrides),
        project_name=project_name,
        experiment_name=experiment_name,
        entity_name=entity_name,
        base_path_to_store_results=base_path_to_store_results,
        log_to_wandb=log_to_wandb,
    )


def train_config(
    config: AnyConfig,
    *,
    project_name: str = "rl4lm_exps",
    experiment_name: str = "rl4lm_experiment",
    entity_name: str | None = None,
    base_path_to_store_results: str | Path = ".",
    log_to_wandb: bool = False,
    quiet: bool = False,
) -> Path:
    """Trains as a config says; see `train`."""
    if not isinstance(config, RunConfig):
        raise ConfigError(
            [Mistake("alg.id", "supervised runs are not there yet; known: see `rl4lms-like list algorithms`")]
        )
    from rl4lms_like.tracking.base import Tracker
    from rl4lms_like.tracking.report import write_report
    from rl4lms_like.training.assemble import assemble
    from rl4lms_like.training.trainer import OnPolicyTrainer

    calm_libraries()
    for notice in config.notices:
        logger.info("%s", notice)
    run = assemble(config)
    try:
        with Tracker(
            base_path_to_store_results,
            config.to_dict(),
            project_name,
            experiment_name,
            entity_name,
            log_to_wandb,
            tensorboard_log=config.alg.args.get("tensorboard_log"),
            quiet=quiet,
        ) as tracker:
            for notice in config.notices:
                tracker.log_info(str(notice))
            try:
                OnPolicyTrainer(run, tracker).train_and_eval()
            finally:
                tracker.log_info(f"report: {write_report(tracker.run_path)}")
    finally:
        run.env.close()
    return tracker.run_path


def evaluate_run(
    run_or_model: str | Path,
    *,
    split: str = "test",
    config_path: str | Path | None = None,
    output: str | Path | None = None,
    decoding: str | None = None,
    num_beams: int | None = None,
    max_new_tokens: int | None = None,
    batch_size: int | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Measures a finished run's model, or any model, on a split.

    Args:
        run_or_model: a run's folder, a model's folder or a hub id.
        split: `train`, `val` or `test`.
        config_path: YAML file with data pool, metrics and lengths; default: the run's own config.
        output: folder for `<split>_split_metrics.jsonl` and the predictions; default: `evaluation/` in the run's
            folder, or the current folder.
        decoding: `sampling`, `greedy` or `beam`; default: as the config evaluates.
        num_beams: of `beam`.
        max_new_tokens: longest response.
        batch_size: prompts per generation call; default: the config's.
        limit: only the first so many samples.
        seed: of the sampling.

    Returns:
        Metric key -> score.
    """
    from rl4lms_like.metrics import METRICS
    from rl4lms_like.tracking.run_folder import RunFolder
    from rl4lms_like.training.assemble import build_datapool, build_tokenizer
    from rl4lms_like.training.evaluation import evaluate_on_samples

    calm_libraries()
    config, model = _config_and_model(run_or_model, config_path)
    policy = _policy_alone(config, model)
    tokenizer = build_tokenizer(dataclasses.replace(config.tokenizer, model_name=model))
    samples = build_datapool(config.datapool, split).samples[:limit]
    evaluation = config.train_evaluation
    result = evaluate_on_samples(
        policy,
        tokenizer,
        samples,
        [METRICS.get(metric.id, metric.args) for metric in evaluation.metrics],
        split_name=split,
        batch_size=batch_size or evaluation.eval_batch_size,
        max_prompt_length=config.env.args.get("max_prompt_length") or tokenizer.model_max_length,
        eos_token_ids=[] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id],
        generation_kwargs=decoding_arguments(
            evaluation.generation_kwargs or config.alg.policy.args.get("generation_kwargs") or {},
            decoding,
            num_beams=num_beams,
            max_new_tokens=max_new_tokens,
        ),
        seed=seed,
    )
    folder = Path(output) if output else Path(run_or_model) / "evaluation" if Path(run_or_model).is_dir() else Path()
    folder.mkdir(parents=True, exist_ok=True)
    files = RunFolder(folder)
    files.log_metrics(0, split, result.scores)
    files.log_predictions(0, split, result.predictions)
    for key, score in result.scores.items():
        print(f"{key:<48} {score:.4f}")
    print(f"{len(samples)} samples of {split}; files in {folder}")
    return result.scores


def generate_texts(
    model: str | Path,
    prompts: Sequence[str],
    *,
    n: int = 1,
    max_new_tokens: int | None = None,
    decoding: str | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    seed: int = 0,
) -> list[list[str]]:
    """Texts of a tuned model.

    Args:
        model: a run's folder, a model's folder or a hub id.
        prompts: what to continue or answer.
        n: texts for each prompt.
        max_new_tokens: longest response; default: the run's, else 64.
        decoding: `sampling`, `greedy` or `beam`; default: as the run sampled its rollouts, else sampling.
        temperature: of the sampling.
        top_k: sample from the k likeliest tokens; 0 from all.
        seed: of the sampling.

    Returns:
        For each prompt `n` texts.
    """
    from rl4lms_like.policies.loading import load_tokenizer
    from rl4lms_like.training.evaluation import generate_responses

    calm_libraries()
    folder = Path(model)
    config = _run_config(folder)
    name = str(folder / "model") if config is not None else str(model)
    own = {} if config is None else config.alg.policy.args.get("generation_kwargs") or {}
    arguments = decoding_arguments(
        own or {"do_sample": True, "top_k": 0, "max_new_tokens": 64}, decoding, max_new_tokens=max_new_tokens
    )
    arguments |= {key: value for key, value in (("temperature", temperature), ("top_k", top_k)) if value is not None}
    policy = _policy_alone(config, name)
    tokenizer = load_tokenizer(name)
    texts = generate_responses(
        policy,
        tokenizer,
        [prompt for prompt in prompts for _ in range(n)],
        batch_size=32,
        max_prompt_length=min(tokenizer.model_max_length, 1_000_000),
        eos_token_ids=[] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id],
        generation_kwargs=arguments,
        seed=seed,
    )
    return [texts[i * n : (i + 1) * n] for i in range(len(prompts))]


def decoding_arguments(
    generation_kwargs: Mapping[str, Any],
    decoding: str | None,
    *,
    num_beams: int | None = None,
    max_new_tokens: int | None = None,
) -> dict[str, Any]:
    """Generation arguments with another way of decoding; None keeps the one they ask for.

    Args:
        generation_kwargs: where to start from.
        decoding: `sampling`, `greedy` or `beam`.
        num_beams: of `beam`, 5 unless given.
        max_new_tokens: replaces theirs.
    """
    arguments = dict(generation_kwargs)
    if decoding in ("greedy", "beam"):
        for name in ("temperature", "top_k", "top_p", "min_p", "typical_p"):
            arguments.pop(name, None)
    if decoding is not None:
        arguments["do_sample"] = decoding == "sampling"
        arguments["num_beams"] = (num_beams or 5) if decoding == "beam" else 1
    if max_new_tokens is not None:
        arguments["max_new_tokens"] = max_new_tokens
    return arguments


def calm_libraries() -> None:
    """Keeps progress bars and advice of other libraries out of ours; their warnings stay."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers.modeling_utils").addFilter(_no_mask_advice)
    warnings.filterwarnings("ignore", message=".*tensorboard.*", category=UserWarning)


def _no_mask_advice(record: logging.LogRecord) -> bool:
    """Transformers' decoder drops a mask of ones, then advises to pass one if a pad token was sampled."""
    return "We strongly recommend passing in an `attention_mask`" not in record.getMessage()


def _run_config(folder: Path) -> RunConfig | None:
    file = folder / "config.json"
    if not file.is_file() or not (folder / "model").is_dir():
        return None
    config = parse_config(json.loads(file.read_text(encoding="utf-8")), source=str(file), components=False)
    return config if isinstance(config, RunConfig) else None


def _config_and_model(run_or_model: str | Path, config_path: str | Path | None) -> tuple[RunConfig, str]:
    folder = Path(run_or_model)
    own = _run_config(folder)
    model = str(folder / "model") if own is not None else str(run_or_model)
    config: AnyConfig | None = load_config(config_path) if config_path else own
    if config is None:
        raise RL4LMsLikeError(
            f"{run_or_model} is not the folder of a finished run (config.json and model/): give --config_path with the "
            f"data pool and the metrics"
        )
    if not isinstance(config, RunConfig):
        raise RL4LMsLikeError(f"{config_path}: expected the config of an RL run")
    return config, model


def _policy_alone(config: RunConfig | None, model_name: str) -> Any:
    """A policy that only writes: no reference, critic on its own trunk."""
    from gymnasium import spaces

    from rl4lms_like.policies import POLICIES
    from rl4lms_like.policies.arguments import PolicyArguments
    from rl4lms_like.training.assemble import load_model_config

    arguments = {} if config is None else dict(config.alg.policy.args)
    arguments |= {"model_name": model_name, "critic": "shared", "reference_model": None, "compile": False}
    model_config = load_model_config(PolicyArguments(**arguments))
    family = "seq2seq" if model_config.is_encoder_decoder else "causal"
    policy_class = POLICIES.resolve(f"{family}_lm_actor_critic_policy")
    vocabulary = spaces.Discrete(int(model_config.get_text_config().vocab_size))
    policy = policy_class(spaces.Dict({}), vocabulary, _no_learning, use_reference=False, **arguments)
    from stable_baselines3.common.utils import get_device

    return policy.to(get_device("auto" if config is None else config.device))


def _no_learning(progress_remaining: float) -> float:
    return 0.0
