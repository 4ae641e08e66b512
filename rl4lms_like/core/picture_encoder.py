"""Prompts with pictures: their ids, and the tensors that a model sees, both made by the model's processor.

    sample    text "<image> What colour?", images (a.png,)
    ids       [... <vision_start> <image_pad> x 64 <vision_end> ...]     one placeholder for each part of a picture
    number    of the sample's pictures (`core.pictures.number_of`), kept with the ids as `EpisodeBatch.pictures`
    tensors   pixel_values, image_grid_thw ...     made from the number when a network reads the prompt

Tensors never leave the policy: those of one prompt may have 20 MiB, and all ids of a rollout have less.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PretrainedConfig

from rl4lms_like.core.observation import NO_LIMIT
from rl4lms_like.core.picture_inputs import TYPES, token_counts
from rl4lms_like.core.pictures import LARGEST_FILE, PLACE, Picture, number_of, text_with_places
from rl4lms_like.core.sample import Sample
from rl4lms_like.system.errors import ConfigError, ConfigIssue, DataPoolError, ModelError

PROBE_SIZE = (56, 56)
"""Width and height of the pictures with which a processor is examined."""

MOST_SHOWN = 10
"""Errors of samples that are shown together."""

CACHE_MB = 256
"""Default size of the tensors that are kept."""


@dataclass(frozen=True)
class LimitKeys:
    """Keys of a config that messages about the limits of prompts name."""

    prompt_length: str
    max_pixels: str


ON_POLICY = LimitKeys("env.args.max_prompt_length", "alg.policy.args.max_pixels")
OFFLINE = LimitKeys("tokenizer.max_length", "alg.max_pixels")
"""Those of runs on given texts."""


class PictureEncoder:
    """Encoder of prompts with pictures, which environment and policy share.

    Args:
        processor: the model's processor; see `core.processors`.
        model_config: the model's config.
        max_pixels: larger pictures are made smaller before the processor gets them; None = the processor's own limit.
        cache_mb: size of the tensors that are kept for later passes, in MiB.
        keys: keys of the run's config, for messages.

    Attributes:
        placeholder_ids: tokens that stand for parts of pictures, videos and sounds. A response cannot have them.
        type_rules: for each of `TYPES` that the processor returns, whether parts of pictures have the type 1; all
            other tokens of prompts have the type 0.

    Raises:
        ConfigError: `max_pixels` has no effect on the number of tokens.
        ModelError: the processor's types of tokens follow another rule.
    """

    def __init__(
        self,
        processor: Any,
        model_config: PretrainedConfig,
        *,
        max_pixels: int | None = None,
        cache_mb: int = CACHE_MB,
        keys: LimitKeys = ON_POLICY,
    ) -> None:
        self.processor = processor
        self.keys = keys
        self.max_pixels = max_pixels
        self._cache_bytes = cache_mb * 2**20

        # Families have different names for these ids. Gemma 3's processor has the token before a picture as its own.
        config: Any = model_config
        names = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")
        ids = [getattr(config, name, None) for name in names] + [getattr(processor, "image_token_id", None)]
        vocab_size = int(config.get_text_config().vocab_size)
        self.placeholder_ids = sorted({int(id) for id in ids if id is not None and id < vocab_size})
        self.image_token_id = next(int(id) for id in ids if id is not None)

        self.mark = str(processor.image_token)
        self.place = place_in_text(processor, model_config)

        self._images: dict[int, tuple[Picture, ...]] = {}  # number -> the pictures of a prompt
        self._ids: dict[tuple[str, bool, int], np.ndarray] = {}  # text, is it plain, number -> ids
        self._tensors: OrderedDict[int, dict[str, Tensor]] = OrderedDict()  # the same; the last ones that were used
        self._n_bytes = 0  # of these tensors
        self._probe = Picture(contents=noise(*PROBE_SIZE))
        self._stand_ins: dict[int, Any] = {}  # number of pictures -> processor that makes no tensors
        self._counts: dict[tuple[int, int], int] = {}  # width, height -> tokens, up to a constant of the family
        self.type_rules: dict[str, bool] = {}
        self._find_type_rules()
        if max_pixels is not None:
            self._require_effect(max_pixels)

    def __deepcopy__(self, memo: dict[int, Any]) -> PictureEncoder:
        """Return the encoder itself: it has no state of a model, and a copied reader shares it too."""
        return self

    # --- ids ------------------------------------------------------------------------------------------------------

    def register(self, samples: Iterable[Sample], max_length: int) -> None:
        """Check the prompts of samples, so that what is wrong with one of them is known before a run starts.

        Their pictures are found by their number from then on, also those of stored episodes.

        Raises:
            DataPoolError: lists what `encode` raises, or `refuse_placeholders` for texts, for all samples.
        """
        # Lengths are computed from the sizes of pictures, in a fraction of the time that encoding takes. Prompts that
        # are too long, or whose length is unknown, are encoded.
        samples = list(samples)
        lengths = self._lengths([sample for sample in samples if sample.images])

        tokenizer = self.processor.tokenizer
        placeholders = tokenizer.convert_ids_to_tokens(self.placeholder_ids)
        errors = []
        for sample in samples:
            text = sample.rendered_prompt or sample.prompt_or_input_text
            try:
                if sample.images:
                    self.number(sample)  # also of those that are not encoded
                    if lengths.get(id(sample), max_length + 1) > max_length:
                        self.encode(sample, max_length)
                elif any(token in text for token in placeholders):  # few texts: most need not be encoded here
                    self.refuse_placeholders(sample, np.asarray(tokenizer(text)["input_ids"]))
            except DataPoolError as error:
                errors.append(str(error))
        if len(errors) > MOST_SHOWN:
            errors = [*errors[:MOST_SHOWN], f"... and {len(errors) - MOST_SHOWN:,} more"]
        if errors:
            raise DataPoolError("\n  ".join(errors))

    def _lengths(self, samples: Sequence[Sample]) -> dict[int, int]:
        """Return the lengths of prompts with pictures, by `id(sample)`; those that cannot be computed are left out."""
        lengths = {}
        for sample in samples:
            try:
                length = self.length(sample)
            except (DataPoolError, ValueError):  # `encode` reports it
                continue
            if length is not None:
                lengths[id(sample)] = length

        # The processor might compute other numbers than it makes tokens. The longest prompt is encoded to compare.
        if not lengths:
            return {}
        longest = max(samples, key=lambda sample: lengths.get(id(sample), 0))
        try:
            is_exact = len(self.encode(longest, NO_LIMIT)) == lengths[id(longest)]
        except DataPoolError:  # raised again, with those of other samples
            is_exact = False
        return lengths if is_exact else {}

    def length(self, sample: Sample) -> int | None:
        """Return the number of tokens of a prompt with pictures, computed from their sizes.

        Returns:
            None if the processor does not compute numbers of tokens.

        Raises:
            DataPoolError: it has other places than pictures, or two of them next to each other, or a picture's file
                cannot be read.
            ValueError: the processor rejects the prompt, or a picture of this size.
        """
        sizes = [PROBE_SIZE, *(self._seen_size(picture.size) for picture in sample.images)]
        new_sizes = [size for size in dict.fromkeys(sizes) if size not in self._counts]
        if new_sizes:
            counts = token_counts(self.processor, new_sizes)
            if counts is None:
                return None
            self._counts |= dict(zip(new_sizes, counts, strict=True))

        # The processor itself writes the prompt, of small pictures that it has seen before. What it writes for each
        # picture has special tokens at both ends, so the text around it has the same tokens with pictures of any size.
        n_images = len(sample.images)
        if n_images not in self._stand_ins:
            self._stand_ins[n_images] = _without_tensors(self.processor)
        probes = [self._probe.open()] * n_images
        is_plain = sample.rendered_prompt is None
        encoded = _processed(self._stand_ins[n_images], self.text(sample), probes, adds_special_tokens=is_plain)
        ids = self._checked_ids(encoded, sample)
        return len(ids) + sum(self._counts[size] - self._counts[PROBE_SIZE] for size in sizes[1:])

    def number(self, sample: Sample) -> int:
        """Return the number of a sample's pictures, with which `tensors` finds them; 0 without pictures."""
        number = number_of(sample.images)
        if number:
            self._images[number] = sample.images
        return number

    def encode(self, sample: Sample, max_length: int) -> np.ndarray:
        """Return the ids `[length]` of a prompt with pictures; they are never truncated.

        Raises:
            DataPoolError: it has more than `max_length` tokens, or other places than pictures.
        """
        text = self.text(sample)
        key = (text, sample.rendered_prompt is None, self.number(sample))
        if key not in self._ids:
            self._ids[key] = self._encoded(text, sample)
        ids = self._ids[key]
        if len(ids) > max_length:
            n_placeholders = int((ids == self.image_token_id).sum())
            name = self.keys.prompt_length.rpartition(".")[2]
            raise DataPoolError(
                f"the prompt of sample {sample.id!r} has {len(ids)} tokens, {n_placeholders} of them for "
                f"images, and cannot be truncated to {name} {max_length}: raise {self.keys.prompt_length}, "
                f"or let {self.keys.max_pixels} make its images smaller"
            )
        return ids

    def _encoded(self, text: str, sample: Sample) -> np.ndarray:
        """Return the ids `[length]` of a prompt, and keep its tensors."""
        try:
            encoded = self._processed(text, sample.images, adds_special_tokens=sample.rendered_prompt is None)
        except ValueError as error:
            raise DataPoolError(f"sample {sample.id!r}: the processor rejects the prompt: {error}") from error
        ids = self._checked_ids(encoded, sample)
        self._keep(self.number(sample), encoded)
        array: np.ndarray = ids.numpy()
        return array

    def _checked_ids(self, encoded: Any, sample: Sample) -> Tensor:
        """Return the ids `[length]` of a processor's output for a prompt.

        Raises:
            DataPoolError: a model would take two of its pictures for one.
            ModelError: the types of its tokens follow another rule than `type_rules`.
        """
        ids: Tensor = encoded["input_ids"][0]

        # The policy computes the types of prompts by a rule, which the processor's must follow.
        for name in self.type_rules:
            if not torch.equal(encoded[name][0], self.types(name, ids)):
                raise ModelError(
                    f"{type(self.processor).__name__}: the {name} of sample {sample.id!r} are not those that the "
                    f"policy computes; report the family"
                )
        self._refuse_adjacent(sample, ids)
        return ids

    def refuse_placeholders(self, sample: Sample | str, ids: np.ndarray) -> None:
        """Raise if the ids of a text without pictures have a placeholder.

        Raises:
            DataPoolError: they have one.
        """
        placeholders = np.intersect1d(ids, self.placeholder_ids)
        if len(placeholders):
            token = self.processor.tokenizer.convert_ids_to_tokens(int(placeholders[0]))
            name = repr(sample) if isinstance(sample, str) else f"of sample {sample.id!r}"
            raise DataPoolError(f"the prompt {name} has no image, but the text {token!r}, which stands for one")

    def types(self, name: str, ids: Tensor) -> Tensor:
        """Return the types of prompt tokens, of the shape of `ids`; `name` is one of `type_rules`."""
        return (ids == self.image_token_id).long() if self.type_rules[name] else torch.zeros_like(ids)

    def text(self, sample: Sample) -> str:
        """Return a prompt with the processor's mark at the place of each picture.

        Raises:
            DataPoolError: it has another number of places than pictures.
        """
        # A chat template writes the marks itself.
        text = sample.rendered_prompt
        if text is None:
            text = text_with_places(sample.prompt_or_input_text, len(sample.images)).replace(PLACE, self.place)

        n_places = text.count(self.mark)
        if n_places != len(sample.images):
            raise DataPoolError(
                f"sample {sample.id!r} has {len(sample.images)} images, but its prompt has {n_places} places for "
                f"one ({self.mark})"
            )
        return text

    def _refuse_adjacent(self, sample: Sample, ids: Tensor) -> None:
        """Raise if a model that finds pictures by their types would take two of them for one."""
        if "mm_token_type_ids" not in self.type_rules:
            return
        is_part = F.pad((ids == self.image_token_id).long(), (1, 0))
        n_runs = int((is_part.diff() == 1).sum())
        if n_runs < len(sample.images):
            raise DataPoolError(
                f"the prompt of sample {sample.id!r} has two images without a token between them, which this model "
                f"would take for one: put a space or a word between them"
            )

    def _find_type_rules(self) -> None:
        """Set `type_rules` from what the processor returns for a prompt with a picture."""
        encoded = self._processed(f"{self.place} a", (self._probe,))
        ids: Tensor = encoded["input_ids"][0]
        for name in TYPES:
            if name not in encoded:
                continue
            types: Tensor = encoded[name][0]
            self.type_rules[name] = bool(types.any())
            if not torch.equal(types, self.types(name, ids)):
                raise ModelError(f"{type(self.processor).__name__}: its {name} are not those of a supported family")

    def _require_effect(self, max_pixels: int) -> None:
        """Raise if a picture with more pixels, if possible four times as many, has no fewer tokens with this limit."""
        # Its file must not be larger than those that are read; it has three bytes for each pixel.
        side = min(2 * math.isqrt(max_pixels), math.isqrt(LARGEST_FILE // 4))
        large = (Picture(contents=noise(side, side)),)
        n_limited = len(self._processed(self.place, large)["input_ids"][0])
        self.max_pixels = None
        n_tokens = len(self._processed(self.place, large)["input_ids"][0])
        self.max_pixels = max_pixels
        if n_limited >= n_tokens:
            message = (
                f"has no effect: {type(self.processor).__name__} makes {n_tokens} tokens of an image of "
                f"{side} x {side} pixels in any case; remove it"
            )
            raise ConfigError([ConfigIssue(self.keys.max_pixels, message)])

    # --- tensors --------------------------------------------------------------------------------------------------

    def tensors(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Return what a model sees of some prompts, by its numbers and in their order; empty without pictures.

        Raises:
            ModelError: a number is not one of a registered sample.
        """
        of_prompts = [self._of_prompt(number) for number in numbers if number]
        if not of_prompts:
            return {}
        return {name: _joined([tensors[name] for tensors in of_prompts]) for name in of_prompts[0]}

    def _of_prompt(self, number: int) -> dict[str, Tensor]:
        if number not in self._tensors:
            images = self._images.get(number)
            if images is None:
                raise ModelError(
                    f"the images with number {number} are not among those of the data pool: it has other images "
                    f"than when this episode was generated"
                )
            self._keep(number, self._processed(" ".join([self.place] * len(images)), images))
        self._tensors.move_to_end(number)
        return self._tensors[number]

    def _keep(self, number: int, encoded: Any) -> None:
        """Keep the tensors of a prompt, and drop those that have not been used for the longest time."""
        if number in self._tensors:  # of another text with the same pictures
            return
        of_text = {"input_ids", "attention_mask", "labels", *TYPES}
        kept = {name: value for name, value in encoded.items() if isinstance(value, Tensor) and name not in of_text}
        self._tensors[number] = kept
        self._n_bytes += _size(kept)
        while self._n_bytes > self._cache_bytes and len(self._tensors) > 1:
            _, dropped = self._tensors.popitem(last=False)
            self._n_bytes -= _size(dropped)

    def _processed(self, text: str, images: Sequence[Picture], *, adds_special_tokens: bool = True) -> Any:
        """Return what the processor makes of a prompt: a batch of one text."""
        opened = [self.opened(picture) for picture in images]
        return _processed(self.processor, text, opened, adds_special_tokens=adds_special_tokens)

    def opened(self, picture: Picture) -> Any:
        """Return a picture as an image of PIL with at most `max_pixels` pixels."""
        image: Any = picture.open()
        size = self._seen_size(image.size)
        return image if size == image.size else image.resize(size)

    def _seen_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return width and height within `max_pixels` of a picture with this width and height."""
        width, height = size
        if self.max_pixels is None or width * height <= self.max_pixels:
            return size
        factor = math.sqrt(self.max_pixels / (width * height))
        return max(int(width * factor), 1), max(int(height * factor), 1)


def place_in_text(processor: Any, model_config: PretrainedConfig) -> str:
    """Return what stands for a picture in a prompt without a chat template.

    It is the processor's mark, between the tokens that the family puts around a picture, as its chat templates do:
    without them, two pictures next to each other would have the positions of a single one.
    """
    names = ("vision_start_token_id", "vision_end_token_id")
    around = [getattr(model_config, name, None) for name in names]
    start, end = ("", "") if None in around else processor.tokenizer.convert_ids_to_tokens(around)
    return f"{start}{processor.image_token}{end}"


def _processed(processor: Any, text: str, images: Sequence[Any], *, adds_special_tokens: bool) -> Any:
    """Return what a processor makes of a text with images of PIL: a batch of one."""
    return processor(text=[text], images=[images], add_special_tokens=adds_special_tokens, return_tensors="pt")


def _without_tensors(processor: Any) -> Any:
    """Return a copy of a processor that makes tensors of the first pictures it gets, and takes all later ones for them.

    They must be as many.
    """
    stand_in = copy.copy(processor)
    stand_in.image_processor = _RememberingImageProcessor(processor.image_processor)
    return stand_in


class _RememberingImageProcessor:
    """Image processor that is called once, and returns the same afterwards."""

    def __init__(self, image_processor: Any) -> None:
        self._image_processor = image_processor
        self._returned: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._returned is None:
            self._returned = self._image_processor(*args, **kwargs)

        # Processors remove entries from what they get.
        return copy.copy(self._returned)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._image_processor, name)


def _size(tensors: dict[str, Tensor]) -> int:
    """Return the bytes of some tensors."""
    return sum(tensor.nbytes for tensor in tensors.values())


def noise(width: int, height: int, seed: int = 0) -> bytes:
    """Return a random picture as the contents of a PPM file, for probes."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return f"P6 {width} {height} 255\n".encode() + pixels.tobytes()


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Join tensors along the first dimension, padded with zeros in the others."""
    # One size for all in most families; Idefics3 has as many pictures in each row as the row with the most.
    widest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    padded = []
    for part in parts:
        missing = [wide - have for wide, have in zip(widest, part.shape[1:], strict=True)]
        padding = [amount for width in reversed(missing) for amount in (0, width)]
        padded.append(F.pad(part, padding) if any(padding) else part)
    return torch.cat(padded)
