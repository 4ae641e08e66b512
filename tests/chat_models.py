"""Tiny chat models: tokenizers with special tokens, and chat templates of the kinds that occur."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import processors

from rl4lms_like.testing import models

START, END, BOS = "<|im_start|>", "<|im_end|>", "<s>"

CHATML = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The same texts, and it marks what the assistant writes, without the end token."""
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}" + CHATML
FORGETFUL = CHATML.replace("{{ message.content }}", "{{ message.content if loop.last else 'gone' }}")
"""Only the last message is kept."""
PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""No special tokens."""


def chat_tokenizer(template: str | None = CHATML) -> Any:
    """A tokenizer that begins every text with its BOS token, and whose pad, end and turn tokens differ."""
    tokenizer = models.make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": BOS, "additional_special_tokens": [START, END]})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = template
    return tokenizer


def save_chat_model(folder: Path, template: str | None = CHATML) -> Path:
    """A far from uniform GPT-2 with this tokenizer."""
    tokenizer = chat_tokenizer(template)
    model = models.make_causal_lm("gpt2", tokenizer, scale=10.0, n_positions=256)
    return models.save_model(folder, model, tokenizer)
