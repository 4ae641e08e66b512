"""Evaluate a trained model on a split, or generate texts with it: `rl4lms-like evaluate` and `generate`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.utils import get_device
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerBase

from rl4lms_like.algorithms import OBJECTIVES
from rl4lms_like.config.load import load_config
from rl4lms_like.config.rules import reads_run_reward
from rl4lms_like.config.run_config import AnyConfig, PreferenceConfig, RunConfig
from rl4lms_like.config.settings import response_length
from rl4lms_like.core.model_weights import require_folder
from rl4lms_like.core.observation import TextLayout
from rl4lms_like.core.picture_encoder import OFFLINE, ON_POLICY
from rl4lms_like.core.pictures import Picture, text_with_places
from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.scoring import EpisodeScorer
from rl4lms_like.offline.assemble_supervised import max_prompt_length
from rl4lms_like.policies.arguments import OWN_ENGINE, MaskablePolicyArguments, PolicyArguments
from rl4lms_like.policies.base import CausalLMActorCriticPolicy, LMActorCriticPolicy
from rl4lms_like.policies.generating_weights import can_pack
from rl4lms_like.policies.generation import TextGenerator
from rl4lms_like.policies.loading import auto_class_of, load_model, load_tokenizer
from rl4lms_like.policies.masked import masked_generator
from rl4lms_like.policies.parity import check_decoding
from rl4lms_like.policies.speedups import no_speedups
from rl4lms_like.policies.teacher_forcing import CausalReader
from rl4lms_like.policies.vision_reader import VisionTextGenerator
from rl4lms_like.run import silence_libraries
from rl4lms_like.small_models.embedded import embedded_model, is_embedded, with_embedded_models
from rl4lms_like.system.disk import refuse_links_to_folders, saving
from rl4lms_like.system.errors import ConfigError, ConfigIssue, RL4LMsLikeError
from rl4lms_like.system.import_paths import refuse_unless_trusted
from rl4lms_like.system.schema import checked_block
from rl4lms_like.tracking.run_folder import RunFolder
from rl4lms_like.tracking.thumbnails import with_thumbnails
from rl4lms_like.training.components import Components, build_components
from rl4lms_like.training.evaluation import Evaluation, Responder, evaluate_on_samples
from rl4lms_like.training.inputs import (
    NO_LIMIT,
    build_datapool,
    build_pictures,
    build_tokenizer,
    chat_template_of,
    dialogue_settings,
    end_tokens,
    load_generation_config,
    load_model_config,
    render_prompts,
    token_limit,
)
from rl4lms_like.training.run_reward import RunReward, connect, is_run_reward, reports_run_reward
from rl4lms_like.training.saved_model import find_saved_model, saved_with_model


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
    trust_remote_code: bool = False,
    engine: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Evaluate the model of a finished run, or any other model, on a split.

    Args:
        run_or_model: folder of a run, of one of its models or of any model, a hub id or `embedded/<name>`.
        split: `train`, `val` or `test`.
        config_path: YAML file with data pool, metrics and lengths; default: the run's own config.
        output: folder for `<split>_split_metrics.jsonl` and the predictions; default: `evaluation/` in the run's
            folder, or the current folder.
        decoding: `sampling`, `greedy` or `beam`; default: as in the config's evaluations.
        num_beams: number of beams of `beam`.
        max_new_tokens: maximum length of a response.
        batch_size: prompts per generation call; default: the config's.
        limit: evaluate only the first `limit` samples.
        seed: of the sampling.
        trust_remote_code: allow code that comes with a model to run, if the config in the run's folder requests it.
        engine: external engine to generate with, as in configs; default: the model itself generates.

    Returns:
        Metric key -> score.

    Raises:
        ConfigError: the config in the run's folder requests code to run that is not trusted.
        RL4LMsLikeError: the folder cannot be written, or the evaluation failed; subclasses name the cause.
    """
    silence_libraries()
    config, model = _config_and_model(run_or_model, config_path)

    # A folder that cannot be written is an error before anything is loaded, not after hours of generation.
    folder = Path()
    if output:
        folder = Path(output)
    elif Path(run_or_model).is_dir():
        folder = Path(run_or_model) / "evaluation"
        refuse_links_to_folders([folder])
    with saving(f"the evaluation (--output) to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        files = RunFolder(folder)

    # A run's folder may come from another user. A config that the caller names is the caller's own.
    reports_reward = reports_run_reward(config)
    if config_path is None:
        blocks = ["tokenizer", "datapool", "alg", "train_evaluation", *["reward_fn"] * reports_reward]
        refuse_unless_trusted(config.to_dict(), trust_remote_code, f"the config of {run_or_model}", tuple(blocks))
    components = components_to_evaluate(config)

    # The tokenizer that was saved with the model. Another config than that of its run may name another chat template.
    tokenizer_config = saved_with_model(config.tokenizer, model)
    if config_path is not None:
        tokenizer_config = replace(tokenizer_config, chat_template=config.tokenizer.chat_template)
    tokenizer = build_tokenizer(tokenizer_config)
    pool = render_prompts({split: build_datapool(config.datapool, split)}, tokenizer_config, tokenizer)[split]
    samples = [sample for sample, _ in pool][:limit]

    # Decoding as in the run's evaluations, or else as in its rollouts; a supervised run has no separate arguments.
    evaluation = config.train_evaluation
    arguments = getattr(evaluation, "generation_kwargs", None) or policy_arguments(config).get("generation_kwargs")
    responder = responder_of(
        config,
        model,
        tokenizer,
        batch_size=batch_size or evaluation.eval_batch_size,
        generation_kwargs=decoding_arguments(arguments or {}, decoding, num_beams, max_new_tokens),
        seed=seed,
        engine=engine,
    )

    result = evaluate_split(config, responder, components, samples, split)
    with saving(f"the evaluation (--output) to {folder}"):
        files.log_metrics(0, split, result.scores)
        files.log_predictions(0, split, with_thumbnails(files.path, result.predictions))
    for key, score in result.scores.items():
        print(f"{key:<48} {score:.4f}")
    print(f"{len(samples)} samples of {split}; files in {folder}")
    return result.scores


def evaluate_split(
    config: AnyConfig, responder: Responder, components: Components, samples: Sequence[Sample], split: str
) -> Evaluation:
    """Return the evaluation of a model on samples of a split, with the run's own reward if it is among the metrics.

    Args:
        config: config of the run.
        responder: the model.
        components: those of the config, or others.
        samples: with rendered prompts.
        split: name of the split.

    Raises:
        ComponentError: the post-processor, a metric or the reward failed.
    """
    # The reward as in the run's evaluations: by workers if it has them, and within its time limit.
    scorer = None
    if any(map(is_run_reward, components.metrics)):
        assert isinstance(config, RunConfig)
        layout = _reward_layout(config, responder)
        scorer = EpisodeScorer(components.reward_fn, layout, config.env.reward_workers, config.env.reward_timeout)
        connect(components.metrics, RunReward(scorer, layout, batch_size=config.env.n_envs))

    try:
        return evaluate_on_samples(
            responder,
            samples,
            components.metrics,
            split_name=split,
            post_processor=components.post_processor,
        )
    finally:
        if scorer is not None:
            scorer.close()


def components_to_evaluate(config: AnyConfig) -> Components:
    """Return the components of an evaluation; without the run's reward if only the default asks for it, and it fails.

    Raises:
        RL4LMsLikeError: as `build_components`.
    """
    # An evaluation calls no callbacks; those that were built in Python could not be built again.
    if not reports_run_reward(config):
        return build_components(config, with_reward=False, with_callbacks=False)
    try:
        return build_components(config, with_callbacks=False)
    except RL4LMsLikeError as error:
        is_selected = isinstance(config, RunConfig) and reads_run_reward(config)
        if config.train_evaluation.metrics or is_selected:
            raise
        # Not on standard output, which has the scores.
        print(f"the run's own reward is not reported: {error}", file=sys.stderr)
        return build_components(config, with_reward=False, with_callbacks=False)


def _reward_layout(config: RunConfig, responder: Responder) -> TextLayout:
    """Return the layout of the observations that the reward of an evaluation reads, as in the run's environment."""
    model_config = responder.model.model.config
    is_encoder_decoder = bool(model_config.is_encoder_decoder)
    return TextLayout(
        responder.tokenizer,
        max_prompt_length=responder.max_prompt_length,
        max_context_length=response_length(config, model_config),
        context_start_token=config.env.args.get("context_start_token") if is_encoder_decoder else None,
        prompt_truncation_side=responder.model.prompt_truncation_side,
        is_encoder_decoder=is_encoder_decoder,
    )


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
    trust_remote_code: bool = False,
    engine: Mapping[str, Any] | None = None,
    images: Sequence[Any] = (),
) -> list[list[str]]:
    """Generate texts with a trained model.

    Args:
        model: folder of a run or of a model, a hub id or `embedded/<name>`.
        prompts: texts to continue or answer.
        n: number of texts for each prompt.
        max_new_tokens: maximum length of a response; default: the run's, else 64.
        decoding: `sampling`, `greedy` or `beam`; default: as in the run's rollouts, else sampling.
        temperature: of the sampling.
        top_k: sample from the k most likely tokens; 0 samples from all.
        seed: of the sampling.
        trust_remote_code: allow code that comes with the model to run, if the config in the run's folder requests it.
        engine: external engine to generate with, as in configs; default: the model itself generates.
        images: the images of each prompt: paths, bytes or images of PIL. A vision-language model needs at least one.

    Returns:
        `n` texts for each prompt.

    Raises:
        ConfigError: the config in the run's folder requests code to run that is not trusted.
        DataPoolError: an image cannot be read, or a prompt has places for another number of images.
        RL4LMsLikeError: there are images and the model does not read them, or it does and there are none.
    """
    silence_libraries()
    config, name, tokenizer = trained_model(model, trust_remote_code=trust_remote_code)
    pictures = tuple(Picture.of(image) for image in images)
    if reads_pictures(config) != bool(pictures):
        what = "reads texts only; remove the image" if pictures else "answers prompts with images; give one (--image)"
        raise RL4LMsLikeError(f"the model of {model} {what}")

    # Decoding as in the run's rollouts. A model without a run samples from its whole distribution.
    arguments = policy_arguments(config).get("generation_kwargs")
    if not arguments:
        arguments = {"do_sample": True, "top_k": 0, "max_new_tokens": 64}
    arguments = decoding_arguments(arguments, decoding, None, max_new_tokens)
    if temperature is not None:
        arguments["temperature"] = temperature
    if top_k is not None:
        arguments["top_k"] = top_k

    # A model that was trained on chats expects the turns of its template around each prompt.
    template = None if config is None else chat_template_of(config.tokenizer, tokenizer)

    responder = responder_of(
        config,
        name,
        tokenizer,
        max_prompt_length=min(tokenizer.model_max_length, NO_LIMIT),
        batch_size=32,
        generation_kwargs=arguments,
        seed=seed,
        engine=engine,
    )

    # Each prompt `n` times in a row: rows `i n` to `(i + 1) n - 1` are the texts of prompt `i`.
    samples = []
    for i, prompt in enumerate(prompts):
        samples += [Sample(str(i), text_with_places(prompt, len(pictures)), images=pictures)] * n

    if template is not None:
        samples = [template.with_rendered_prompt(sample) for sample in samples]

    texts = responder.respond(samples)
    return [texts[i * n : (i + 1) * n] for i in range(len(prompts))]


def trained_model(
    model: str | Path, *, trust_remote_code: bool = False
) -> tuple[AnyConfig | None, str, PreTrainedTokenizerBase]:
    """Return the config of a model's run, None without one, the folder or hub id of the model, and its tokenizer.

    Args:
        model: folder of a run or of a model, a hub id or `embedded/<name>`.
        trust_remote_code: allow code that comes with the model to run, if the config in the run's folder requests it.

    Raises:
        ConfigError: the config in the run's folder requests code to run that is not trusted.
        ModelError: the folder does not exist.
        RL4LMsLikeError: it is a reward model.
    """
    saved = find_saved_model(Path(model))
    if saved is None:
        name = _model_name(model)
        return None, name, load_tokenizer(name)
    config = saved.config
    _refuse_reward_model(config, model)
    refuse_unless_trusted(config.to_dict(), trust_remote_code, f"the config of {model}", ("tokenizer", "alg"))

    # The tokenizer that was saved with the model, with the date of its run in the chat template.
    name = str(saved.folder)
    return config, name, build_tokenizer(saved_with_model(config.tokenizer, name))


def decoding_arguments(
    generation_kwargs: Mapping[str, Any],
    decoding: str | None,
    num_beams: int | None = None,
    max_new_tokens: int | None = None,
) -> dict[str, Any]:
    """Return generation arguments with another decoding method.

    Args:
        generation_kwargs: arguments to change.
        decoding: `sampling`, `greedy` or `beam`; None keeps the method of `generation_kwargs`.
        num_beams: number of beams of `beam`; default: 5.
        max_new_tokens: replaces the value in `generation_kwargs`; None keeps it.
    """
    arguments = dict(generation_kwargs)

    # Search takes the most likely tokens: transformers warns of arguments that only change sampling.
    if decoding in ("greedy", "beam"):
        for name in ("temperature", "top_k", "top_p", "min_p", "typical_p"):
            arguments.pop(name, None)

    if decoding is not None:
        arguments["do_sample"] = decoding == "sampling"
        arguments["num_beams"] = 1
    if decoding == "beam":
        arguments["num_beams"] = num_beams or 5
    if max_new_tokens is not None:
        arguments["max_new_tokens"] = max_new_tokens
    return arguments


def reads_pictures(config: AnyConfig | None) -> bool:
    """Return whether the model of a run reads prompts with pictures."""
    return config is not None and config.reads_pictures


def policy_arguments(config: AnyConfig | None) -> dict[str, Any]:
    """Return the arguments of a run's policy; for a supervised run, those with which a policy generates alike."""
    if config is None:
        return {}
    if isinstance(config, RunConfig):
        return dict(config.alg.policy.args)

    # transformers' Trainer trains in bfloat16 by autocast, as a policy with this `dtype` does.
    return {
        "generation_kwargs": config.alg.generation_kwargs,
        "prompt_truncation_side": config.tokenizer.truncation_side,
        "dtype": "bfloat16" if config.alg.training_args.get("bf16") else "float32",
        "attn_implementation": config.alg.attn_implementation,
        "speedups": no_speedups(),  # those of rollouts and updates; the Trainer has its own
        "max_pixels": config.alg.max_pixels,
    }


def _max_prompt_length(config: AnyConfig, tokenizer: Any, model_config: Any) -> int:
    """Return the maximum prompt length in tokens, as in the run's own evaluations."""
    if isinstance(config, RunConfig):
        return int(config.env.args.get("max_prompt_length") or min(tokenizer.model_max_length, NO_LIMIT))
    return max_prompt_length(config, token_limit(tokenizer, model_config))


def _config_and_model(run_or_model: str | Path, config_path: str | Path | None) -> tuple[AnyConfig, str]:
    """Return the config that describes an evaluation, and the folder or hub id of the model."""
    saved = find_saved_model(Path(run_or_model))
    run_config = None if saved is None else saved.config
    model = _model_name(run_or_model) if saved is None else str(saved.folder)
    config = load_config(config_path, data=False) if config_path else run_config

    _refuse_reward_model(run_config, run_or_model)
    if config is None:
        hint = "set --config_path to a file with data pool and metrics"
        raise RL4LMsLikeError(f"{run_or_model} is a model without the config of a run: {hint}")
    return with_embedded_models(config), model


def _refuse_reward_model(config: AnyConfig | None, run_or_model: str | Path) -> None:
    """Raise an `RL4LMsLikeError` for a run whose model has a head for a score in place of one for tokens."""
    if not isinstance(config, PreferenceConfig):
        return
    objective = OBJECTIVES.signature(config.alg.id)
    if not getattr(objective, "has_language_model", True):
        hint = "use it as `model_name` of the reward or the metric 'reward_model'"
        raise RL4LMsLikeError(f"{run_or_model} is a run of {config.alg.id!r}, whose model writes no text: {hint}")


def _model_name(model: str | Path) -> str:
    """Return the folder or hub id of a model.

    Raises:
        ModelError: the name can only be a folder, which does not exist. The hub is not queried.
    """
    if is_embedded(str(model)):
        return str(embedded_model(str(model)))
    require_folder("run or the model", str(model))
    return str(model)


def responder_of(
    config: AnyConfig | None,
    model_name: str,
    tokenizer: Any,
    *,
    max_prompt_length: int | None = None,
    engine: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Responder:
    """Load a model that decodes like the run's policy, including its masks; without a run, with defaults.

    Raises:
        ConfigError: the engine cannot generate for this model, or with these arguments.
    """
    policy_args = policy_arguments(config) | {"model_name": model_name}
    arguments = PolicyArguments.known_in(policy_args)
    model_config = load_model_config(arguments)
    pictures = None
    auto_class = auto_class_of(model_config)
    if config is not None and reads_pictures(config):
        auto_class = AutoModelForImageTextToText
        saved = saved_with_model(config.tokenizer, model_name)
        keys = ON_POLICY if isinstance(config, RunConfig) else OFFLINE
        pictures = build_pictures(saved, model_config, max_pixels=policy_args.get("max_pixels"), keys=keys)
        if engine is not None and engine["id"] != OWN_ENGINE:
            message = f"{engine['id']} gets prompts without their images; use {OWN_ENGINE}"
            raise ConfigError([ConfigIssue("engine.id", message)], "the engine")
    device = get_device("auto" if config is None else config.device)

    # An external engine generates for a policy, which sends it the weights; otherwise the bare model generates.
    policy = None
    if engine is not None:
        policy = _policy_with(engine, policy_args | settings, device)
    model: Any
    if policy is not None:
        model = policy.policy_model
    else:
        model, _ = load_model(
            auto_class,
            arguments.model_name,
            attn_implementation=arguments.attn_implementation,
            trust_remote_code=arguments.trust_remote_code,
        )
        model = model.to(device)

    # Chat models end a turn with another token than a text, which is in the generation config or the template.
    template = None if config is None else chat_template_of(config.tokenizer, tokenizer)
    ends = end_tokens(tokenizer, model.config, load_generation_config(model_name), template)

    generator: TextGenerator | LMActorCriticPolicy
    if policy is not None:
        generator = policy
    elif "top_mask" in policy_args:  # maskable policies require this argument, others do not accept it
        special = sorted({*tokenizer.all_special_ids, *ends})  # as in NLPO's rollouts
        generator = masked_generator(model, MaskablePolicyArguments.known_in(policy_args), special)
    else:
        options: dict[str, Any] = {
            "generation_kwargs": arguments.generation_kwargs,
            "prompt_truncation_side": arguments.prompt_truncation_side,
            "bfloat16": arguments.dtype == "bfloat16",
        }
        generator = TextGenerator(model, **options)
        if pictures is not None:
            generator = VisionTextGenerator(model, pictures, **options)

    # As in the run's own evaluations, so that the same seed gives the same texts.
    if isinstance(generator, TextGenerator) and generator.has_decode_loop and arguments.used_speedups.fast_decoding:
        generator.uses_decode_loop = not generator.is_encoder_decoder and check_decoding(
            CausalReader(model), model_name, in_bfloat16="flash" in (arguments.attn_implementation or "")
        )

    if isinstance(generator, TextGenerator) and model.device.type == "cpu":
        generator.packs_weights = can_pack(arguments.used_speedups)

    if max_prompt_length is None:
        assert config is not None
        max_prompt_length = _max_prompt_length(config, tokenizer, model.config)
    return Responder(
        generator,
        tokenizer,
        max_prompt_length=max_prompt_length,
        eos_token_ids=ends,
        dialogue=None if config is None else dialogue_settings(config, tokenizer),
        **settings,
    )


def _policy_with(
    engine: Mapping[str, Any], policy_args: Mapping[str, Any], device: torch.device
) -> LMActorCriticPolicy | None:
    """Return a policy without critic and reference for an external engine; None if the model itself generates."""
    # A maskable policy requires `top_mask`, others do not accept it.
    block = MaskablePolicyArguments if "top_mask" in policy_args else PolicyArguments
    names = {field.name for field in fields(block)}
    known = {name: value for name, value in policy_args.items() if name in names}
    arguments = checked_block(block, {**known, "engine": engine}, "the engine")

    model_config = load_model_config(arguments)
    issues = list(arguments.family_issues(is_causal=auto_class_of(model_config) is AutoModelForCausalLM))
    if issues:
        raise ConfigError(issues, "the engine")
    if engine["id"] == OWN_ENGINE:
        return None

    # Nothing is trained, so there are no observations, no learning rate, no critic and no reference.
    return CausalLMActorCriticPolicy(
        spaces.Dict({}),
        spaces.Discrete(model_config.vocab_size),
        lambda _: 0.0,
        device=device,
        use_reference=False,
        model_name=arguments.model_name,
        critic="none",
        engine=dict(engine),
        generation_kwargs=arguments.generation_kwargs,
        prompt_truncation_side=arguments.prompt_truncation_side,
        dtype=arguments.dtype,
        attn_implementation=arguments.attn_implementation,
        trust_remote_code=arguments.trust_remote_code,
    )
