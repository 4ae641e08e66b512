"""The `alg.policy.args.engine.args` block of each engine, and the lengths of responses. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rl4lms_like.core.stop_strings import KEY as STOP_STRINGS
from rl4lms_like.system.http_client import check_url, secret_headers
from rl4lms_like.system.numbers import Count, NonNegative, Positive, Whole

DEFAULT_LENGTH = 20
"""transformers' default length; for seq2seq models it includes the decoder's start token."""

NO_EFFECT = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "typical_p": 1,
    "top_p": 1,
}
"""Arguments of transformers' `generate` -> value without effect, where it is neither null, false nor 0."""


@dataclass(frozen=True, kw_only=True)
class TransformersArguments:
    """Arguments of the engine `transformers`: none."""


@dataclass(frozen=True, kw_only=True)
class ServerArguments:
    """Arguments that are the same for all engines which are servers.

    Args:
        url: address of the server, `http://127.0.0.1:8000`; or a list of the addresses of several, which divide the
            requests.
        weights_dir: folder that this process and the servers see under the same path. The weights are passed on through
            it. It is created; a folder with other files is refused. Required, except with `sync: transfer`.
        sync: what is passed on: `weights`, those of the whole model; or `adapters`, with `peft` only these, each time
            under a new name, to a server that was started with the base model and `--enable-lora`. `transfer`, for
            `vllm`: those of the whole model from GPU to GPU, without files.
        timeout: time limit of a request in seconds.
        retries: maximum number of retries of a request after a timeout, a lost connection or a status of 500 and above.
        backoff: seconds before the first retry; doubled with each retry.
        max_gap: largest accepted mean absolute difference between the engine's log-probs and those of the policy, in
            nats per token. Precisions below float32 give larger differences than float32, outdated weights 0.1 and
            more.
        sleep: release the server's memory during updates. On GPUs the server needs options for it (docs/engines.md).
        max_connections: maximum number of concurrent requests, one for each response.
        headers_from_env: header -> name of the environment variable that holds its value.
    """

    # Arguments of `generate` that requests to a server have too. `use_cache` changes no response, and the last one is
    # applied to the generated texts.
    SUPPORTED: ClassVar[tuple[str, ...]] = (
        *("do_sample", "temperature", "top_k", "stop_strings"),
        *("max_new_tokens", "max_length", "min_new_tokens", "min_length", "use_cache", "post_processing_fn"),
    )
    # Keys of `peft` whose adapters a server does not load, or not with their effect.
    UNSUPPORTED_PEFT: ClassVar[tuple[str, ...]] = (
        *("use_dora", "rank_pattern", "alpha_pattern", "trainable_token_indices"),
    )

    url: str | list[str]
    weights_dir: str | None = None
    sync: Literal["weights", "adapters", "transfer"] = "weights"
    timeout: Positive = 600.0
    retries: Whole = 3
    backoff: NonNegative = 1.0
    max_gap: Positive = 0.05
    sleep: bool = False
    max_connections: Count = 256
    headers_from_env: dict[str, str] | None = None

    def __post_init__(self) -> None:
        """Validate the addresses and the variables."""
        for url in self.urls:
            check_url(url)

        # A server that is named twice would be asked to load the same weights, or adapters, twice.
        if not self.urls or len(set(self.urls)) < len(self.urls):
            raise ValueError(f"url: expected one address or several different ones, got {self.url!r}")
        secret_headers(self.headers_from_env)

        if self.sync == "transfer" and self.weights_dir is not None:
            raise ValueError("weights_dir: has no effect with sync: transfer; remove it")
        if self.sync != "transfer" and self.weights_dir is None:
            raise ValueError(f"weights_dir: is required with sync: {self.sync}, which passes files on")

    @property
    def urls(self) -> list[str]:
        """Address of each server, without a slash at its end."""
        urls = [self.url] if isinstance(self.url, str) else self.url
        return [url.rstrip("/") for url in urls]

    @classmethod
    def unsupported(cls, generation_kwargs: Mapping[str, Any]) -> list[str]:
        """Return the arguments of transformers' `generate` that have an effect which the engine does not have."""
        # With null, false, 0 or a neutral value, an argument only repeats what a server does without it.
        unsupported = []
        for key, value in generation_kwargs.items():
            has_effect = bool(value) and value != NO_EFFECT.get(key)
            if has_effect and key not in cls.SUPPORTED:
                unsupported.append(key)
        return unsupported


@dataclass(frozen=True, kw_only=True)
class VllmArguments(ServerArguments):
    """Arguments of the engine `vllm`.

    Args:
        n_workers: with `sync: transfer`, the number of GPUs of each vLLM server.
    """

    SUPPORTED = (*ServerArguments.SUPPORTED, "top_p", "min_p")

    n_workers: Count = 1


@dataclass(frozen=True, kw_only=True)
class SglangArguments(ServerArguments):
    """Arguments of the engine `sglang`.

    `top_p` and `min_p` are not supported: with `top_k`, SGLang applies `top_p` to the probabilities of all tokens
    instead of those that `top_k` leaves, and without `top_k` it returns no log-probs of the sampled distribution.
    """

    # SGLang scales adapters by `lora_alpha / r`, whatever their config says.
    UNSUPPORTED_PEFT = (*ServerArguments.UNSUPPORTED_PEFT, "use_rslora")

    sync: Literal["weights", "adapters"] = "weights"


def longest_response(generation_kwargs: Mapping[str, Any], *, is_causal: bool) -> int:
    """Return the maximum response length in tokens that generation arguments allow.

    `max_length` counts the start token of an encoder-decoder model's response.
    """
    # As in transformers, `max_new_tokens` takes precedence.
    if generation_kwargs.get("max_new_tokens") is not None:
        return int(generation_kwargs["max_new_tokens"])

    max_length = generation_kwargs.get("max_length")
    length = DEFAULT_LENGTH if max_length is None else int(max_length)
    return length if is_causal else length - 1


def generate_arguments(
    generation_kwargs: Mapping[str, Any],
    *,
    max_new_tokens: int | None,
    eos_token_ids: Sequence[int],
    is_encoder_decoder: bool,
) -> dict[str, Any]:
    """Return the keyword arguments of one `generate` call.

    `min_length` has RL4LMs' meaning: new tokens for a causal model, decoder tokens including the start token for a
    seq2seq model.

    Args:
        generation_kwargs: arguments from the config.
        max_new_tokens: the environment's limit; the smaller of the two limits applies.
        eos_token_ids: tokens that end a response; may be empty.
        is_encoder_decoder: True for seq2seq models.
    """
    arguments = {key: value for key, value in generation_kwargs.items() if key != "post_processing_fn"}

    # The smaller one of the config's and the environment's limit.
    longest = longest_response(arguments, is_causal=not is_encoder_decoder)
    arguments.pop("max_length", None)
    arguments["max_new_tokens"] = longest if max_new_tokens is None else min(longest, max_new_tokens)

    # At least so many tokens, as far as the limit allows; without an end token there is nothing to postpone.
    min_length = arguments.pop("min_length", None)
    if min_length is not None:
        arguments["min_new_tokens"] = min_length - 1 if is_encoder_decoder else min_length
    if arguments.get("min_new_tokens", 0) > arguments["max_new_tokens"]:
        arguments["min_new_tokens"] = arguments["max_new_tokens"]
    if not arguments.get("min_new_tokens") or not eos_token_ids:
        arguments.pop("min_new_tokens", None)

    arguments["eos_token_id"] = list(eos_token_ids) or None
    arguments.pop(STOP_STRINGS, None)
    return arguments
