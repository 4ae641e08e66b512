"""Probabilities of the steps of a response from a process reward model: a token classifier, as of TRL's `PRMTrainer`.

[bos] prompt   step 1  separator   step 2  separator       each part tokenized alone
                           |                   |
                       label of 1          label of 2      at the last token of the separator
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl4lms_like.scoring.classifier import index_of_label
from rl4lms_like.scoring.frozen import FrozenModel, batches_by_length, longest_input, model_inputs, require_finite
from rl4lms_like.system.errors import ModelError

if TYPE_CHECKING:
    import torch


class StepClassifier(FrozenModel):
    """Token classifier whose labels at the separators are those of the steps before them."""

    def __init__(self, model_name: str, **settings: Any) -> None:
        super().__init__(model_name, "AutoModelForTokenClassification", role="process reward model", **settings)

    def probabilities(
        self,
        prompts: Sequence[str],
        steps: Sequence[Sequence[str]],
        *,
        separator: str,
        label: int | str,
        batch_size: int,
    ) -> list[list[float]]:
        """Return the softmax probability of a label for each step of each response.

        The beginning of a prompt is cut if the whole is longer than the model's limit.

        Raises:
            ModelError: the model cannot be loaded, has no such label, or returns NaN or infinity.
            ValueError: the steps of a response are longer than the model's limit.
        """
        import torch

        rows = []
        ends = []  # of each row the indices of the last tokens of its separators
        for prompt, steps_of_response in zip(prompts, steps, strict=True):
            row, ends_of_row = self._row(prompt, steps_of_response, separator)
            rows.append(row)
            ends.append(ends_of_row)

        label_index = self._label_index(label)
        padding = self.tokenizer.pad_token_id or 0  # excluded by the mask
        results: list[list[float]] = [[] for _ in rows]
        with torch.inference_mode():
            for indices in batches_by_length(rows, batch_size):
                inputs = model_inputs([rows[index] for index in indices], padding, self.model.device)
                logits = self.model(**inputs).logits.float().cpu()  # [n, longest, n_labels]
                for index, row_logits in zip(indices, logits, strict=True):
                    results[index] = self._of_label(row_logits[ends[index]], label_index)
        return results

    def _of_label(self, logits: torch.Tensor, label_index: int) -> list[float]:
        """Return the probability of a label under logits `[n_steps, n_labels]`."""
        require_finite(logits, self.role, self.model_name)
        probabilities: list[float] = logits.softmax(dim=-1)[:, label_index].tolist()
        return probabilities

    def _row(self, prompt: str, steps: Sequence[str], separator: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a prompt with its steps, and the indices of the last tokens of the separators."""
        # As in the training: the parts are tokenized one by one, and only the beginning-of-text token is added.
        texts = self.tokenizer([prompt, separator, *steps], add_special_tokens=False, verbose=False)["input_ids"]
        prompt_ids, separator_ids, *ids_of_steps = texts
        if not separator_ids:
            raise ValueError(f"the tokenizer of {self.model_name!r} has no tokens for the separator {separator!r}")
        bos_token_id = self.tokenizer.bos_token_id
        if bos_token_id is not None:
            prompt_ids = [bos_token_id, *prompt_ids]

        response_ids: list[int] = []
        ends = []
        for ids in ids_of_steps:
            response_ids += [*ids, *separator_ids]
            ends.append(len(response_ids) - 1)

        # A step that the model does not read has no score, so only the prompt is cut.
        limit = longest_input(self.model, self.tokenizer)
        if limit is not None and len(response_ids) > limit:
            n_tokens = len(response_ids)
            raise ValueError(
                f"the steps of a response have {n_tokens} tokens, and {self.model_name!r} reads at most {limit}: "
                "generate shorter responses, or use another process reward model"
            )
        n_of_prompt = len(prompt_ids) if limit is None else min(len(prompt_ids), limit - len(response_ids))
        prompt_ids = prompt_ids[len(prompt_ids) - n_of_prompt :]
        return [*prompt_ids, *response_ids], [n_of_prompt + end for end in ends]

    def check_label(self, label: int | str) -> None:
        """Raise a `ModelError` if a local checkpoint has no such label, without loading weights."""
        config = self.local_config()
        if config is not None:
            self._label_index(label, config)

    def _label_index(self, label: int | str, config: Any = None) -> int:
        config = config or self.model.config
        if config.num_labels == 1:
            raise ModelError(f"{self.model_name!r} has one label, whose probability is always 1")
        return index_of_label(self.model_name, config, label)
