"""Construction of the objects of a supervised run from its config; parts that preference runs share.

SupervisedConfig ─ training arguments ─ metrics ─ tokenizer ─ samples ─ examples ─ model ─> SupervisedRun
                          └────────────────────── tokenizer ─ samples ─ first examples ──> plan, for `check`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import load_file
from stable_baselines3.common.utils import get_device, set_random_seed
from torch import nn
from transformers import (
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rl4lms_like.algorithms import OBJECTIVES
from rl4lms_like.callbacks.base import Callback
from rl4lms_like.config.added_tokens import with_created_models
from rl4lms_like.config.run_config import OfflineConfig, PreferenceConfig, SupervisedConfig
from rl4lms_like.config.settings import attention_issues, check_prompts, check_vocabulary, device_issues
from rl4lms_like.core.model_weights import Unused
from rl4lms_like.core.observation import TextLayout, refuse_images
from rl4lms_like.core.packed_rows import RowPacking
from rl4lms_like.core.picture_encoder import OFFLINE, PictureEncoder
from rl4lms_like.core.sample import Preference, Sample
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.core.vision_rewards import AutoVisionRewardModel
from rl4lms_like.engines.arguments import generate_arguments
from rl4lms_like.estimates.memory import N_PROCESSES, MemoryEstimate, estimate_supervised_memory, gibibytes
from rl4lms_like.estimates.savings import advice
from rl4lms_like.metrics.base import BaseMetric
from rl4lms_like.offline.checked_readers import checked_vision_reader, reads_prompts_in_order
from rl4lms_like.offline.objective import CrossEntropy, TrainingObjective
from rl4lms_like.offline.settable_arguments import PATH, float16_reason
from rl4lms_like.offline.shown_example import example_lines
from rl4lms_like.offline.training_arguments import make_training_arguments, n_steps_of, steps_per_epoch
from rl4lms_like.offline.vision_objective import VisionCrossEntropy
from rl4lms_like.policies.generation import TextGenerator, seeded, unknown_generation_arguments
from rl4lms_like.policies.gradient_check import check_gradients
from rl4lms_like.policies.head_inputs import has_linear_head
from rl4lms_like.policies.loading import (
    auto_class_of,
    check_model_weights,
    is_loaded_by,
    load_model,
    load_model_config,
)
from rl4lms_like.policies.lora import add_lora, lora_conflicts, needs_values, refuse_unknown_layers, require_stackable
from rl4lms_like.policies.parity import (
    check_packing,
    dependence_on_batch,
    first_episodes,
    is_flash_attention,
    longest_independent_of_batch,
    probe_episodes,
)
from rl4lms_like.policies.quantization import require_package
from rl4lms_like.policies.routing import BalancingLoss
from rl4lms_like.policies.sharding import process_mesh
from rl4lms_like.policies.teacher_forcing import CausalReader, Seq2SeqReader, decoder_start_token_id
from rl4lms_like.policies.vision_parts import freeze_vision, within_scope
from rl4lms_like.policies.vision_reader import VisionTextGenerator
from rl4lms_like.system.errors import ConfigError, ConfigIssue, DataPoolError, ModelError
from rl4lms_like.system.freed_memory import keep_freed_memory
from rl4lms_like.system.ranks import Ranks
from rl4lms_like.training.components import (
    N_COUNTED,
    Components,
    build_components,
    check_samples,
    image_sizes,
    prompt_lengths,
)
from rl4lms_like.training.examples import NOT_LEARNED, ExampleCollator, ExampleEncoder, Examples
from rl4lms_like.training.inputs import (
    NO_LIMIT,
    build_datapools,
    build_pictures,
    build_tokenizer,
    chat_template_of,
    end_tokens,
    load_generation_config,
    render_prompts,
    token_limit,
)
from rl4lms_like.training.threads import set_n_threads

Offline = TypeVar("Offline", SupervisedConfig, PreferenceConfig)

N_ENCODED = 2000
"""Number of samples that are encoded to estimate the number of tokens."""


@dataclass(frozen=True)
class SupervisedRun:
    """Objects that the trainer of a supervised or preference run needs."""

    config: OfflineConfig
    tokenizer: PreTrainedTokenizerBase  # of prompts, references and responses
    samples: Mapping[str, list[Sample]]  # of `train`, `val` and `test`
    examples: Mapping[str, Any]  # `rows` and `notices` of each split that the objective reads
    model: PreTrainedModel  # is trained
    objective: TrainingObjective
    metrics: list[BaseMetric]
    generator: TextGenerator | None  # generates text with the model; None if no text is evaluated
    max_prompt_length: int  # tokens; longer prompts are truncated
    eos_token_ids: list[int]  # tokens that end a response
    post_processor: Callable[[str], str] | None = None  # applied to each response before it is scored and saved
    dropout_rates: Mapping[str, float] = field(default_factory=dict)  # saved in the model's config
    head: tuple[str, ...] = ()  # modules of a reward model that are not part of adapters
    ranks: Ranks = field(default_factory=Ranks)  # processes that train together
    callbacks: list[Callback] = field(default_factory=list)  # of the user, in the order of the config
    pictures: PictureEncoder | None = None  # encodes prompts with pictures; its processor is saved with the model


def assemble_supervised(config: SupervisedConfig, ranks: Ranks | None = None) -> SupervisedRun:
    """Build the objects of a supervised run.

    Args:
        config: config of the run.
        ranks: the processes that train together; default: this one alone.

    Raises:
        ConfigError: settings of the config are not compatible.
        DataPoolError: a data pool could not be prepared, or has no references to learn from.
        RL4LMsLikeError: a model, a component or one of their dependencies is missing; subclasses name the cause.
    """
    ranks = ranks or Ranks()
    prepared = prepare(config, ranks)
    config = prepared.config
    encoder = prepared.encoder
    samples = prepared.samples
    # Only texts are evaluated on `test`, so it needs no examples.
    examples = {split: encoder.encode(samples[split]) for split in ("train", "val")}
    check_best_metric(config, samples["val"])
    networks = {"alg.model_name": prepared.model_config}
    generates = config.train_evaluation.generate
    check_independence(config, networks, encoder, examples, samples, generates=generates)

    # The model last: it takes longest, and everything that can be wrong with the rest is reported by now.
    model, _ = load_model(
        language_model_class(config, prepared.model_config),
        config.alg.model_name,
        dropout=True,
        attn_implementation=config.alg.attn_implementation,
        quantization=config.alg.quantization,
        unread=leaves_unread(config, ranks),
    )
    add_adapters(model, config, dropout=True)
    # The Trainer would do it too late: an average of the weights begins with a copy on their device.
    nn.Module.to(model, loading_device(config, ranks))
    if config.alg.quantization is not None:
        check_offline_gradients(model, config)
    set_n_threads(config, model)

    pad_token_id = TextLayout(encoder.tokenizer, 1, 1).pad_token_id
    if encoder.pictures is not None:
        objective = _vision_objective(config, model, encoder.pictures, examples, pad_token_id)
        return prepared.run(examples=examples, model=model, objective=objective, generates=generates, ranks=ranks)

    start_token_id = decoder_start_token_id(model) if encoder.is_encoder_decoder else None
    arguments = make_training_arguments(config, "checkpoints")
    cross_entropy = CrossEntropy(
        ExampleCollator(pad_token_id, start_token_id),
        is_encoder_decoder=encoder.is_encoder_decoder,
        label_smoothing=arguments.label_smoothing_factor,
        use_cache=arguments.use_cache,
        logits_budget=None,
        balancing=BalancingLoss.of(model),
    )
    # Weights are split first: a process has the rows of each, and may have read no others.
    prepared.split(cross_entropy, model, ranks)
    cross_entropy.logits_budget = cross_entropy.call(logits_budget, config, model)
    cross_entropy.packing = cross_entropy.call(row_packing, config, model)
    cross_entropy.reshard()
    return prepared.run(examples=examples, model=model, objective=cross_entropy, generates=generates, ranks=ranks)


def _vision_objective(
    config: SupervisedConfig,
    model: PreTrainedModel,
    pictures: PictureEncoder,
    examples: Mapping[str, Examples],
    pad_token_id: int,
) -> VisionCrossEntropy:
    """Return the objective of a vision-language model, after the checks of a policy.

    Raises:
        ConfigError: messages of the assistant before the last one would be learned, and the model reads prompts in any
            order.
        ModelError: the model's interface is not supported, or its outputs are not finite.
        ParityError: log-probs differ from those of generation.
    """
    reader = checked_vision_reader(model.eval(), config.alg.model_name, pictures)
    learns_prompts = any(of_split.n_learned_in_prompts for of_split in examples.values())
    if learns_prompts and not reads_prompts_in_order(reader):
        text = f"{config.alg.model_name!r} sees all of a prompt at once, so it cannot learn messages within it"
        message = f"{text}; give it conversations with one message of the assistant"
        raise ConfigError([ConfigIssue("alg.model_name", message)])
    return VisionCrossEntropy(
        reader,
        pad_token_id,
        logits_budget=logits_budget(config, model),
        dtype=autocast_dtype(config),
        balancing=BalancingLoss.of(model),
    )


def autocast_dtype(config: OfflineConfig) -> torch.dtype | None:
    """Return the data type of autocast for an objective that does not call the model's own forward; None for none."""
    training = make_training_arguments(config, "checkpoints")
    if training.bf16:
        return torch.bfloat16
    return torch.float16 if training.fp16 else None


class Prepared(NamedTuple):
    """Objects of a supervised or preference run that exist before its model is loaded."""

    config: Any  # with a folder in place of each embedded model
    components: Components
    model_config: PretrainedConfig
    eos_token_ids: list[int]  # tokens that end a response
    encoder: ExampleEncoder
    samples: dict[str, list[Sample]]  # of all splits

    def split(self, objective: TrainingObjective, model: PreTrainedModel, ranks: Ranks) -> None:
        """Split the weights of a run over its processes, if the config says so.

        Before the checks of the model, and before an optimizer is made for the parts of the weights.
        """
        if splits_weights(self.config, ranks):
            device = get_device(self.config.device)
            reshards = self.config.distributed.reshard_after_forward
            objective.split_weights(model, process_mesh(device), reshard_after_forward=reshards)
            nn.Module.to(model, device)  # the buffers

    def run(
        self,
        *,
        examples: Mapping[str, Any],
        model: PreTrainedModel,
        objective: TrainingObjective,
        generates: bool,
        ranks: Ranks,
        dropout_rates: Mapping[str, float] | None = None,
        head: Sequence[str] = (),
    ) -> SupervisedRun:
        """Return the run of a loaded model and its objective; for the arguments see `SupervisedRun`."""
        objective.ranks = ranks
        return SupervisedRun(
            config=self.config,
            tokenizer=self.encoder.tokenizer,
            samples=self.samples,
            examples=examples,
            model=model,
            objective=objective,
            metrics=self.components.metrics,
            generator=make_generator(model, self.config, self.encoder.pictures) if generates else None,
            max_prompt_length=self.encoder.max_prompt_length,
            eos_token_ids=self.eos_token_ids,
            post_processor=self.components.post_processor,
            dropout_rates=dropout_rates or {},
            head=tuple(head),
            ranks=ranks,
            callbacks=self.components.callbacks,
            pictures=self.encoder.pictures,
        )


def prepare(config: OfflineConfig, ranks: Ranks, unused: Unused | None = None) -> Prepared:
    """Check the settings, and load tokenizer, components and data; raises the errors of `assemble_supervised`.

    `unused` returns the modules of the language model that the run does not use.
    """
    set_n_threads(config)
    check_settings(config)
    # Before the first large tensors are made. It changes no number, so that no run needs a switch.
    if get_device(config.device).type == "cpu":
        keep_freed_memory()
    # The main process creates embedded models that do not exist yet; the others find them in the cache.
    with ranks.main_first():
        config = with_created_models(config)

    # Components of users may use the global generators.
    set_random_seed(config.seed)
    components = build_components(config)
    model_config, eos_token_ids, encoder = load_encoder(config)

    # Before the data, which may take long: missing weights are known from the file headers.
    check_model_weights(language_model_class(config, model_config), config.alg.model_name, unused=unused)
    pools = render_prompts(build_datapools(config.datapool), config.tokenizer, encoder.tokenizer)
    samples = {}
    for split, pool in pools.items():
        samples[split] = [sample for sample, _ in pool]
    check_samples(config, components, samples)
    check_images(config, encoder, samples)
    check_texts(config, encoder, model_config, samples)
    return Prepared(config, components, model_config, eos_token_ids, encoder=encoder, samples=samples)


def splits_weights(config: OfflineConfig, ranks: Ranks) -> bool:
    """Return whether the weights of a run are split over its processes."""
    return config.distributed.strategy == "fsdp" and ranks.size > 1


def leaves_unread(config: OfflineConfig, ranks: Ranks) -> bool:
    """Return whether models are split before their weights are read, where that is possible."""
    return splits_weights(config, ranks) and not needs_values(config.alg.peft)


def loading_device(config: OfflineConfig, ranks: Ranks) -> torch.device:
    """Return the device of a model before training: main memory if its weights are then split.

    A whole model may not fit on the device of one process.
    """
    return torch.device("cpu") if splits_weights(config, ranks) else get_device(config.device)


def language_model_class(config: OfflineConfig, model_config: PretrainedConfig) -> Any:
    """Return the transformers class that loads the language model of a run."""
    if config.reads_pictures and is_loaded_by(model_config, AutoModelForImageTextToText):
        return AutoModelForImageTextToText
    return auto_class_of(model_config)


def reward_model_class(config: OfflineConfig) -> Any:
    """Return the class that loads the reward model of a run."""
    return AutoVisionRewardModel if config.reads_pictures else AutoModelForSequenceClassification


def add_adapters(model: PreTrainedModel, config: OfflineConfig, *, dropout: bool) -> None:
    """Freeze the parts of a model's vision that are not trained, and add the adapters of `alg.peft`, if there are some.

    Raises:
        ModelError: `peft` or `train_vision` does not fit the model.
    """
    if config.reads_pictures:
        freeze_vision(model, config.alg.train_vision)
    if config.alg.peft is None:
        return
    refuse_unknown_layers([model], config.alg.peft)
    # Their initial weights depend on the run's seed alone, not on how many random numbers were drawn before.
    peft = within_scope(model, config.alg.peft, config.alg.train_vision) if config.reads_pictures else config.alg.peft
    with seeded(derived_seed(config.seed, "adapters"), model.device):
        add_lora(model, peft, dropout=dropout)
    if not config.alg.merge_on_save:
        require_stackable(model)


def check_offline_gradients(model: PreTrainedModel, config: OfflineConfig) -> None:
    """Check that quantized layers give the adapters of `alg.peft` their gradients.

    Raises:
        ModelError: they do not, or the model's interface is not supported.
    """
    was_training = model.training
    model.eval()
    reader = Seq2SeqReader(model) if model.config.is_encoder_decoder else CausalReader(model)
    with first_episodes(model, config.alg.model_name):
        probe = probe_episodes(int(model.config.get_text_config().vocab_size), reader.prompt_side)
        check_gradients(reader, config.alg.model_name, probe.to(model.device))
    model.train(was_training)


def logits_budget(config: SupervisedConfig, model: PreTrainedModel) -> int | None:
    """Return the largest number of logits, of 4 bytes each, that `alg.logits_budget_mb` allows; None for no limit."""
    budget_mb = config.alg.logits_budget_mb
    if budget_mb is None or config.alg.needs_whole_logits or not has_linear_head(model):
        return None
    return int(budget_mb * 2**20 / 4)


def row_packing(config: SupervisedConfig, model: PreTrainedModel) -> RowPacking | None:
    """Return how the texts of a batch are packed, if `alg.packing` says so and that is exact; otherwise None.

    Raises:
        ModelError: the model's interface is not supported.
    """
    if config.alg.packing is None:
        return None
    was_training = model.training
    model.eval()
    with first_episodes(model, config.alg.model_name):
        reader = CausalReader(model)
        packing = check_packing(reader, config.alg.model_name, has_head=False, in_bfloat16=is_flash_attention(model))
    model.train(was_training)
    return packing


def make_generator(
    model: PreTrainedModel, config: OfflineConfig, pictures: PictureEncoder | None = None
) -> TextGenerator:
    """Create the generator of evaluations; `pictures` encodes the prompts of a vision-language model."""
    options: dict[str, Any] = {
        "generation_kwargs": config.alg.generation_kwargs,
        "prompt_truncation_side": config.tokenizer.truncation_side,
        "bfloat16": bool(config.alg.training_args.get("bf16")),
    }
    if pictures is not None:
        return VisionTextGenerator(model, pictures, **options)
    return TextGenerator(model, **options)


# --- settings ---------------------------------------------------------------------------------------------------------


def check_settings(config: OfflineConfig, *, runs_here: bool = True) -> None:
    """Check the settings that need torch and transformers, before anything is loaded.

    Args:
        config: config of the run.
        runs_here: False if its device may be that of another machine.

    Raises:
        ConfigError: lists every error.
    """
    unknown = unknown_generation_arguments(config.alg.generation_kwargs)
    issues = [ConfigIssue(f"alg.generation_kwargs.{key}", message) for key, message in unknown.items()]
    issues += lora_conflicts(config.alg.peft, "alg.peft")
    require_package(config.alg.quantization)
    issues += attention_issues(config.alg.attn_implementation, "alg.attn_implementation")
    device_errors = supervised_device_issues(config.device)
    issues += device_errors
    reason = float16_reason(config) if runs_here and not device_errors else None
    if reason is not None:
        issues.append(ConfigIssue(f"{PATH}.fp16", f"cannot be set: {reason}"))

    # A wrong device would hide errors in the other arguments, so these are then checked for the CPU.
    checkable = replace(config, device="cpu") if device_errors else config
    try:
        make_training_arguments(checkable, "checkpoints")
    except ConfigError as error:
        issues += error.issues
    if issues:
        raise ConfigError(issues)


def supervised_device_issues(device: str, *, here: bool = True) -> list[ConfigIssue]:
    """Return the errors in the device of a supervised run; those on every machine only, if `here` is False."""
    issues = device_issues(device, here=False)
    if issues:
        return issues

    # `TrainingArguments` has no setting for another GPU.
    if device != "auto" and torch.device(device).index:
        text = "a supervised run uses the first visible GPU: write cuda, and select the GPU with CUDA_VISIBLE_DEVICES"
        return [ConfigIssue("device", text)]
    return device_issues(device) if here else []


def check_images(config: OfflineConfig, encoder: ExampleEncoder, samples: Mapping[str, Sequence[Sample]]) -> None:
    """Encode the prompts with images, so that what is wrong with them is known before the model is loaded.

    Raises:
        DataPoolError: lists the prompts that are too long with their images; or the model reads texts only, and prompts
            have images.
    """
    of_all_splits = [sample for members in samples.values() for sample in members]
    if encoder.pictures is None:
        refuse_images(of_all_splits)
        return

    # A reward model writes no text, for which a prompt would have to leave room.
    is_reward_model = isinstance(config, PreferenceConfig) and not config.alg.writes_text
    limit = encoder.max_length if is_reward_model else encoder.max_prompt_length
    encoder.pictures.register(of_all_splits, limit)


def check_texts(
    config: OfflineConfig,
    encoder: ExampleEncoder,
    model_config: PretrainedConfig,
    samples: Mapping[str, Sequence[Sample]],
) -> None:
    """Check that evaluations do not have to continue texts without prompts.

    Raises:
        DataPoolError: they would have to; the message says how to evaluate the loss alone.
    """
    if config.train_evaluation.generate and samples["train"][0].learned == "text":
        try:
            check_prompts(samples, encoder.tokenizer, model_config)
        except DataPoolError as error:
            raise DataPoolError(f"{error}; train_evaluation.generate: false evaluates the loss alone") from error


def learns_response_of_dialogues(run: SupervisedRun) -> bool:
    """Return whether a supervised run leaves out messages of the assistant that are in the prompts."""
    if not isinstance(run.config, SupervisedConfig):
        return False
    for sample in run.samples["train"]:
        has_turns = any(message["role"] == "assistant" for message in sample.messages or ())
        if has_turns and sample.learned == "response":
            return True
    return False


def check_best_metric(config: OfflineConfig, samples: Sequence[Sample]) -> None:
    """Check that the metric that selects the best checkpoint can be computed on the samples of `val`."""
    metric = make_training_arguments(config, "checkpoints").metric_for_best_model
    if metric is None:
        return

    text = None
    if not samples:
        text = f"it cannot be computed: the data pool {config.datapool.id!r} has no samples in the split 'val'"
    elif metric in ("loss", "eval_loss"):
        # Labelled responses have no references, but a loss.
        has_loss = any(sample.references or isinstance(sample, Preference) for sample in samples)
        if not has_loss:
            text = "the loss cannot be computed: no sample of the split 'val' has a reference; name a metric"
    if text is not None:
        raise ConfigError([ConfigIssue(f"{PATH}.metric_for_best_model", text)])


# --- tokenizer and lengths --------------------------------------------------------------------------------------------


def load_encoder(config: OfflineConfig) -> tuple[PretrainedConfig, list[int], ExampleEncoder]:
    """Load and compare the model's config and the tokenizer; also return the ids of tokens that end a response."""
    model_name = config.alg.model_name
    model_config = load_model_config(model_name)
    family = "seq2seq" if model_config.is_encoder_decoder else "causal"
    # Some families, such as Gemma 3, are trained as either: on texts alone, or on images too.
    if language_model_class(config, model_config) is AutoModelForImageTextToText:
        family = "vision"
    if family != config.alg.model_type:
        text = f"{model_name!r} is a {family} model: write {family}, or name another model"
        raise ConfigError([ConfigIssue("alg.model_type", text)])

    pictures = None
    if config.reads_pictures:
        pictures = build_pictures(config.tokenizer, model_config, max_pixels=config.alg.max_pixels, keys=OFFLINE)
        tokenizer = pictures.processor.tokenizer
    else:
        tokenizer = build_tokenizer(config.tokenizer)
    check_vocabulary(tokenizer, model_config, config.tokenizer.model_name, model_name)
    template = chat_template_of(config.tokenizer, tokenizer)
    eos_token_ids = end_tokens(tokenizer, model_config, load_generation_config(model_name), template)
    return model_config, eos_token_ids, example_encoder(config, tokenizer, model_config, eos_token_ids, pictures)


def example_encoder(
    config: OfflineConfig,
    tokenizer: PreTrainedTokenizerBase,
    model_config: PretrainedConfig,
    eos_token_ids: list[int],
    pictures: PictureEncoder | None = None,
) -> ExampleEncoder:
    """Create the encoder of examples, within the length limits of tokenizer and model.

    `pictures` encodes prompts with pictures.

    Raises:
        ConfigError: the responses leave no room for a prompt.
    """
    limit = token_limit(tokenizer, model_config)
    # A model must learn to end with a token at which generation stops; not every tokenizer names one.
    end_token_id = tokenizer.eos_token_id
    if end_token_id is None:
        end_token_id = next(iter(eos_token_ids), None)

    return ExampleEncoder(
        tokenizer=tokenizer,
        is_encoder_decoder=bool(model_config.is_encoder_decoder),
        max_prompt_length=max_prompt_length(config, limit),
        max_length=limit,
        end_token_id=end_token_id,
        separator=config.alg.separator,
        loss_on_prompt=isinstance(config, SupervisedConfig) and config.alg.loss_on_prompt,
        block_length=config.alg.block_length if isinstance(config, SupervisedConfig) else None,
        pictures=pictures,
    )


def max_prompt_length(config: OfflineConfig, limit: int) -> int:
    """Return the largest prompt length in tokens, such that a causal model's response fits after it within `limit`."""
    # The decoder of a seq2seq model has positions of its own.
    configured = min(config.tokenizer.max_length or limit, limit)
    if config.alg.model_type == "seq2seq" or limit == NO_LIMIT:
        return configured

    generation = generate_arguments(
        config.alg.generation_kwargs, max_new_tokens=None, eos_token_ids=(), is_encoder_decoder=False
    )
    n_response = generation["max_new_tokens"]
    if n_response >= limit:
        text = f"responses of {n_response} tokens leave no room for a prompt: the model takes {limit} in total"
        raise ConfigError([ConfigIssue("alg.generation_kwargs.max_new_tokens", text)])
    return int(min(configured, limit - n_response))


def check_independence(
    config: OfflineConfig,
    networks: Mapping[str, PretrainedConfig],
    encoder: ExampleEncoder,
    examples: Mapping[str, Any],
    samples: Mapping[str, Sequence[Sample]],
    *,
    generates: bool,
) -> None:
    """Check that no text is so long that log-probs would depend on the batch; see `longest_independent_of_batch`.

    Args:
        config: config of the run.
        networks: key of the config that names a model; the model's config.
        encoder: encodes the prompts of evaluations.
        examples: `Examples` or `Pairs` of each split that is read.
        samples: samples of each split.
        generates: evaluations generate texts.

    Raises:
        ConfigError: a text that is trained or evaluated is longer.
    """
    for key, network in networks.items():
        limit = longest_independent_of_batch(network)
        if limit is None:
            continue

        longest = {}
        for split, of_split in examples.items():
            longest[split] = of_split.longest(is_encoder_decoder=encoder.is_encoder_decoder)
        if generates and key == "alg.model_name":
            longest["generated"] = _longest_generated(config, encoder, samples)
        split = max(longest, key=lambda name: longest[name])
        n_tokens = longest[split]
        if n_tokens > limit:
            what = f"texts that are generated in evaluations may have {n_tokens} tokens"
            if split != "generated":
                what = f"the longest text of {split!r} has {n_tokens} tokens"
            text = f"{what}: {dependence_on_batch(limit)}, by shorter samples, tokenizer.max_length or max_new_tokens"
            raise ConfigError([ConfigIssue(key, text)])


def _longest_generated(config: OfflineConfig, encoder: ExampleEncoder, samples: Mapping[str, Sequence[Sample]]) -> int:
    """Return the largest number of tokens of a prompt of `val` and `test` with a generated response."""
    generation = generate_arguments(
        config.alg.generation_kwargs,
        max_new_tokens=None,
        eos_token_ids=(),
        is_encoder_decoder=encoder.is_encoder_decoder,
    )
    n_response = int(generation["max_new_tokens"])
    n_prompt = 0
    for split in ("val", "test"):
        evaluated = samples[split][: config.train_evaluation.max_eval_samples]
        n_prompt = max([n_prompt, *(len(ids) for ids in encoder.prompts(evaluated))])
    return max(n_prompt, n_response) if encoder.is_encoder_decoder else n_prompt + n_response


# --- the plan of a run, for `check` -----------------------------------------------------------------------------------


def config_to_plan(config: Offline) -> Offline:
    """Check the settings of a run that may be trained on another machine; return its config with embedded models.

    Raises:
        ConfigError: settings have errors.
    """
    # The device may exist on another machine only.
    runs_here = config.device == "cpu"
    if not supervised_device_issues(config.device, here=False):
        config = replace(config, device="cpu")
    check_settings(config, runs_here=runs_here)
    return with_created_models(config, local_files_only=True)


class Schedule(NamedTuple):
    """Size of the optimizer steps of a run, their number, and how often they read all examples."""

    batch_size: int
    n_steps: int
    n_epochs: float


def schedule_of(config: OfflineConfig, n_examples: int) -> Schedule:
    """Return the schedule of a run with this number of examples."""
    arguments = make_training_arguments(config, "checkpoints")
    batch_size = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    n_steps = n_steps_of(arguments, n_examples)
    n_epochs = arguments.num_train_epochs
    if arguments.max_steps > 0:  # it wins over the epochs
        n_epochs = round(n_steps / steps_per_epoch(arguments, n_examples), 2)
    return Schedule(batch_size, n_steps, n_epochs)


def plan(
    config: SupervisedConfig, find: Callable[[], Mapping[str, Sequence[Sample]]], *, gpu_bytes: int | None = None
) -> list[tuple[str, str]]:
    """Return the size of a run as lines of name and value, before weights are loaded.

    Args:
        config: of the run.
        find: prepares the samples.
        gpu_bytes: see `estimate_memory`.

    Raises:
        ConfigError: settings have errors.
        RL4LMsLikeError: the data, the tokenizer or the model's config cannot be loaded; the message names which.
    """
    config = config_to_plan(config)
    model_config, _, encoder = load_encoder(config)
    samples_of_splits = find()
    check_best_metric(config, samples_of_splits["val"])
    check_images(config, encoder, samples_of_splits)
    check_texts(config, encoder, model_config, samples_of_splits)
    samples = samples_of_splits["train"]
    n_references = sum(len(sample.references) for sample in samples)

    # Encoding all samples would take as long as the start of the run. The mean of the first ones stands for all.
    encoded = encoder.encode(samples[:N_ENCODED])
    n_examples = n_references
    what = f"{n_references:,} references of {len(samples):,} samples"
    if encoded.n_texts:
        n_examples = round(len(encoded.rows) / encoded.n_texts * n_references)
        what = f"about {n_examples:,} blocks of {n_references:,} texts"
    schedule = schedule_of(config, n_examples)
    networks = {"alg.model_name": model_config}
    generates = config.train_evaluation.generate
    check_independence(config, networks, encoder, {"train": encoded}, samples_of_splits, generates=generates)
    prompts = prompt_lengths(
        samples,
        encoder.tokenizer,
        encoder.max_prompt_length,
        is_encoder_decoder=encoder.is_encoder_decoder,
        pictures=encoder.pictures,
    )
    memory = _memory_lines(config, encoded, is_encoder_decoder=encoder.is_encoder_decoder, gpu_bytes=gpu_bytes)
    n_tokens = round(encoded.n_learned / max(len(encoded.rows), 1) * n_examples)
    lines = [
        ("examples", what),
        ("prompts", prompts),
        *image_lines(samples, encoder.pictures),
        ("learned tokens", f"about {n_tokens:,} per epoch"),
        ("batches", f"of {schedule.batch_size:,} examples"),
        ("optimizer steps", f"{schedule.n_steps:,} in {schedule.n_epochs:g} epochs"),
        *memory,
    ]
    if encoded.rows:
        lines.append(("first example", ""))
        lines += example_lines(encoder.tokenizer, encoded.rows[0], is_encoder_decoder=encoder.is_encoder_decoder)
    return lines


def image_lines(samples: Sequence[Sample], pictures: PictureEncoder | None) -> list[tuple[str, str]]:
    """Return the size of the images of samples as a line of name and value; none if there are no images."""
    counted = samples[:N_COUNTED]
    if pictures is None or not any(sample.images for sample in counted):
        return []
    return [("images", image_sizes(counted, pictures))]


def _memory_lines(
    config: SupervisedConfig, encoded: Examples, *, is_encoder_decoder: bool, gpu_bytes: int | None = None
) -> list[tuple[str, str]]:
    """Return the trainable parameters and the memory of a run, for batches of the longest of some examples."""
    if not encoded.rows:
        return []

    # A causal model reads prompt and reference as one text.
    n_input = max(len(row["input_ids"]) for row in encoded.rows)
    n_response = max(len(row["labels"]) for row in encoded.rows)
    if not is_encoder_decoder:
        n_response = max(sum(label != NOT_LEARNED for label in row["labels"]) for row in encoded.rows)
        n_input -= n_response

    def estimate_of(changed: SupervisedConfig, n_processes: int) -> MemoryEstimate:
        return estimate_supervised_memory(
            changed,
            prompt_tokens=n_input,
            response_tokens=n_response,
            packed=packed_shape(changed, encoded, n_processes),
            n_processes=n_processes,
            gpu_bytes=gpu_bytes,
        )

    estimate = estimate_of(config, 1)
    lines = [("trainable parameters", estimate.parameters)]
    lines += [(name, gibibytes(size)) for name, size in estimate.parts.items() if size]
    lines.append(("peak of the update", gibibytes(estimate.update)))
    lines.append(("peak of evaluations", gibibytes(estimate.rollout)))
    if estimate.loading:
        lines.append(("peak of the loading", gibibytes(estimate.loading)))
    # Split weights: the number of processes is only known when `torchrun` starts them.
    if config.distributed.strategy == "fsdp":
        for n in N_PROCESSES:
            lines.append((f"peak of each of {n} processes", gibibytes(estimate_of(config, n).peak)))
    lines.append(("memory", estimate.verdict))
    change = advice(config, estimate, estimate_of)
    return [*lines, ("", change)] if change else lines


def packed_shape(config: SupervisedConfig, encoded: Examples, n_processes: int = 1) -> tuple[int, int] | None:
    """Return the numbers of packed rows and of their columns of a process's longest examples; None if padded."""
    if config.alg.packing is None:
        return None
    batch_size = math.ceil(int(config.alg.training_args.get("per_device_train_batch_size") or 8) / n_processes)
    lengths = sorted((len(row["input_ids"]) for row in encoded.rows), reverse=True)[:batch_size]
    model_config = load_model_config(config.alg.model_name, local_files_only=True)
    packing = RowPacking(
        int(model_config.get_text_config().hidden_size), one_row="flash" in (config.alg.attn_implementation or "")
    )
    packed = packing.packed(torch.tensor(lengths))
    return None if packed is None else packed.shape


def check_model(config: OfflineConfig) -> None:
    """Check a model in a local folder, without reading its weights.

    Raises:
        ModelError: the folder lacks weights, which the message names, or the adapters do not fit the model.
    """
    try:
        config = with_created_models(config, local_files_only=True)
        model_name = config.alg.model_name
        model_config = load_model_config(model_name, local_files_only=True)
    except ModelError:  # `plan` raises it
        return

    # A reward model is a classifier, whose head may be missing: it is then a new one.
    auto_class = language_model_class(config, model_config)
    unused = None
    if isinstance(config, PreferenceConfig):
        objective_arguments: Any = OBJECTIVES.signature(config.alg.id)
        if not objective_arguments.has_language_model:
            auto_class = reward_model_class(config)
            unused = head_modules
    check_model_weights(auto_class, model_name, unused=unused)

    # On the meta device, tensors have shapes but no memory: enough to see which layers get adapters.
    if config.alg.peft is None:
        return
    try:
        with torch.device("meta"):
            model = auto_class.from_config(model_config)
    except (ValueError, ImportError) as error:
        raise ModelError(f"cannot build {model_name!r} from its config: {error}") from error
    except RuntimeError:  # the class computes with weights, which have no values on the meta device
        return
    refuse_unknown_layers([model], config.alg.peft)
    add_lora(model, config.alg.peft, dropout=False, empty=True)


def head_modules(model: PreTrainedModel) -> list[str]:
    """Return the names of the modules of a classifier that are not part of its language model."""
    return [name for name, _ in model.named_children() if name != model.base_model_prefix]


def load_head(model: PreTrainedModel, file: Path) -> None:
    """Load the output layer of a reward model from a file of a checkpoint, in place.

    Args:
        model: with the weights of its language model, which the file lacks.
        file: `head.safetensors`.

    Raises:
        ModelError: the file has other weights than those of the model's output layer.
    """
    result = model.load_state_dict(load_file(file), strict=False)
    prefixes = tuple(f"{name}." for name in head_modules(model))
    wrong = [name for name in result.missing_keys if name.startswith(prefixes)] + result.unexpected_keys
    if wrong:
        raise ModelError(f"the output layer in {file} does not match this model: {', '.join(wrong[:3])}")
