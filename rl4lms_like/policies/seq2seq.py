"""Encoder-decoder language models as actor-critic policies."""

from __future__ import annotations

from transformers import AutoModelForSeq2SeqLM

from rl4lms_like.policies.base import LMActorCriticPolicy
from rl4lms_like.policies.teacher_forcing import Seq2SeqReader


class Seq2SeqLMActorCriticPolicy(LMActorCriticPolicy):
    """Actor-critic policy of any `AutoModelForSeq2SeqLM`: T5, BART, Marian, mBART, Blenderbot ..."""

    reader_class = Seq2SeqReader
    auto_class = AutoModelForSeq2SeqLM
