"""Reward models of prompts with pictures, which the reward and the metric `reward_model` use.

prompt, pictures ─ processor ─> ids with placeholders, tensors ─┐
response ─ tokenizer ─> ids that continue the prompt, end ──────┴─ model ─ state after the last token ─> reward
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl4lms_like.core.chat_template import ChatTemplate
from rl4lms_like.core.devices import existing_device
from rl4lms_like.core.model_weights import check_complete, load_complete, place_of
from rl4lms_like.core.observation import NO_LIMIT, TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.scoring.frozen import FrozenModel, Loaded, batches_by_length, longest_input, require_finite
from rl4lms_like.scoring.score import Texts
from rl4lms_like.system.errors import ModelError

if TYPE_CHECKING:
    import torch

    from rl4lms_like.core.picture_encoder import PictureEncoder


RECORD = "reward_images"
"""Key of config.json that marks a reward model of prompts with pictures; its value has `max_pixels`."""


def reads_images(model_name: str) -> bool:
    """Return whether a name is that of a reward model of prompts with pictures: a folder, or a hub id.

    Of a hub id, `config.json` is downloaded, unless it is in the cache. Without a connection the answer is no, and the
    error is that of loading the model.
    """
    from huggingface_hub import hf_hub_download

    place = place_of(model_name)
    try:
        file = Path(place) / "config.json" if Path(place).is_dir() else Path(hf_hub_download(place, "config.json"))
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get(RECORD) is not None


@dataclass(frozen=True, eq=False)
class LoadedWithProcessor(Loaded):
    """Model in evaluation mode, its tokenizer, and the encoder of prompts with pictures."""

    pictures: PictureEncoder


class VisionRewardModel(FrozenModel):
    """Reward model of prompts with pictures, with one logit; its model and processor are loaded at first use."""

    def __init__(self, model_name: str, *, batch_size: int, role: str = "reward model", **settings: Any) -> None:
        super().__init__(model_name, "AutoModelForImageTextToText", role=role, **settings)
        self.batch_size = batch_size

    def label_index(self, label: int | str | None) -> int:
        """Return the index of the only logit; a `ModelError` if another one is asked for."""
        if label not in (None, 0):
            raise ModelError(f"{self.model_name!r} has one logit and no label {label!r}")
        return 0

    def _check_weights(self) -> None:
        from rl4lms_like.core.vision_rewards import AutoVisionRewardModel

        location = place_of(self.model_name)
        check_complete(AutoVisionRewardModel, location, role=self.role, model_name=self.model_name)

    def _load(self) -> Loaded:
        import torch

        from rl4lms_like.core.picture_encoder import PictureEncoder
        from rl4lms_like.core.processors import load_processor
        from rl4lms_like.core.vision_rewards import AutoVisionRewardModel

        location = place_of(self.model_name)
        model = load_complete(
            AutoVisionRewardModel,
            location,
            role=self.role,
            model_name=self.model_name,
            dtype=getattr(torch, self.dtype),
        )
        model = model.to(existing_device(self.device)).eval().requires_grad_(False)
        processor = load_processor(location, model.config, local_files_only=True)
        pictures = PictureEncoder(processor, model.config, max_pixels=getattr(model.config, RECORD).get("max_pixels"))
        return LoadedWithProcessor(model, processor.tokenizer, pictures)

    def logits_of_texts(self, texts: Texts, *, is_chat: bool, append_eos: bool) -> torch.Tensor:
        """Return the logits of prompts with their responses, `[n, 1]`, float32 on the CPU.

        Args:
            texts: `n` texts.
            is_chat: prompt and response are messages of a user and of the assistant.
            append_eos: append the tokenizer's end-of-text token to each text that does not end with it.

        Raises:
            ModelError: the checkpoint cannot be loaded, or returns NaN or infinity, or a text is too long for it.
        """
        import torch

        from rl4lms_like.core.vision_rewards import rewards_of_rows

        loaded: Any = self.loaded
        pictures: PictureEncoder = loaded.pictures
        layout = TextLayout(self.tokenizer, NO_LIMIT, 1, pictures=pictures)
        images = texts.images or [()] * len(texts.prompts)
        prompts = []
        responses = []
        numbers = []
        for prompt, response, images_of_prompt in zip(texts.prompts, texts.responses, images, strict=True):
            sample = Sample("of the reward model", prompt, images=images_of_prompt)
            prompt_ids, response_ids = _encoded(sample, response, layout, pictures, is_chat=is_chat)

            # The reward is read at the last token, which an empty response does not have.
            is_ended = response_ids[-1:] == [self.tokenizer.eos_token_id]
            if not response_ids or (append_eos and not is_ended):
                response_ids.append(self.tokenizer.eos_token_id)
            prompts.append(prompt_ids)
            responses.append(response_ids)
            numbers.append(pictures.number(sample))
        self._require_room(prompts, responses)

        # [n], in the order of the texts: each batch is written to the rows of its texts.
        results = torch.zeros(len(prompts))
        wholes = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
        for indices in batches_by_length(wholes, self.batch_size):
            results[indices] = rewards_of_rows(
                self.model,
                pictures,
                [prompts[index] for index in indices],
                [responses[index] for index in indices],
                [numbers[index] for index in indices],
            )
        require_finite(results, self.role, self.model_name)
        return results[:, None]

    def _require_room(self, prompts: list[list[int]], responses: list[list[int]]) -> None:
        """Raise a `ModelError` if a text is longer than the model accepts: prompts with pictures are not truncated."""
        limit = longest_input(self.model, self.tokenizer)
        longest = max((len(prompt) + len(text) for prompt, text in zip(prompts, responses, strict=True)), default=0)
        if limit is not None and longest > limit:
            raise ModelError(
                f"a prompt with its images and a response has {longest} tokens, but the {self.role} "
                f"{self.model_name!r} takes {limit}: use shorter responses, or train it with a lower alg.max_pixels"
            )


def _encoded(
    sample: Sample, response: str, layout: TextLayout, pictures: PictureEncoder, *, is_chat: bool
) -> tuple[list[int], list[int]]:
    """Return the ids of a prompt and of the response after it, as in the training of a reward model."""
    tokenizer = layout.tokenizer
    if is_chat:
        # The template writes one mark for each picture, so the prompt has as many tokens in the whole as alone.
        template = ChatTemplate(tokenizer)
        sample = template.with_rendered_prompt(sample)
        whole = template.render([*(sample.messages or ()), {"role": "assistant", "content": response}])
        n_prompt = len(tokenizer(sample.rendered_prompt, add_special_tokens=False)["input_ids"])
        response_ids = tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"][n_prompt:]
    else:
        prompt = pictures.text(sample) if sample.images else sample.prompt_or_input_text
        response_ids = layout.continuations.ids_or_alone(prompt, response)

    # A response that spells the token of a picture shows none.
    placeholders = set(pictures.placeholder_ids)
    return layout.encode(sample).tolist(), [id for id in response_ids if id not in placeholders]
