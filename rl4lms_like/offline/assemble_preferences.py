"""Construction of the objects of a preference run from its config, and its plan for `check`.

PreferenceConfig ─ tokenizer, samples ─ pairs ─ model, reader ─ reference ─ objective ─> SupervisedRun
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from rl4lms_like.algorithms import OBJECTIVES
from rl4lms_like.algorithms.preference_arguments import RewardModelArguments
from rl4lms_like.config.run_config import PreferenceConfig
from rl4lms_like.config.settings import check_vocabulary
from rl4lms_like.core.model_weights import output_layer
from rl4lms_like.core.observation import TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.offline.assemble_supervised import (
    SupervisedRun,
    add_adapters,
    autocast_dtype,
    check_best_metric,
    check_images,
    check_independence,
    check_offline_gradients,
    config_to_plan,
    head_modules,
    image_lines,
    language_model_class,
    leaves_unread,
    load_encoder,
    loading_device,
    prepare,
    reward_model_class,
    schedule_of,
)
from rl4lms_like.offline.checked_readers import check_reader, checked_reward_reader, new_reader
from rl4lms_like.offline.pairs import (
    Pairs,
    encode_labels,
    encode_pairs,
    encode_texts,
    encode_texts_with_pictures,
    preferences_of,
)
from rl4lms_like.offline.preference_objectives import PreferenceObjective, ReferenceObjective, RewardModel
from rl4lms_like.offline.shown_example import row_lines
from rl4lms_like.offline.training_arguments import make_training_arguments
from rl4lms_like.policies.generation import seeded
from rl4lms_like.policies.loading import is_loaded_by, load_model, load_model_config
from rl4lms_like.policies.parity import SHARING_TOLERANCE, check_packing, check_sharing, first_episodes, probe_episodes
from rl4lms_like.policies.teacher_forcing import CausalReader, EpisodeReader
from rl4lms_like.scoring.classifier import RECORDED
from rl4lms_like.scoring.vision_rewards import RECORD
from rl4lms_like.system.errors import ConfigError, ConfigIssue, ModelError
from rl4lms_like.system.ranks import Ranks
from rl4lms_like.training.components import prompt_lengths
from rl4lms_like.training.examples import ExampleEncoder
from rl4lms_like.training.threads import set_n_threads

N_COUNTED = 5000
"""Number of preferences per split that `check` encodes."""


def assemble_preferences(config: PreferenceConfig, ranks: Ranks | None = None) -> SupervisedRun:
    """Build the objects of a preference run.

    Args:
        config: config of the run.
        ranks: the processes that train together; default: this one alone.

    Raises:
        ConfigError: settings of the config are not compatible.
        DataPoolError: a data pool could not be prepared, or has no preferences to learn from.
        ParityError: log-probs differ from those of generation.
        RL4LMsLikeError: a model, a component or one of their dependencies is missing; subclasses name the cause.
    """
    ranks = ranks or Ranks()
    signature: Any = OBJECTIVES.signature(config.alg.id)
    has_language_model: bool = signature.has_language_model
    prepared = prepare(config, ranks, None if has_language_model else output_layer)
    config = prepared.config
    encoder = prepared.encoder
    # Of the prepared config: an embedded reference model has a folder in it.
    arguments = signature(**config.alg.args)

    check_end_token(arguments, encoder)
    samples_read = used(prepared.samples, config)
    examples = {split: encode(arguments, encoder, samples, config) for split, samples in samples_read.items()}
    check_best_metric(config, samples_read["val"])
    networks = _networks(config, prepared.model_config, arguments)
    generates = has_language_model and config.train_evaluation.generate
    check_independence(config, networks, encoder, examples, prepared.samples, generates=generates)

    # The head of a reward model is not part of the adapters: PEFT freezes it with the rest, and it is trained whole.
    model, dropout_rates = _load(config, prepared.model_config, arguments, unread=leaves_unread(config, ranks))
    head = () if has_language_model else head_modules(model)
    nn.Module.to(model, loading_device(config, ranks)).eval()
    add_adapters(model, config, dropout=bool(arguments.dropout))
    for name in head:
        model.get_submodule(name).requires_grad_(True)
    if config.alg.peft is not None and config.alg.quantization is not None:
        check_offline_gradients(model, config)

    # Weights are split first: a process has the rows of each, and may have read no others.
    objective = _objective(config, arguments, model, encoder, unread=leaves_unread(config, ranks))
    prepared.split(objective, model, ranks)
    _check(objective, config, encoder)
    objective.reshard()
    set_n_threads(config, model)
    return prepared.run(
        examples=examples,
        model=model,
        objective=objective,
        generates=generates,
        ranks=ranks,
        dropout_rates=dropout_rates,
        head=head,
    )


# --- data -------------------------------------------------------------------------------------------------------------


def check_end_token(arguments: Any, encoder: ExampleEncoder) -> None:
    """Raise a `ConfigError` if the tokenizer lacks the token with which texts for a reward model end."""
    needs_end_token = isinstance(arguments, RewardModelArguments) and arguments.append_eos
    if needs_end_token and encoder.tokenizer.eos_token_id is None:
        text = "the tokenizer has no end-of-text token: set it to false"
        raise ConfigError([ConfigIssue("alg.args.append_eos", text)])


def used(samples: Mapping[str, Sequence[Sample]], config: PreferenceConfig) -> dict[str, Sequence[Sample]]:
    """Return the samples of each split that a run reads: of `val` and `test`, at most `max_eval_samples`."""
    limit = config.train_evaluation.max_eval_samples
    limited = {split: of_split[:limit] for split, of_split in samples.items()}
    return limited | {"train": samples["train"]}


def encode(arguments: Any, encoder: ExampleEncoder, samples: Sequence[Sample], config: PreferenceConfig) -> Pairs:
    """Return the samples of a split as rows of an objective with these arguments.

    Raises:
        DataPoolError: the samples are not what the objective needs.
    """
    pool = f"the data pool {config.datapool.id!r}"
    preferences = preferences_of(samples, reads_labels=arguments.reads_labels, source=pool)
    if arguments.has_language_model:
        encode_all = encode_labels if arguments.reads_labels else encode_pairs
        return encode_all(encoder, preferences, arguments.max_response_length)

    if encoder.pictures is not None:
        return encode_texts_with_pictures(encoder, preferences, append_eos=arguments.append_eos)

    # A causal reward model computes the common beginning of two texts once. The encoder of a seq2seq model cannot: it
    # reads each token together with those after it.
    return encode_texts(
        encoder,
        preferences,
        append_eos=arguments.append_eos,
        split_beginning=not encoder.is_encoder_decoder,
    )


# --- model and objective ----------------------------------------------------------------------------------------------


def _load(
    config: PreferenceConfig, model_config: PretrainedConfig, arguments: Any, *, unread: bool
) -> tuple[PreTrainedModel, dict[str, float]]:
    """Load the model that is trained; return it and the dropout rates of its checkpoint."""
    name = config.alg.model_name
    # With `adapters`, only the adapters have dropout. A trained model that is measured has no new adapters, and its
    # weights stay as they were trained.
    options: Any = {"dropout": arguments.dropout is True, "attn_implementation": config.alg.attn_implementation}
    options["unread"] = unread
    if config.alg.peft is not None:
        options["quantization"] = config.alg.quantization
    if arguments.has_language_model:
        return load_model(language_model_class(config, model_config), name, **options)

    # The head is new, unless the model is a classifier already; its weights depend on the run's seed alone.
    with seeded(derived_seed(config.seed, "reward head"), torch.device("cpu")):
        return load_model(reward_model_class(config), name, unused=head_modules, n_labels=1, **options)


def _objective(
    config: PreferenceConfig, arguments: Any, model: PreTrainedModel, encoder: ExampleEncoder, *, unread: bool
) -> PreferenceObjective:
    training = make_training_arguments(config, "checkpoints")
    # Both act in training mode only. Older versions of transformers have one name for the recomputation.
    recomputes = getattr(training, "activation_checkpointing", False) or training.gradient_checkpointing
    if arguments.has_language_model:
        reader = new_reader(model, encoder.pictures)
    elif encoder.pictures is not None:
        reader = checked_reward_reader(model, config.alg.model_name, encoder.pictures)
    else:
        reader = CausalReader(model)
    objective_class = OBJECTIVES.resolve(config.alg.id)
    objective: PreferenceObjective = objective_class(
        arguments,
        reader,
        pad_token_id=TextLayout(encoder.tokenizer, 1, 1).pad_token_id,
        eval_batch_size=training.per_device_eval_batch_size,
        dtype=autocast_dtype(config),
        needs_training_mode=bool(arguments.dropout) or recomputes,
    )

    # Without another reference, the trained model itself is read before its first step.
    if isinstance(objective, ReferenceObjective):
        name = arguments.reference_model
        if name not in (None, config.alg.model_name):
            objective.reference = _reference(config, name, encoder, model, unread=unread)
    return objective


def _networks(config: PreferenceConfig, model_config: PretrainedConfig, arguments: Any) -> dict[str, PretrainedConfig]:
    """Return the configs of the models that read the data, by the keys that name them."""
    networks = {"alg.model_name": model_config}
    reference_model = getattr(arguments, "reference_model", None)
    if reference_model not in (None, config.alg.model_name):
        networks["alg.args.reference_model"] = load_model_config(reference_model)
    return networks


def _reference(
    config: PreferenceConfig, name: str, encoder: ExampleEncoder, model: PreTrainedModel, *, unread: bool
) -> EpisodeReader:
    # It scores the same token ids as the trained model, so both need one family and one vocabulary.
    reference_config = load_model_config(name)
    is_readable = not config.reads_pictures or is_loaded_by(reference_config, AutoModelForImageTextToText)
    if reference_config.is_encoder_decoder != model.config.is_encoder_decoder or not is_readable:
        text = f"{name!r} is of another family than {config.alg.model_name!r}"
        raise ConfigError([ConfigIssue("alg.args.reference_model", text)])
    check_vocabulary(encoder.tokenizer, reference_config, config.tokenizer.model_name, name)

    reference, _ = load_model(
        language_model_class(config, reference_config),
        name,
        role="reference model",
        attn_implementation=config.alg.attn_implementation,
        quantization=config.alg.quantization,
        unread=unread,
    )
    reference = nn.Module.to(reference, model.device).eval()
    return new_reader(reference, encoder.pictures)


def _check(objective: PreferenceObjective, config: PreferenceConfig, encoder: ExampleEncoder) -> None:
    """Find how an objective computes its scores, and check its log-probs.

    Raises:
        ModelError: a model's interface is not supported, or its outputs are not finite.
        ParityError: log-probs differ from those of generation.
    """
    if isinstance(objective, RewardModel):
        _set_up_reward_model(objective, config, encoder)
        return

    packs_rows = config.alg.packing is not None
    check_reader(objective.reader, config.alg.model_name, packs_rows=packs_rows)
    if isinstance(objective, ReferenceObjective) and objective.reference is not None:
        name = objective.arguments.reference_model or config.alg.model_name
        check_reader(objective.reference, name, packs_rows=packs_rows)


def _set_up_reward_model(objective: RewardModel, config: PreferenceConfig, encoder: ExampleEncoder) -> None:
    """Record how texts end, and find out how rewards are computed."""
    model = objective.reader.model
    tokenizer = encoder.tokenizer
    setattr(model.config, RECORDED, objective.arguments.append_eos)

    # Classifiers read the last token that is not padding. If the end token is also that of padding, they would read the
    # one before it; without a padding token, the score `reward_model` finds another one for each batch.
    is_ambiguous = tokenizer.pad_token_id == tokenizer.eos_token_id
    model.config.get_text_config().pad_token_id = None if is_ambiguous else tokenizer.pad_token_id

    if encoder.pictures is not None:
        setattr(model.config, RECORD, {"max_pixels": config.alg.max_pixels})
        objective.head = reward_layer(model)
        return

    # Seq2seq classifiers are computed by their own forward.
    if not model.config.is_encoder_decoder:
        with first_episodes(model, config.alg.model_name):
            objective.head = reward_head(objective.reader)
            if objective.network is None:
                objective.reader.shares_prompts = check_sharing(objective.reader, config.alg.model_name, has_head=False)
            if config.alg.packing is not None:
                objective.reader.packing = check_packing(objective.reader, config.alg.model_name, has_head=False)


def reward_layer(model: PreTrainedModel) -> nn.Linear:
    """Return the linear layer `score` of a classifier.

    Raises:
        ModelError: the classifier has no such layer.
    """
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        # PEFT has replaced the layer, if `target_modules` matches it.
        hint = "; add 'score' to exclude_modules" if hasattr(head, "get_base_layer") else ""
        raise ModelError(f"{type(model).__name__} has no linear layer `score` for the reward{hint}")
    return head


@torch.no_grad()
def reward_head(reader: EpisodeReader) -> nn.Linear:
    """Return the linear layer `score` of a classifier, if it gives the output of the model's own forward.

    Raises:
        ModelError: the classifier has no such layer, or its output differs.
    """
    model: Any = reader.model
    class_name = type(model).__name__
    head = reward_layer(model)

    # One text without padding [1, n]. The model's own forward reads the last token without the id of padding, so none
    # may have it.
    vocab_size = int(model.config.get_text_config().vocab_size)
    padding = model.config.get_text_config().pad_token_id
    probe = probe_episodes(vocab_size, reader.prompt_side).select(torch.tensor([0])).to(model.device)
    ids = torch.cat([probe.prompt_ids[probe.prompt_mask], probe.response_ids[0]])
    if padding is not None:
        ids = torch.where(ids == padding, (ids + 1) % vocab_size, ids)
    n_prompt = int(probe.prompt_mask.sum())
    prompt_ids = ids[None, :n_prompt]
    is_real = torch.ones_like(prompt_ids, dtype=torch.bool)
    probe = replace(probe, prompt_ids=prompt_ids, prompt_mask=is_real, response_ids=ids[None, n_prompt:])

    # Both in evaluation mode and float32, so that only the order of operations differs.
    of_model = reader.call(partial(model, input_ids=ids[None])).logits[0]
    of_head = head(reader.final_states(probe))[0]
    tolerance = SHARING_TOLERANCE * max(1.0, float(of_model.abs().max()))
    if not bool((of_model - of_head).abs().max() <= tolerance):  # NaN is not within it
        raise ModelError(f"{class_name}: rewards differ from those of its own forward; report this family")
    return head


# --- the plan of a run, for `check` -----------------------------------------------------------------------------------


def plan(config: PreferenceConfig, find: Callable[[], Mapping[str, Sequence[Sample]]]) -> list[tuple[str, str]]:
    """Return the size of a run, its formula, and everything unusual about its data, before weights are loaded.

    Arguments, lines and errors are those of the `plan` of a supervised run.
    """
    config = config_to_plan(config)
    arguments = OBJECTIVES.signature(config.alg.id)(**config.alg.args)
    first_line, *more_lines = arguments.formula()
    lines = [("objective", first_line)]
    lines += [("", line) for line in more_lines]

    model_config, _, encoder = load_encoder(config)
    check_end_token(arguments, encoder)
    samples = used(find(), config)
    check_images(config, encoder, samples)
    check_best_metric(config, samples["val"])

    # Of large splits, only the first preferences are encoded; the counts that follow are extrapolated by `growth`.
    pairs: dict[str, Pairs] = {}
    growth: dict[str, float] = {}
    for split, of_split in samples.items():
        pairs[split] = encode(arguments, encoder, of_split[:N_COUNTED], config)
        n_counted = pairs[split].n_preferences
        growth[split] = len(of_split) / max(n_counted, 1)
        title = split
        if n_counted < len(of_split):
            title = f"{split} (the first {n_counted:,} of {len(of_split):,})"
        if pairs[split].rows:
            lines += [(f"{title}: {name}", value) for name, value in pairs[split].lines()]

    networks = _networks(config, model_config, arguments)
    generates = arguments.has_language_model and config.train_evaluation.generate
    check_independence(config, networks, encoder, pairs, samples, generates=generates)

    train = pairs["train"]
    batch_size, n_steps, n_epochs = schedule_of(config, round(len(train.rows) * growth["train"]))
    unit = "responses" if arguments.reads_labels else "pairs"
    prompts = prompt_lengths(
        samples["train"],
        encoder.tokenizer,
        encoder.max_prompt_length,
        is_encoder_decoder=encoder.is_encoder_decoder,
        pictures=encoder.pictures,
    )
    lines += [
        ("prompts", prompts),
        *image_lines(samples["train"], encoder.pictures),
        ("optimizer steps", f"{n_steps:,} of {batch_size:,} {unit}, {n_epochs:g} epochs"),
    ]

    # The reference reads every split once, forward. Training reads `train` in each epoch, forward and backward: about
    # three times the work for each token.
    if arguments.needs_reference:
        n_tokens = round(sum(of_split.n_tokens * growth[split] for split, of_split in pairs.items()))
        n_in_training = train.n_tokens * growth["train"] * n_epochs * 3
        fraction = n_tokens / max(n_in_training, 1)
        lines.append(("reference", f"one forward pass over {n_tokens:,} tokens, about {fraction:.0%} of the training"))

    if train.rows:
        lines.append(("first example", ""))
        lines += row_lines(
            encoder.tokenizer,
            train.rows[0],
            is_encoder_decoder=encoder.is_encoder_decoder,
            has_language_model=arguments.has_language_model,
            reads_labels=arguments.reads_labels,
        )
    return lines
