"""Construction of the objects of a preference run from its config, and its plan for `check`.

PreferenceConfig ─ tokenizer, samples ─ pairs ─ model, reader ─ reference ─ objective ─> SupervisedRun
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from stable_baselines3.common.utils import get_device
from torch import nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from rl4lms_like.algorithms import OBJECTIVES
from rl4lms_like.core.errors import ConfigError, ConfigIssue, ModelError
from rl4lms_like.core.model_weights import output_layer
from rl4lms_like.core.observation import TextLayout
from rl4lms_like.core.ranks import Ranks
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.policies.generation import seeded
from rl4lms_like.policies.loading import auto_class_of, load_model, load_model_config
from rl4lms_like.policies.parity import SHARING_TOLERANCE, check_parity, check_sharing, first_episodes, probe_episodes
from rl4lms_like.policies.teacher_forcing import CausalReader, EpisodeReader, Seq2SeqReader
from rl4lms_like.scoring.classifier import RECORDED
from rl4lms_like.training.assemble import set_n_threads
from rl4lms_like.training.components import prompt_lengths
from rl4lms_like.training.config.run_config import PreferenceConfig
from rl4lms_like.training.config.settings import check_vocabulary
from rl4lms_like.training.preferences.objectives import PreferenceObjective, ReferenceObjective, RewardModel
from rl4lms_like.training.preferences.pairs import Pairs, encode_labels, encode_pairs, encode_texts, preferences_of
from rl4lms_like.training.supervised.assemble import (
    SupervisedRun,
    add_adapters,
    check_best_metric,
    config_to_plan,
    head_modules,
    load_encoder,
    make_generator,
    prepare,
    schedule_of,
)
from rl4lms_like.training.supervised.examples import ExampleEncoder
from rl4lms_like.training.supervised.training_arguments import make_training_arguments

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
    given = OBJECTIVES.signature(config.alg.id)(**config.alg.args)
    ranks = ranks or Ranks()
    found = prepare(config, ranks, None if given.has_language_model else output_layer)
    config, encoder = found.config, found.encoder
    given = OBJECTIVES.signature(config.alg.id)(**config.alg.args)  # with the folder of an embedded reference
    check_end_token(given, encoder)
    examples = {split: encode(given, encoder, each, config) for split, each in used(found.samples, config).items()}
    check_best_metric(config, used(found.samples, config)["val"])
    model, rates = _load(config, found.model_config, given)
    head = head_modules(model) if not given.has_language_model else ()
    nn.Module.to(model, get_device(config.device)).eval()
    add_adapters(model, config, dropout=bool(given.dropout))
    for name in head:
        model.get_submodule(name).requires_grad_(True)
    objective = _objective(config, given, model, encoder)
    objective.ranks = ranks
    set_n_threads(config, model)
    return SupervisedRun(
        config,
        encoder.tokenizer,
        found.samples,
        examples,
        model,
        objective,
        found.components.metrics,
        make_generator(model, config) if given.has_language_model and config.train_evaluation.generate else None,
        encoder.max_prompt_length,
        found.ends,
        found.components.post_processor,
        rates,
        tuple(head),
        ranks,
    )


def check_end_token(given: Any, encoder: ExampleEncoder) -> None:
    """Raise a `ConfigError` if the tokenizer lacks the token with which texts for a reward model end."""
    if getattr(given, "append_eos", False) and encoder.tokenizer.eos_token_id is None:
        text = "the tokenizer has no end-of-text token: set it to false"
        raise ConfigError([ConfigIssue("alg.args.append_eos", text)])


def used(samples: Mapping[str, Sequence[Sample]], config: PreferenceConfig) -> dict[str, Sequence[Sample]]:
    """Return the samples of each split that a run reads: of `val` and `test`, at most `max_eval_samples`."""
    limit = config.train_evaluation.max_eval_samples
    return {split: each if split == "train" else each[:limit] for split, each in samples.items()}


def encode(given: Any, encoder: ExampleEncoder, samples: Sequence[Sample], config: PreferenceConfig) -> Pairs:
    """Return the samples of a split as rows of an objective with these arguments.

    Raises:
        DataPoolError: the samples are not what the objective needs.
    """
    pool = f"the data pool {config.datapool.id!r}"
    preferences = preferences_of(samples, reads_labels=given.reads_labels, source=pool)
    if not given.has_language_model:
        whole = encoder.is_encoder_decoder
        return encode_texts(encoder, preferences, append_eos=given.append_eos, split_beginning=not whole)
    encode_all = encode_labels if given.reads_labels else encode_pairs
    return encode_all(encoder, preferences, given.max_response_length)


def _load(
    config: PreferenceConfig, model_config: PretrainedConfig, given: Any
) -> tuple[PreTrainedModel, dict[str, float]]:
    """Load the model that is trained; return it and the dropout rates of its checkpoint."""
    name = config.alg.model_name
    if given.has_language_model:
        return load_model(auto_class_of(model_config), name, dropout=given.dropout is True)
    with seeded(derived_seed(config.seed, "reward head"), torch.device("cpu")):
        return load_model(
            AutoModelForSequenceClassification, name, dropout=given.dropout is True, unused=head_modules, n_labels=1
        )


def _objective(
    config: PreferenceConfig, given: Any, model: PreTrainedModel, encoder: ExampleEncoder
) -> PreferenceObjective:
    arguments = make_training_arguments(config, "checkpoints")
    dtype = torch.bfloat16 if arguments.bf16 else torch.float16 if arguments.fp16 else None
    recomputes = getattr(arguments, "activation_checkpointing", False) or arguments.gradient_checkpointing
    objective_class = OBJECTIVES.resolve(config.alg.id)
    objective: PreferenceObjective = objective_class(
        given,
        checked_reader(model, config.alg.model_name) if given.has_language_model else CausalReader(model),
        pad_token_id=TextLayout(encoder.tokenizer, 1, 1).pad_token_id,
        eval_batch_size=arguments.per_device_eval_batch_size,
        dtype=dtype,
        needs_training_mode=bool(given.dropout) or recomputes,
    )
    if isinstance(objective, RewardModel):
        _set_up_reward_model(objective, config, encoder)
    if isinstance(objective, ReferenceObjective) and (name := given.reference_model) not in (
        None,
        config.alg.model_name,
    ):
        objective.reference = _reference(config, name, encoder, model)
    return objective


def checked_reader(model: PreTrainedModel, name: str) -> EpisodeReader:
    """Return the reader of a language model, after the checks of a policy.

    Raises:
        ModelError: the model's interface is not supported, or its outputs are not finite.
        ParityError: log-probs differ from those of generation.
    """
    reader = (Seq2SeqReader if model.config.is_encoder_decoder else CausalReader)(model)
    with first_episodes(model, name):
        probe = probe_episodes(int(model.config.get_text_config().vocab_size), reader.prompt_side)
        reader.probe_head(probe.to(model.device))
        check_parity(reader, name)
        reader.shares_prompts = check_sharing(reader, name)
    return reader


def _reference(config: PreferenceConfig, name: str, encoder: ExampleEncoder, model: PreTrainedModel) -> EpisodeReader:
    reference_config = load_model_config(name)
    if reference_config.is_encoder_decoder != model.config.is_encoder_decoder:
        text = f"{name!r} is of another family than {config.alg.model_name!r}"
        raise ConfigError([ConfigIssue("alg.args.reference_model", text)])
    check_vocabulary(encoder.tokenizer, reference_config, config.tokenizer.model_name, name)
    reference = load_model(auto_class_of(reference_config), name, role="reference model")[0]
    return checked_reader(nn.Module.to(reference, model.device).eval(), name)


def _set_up_reward_model(objective: RewardModel, config: PreferenceConfig, encoder: ExampleEncoder) -> None:
    """Record how texts end, and find out how rewards are computed."""
    model, tokenizer = objective.reader.model, encoder.tokenizer
    setattr(model.config, RECORDED, objective.arguments.append_eos)
    # Classifiers read the last token that is not padding. If the end token is also that of padding, they would read the
    # one before it; without a padding token, the score `reward_model` finds another one for each batch.
    is_ambiguous = tokenizer.pad_token_id == tokenizer.eos_token_id
    model.config.get_text_config().pad_token_id = None if is_ambiguous else tokenizer.pad_token_id
    if model.config.is_encoder_decoder:
        return
    with first_episodes(model, config.alg.model_name):
        objective.head = reward_head(objective.reader)
        objective.reader.shares_prompts = check_sharing(objective.reader, config.alg.model_name, has_head=False)


@torch.no_grad()
def reward_head(reader: EpisodeReader) -> nn.Linear:
    """Return the linear layer `score` of a classifier, if it gives the output of the model's own forward.

    Raises:
        ModelError: the classifier has no such layer, or its output differs.
    """
    model: Any = reader.model
    head, name = getattr(model, "score", None), type(model).__name__
    if not isinstance(head, nn.Linear):
        hint = "; add 'score' to exclude_modules" if hasattr(head, "get_base_layer") else ""
        raise ModelError(f"{name} has no linear layer `score` for the reward{hint}")
    vocab_size = int(model.config.get_text_config().vocab_size)
    padding = model.config.get_text_config().pad_token_id
    probe = probe_episodes(vocab_size, reader.prompt_side).select(torch.tensor([0])).to(model.device)
    ids = torch.cat([probe.prompt_ids[probe.prompt_mask], probe.response_ids[0]])
    ids = torch.where(ids == (-1 if padding is None else padding), (ids + 1) % vocab_size, ids)
    n = int(probe.prompt_mask.sum())
    probe = replace(probe, prompt_ids=ids[None, :n], prompt_mask=ids[None, :n] >= 0, response_ids=ids[None, n:])
    own, found = model(input_ids=ids[None]).logits[0], head(reader.final_states(probe))[0]
    if not bool((own - found).abs().max() <= SHARING_TOLERANCE * max(1.0, float(own.abs().max()))):
        raise ModelError(f"{name}: rewards differ from those of its own forward; report this family")
    return head


def plan(config: PreferenceConfig, find: Callable[[], Mapping[str, Sequence[Sample]]]) -> list[tuple[str, str]]:
    """Return the size of a run, its formula, and everything unusual about its data, before weights are loaded.

    Arguments, lines and errors are those of the `plan` of a supervised run.
    """
    config = config_to_plan(config)
    given = OBJECTIVES.signature(config.alg.id)(**config.alg.args)
    lines = [("objective" if not i else "", line) for i, line in enumerate(given.formula())]
    encoder = load_encoder(config)[-1]
    check_end_token(given, encoder)
    found = used(find(), config)
    check_best_metric(config, found["val"])
    pairs = {split: encode(given, encoder, samples[:N_COUNTED], config) for split, samples in found.items()}
    for split, of_split in pairs.items():
        n, counted = len(found[split]), of_split.n_preferences
        title = split if n == counted else f"{split} (the first {counted:,} of {n:,})"
        lines += [(f"{title}: {name}", value) for name, value in of_split.lines()] if of_split.rows else []
    train = pairs["train"]
    growth = {split: len(found[split]) / max(each.n_preferences, 1) for split, each in pairs.items()}
    batch_size, n_steps, n_epochs = schedule_of(config, round(len(train.rows) * growth["train"]))
    unit = "responses" if given.reads_labels else "pairs"
    lines += [
        ("prompts", prompt_lengths(found["train"], encoder.tokenizer, encoder.max_prompt_length)),
        ("optimizer steps", f"{n_steps:,} of {batch_size:,} {unit}, {n_epochs:g} epochs"),
    ]
    if given.needs_reference:
        n_tokens = round(sum(each.n_tokens * growth[split] for split, each in pairs.items()))
        in_training = train.n_tokens * growth["train"] * n_epochs * 3  # forward and backward
        fraction = n_tokens / max(in_training, 1)
        lines.append(("reference", f"one forward pass over {n_tokens:,} tokens, about {fraction:.0%} of the training"))
    return lines
