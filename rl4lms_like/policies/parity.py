"""Check at construction of a policy: the trained log-probs are those of sampling.

A ratio of 1 in the first minibatch only shows that two teacher-forced passes agree; both could be wrong. The log-probs
of a model are therefore compared with independent ones:

generated   teacher-forced log-probs with the raw logits of `generate`, with a pad token inside the responses
padded      log-probs of a batch with those of each row alone, and with those of a wider batch
shared      outputs of a batch that computes each prompt once with those of one that computes it for each response;
            if they differ, each response's prompt is computed
packed      outputs of packed rows with those of padded ones; if they differ, padded ones are computed
decoded     log-probs of `DecodeLoop` with teacher-forced ones; if they differ, the steps of `generate` are used
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from rl4lms_like.core.episodes import EpisodeBatch, padded, real_ids
from rl4lms_like.core.packed_rows import RowPacking
from rl4lms_like.policies.decoding import Contexts, Decoded, DecodeLoop, keeps_all_keys
from rl4lms_like.policies.generation import pad_token_id, plain_generation, seeded, shared_prompt_inputs
from rl4lms_like.policies.teacher_forcing import EpisodeReader
from rl4lms_like.system.errors import ModelError, ParityError, RL4LMsLikeError
from rl4lms_like.system.out_of_memory import is_out_of_memory
from rl4lms_like.system.wording import raised

logger = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""Largest difference in nats, in float32. Rounding gives about 1e-5, errors give 0.1 to 100."""

TOLERANCE_BFLOAT16 = 0.1
"""The same for attention kernels without float32 support."""

SHARING_TOLERANCE = 1e-4
"""Largest difference of outputs with shared prompts, packed rows and `DecodeLoop`. It is smaller than `TOLERANCE`,
because exceeding it costs only time, and an untrained model's log-probs hardly depend on its prompt."""

PROMPT_LENGTHS = (2, 5)
RESPONSE_LENGTH = 4


def probe_episodes(vocab_size: int, prompt_side: Literal["left", "right"]) -> EpisodeBatch:
    """Return two short random episodes with prompts of unequal length."""
    # A generator of its own: the check must not change the random numbers of the run.
    generator = torch.Generator().manual_seed(0)
    width = max(PROMPT_LENGTHS)
    prompt_ids = torch.randint(0, vocab_size, (len(PROMPT_LENGTHS), width), generator=generator)
    lengths = torch.tensor(PROMPT_LENGTHS)[:, None]
    columns = torch.arange(width)
    mask = columns >= width - lengths if prompt_side == "left" else columns < lengths  # [n, width]

    response_ids = torch.randint(0, vocab_size, (len(PROMPT_LENGTHS), RESPONSE_LENGTH), generator=generator)
    response_mask = torch.ones_like(response_ids).bool()
    terminated = response_mask[:, 0]  # all True; scoring does not read it
    return EpisodeBatch(prompt_ids, mask, response_ids, response_mask, terminated, prompt_side=prompt_side)


@torch.no_grad()
def parity_gap(
    reader: EpisodeReader, prompt_ids: Tensor, prompt_mask: Tensor, *, max_new_tokens: int, with_pad: bool = True
) -> float:
    """Return the largest difference between teacher-forced log-probs and the raw logits of `generate`, in nats.

    Args:
        reader: reader of a model in evaluation mode, after `probe_head`.
        prompt_ids: `[n, prompt_len]`, padded on the side that the family requires.
        prompt_mask: `[n, prompt_len]`, bool.
        max_new_tokens: length of all responses.
        with_pad: force a pad token, which any policy may sample, as the first token of each response.
    """
    device = prompt_ids.device
    model: Any = reader.model
    start = 1 if reader.is_encoder_decoder else prompt_ids.shape[1]

    # With `with_pad`, only the pad token is possible at the first step, and every token at all others.
    pad = [pad_token_id(model.config)]
    any_token = list(range(model.config.get_text_config().vocab_size))

    def possible_tokens(_: int, ids: Tensor) -> list[int]:
        return pad if len(ids) == start else any_token

    with plain_generation(model), seeded(0, device):
        generate = partial(
            model.generate,
            input_ids=prompt_ids,
            attention_mask=prompt_mask.long(),
            do_sample=True,
            top_k=0,
            max_new_tokens=max_new_tokens,
            eos_token_id=None,
            prefix_allowed_tokens_fn=possible_tokens if with_pad else None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        output: Any = reader.call(generate)

    # The same responses, teacher-forced. No end tokens, so every token of a response is an action.
    response_ids = output.sequences[:, start:]
    response_mask = torch.ones_like(response_ids).bool()
    episodes = EpisodeBatch(
        prompt_ids, prompt_mask, response_ids, response_mask, ~response_mask[:, 0], prompt_side=reader.prompt_side
    )

    # `logits` are those before all processing by `generate`, also where the pad token is forced.
    raw = torch.stack(output.logits, dim=1).float().log_softmax(dim=-1)  # [n, response_len, vocab]
    sampled = raw.gather(2, response_ids[:, :, None]).squeeze(2)
    return float((log_probs_of(reader, episodes) - sampled).abs().max())


@torch.no_grad()
def padding_gap(reader: EpisodeReader, episodes: EpisodeBatch) -> float:
    """Return the largest difference of an episode's log-probs between batches with different padding, in nats.

    Args:
        reader: reader of a model in evaluation mode, after `probe_head`.
        episodes: episodes padded to the width of the longest.
    """
    together = log_probs_of(reader, episodes)  # [n, response_len]
    prompt_len = episodes.prompt_ids.shape[1]
    response_len = episodes.response_ids.shape[1]

    # More padding than real tokens.
    wider = log_probs_of(reader, episodes.widened(2 * prompt_len + 1, 2 * response_len + 1))
    gaps = [(wider[:, :response_len] - together).abs().max()]

    # No padding at all. Each episode twice, since a batch of one would be compiled separately.
    for row in range(episodes.n_episodes):
        twice = torch.tensor([row, row], device=together.device)
        alone = log_probs_of(reader, episodes.select(twice))
        gaps.append((alone - together[twice, : alone.shape[1]]).abs().max())
    return float(torch.stack(gaps).max())


def check_parity(
    reader: EpisodeReader,
    name: str,
    *,
    in_bfloat16: bool = False,
    never_written: Collection[int] = (),
    probe: EpisodeBatch | None = None,
    generated_gap: Callable[..., float] | None = None,
) -> float:
    """Check `parity_gap` and `padding_gap` on two short random prompts, on the model's device.

    Weights are float32 even if a run computes in bfloat16, so the check is exact. Only kernels without float32 support
    are checked under autocast, with a larger tolerance.

    Args:
        reader: reader of a model in evaluation mode, after `probe_head`.
        name: name of the model in messages.
        in_bfloat16: check under bfloat16 autocast.
        never_written: tokens that cannot occur in responses; if the pad token is among them, it is not checked.
        probe: episodes for `padding_gap`; default: two with short random prompts.
        generated_gap: called with `with_pad` in place of `parity_gap` on the probe's prompts.

    Returns:
        The larger gap, in nats.

    Raises:
        ModelError: log-probs are not finite.
        ParityError: a gap exceeds the tolerance.
    """
    model = reader.model
    pad = pad_token_id(model.config)
    if probe is None:
        probe = probe_episodes(int(model.config.get_text_config().vocab_size), reader.prompt_side).to(model.device)
    if generated_gap is None:
        prompts = (probe.prompt_ids, probe.prompt_mask)
        generated_gap = partial(parity_gap, reader, *prompts, max_new_tokens=RESPONSE_LENGTH)
    tolerance = TOLERANCE_BFLOAT16 if in_bfloat16 else TOLERANCE

    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=in_bfloat16):
        # First of all: with NaN every comparison below would fail too, and blame something else.
        with torch.no_grad():
            require_finite(model, name, log_probs_of(reader, probe))

        # `not <=` in all comparisons: a gap that is NaN is an error too. If only responses with a pad token fail, the
        # model can be trained without it.
        with_pad = pad not in never_written
        generated = generated_gap(with_pad=with_pad)
        if with_pad and not generated <= tolerance and generated_gap(with_pad=False) <= tolerance:
            raise ParityError(
                f"{type(model).__name__} ({name!r}): after a pad token inside a response, teacher-forced log-probs "
                f"differ from those of its own generate() by {generated:.3g} nats: the model treats it as padding. "
                f"Exclude it from sampling: suppress_tokens: [{pad}] in generation_kwargs"
            )
        if not generated <= tolerance:
            raise ParityError(
                f"{type(model).__name__} ({name!r}): teacher-forced log-probs differ from those of its own "
                f"generate() by {generated:.3g} nats (at most {tolerance:g} is rounding). Training on them would be "
                f"silently wrong. Likely causes: the model needs arguments that are not passed (positions, token "
                f"types), its cache is faulty, or its generate() alters logits. Try attn_implementation: eager, or "
                f"report the family."
            )

        padding = padding_gap(reader, probe)
    if not padding <= tolerance:
        raise ParityError(
            f"{type(model).__name__} ({name!r}): the log-probs of an episode depend on the padding of its batch, by "
            f"{padding:.3g} nats (at most {tolerance:g} is rounding). Batches of prompts of unequal length would be "
            f"silently wrong. Likely cause: the model attends to padding despite the attention mask. Try "
            f"attn_implementation: eager, or report the family."
        )
    return max(generated, padding)


def check_sharing(
    reader: EpisodeReader,
    name: str,
    *,
    has_head: bool = True,
    in_bfloat16: bool = False,
    gap: Callable[..., float] | None = None,
) -> bool:
    """Return whether a prompt may be computed once for all of its responses; log the reason if it may not.

    It may not for models whose state after a prompt is more than keys and values (recurrent layers, convolutions), and
    for models whose positions depend on the length of the batch (`longest_independent_of_batch`).

    Args:
        reader: reader of a model in evaluation mode.
        name: name of the model in messages.
        has_head: False for a critic, which has no output layer.
        in_bfloat16: check under bfloat16 autocast.
        gap: called in place of `sharing_gap`, with its arguments.
    """
    model = reader.model
    if longest_independent_of_batch(model.config) is not None:
        reason = "its positions depend on the longest text of a batch"  # and a prompt alone is shorter
    else:
        compare = partial(gap or sharing_gap, reader, has_head=has_head)
        reason = _difference(model, compare, in_bfloat16=in_bfloat16)
        if not reason:
            return True

    logger.info("%s (%r): a prompt is computed for each of its responses: %s", type(model).__name__, name, reason)
    return False


def check_packing(
    reader: EpisodeReader, name: str, *, has_head: bool = True, in_bfloat16: bool = False
) -> RowPacking | None:
    """Return how a model's rows may be packed, or None if they may not; log the reason as a warning.

    They may not for models that do not separate texts by their positions, which is wrong without an error: such a model
    reads the texts before in its row as a beginning of each text.

    Args:
        reader: reader of a decoder-only model in evaluation mode, after `probe_head` if it has a head.
        name: name of the model in messages.
        has_head: False if no log-probs are computed from hidden states: of a critic, or a model that computes its own
            loss.
        in_bfloat16: check under bfloat16 autocast.
    """
    model = reader.model
    packing = RowPacking(int(model.config.get_text_config().hidden_size), one_row=is_flash_attention(model))
    if has_head and reader.head_scale is None:
        reason = "its logits are not computed from hidden states alone"
    elif "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        reason = "it has no positions as an argument"
    else:
        compare = partial(packing_gap, reader, packing, has_head=has_head)
        reason = _difference(model, compare, in_bfloat16=in_bfloat16)
        if not reason:
            return packing

    logger.warning("%s (%r): rows are padded in spite of packing: %s", type(model).__name__, name, reason)
    return None


def is_flash_attention(model: PreTrainedModel) -> bool:
    """Return whether a model's attention has kernels for texts of unequal length, and none for float32."""
    return "flash" in str(model.config._attn_implementation)


@torch.no_grad()
def packing_gap(reader: EpisodeReader, packing: RowPacking, *, has_head: bool) -> float:
    """Return the largest difference between outputs of packed and of padded rows; see `sharing_gap`.

    Args:
        reader: reader of a decoder-only model in evaluation mode. It is not changed, and its networks not compiled.
        packing: choice of the packed rows.
        has_head: compare log-probs of actions, too.
    """
    # 5 + 4, 2 + 1, 2 + 2 and 2 + 1 tokens: several texts in a packed row, and padding after the last one.
    vocab_size = int(reader.model.config.get_text_config().vocab_size)
    rows = torch.tensor([1, 0, 0, 0])
    lengths = torch.tensor([RESPONSE_LENGTH, 1, 2, 1])
    probe = probe_episodes(vocab_size, "left").select(rows)
    prompts = (probe.prompt_ids + torch.arange(len(rows))[:, None]) % vocab_size
    is_real = torch.arange(RESPONSE_LENGTH) < lengths[:, None]
    probe = replace(probe, prompt_ids=prompts, response_mask=is_real).to(reader.model.device)

    # New readers, which compile nothing: the given one may be compiled.
    padded_reader, packed_reader = reader.fresh(), reader.fresh()
    packed_reader.packing = packing
    states = padded_reader.states(probe).float()  # [n_tokens, d]
    gap = float((packed_reader.states(probe) - states).abs().max() / states.abs().max())
    if has_head:
        padded_reader.head_scale = packed_reader.head_scale = reader.head_scale
        difference = log_probs_of(packed_reader, probe) - log_probs_of(padded_reader, probe)
        gap = max(gap, float(difference.abs().max()))
    return gap


def check_decoding(reader: EpisodeReader, name: str, *, in_bfloat16: bool = False) -> bool:
    """Return whether `DecodeLoop` may sample a model's responses; log the reason if it may not.

    It may not for encoder-decoder models, for models whose cache is not one of the keys and values of all tokens
    (sliding windows, recurrent layers), and where its log-probs are not those of one pass over the text.

    Args:
        reader: reader of a model in evaluation mode.
        name: name of the model in messages.
        in_bfloat16: check under bfloat16 autocast.
    """
    model = reader.model
    if reader.is_encoder_decoder or not keeps_all_keys(model):
        reason = "its cache is not one of the keys and values of all tokens"
    else:
        reason = _difference(model, partial(decoding_gap, reader), in_bfloat16=in_bfloat16)
        if not reason:
            return True

    logger.info("%s (%r): generated with the steps of transformers: %s", type(model).__name__, name, reason)
    return False


def _difference(model: PreTrainedModel, gap: Callable[[], float], *, in_bfloat16: bool) -> str:
    """Return how a faster computation differs from the plain one, for messages; empty if by rounding only.

    Args:
        model: what computes.
        gap: returns the largest difference of their outputs. Its exceptions are differences too: unlike a wrong
            log-prob, the plain computation is only slower.
        in_bfloat16: compare under bfloat16 autocast.
    """
    tolerance = TOLERANCE_BFLOAT16 if in_bfloat16 else SHARING_TOLERANCE
    try:
        with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=in_bfloat16):
            size = gap()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return raised(error)
    return "" if size <= tolerance else f"outputs differ by {size:.3g}"


@torch.no_grad()
def decoding_gap(reader: EpisodeReader) -> float:
    """Return the largest difference between log-probs of `DecodeLoop`, in two turns, and teacher-forced ones, in nats.

    The reader is not changed, and its networks are not compiled.

    Args:
        reader: reader of a decoder-only model in evaluation mode.
    """
    # Padded prompts of unequal length, two of them equal. Their first responses end after 3, 1 and 4 tokens.
    model: Any = reader.model
    plain_reader = reader.fresh()
    probe = probe_episodes(int(model.config.get_text_config().vocab_size), "left").select(torch.tensor([0, 1, 0]))
    texts = real_ids(probe.prompt_ids, probe.prompt_mask)
    lengths = torch.tensor([3, 1, RESPONSE_LENGTH], device=model.device)

    # A second turn continues them, with what the responses left out as holes, and one observed token.
    contexts = Contexts(model)
    gaps = []
    for _ in range(2):
        ids, mask = (part.to(model.device) for part in padded(texts, side="left"))
        with plain_generation(model), seeded(0, model.device):
            generate = partial(
                model.generate,
                input_ids=ids,
                attention_mask=mask.long(),
                do_sample=True,
                top_k=0,
                max_new_tokens=RESPONSE_LENGTH,
                eos_token_id=None,
                stopping_criteria=StoppingCriteriaList([_EndAfter(ids.shape[1] + lengths)]),
                custom_generate=DecodeLoop(mask, shares_prompts=True, contexts=contexts),
            )
            decoded: Decoded = reader.call(generate)
        is_action = torch.arange(RESPONSE_LENGTH, device=model.device) < lengths[:, None]
        episodes = EpisodeBatch(ids, mask, decoded.response_ids, is_action, is_action[:, 0])
        gaps.append((log_probs_of(plain_reader, episodes) - decoded.log_prob)[is_action].abs().max())
        responses = real_ids(decoded.response_ids, is_action)
        texts = [[*text, *response, 0] for text, response in zip(texts, responses, strict=True)]
    return float(torch.stack(gaps).max())


class _EndAfter(StoppingCriteria):
    """Criterion that ends each text at a given number of tokens `[n]`."""

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return input_ids.shape[1] >= self.lengths


@torch.no_grad()
def sharing_gap(reader: EpisodeReader, *, has_head: bool = True) -> float:
    """Return the largest difference between outputs with a prompt computed once and computed for each response.

    It is the larger one of the differences of hidden states, relative to the largest, and of log-probs of all tokens,
    in nats. The reader is not changed, and its networks are not compiled.

    Args:
        reader: reader of a model in evaluation mode.
        has_head: False for a critic, which has no output layer.
    """
    # Two prompts with mixed responses: episodes in the order of their prompts would hide a wrong index.
    vocab_size = int(reader.model.config.get_text_config().vocab_size)
    rows = torch.tensor([0, 1, 0, 1, 1])
    probe = probe_episodes(vocab_size, reader.prompt_side).select(rows)

    # Different responses, so that one which continues the prompt of another is noticed.
    responses = (probe.response_ids + torch.arange(len(rows))[:, None]) % vocab_size
    probe = replace(probe, response_ids=responses, prompt_rows=rows).to(reader.model.device)

    gap, log_probs = shared_scoring_gap(reader, probe, has_head=has_head)

    # `generate` shares prompts of decoder-only models. Its first token is that of each response's first action.
    if log_probs is not None and not reader.is_encoder_decoder:
        gap = max(gap, _generation_gap(reader.model, probe, log_probs[::RESPONSE_LENGTH]))
    return gap


def shared_scoring_gap(reader: EpisodeReader, probe: EpisodeBatch, *, has_head: bool) -> tuple[float, Tensor | None]:
    """Return the difference of a reader's outputs for episodes with shared and with separate prompts.

    Returns:
        The gap, see `sharing_gap`; and the log-probs of all tokens with separate prompts `[n_tokens, vocab]`, or None
        without an output layer.
    """
    # New readers, which compile nothing: the given one may be compiled.
    separate = reader.fresh()
    shared = reader.fresh()
    shared.shares_prompts = True

    states = separate.states(probe).float()  # [n_tokens, d]
    gap = float((shared.states(probe) - states).abs().max() / states.abs().max())
    if not has_head:
        return gap, None

    log_probs = separate.logits(probe).log_softmax(dim=-1)  # [n_tokens, vocab]
    log_probs_shared = shared.logits(probe).log_softmax(dim=-1)
    return max(gap, float((log_probs_shared - log_probs).abs().max())), log_probs


def _generation_gap(model: Any, probe: EpisodeBatch, log_probs: Tensor) -> float:
    """Return the largest difference between log-probs `[n, vocab]` and those of `generate` with shared prompts."""
    with plain_generation(model):
        inputs = shared_prompt_inputs(model, probe.prompt_ids, probe.prompt_mask)
        if inputs is None:
            return 0.0
        output = model.generate(
            **inputs,
            max_new_tokens=1,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return float((output.logits[0].log_softmax(dim=-1) - log_probs).abs().max())


def require_finite(model: PreTrainedModel, name: str, numbers: Tensor) -> None:
    """Raise if a model's outputs on the probe contain NaN or infinity; the error names its non-finite weights.

    Raises:
        ModelError: not all outputs are finite.
    """
    if bool(numbers.isfinite().all()):
        return

    # Weights that are not finite are a damaged checkpoint; finite ones can still overflow.
    broken = [key for key, weight in model.named_parameters() if not bool(weight.isfinite().all())]
    cause = "its weights are finite, so its activations overflow their precision"
    if broken:
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        cause = f"its weights {', '.join(broken[:3])}{more} contain NaN or infinity: copy the checkpoint again"
    raise ModelError(f"{type(model).__name__} ({name!r}) outputs NaN or infinity; {cause}")


@contextmanager
def first_episodes(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Convert exceptions of a model's code on the first episodes to `ModelError`.

    Raises:
        ModelError: the family has other arguments or outputs than the supported ones.
    """
    try:
        yield
    except RL4LMsLikeError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"{type(model).__name__} ({name!r}) cannot be trained: its interface differs from those of the supported "
            f"families ({raised(error)}). Use another family, or report this one"
        ) from error


def require_independent_positions(model: PreTrainedModel, name: str, longest: int | None) -> None:
    """Raise if a text's log-probs would depend on the longest text of its batch.

    Args:
        model: the language model.
        name: name of the model in messages.
        longest: maximum number of tokens of prompt and response together. If it is None, because it is not known, only
            a warning is logged.

    Raises:
        ModelError: texts may be longer than the length up to which they are independent.
    """
    limit = longest_independent_of_batch(model.config)
    if limit is None:
        return
    text = f"{type(model).__name__} ({name!r}): {dependence_on_batch(limit)}"
    if longest is None:
        logger.warning(text)
    elif longest > limit:
        raise ModelError(f"{text}. They may have {longest} here")


def dependence_on_batch(limit: int) -> str:
    """Return why texts must have at most `limit` tokens, for messages; see `longest_independent_of_batch`."""
    return (
        f"if one text of a batch has more than {limit} tokens, its rotary positions change the log-probs of all texts "
        f"of the batch. Keep prompt and response together within {limit} tokens"
    )


def longest_independent_of_batch(config: PretrainedConfig) -> int | None:
    """Return the length up to which a text's log-probs are independent of its batch, or None if unlimited.

    Rotary positions of the types `dynamic` and `longrope` depend on the longest text of a batch if it is longer than
    the pretraining length.
    """
    # Families with several types of layers have a mapping for each type; the others have one for all.
    config = config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [rotary for rotary in parameters.values() if isinstance(rotary, Mapping)] or [parameters]

    limits = []
    for rotary in by_layer_type:
        kind = str(rotary.get("rope_type"))
        if "dynamic" in kind or kind == "longrope":
            limits.append(rotary.get("original_max_position_embeddings") or config.max_position_embeddings)
    return min(limits, default=None)


def log_probs_of(reader: EpisodeReader, episodes: EpisodeBatch) -> Tensor:
    """Return the teacher-forced log-probs of all actions `[n, response_len]`."""
    return episodes.pad(reader.scores(episodes, logits_budget=sys.maxsize).log_prob)
