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
REASONING = (
    "{{ bos_token }}{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think>\n{{ message.reasoning_content or '' }}\n</think>\n\n"
    "{% endif %}{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>\n"
    "{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The last message has its reasoning, which earlier ones lose, as with Qwen3; tools and their calls are written."""
OPENS_REASONING = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
"""A generated response begins within its reasoning, a given one does not, as with DeepSeek-R1."""
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
