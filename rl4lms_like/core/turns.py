"""Texts of dialogues as token ids: the first text of an environment, and each of its answers.

prompt    [the first text, rendered]
response  [turn 1 | rest of the message, answer 1, beginning of the next message | turn 2 | ...]
           actions  observed                                                       actions

Sampled ids stay as they were sampled. An answer is encoded once and appended; nothing that is in the context already is
decoded and encoded again, because another tokenization would have other log-probs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from rl4lms_like.core.chat_template import PLACEHOLDER, PLACEHOLDER_TURN, ChatTemplate, Tools, chat_template_issue
from rl4lms_like.core.observation import TextLayout
from rl4lms_like.core.sample import Message, Sample

Answer: TypeAlias = "str | Sequence[Message]"
"""Text that the policy reads, or messages with `role` and `content`: the prompt or an answer of an environment."""


@dataclass(frozen=True)
class TurnTexts:
    """Encoder of the texts of dialogues.

    Args:
        layout: of prompts.
        template: renders messages; None = texts are joined as they are.
    """

    layout: TextLayout
    template: ChatTemplate | None = None

    def opened(self, sample: Sample, first: Answer, tools: Tools = None) -> Sample:
        """Return the sample with the first text of its environment as the prompt.

        Args:
            sample: from which the environment was started.
            first: what `reset` returned.
            tools: descriptions of functions that the policy may call, for the chat template.
        """
        # What rewards and metrics read of the sample stays; its text and messages are those of the environment now.
        prompt = Sample(sample.id, first) if isinstance(first, str) else Sample.of_messages(sample.id, first)
        opened = replace(
            prompt, references=sample.references, meta_data=sample.meta_data, tools=list(tools) if tools else None
        )
        return opened if self.template is None else self.template.with_rendered_prompt(opened)

    def answer_ids(
        self, answer: Answer, *, turn_text: str, last_token: int, tools: Tools = None, where: str = ""
    ) -> list[int]:
        """Return the ids that follow a turn, up to the beginning of the policy's next turn.

        With a template they are the rest of the policy's message, the environment's messages and the beginning of the
        policy's next message. If the turn was cut, the token that ends its message is among them: it is then observed,
        not an action.

        Args:
            answer: what `step` returned.
            turn_text: text of the turn.
            last_token: last id of the turn.
            tools: as those of the prompt.
            where: description of the answer for errors of the template.

        Raises:
            ConfigError: the template does not accept the messages.
        """
        if self.template is None:
            assert isinstance(answer, str)
            if not answer:
                return []
            # As the continuation of the turn: encoded alone, some tokenizers would put a space before it.
            return self.layout.continuations.ids_or_alone(turn_text or ".", answer)

        # Rendered after a message that stands for all earlier ones, whose text is not encoded. Its content is searched,
        # since the length of what is rendered before it is not that of the messages: there may be a system message.
        messages = [{"role": "user", "content": answer}] if isinstance(answer, str) else list(answer)
        conversation = [*PLACEHOLDER_TURN, *messages]
        rendered = self.template.render(conversation, add_generation_prompt=True, tools=tools, where=where)
        _, placeholder, rest = rendered.partition(PLACEHOLDER)
        if not placeholder:
            name = self.layout.tokenizer.name_or_path
            raise chat_template_issue(
                f"the chat template of {name!r} leaves out earlier messages of the assistant, so an answer cannot "
                f"follow them; use a template that writes all messages"
            )
        ids = list(self.layout.tokenizer(rest, add_special_tokens=False, verbose=False)["input_ids"])

        # The policy has written this token itself, unless the turn was cut or ended with another one.
        if ids and ids[0] == last_token and last_token == self.template.end_of_turn:
            return ids[1:]
        return ids
