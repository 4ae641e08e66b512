"""Checkpoints with the tokens of a chat format, `tokenizer.add_tokens` and `chat_template: chatml`.

    checkpoint of the config    n rows       embeddings, output layer
    extended checkpoint         n + k rows   a new row is the mean of the rows of the tokens that there were

An extended checkpoint is a whole model with its tokenizer and chat template. Its generation config ends at the
template's end of turn. It is written once, to the cache, and then used like any other model: it is the base of the
adapters that are trained on it, so that plain transformers and PEFT load them.

Rows that no token has (many checkpoints have spare ones) were never trained: a new token that gets one of them gets the
mean too, and they are no part of it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoModelForSequenceClassification, GenerationConfig, PretrainedConfig, PreTrainedModel

from rl4lms_like.config.run_config import AnyConfig, RunConfig, TokenizerConfig
from rl4lms_like.core.chat_template import ChatTemplate, ids_of_tokens, require_markers, template_text
from rl4lms_like.policies.loading import auto_class_of, checkpoint_chain, load_model, load_model_config, load_tokenizer
from rl4lms_like.policies.routing import with_saved_setting
from rl4lms_like.small_models.embedded import cache_folder, digest_of_tokenizer, make_atomically, with_embedded_models
from rl4lms_like.system.errors import ConfigError, ConfigIssue, ModelError

ConfigT = TypeVar("ConfigT", bound=AnyConfig)

CONTENT = "with_added_tokens"
"""Folder of the cache."""
VERSION = 1
"""Part of the digests; to be increased when other checkpoints are written for the same config."""


def with_created_models(config: ConfigT, *, local_files_only: bool = False) -> ConfigT:
    """Return a config with folders in place of the names of models that this library creates, and create these.

    They are embedded models, and checkpoints with added tokens. The rows of these tokens are added to those that
    adapters train.

    Args:
        config: config of a run.
        local_files_only: do not query the hub.

    Raises:
        ConfigError: the tokenizer is not that of the model, or the chat template does not use its tokens.
        DataPoolError: the data pool has no texts for the model of the block `tiny_model`.
        ModelError: a model cannot be loaded, or the cache cannot be read or written.
    """
    config = with_embedded_models(config)
    tokens = config.tokenizer.named_tokens
    if not tokens:
        return config

    # In RL runs the networks are arguments of the policy. A teacher has the tokens already, or it could not teach them.
    networks, peft = _networks(config)
    model_name = networks.get("model_name")
    if model_name is None:
        message = "needs a policy with the argument model_name, whose model gets the tokens"
        raise ConfigError([ConfigIssue("tokenizer.add_tokens", message)])
    trusts_code = isinstance(config, RunConfig) and bool(config.alg.policy.args.get("trust_remote_code"))
    folders = {}
    for key, name in networks.items():
        checkpoint = _Checkpoint(name, config.tokenizer, trusts_code, local_files_only)

        # A critic that was pretrained has no tokenizer. It was trained from a model that had the tokens.
        if key == "model_name" or checkpoint.has_tokenizer:
            folders[key] = checkpoint.with_tokens()

    # The tokenizer of the config may be that of the model without the tokens.
    tokenizer = config.tokenizer
    loaded = _load_tokenizer(tokenizer.model_name, tokenizer, local_files_only)
    if _missing(loaded, tokens):
        tokenizer = replace(tokenizer, model_name=folders["model_name"])
        loaded = _load_tokenizer(tokenizer.model_name, tokenizer, local_files_only)

    if peft is not None:
        rows = set(peft.get("trainable_token_indices") or ())
        rows.update(ids_of_tokens(loaded, tokens).values())
        peft = {**peft, "trainable_token_indices": sorted(rows)}
    return replace(config, tokenizer=tokenizer, alg=_alg_with(config, folders, peft))


def _networks(config: AnyConfig) -> tuple[dict[str, str], dict[str, Any] | None]:
    """Return the names of the models that get tokens, by their keys, and the `peft` block."""
    if isinstance(config, RunConfig):
        args = config.alg.policy.args
        names = {key: args.get(key) for key in ("model_name", "critic_model", "reference_model")}
        peft = args.get("peft")
    else:
        names = {"model_name": config.alg.model_name}
        names["reference_model"] = getattr(config.alg, "args", {}).get("reference_model")
        peft = config.alg.peft
    return {key: name for key, name in names.items() if name is not None}, peft


def _alg_with(config: AnyConfig, folders: Mapping[str, str], peft: dict[str, Any] | None) -> Any:
    """Return the `alg` block with other models and adapters."""
    if isinstance(config, RunConfig):
        args = {**config.alg.policy.args, **folders}
        if peft is not None:
            args["peft"] = peft
        return replace(config.alg, policy=replace(config.alg.policy, args=args))
    alg: Any = config.alg
    if "reference_model" in folders:
        alg = replace(alg, args={**alg.args, "reference_model": folders["reference_model"]})
    return replace(alg, model_name=folders["model_name"], peft=peft)


def _load_tokenizer(name: str, config: TokenizerConfig, local_files_only: bool) -> Any:
    """Return a tokenizer as it was saved, without a pad token if it has none."""
    return load_tokenizer(
        name,
        pad_token_as_eos_token=False,
        trust_remote_code=config.trust_remote_code,
        local_files_only=local_files_only,
    )


def _missing(tokenizer: Any, tokens: Iterable[str]) -> list[str]:
    """Return the texts that a tokenizer does not encode as one token."""
    known = ids_of_tokens(tokenizer, tokens)
    return [token for token in tokens if token not in known]


@dataclass(frozen=True)
class _Checkpoint:
    """Checkpoint that gets the tokens of a `tokenizer` block.

    Args:
        name: hub id or local folder, of a model or of an adapter.
        config: the `tokenizer` block.
        trusts_code: allow code that comes with the model to run.
        local_files_only: do not query the hub.
    """

    name: str
    config: TokenizerConfig
    trusts_code: bool
    local_files_only: bool

    @cached_property
    def chain(self) -> list[str]:
        """Locations of an adapter, the adapters under it, and their base; of a model, its own."""
        return list(checkpoint_chain(self.name, local_files_only=self.local_files_only))

    @cached_property
    def model_config(self) -> PretrainedConfig:
        """Config of the model."""
        return load_model_config(self.name, trust_remote_code=self.trusts_code, local_files_only=self.local_files_only)

    @property
    def has_tokenizer(self) -> bool:
        """True if the checkpoint has a tokenizer of its own; that of a model on the hub is assumed."""
        is_on_hub = not Path(self.chain[-1]).is_dir()
        return is_on_hub or any((Path(folder) / "tokenizer_config.json").is_file() for folder in self.chain)

    def with_tokens(self) -> str:
        """Return the folder of this checkpoint with the tokens, which is written if need be; its name if it has them.

        Raises:
            ConfigError: the tokenizer is not that of the model, or the chat template does not use its tokens.
            ModelError: the checkpoint cannot be loaded, or the cache cannot be read or written.
        """
        tokenizer, used = self._tokenizers()
        missing = _missing(tokenizer, self.config.named_tokens)
        tokenizer.add_special_tokens({"extra_special_tokens": missing}, replace_extra_special_tokens=False)
        end_of_turn = self._end_of_turn(tokenizer)
        end_tokens = self._end_tokens()

        # The rows of all tokens that the model did not have, and all rows that are new.
        vocabulary = tokenizer.get_vocab()
        n_tokens = max(vocabulary.values()) + 1
        n_rows = int(self.model_config.get_text_config().vocab_size)
        new_rows = {id for token, id in vocabulary.items() if token not in used}
        new_rows.update(range(n_rows, n_tokens))
        ends_turns = end_of_turn is None or end_of_turn in end_tokens
        if not new_rows and ends_turns:
            return self.name
        if end_of_turn is not None:
            end_tokens = list(dict.fromkeys([*end_tokens, end_of_turn]))

        mean_of = sorted({id for id in used.values() if id < n_rows} - new_rows)
        content = [VERSION, sorted(new_rows), mean_of, end_tokens, digest_of_tokenizer(tokenizer).hex()]
        content += [_identity(location, self.local_files_only) for location in self.chain]
        digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
        folder = cache_folder(CONTENT) / f"{self.model_config.model_type}-{digest}"

        def write(partial: Path) -> None:
            model = self._load()
            extend(model, n_tokens, sorted(new_rows), mean_of)
            if end_of_turn is not None and model.can_generate():
                model.generation_config.eos_token_id = end_tokens

            # In the precision of the checkpoint, to which the sum of a weight and an adapter must not be rounded.
            dtype: Any = getattr(self.model_config, "dtype", None)
            if dtype is None or len(self.chain) > 1:
                dtype = torch.float32
            with with_saved_setting(model):
                torch.nn.Module.to(model, dtype).save_pretrained(partial)
            tokenizer.save_pretrained(partial)

        try:
            if not (folder / "config.json").is_file():
                print(f"writing {self.name} with added tokens, once, to {folder}", file=sys.stderr, flush=True)
                make_atomically(folder, write)
        except OSError as error:
            message = f"cannot write {self.name!r} with added tokens to {folder}: {error}"
            raise ModelError(f"{message}; set RL4LMS_LIKE_HOME to another folder") from error
        return str(folder)

    def _tokenizers(self) -> tuple[Any, dict[str, int]]:
        """Return the tokenizer that gets the tokens, and the ids of the tokens that the model has, by token."""
        named = _load_tokenizer(self.config.model_name, self.config, self.local_files_only)
        if not self.has_tokenizer:
            return named, named.get_vocab()

        # One of both may be the other one with further tokens: of an earlier stage, or added by the user.
        of_model = _load_tokenizer(self.name, self.config, self.local_files_only)
        used = of_model.get_vocab()
        if named.get_vocab().items() <= used.items():
            return of_model, used
        if used.items() <= named.get_vocab().items():
            return named, used
        message = f"is another tokenizer than that of {self.name!r}, to which tokens are added; name that model"
        raise ConfigError([ConfigIssue("tokenizer.model_name", message)])

    def _end_of_turn(self, tokenizer: Any) -> int | None:
        """Give the chat template of the config to the tokenizer; return the token at which a response ends."""
        if isinstance(self.config.chat_template, str):
            tokenizer.chat_template = template_text(self.config.chat_template)
            require_markers(tokenizer)

        # A seq2seq model ends its responses with its end token, also if its prompts are conversations.
        has_template = self.config.chat_template and getattr(tokenizer, "chat_template", None)
        if not has_template or self.model_config.is_encoder_decoder:
            return None
        return ChatTemplate(tokenizer).end_of_turn

    def _end_tokens(self) -> list[int]:
        """Return the ids of the tokens at which `generate` ends the responses of the checkpoint."""
        try:
            config: Any = GenerationConfig.from_pretrained(self.chain[-1], local_files_only=self.local_files_only)
        except OSError:  # it has none, and transformers makes one of the model's config
            config = self.model_config.get_text_config()
        ends = config.eos_token_id
        if ends is None:
            return []
        return list(ends) if isinstance(ends, list | tuple) else [int(ends)]

    def _load(self) -> Any:
        """Return the model: a language model, or a reward model that is trained on."""
        auto_class = auto_class_of(self.model_config)
        architectures = self.model_config.architectures or [""]
        if architectures[0].endswith("ForSequenceClassification"):
            auto_class = AutoModelForSequenceClassification
        model, _ = load_model(
            auto_class,
            self.name,
            dropout=True,  # the saved config has the rates of the checkpoint
            trust_remote_code=self.trusts_code,
            local_files_only=self.local_files_only,
        )
        return model


def _identity(location: str, local_files_only: bool) -> str:
    """Return a text that is another one for other weights: of a folder their digest, of a hub id its commit."""
    folder = Path(location)
    if not folder.is_dir():
        config = load_model_config(location, local_files_only=local_files_only)
        return f"{location}@{getattr(config, '_commit_hash', None)}"

    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        is_weight = file.suffix in (".safetensors", ".bin")
        if is_weight or file.name in ("config.json", "generation_config.json", "adapter_config.json"):
            state = file.stat()
            digest.update(f"{file.name} {_digest_of_file(file, state.st_size, state.st_mtime_ns)}".encode())
    return digest.hexdigest()


@lru_cache(maxsize=256)
def _digest_of_file(file: Path, size: int, changed: int) -> str:
    """Return the digest of a file's content, which is read again if its size or the time of its change is another."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(2**24):
            digest.update(block)
    return digest.hexdigest()


@torch.no_grad()
def extend(model: PreTrainedModel, n_tokens: int, new_rows: list[int], mean_of: list[int]) -> None:
    """Let a model have `n_tokens` tokens, in place; the new rows become the mean of other rows.

    Args:
        model: a language model or a classifier.
        n_tokens: rows of the embeddings, if the model has fewer.
        new_rows: rows that are replaced.
        mean_of: rows of which the mean is taken.
    """
    if n_tokens > int(model.config.get_text_config().vocab_size):
        with torch.random.fork_rng(devices=[]):  # transformers draws the new rows
            model.resize_token_embeddings(n_tokens, mean_resizing=False)

    # [n_tokens, d] of the embeddings and the output layer, or the bias [n_tokens]. Tied weights are one tensor.
    tensors: dict[int, torch.Tensor] = {}
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        for name in ("weight", "bias"):
            values = getattr(layer, name, None)
            if values is not None:
                tensors[id(values)] = values.data

    # BART's family keeps the bias of its logits [1, n_tokens] outside of the layer.
    logits_bias = getattr(model, "final_logits_bias", None)
    if logits_bias is not None:
        tensors[id(logits_bias)] = logits_bias[0]
    rows = torch.tensor(new_rows, dtype=torch.long)  # empty if only the end of turn is new
    for values in tensors.values():
        values[rows] = values[mean_of].double().mean(dim=0).to(values.dtype)
