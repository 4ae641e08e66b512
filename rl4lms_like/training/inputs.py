"""Load what a run starts from, by its config: tokenizer, samples with rendered prompts, configs of models.

Pools and templates are those of all runs: RL, supervised, preference. The tokens that end a response depend on
tokenizer, model and template together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from rl4lms_like.config.binding import ComponentConfig
from rl4lms_like.config.run_config import AnyConfig, RunConfig, TokenizerConfig
from rl4lms_like.core.chat_template import (
    ChatTemplate,
    chat_template_issue,
    require_markers,
    set_template_date,
    template_text,
)
from rl4lms_like.core.continuation import keep_special_tokens, kept_ids, stripped_tokens
from rl4lms_like.core.picture_encoder import ON_POLICY, LimitKeys, PictureEncoder
from rl4lms_like.core.processors import load_processor
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools import DATA_POOLS
from rl4lms_like.envs import ENVIRONMENTS
from rl4lms_like.envs.dialogues import DialogueSettings
from rl4lms_like.policies import loading
from rl4lms_like.policies.arguments import PolicyArguments, VisionPolicyArguments
from rl4lms_like.policies.loading import load_tokenizer, set_pad_token
from rl4lms_like.system.errors import ConfigError, ConfigIssue, DataPoolError, Notice, RL4LMsLikeError
from rl4lms_like.system.functions import short_name
from rl4lms_like.system.schema import join
from rl4lms_like.system.wording import excerpt, raised

_KEEP = "tokenizer.keep_special_tokens"

SPLITS = ("train", "val", "test")

NO_LIMIT = 1_000_000
"""Length limit, in tokens, of tokenizers and models without one. Their own value is about 1e30, or missing."""


def build_tokenizer(config: TokenizerConfig, *, local_files_only: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a config's `tokenizer` block.

    Raises:
        ConfigError: it has no chat template, although the config uses one, or not the template's tokens, or the
            template's file cannot be read; or it has no such special token to keep.
        ModelError: it cannot be loaded.
    """
    tokenizer = load_tokenizer(
        config.model_name,
        pad_token_as_eos_token=config.pad_token_as_eos_token,
        padding_side=config.padding_side,
        truncation_side=config.truncation_side,
        trust_remote_code=config.trust_remote_code,
        local_files_only=local_files_only,
    )
    _apply(config, tokenizer)
    return tokenizer


def tokenizer_and_pictures(
    config: RunConfig, *, local_files_only: bool = False
) -> tuple[PreTrainedTokenizerBase, PictureEncoder | None]:
    """Return the tokenizer of a run, and the encoder of its prompts with pictures; None if it reads texts only.

    Args:
        config: config of the run, whose model is of the family that the policy supports.
        local_files_only: do not query the hub.

    Raises:
        ConfigError: as in `build_tokenizer`; or `max_pixels` has no effect.
        MissingExtraError: pillow is needed and not installed.
        ModelError: tokenizer or processor cannot be loaded.
    """
    if not config.alg.policy.reads_pictures:
        return build_tokenizer(config.tokenizer, local_files_only=local_files_only), None
    arguments = VisionPolicyArguments.known_in(config.alg.policy.args)
    model_config = load_model_config(arguments, local_files_only=local_files_only)
    pictures = build_pictures(
        config.tokenizer, model_config, max_pixels=arguments.max_pixels, local_files_only=local_files_only
    )
    return pictures.processor.tokenizer, pictures


def build_pictures(
    config: TokenizerConfig,
    model_config: PretrainedConfig,
    *,
    max_pixels: int | None = None,
    keys: LimitKeys = ON_POLICY,
    local_files_only: bool = False,
) -> PictureEncoder:
    """Return the encoder of prompts with pictures; its processor has the tokenizer of a config's `tokenizer` block.

    Args:
        config: the block.
        model_config: config of the vision-language model.
        max_pixels: see `PictureEncoder`.
        keys: see `PictureEncoder`.
        local_files_only: do not query the hub.

    Raises:
        ConfigError: as in `build_tokenizer`.
        MissingExtraError: pillow is not installed.
        ModelError: the processor cannot be loaded, or is not one of a supported family.
    """
    # The tokenizer is that of the processor, which may add tokens and settings to it.
    processor = load_processor(config.model_name, model_config, local_files_only=local_files_only)
    tokenizer = processor.tokenizer
    tokenizer.padding_side = config.padding_side
    tokenizer.truncation_side = config.truncation_side
    if config.pad_token_as_eos_token:
        set_pad_token(tokenizer, config.model_name)

    # Older checkpoints have the template of their messages beside the processor only.
    if getattr(tokenizer, "chat_template", None) is None and isinstance(processor.chat_template, str):
        tokenizer.chat_template = processor.chat_template
    _apply(config, tokenizer)
    return PictureEncoder(processor, model_config, max_pixels=max_pixels, keys=keys)


def _apply(config: TokenizerConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set what a config's `tokenizer` block says of chat template and special tokens; errors as `build_tokenizer`."""
    # A text is chatml or the path of a template; True stands for the tokenizer's own, which is used as it is.
    if isinstance(config.chat_template, str):
        tokenizer.chat_template = template_text(config.chat_template)
        require_markers(tokenizer)
    if config.chat_template and not getattr(tokenizer, "chat_template", None):
        message = (
            f"the tokenizer of {config.model_name!r} has no chat template; write chatml, or the path of a Jinja file"
        )
        raise chat_template_issue(message)
    if config.template_date is not None:
        set_template_date(tokenizer, config.template_date)

    issues = []
    for index, token in enumerate(config.keep_special_tokens or ()):
        if token not in tokenizer.get_vocab():
            issues.append(ConfigIssue(f"{_KEEP}.{index}", f"the tokenizer has no token {token!r}"))
        elif token in (tokenizer.eos_token, tokenizer.pad_token):
            issues.append(ConfigIssue(f"{_KEEP}.{index}", f"{token!r} ends or pads texts and is always removed"))
    if issues:
        raise ConfigError(issues)
    keep_special_tokens(tokenizer, config.keep_special_tokens or ())


def stripped_pattern_notices(config: AnyConfig, tokenizer: PreTrainedTokenizerBase) -> list[Notice]:
    """Return a notice for each `pattern` of a reward or metric with a special token that responses do not have."""
    tokens = stripped_tokens(tokenizer)
    mapping = config.to_dict()
    blocks = {"reward_fn": mapping.get("reward_fn"), "train_evaluation.metrics": mapping["train_evaluation"]["metrics"]}

    notices = []
    for path, block in blocks.items():
        for pattern_path, pattern in _patterns(block, path):
            for token in tokens:
                if token not in pattern and re.escape(token) not in pattern:
                    continue
                hint = f"name it in {_KEEP}"
                if token in (tokenizer.eos_token, tokenizer.pad_token):
                    hint = "it ends or pads texts and is always removed"
                message = f"responses are read without the special token {token!r}; {hint}"
                notices.append(Notice(pattern_path, message))
    return notices


def _patterns(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path and value of each argument `pattern` in a block, at any depth."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        if key == "pattern" and isinstance(item, str):
            yield join(path, key), item
        else:
            yield from _patterns(item, join(path, key))


def chat_template_of(config: TokenizerConfig, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate | None:
    """Return the chat template of a config's `tokenizer` block; None if prompts are plain texts."""
    if not config.chat_template:
        return None
    return ChatTemplate(tokenizer, config.system_prompt, bool(config.tools_in_system))


def dialogue_settings(config: AnyConfig, tokenizer: PreTrainedTokenizerBase) -> DialogueSettings | None:
    """Return environment and limits of a config's `env.dialogue` block; None without one.

    Rollouts and all evaluations get them from here.
    """
    if not isinstance(config, RunConfig) or config.env.dialogue is None:
        return None
    dialogue = config.env.dialogue
    name = short_name(dialogue.args["object"]) if dialogue.id == "object" else dialogue.id
    return DialogueSettings(
        name,
        partial(ENVIRONMENTS.get, dialogue.id, dialogue.args),
        max_turns=dialogue.max_turns,
        max_turn_length=dialogue.max_turn_length,
        max_episode_length=config.env.arguments.max_episode_length,
        template=chat_template_of(config.tokenizer, tokenizer),
        threads=dialogue.threads,
        timeout=dialogue.timeout,
    )


def render_prompts(
    pools: Mapping[str, Iterable[tuple[Sample, float]]], config: TokenizerConfig, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return pools, split -> pairs of sample and weight, in which the chat template has rendered the prompts.

    Raises:
        ConfigError: prompts are messages and the config has no chat template, or the template does not accept them.
        DataPoolError: messages end with one of the assistant.
    """
    template = chat_template_of(config, tokenizer)
    if template is not None:
        return {
            split: [(template.with_rendered_prompt(sample), weight) for sample, weight in pool]
            for split, pool in pools.items()
        }
    for split, pool in pools.items():
        for sample, _ in pool:
            if sample.messages is not None or sample.response_messages or sample.tools:
                what = "messages of the data pool, or its tools"
                raise chat_template_issue(f"{what}, need it ({sample.id!r} of {split!r}): set it to true")
    return dict(pools)


def build_datapools(config: ComponentConfig) -> dict[str, Any]:
    """Return all splits of a config's `datapool` block.

    Raises:
        DataPoolError: a split could not be prepared or has entries that are not samples, or `train` is empty.
    """
    pools = {split: build_datapool(config, split) for split in SPLITS}
    if not len(pools["train"]):
        raise DataPoolError(f"data pool {config.id!r}: the split 'train' has no samples")
    return pools


def build_datapool(config: ComponentConfig, split: str) -> Any:
    """Return one split of a config's `datapool` block.

    Raises:
        DataPoolError: the split could not be prepared or has entries that are not samples.
    """
    of_split = f"the split {split!r} of the data pool {config.id!r}"
    try:
        pool = DATA_POOLS.get(config.id, {"split": split, **config.args})
        wrong = next((entry for entry in pool if not _is_entry(entry)), None)
    except DataPoolError as error:
        raise DataPoolError(f"{of_split}: {error}") from error
    except (RL4LMsLikeError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise DataPoolError(f"{of_split} could not be prepared: {raised(error)}") from error
    if wrong is not None:
        message = "expected pairs (Sample, weight), where the prompt is a text and the references are a list"
        raise DataPoolError(f"{of_split} has {excerpt(wrong)}; {message}")
    return pool


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, tuple) or len(entry) != 2:
        return False
    prompt, references = (getattr(entry[0], name, None) for name in ("prompt_or_input_text", "references"))
    return isinstance(prompt, str) and isinstance(references, list | tuple)


def load_model_config(arguments: PolicyArguments, *, local_files_only: bool = False) -> PretrainedConfig:
    """Return the config of the policy's model.

    Raises:
        ModelError: no model has that name.
    """
    return loading.load_model_config(
        arguments.model_name, trust_remote_code=arguments.trust_remote_code, local_files_only=local_files_only
    )


def load_generation_config(model_name: str) -> GenerationConfig | None:
    """Return the generation config of a checkpoint, or of an adapter's base model; None if there is none."""
    try:
        return GenerationConfig.from_pretrained(loading.whole_checkpoint(model_name))
    except OSError:
        return None


def end_tokens(
    tokenizer: PreTrainedTokenizerBase,
    model_config: PretrainedConfig,
    generation_config: GenerationConfig | None,
    template: ChatTemplate | None = None,
) -> list[int]:
    """Return the ids of the tokens that end a response.

    This is the tokenizer's end-of-text token, or all end tokens of the model if the tokenizer's is one of several.
    Chat models end a turn with a special token, which often is only in their generation config. With a chat template
    it is also the token that the template writes after a message of the assistant.

    Raises:
        ConfigError: `keep_special_tokens` has one of them.
    """
    end_token_ids = _model_end_tokens(tokenizer, model_config, generation_config)
    end_of_turn = None if template is None else template.end_of_turn
    if end_of_turn is not None and end_of_turn not in end_token_ids:
        end_token_ids = [*end_token_ids, end_of_turn]

    # Rewards read a response without its end.
    kept = kept_ids(tokenizer).intersection(end_token_ids)
    if kept:
        token = tokenizer.convert_ids_to_tokens(min(kept))
        raise ConfigError([ConfigIssue(_KEEP, f"{token!r} ends responses and is always removed")])
    return end_token_ids


def _model_end_tokens(
    tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig, generation_config: GenerationConfig | None
) -> list[int]:
    """Return the tokenizer's end-of-text token, or all end tokens of the model if the tokenizer's is one of several."""
    model_token: Any = None
    for config in (generation_config, model_config.get_text_config()):
        model_token = getattr(config, "eos_token_id", None)
        if isinstance(model_token, list | tuple) and tokenizer.eos_token_id in model_token:
            return list(model_token)

    # Without one of the tokenizer, those of the model's own config count.
    if tokenizer.eos_token_id is not None:
        return [tokenizer.eos_token_id]
    if isinstance(model_token, list | tuple):
        return list(model_token)
    return [] if model_token is None else [int(model_token)]


def token_limit(tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig) -> int:
    """Return the largest number of tokens that both the tokenizer and the model accept."""
    # T5 has relative positions, and no such attribute.
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None) or NO_LIMIT
    return min(int(tokenizer.model_max_length), int(positions), NO_LIMIT)
