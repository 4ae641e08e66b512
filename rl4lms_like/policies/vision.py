"""Vision-language model as an actor-critic policy: prompts with pictures, responses of text.

    environment   ids with placeholders, number of the pictures ─> EpisodeBatch.pictures
    policy        number ─ PictureEncoder ─> tensors ─> network        each prompt once in a pass

Pictures stay in the encoder that environment and policy share: buffers, gathered episodes and stored rollouts have
their numbers only.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from gymnasium import spaces
from stable_baselines3.common.type_aliases import Schedule
from transformers import AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerBase

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.picture_encoder import PictureEncoder
from rl4lms_like.core.processors import save_processor
from rl4lms_like.policies.arguments import VisionPolicyArguments
from rl4lms_like.policies.base import LMActorCriticPolicy
from rl4lms_like.policies.generation import TextGenerator
from rl4lms_like.policies.parity import check_sharing
from rl4lms_like.policies.teacher_forcing import EpisodeReader
from rl4lms_like.policies.vision_parity import check_vision_parity, probe_episodes_with_pictures, vision_sharing_gap
from rl4lms_like.policies.vision_reader import VisionReader, VisionTextGenerator


class VisionLMActorCriticPolicy(LMActorCriticPolicy):
    """Actor-critic policy of any `AutoModelForImageTextToText`: Qwen-VL, Idefics3, LLaVA, PaliGemma, Gemma 3 ...

    Args:
        observation_space: as in `LMActorCriticPolicy`.
        action_space: as in `LMActorCriticPolicy`.
        lr_schedule: as in `LMActorCriticPolicy`.
        pictures: encoder of prompts with pictures, the same as that of the environment.
        settings: further arguments of `LMActorCriticPolicy`, and those of `VisionPolicyArguments`.

    Raises:
        ModelError: as in `LMActorCriticPolicy`.
        ParityError: as in `LMActorCriticPolicy`; the reference is the model's own use of what its processor returns.
    """

    reader_class = VisionReader
    auto_class = AutoModelForImageTextToText
    arguments_class = VisionPolicyArguments
    arguments: VisionPolicyArguments
    reader: VisionReader
    pictures: PictureEncoder

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        *,
        pictures: PictureEncoder,
        **settings: Any,
    ) -> None:
        self.pictures = pictures
        super().__init__(observation_space, action_space, lr_schedule, **settings)

    def _new_reader(self, model: PreTrainedModel, *, compile: bool = False) -> VisionReader:
        return VisionReader(model, self.pictures, compile=compile)

    def _new_generator(self, **options: Any) -> TextGenerator:
        return VisionTextGenerator(self.policy_model, self.pictures, **options)

    def _probe(self, reader: EpisodeReader) -> EpisodeBatch:
        assert isinstance(reader, VisionReader)
        return probe_episodes_with_pictures(reader)

    def _check_log_probs(self, reader: EpisodeReader, name: str, **options: Any) -> None:
        assert isinstance(reader, VisionReader)
        check_vision_parity(reader, name, **options)

    def _may_share(self, reader: EpisodeReader, name: str, **options: Any) -> bool:
        return check_sharing(reader, name, gap=vision_sharing_gap, **options)

    def save_model(
        self,
        folder: str | Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        eos_token_ids: Collection[int] = (),
    ) -> Path:
        """Save the model as `LMActorCriticPolicy.save_model` does, and its processor if a tokenizer is given."""
        folder = super().save_model(folder, tokenizer, eos_token_ids=eos_token_ids)
        if tokenizer is not None:
            save_processor(self.pictures.processor, folder, tokenizer)
        return folder

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {**super()._get_constructor_parameters(), "pictures": self.pictures}
