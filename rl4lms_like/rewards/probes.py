r"""Texts with which rewards are audited, made from a few samples.

    sample 'What is 30 + 12?', reference '42'
    empty        ''                        reference     '42'
    repeated     'the the the ...'         whitespace    ' \n 42 \n\n'
    prompt       'What is 30 + 12?'        padded        '42' and padding tokens
    answer_list  '0 1 ... 42 7 31 ... 60'  long_tail     '42 and then it went on ...'

References of several words are also cut in half (`truncated`), reordered (`shuffled`), and one of their words is
repeated (`keyword`). `long` and `very_long` are 300 and 1200 words of the samples' texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rl4lms_like.core.observation import Observation, TextLayout
from rl4lms_like.core.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

N_SAMPLES = 3
"""Number of samples whose texts are scored."""

N_WORDS = {"long": 300, "very_long": 1200}
"""Words of the long texts."""

N_PAD = 8
"""Number of padding tokens that are added."""


class Probes:
    """Texts with which rewards are audited, as finished episodes.

    Args:
        samples: their prompts, references and `meta_data`; the first `N_SAMPLES` with different prompts are used.
        layout: its tokenizer encodes the texts as responses, which then end with its end token. A reward gets the
            decoded tokens, as in training.
    """

    def __init__(self, samples: Sequence[Sample], layout: TextLayout) -> None:
        by_prompt = {sample.prompt_or_input_text: sample for sample in reversed(samples)}
        self.samples = list(reversed(by_prompt.values()))[:N_SAMPLES]
        texts = [(name, each, text) for each in self.samples for name, text in _texts(each, self.samples).items()]
        texts += [(name, self.samples[0], text) for name, text in _long_texts(self.samples).items()]
        self.names: list[str] = []
        self.episodes: list[Observation] = []
        for name, sample, text in texts:
            ids = _response(text, layout.tokenizer, padded=name == "padded")
            if len(ids):  # without an end token, there is no empty response
                prompt = layout.encode(sample)
                self.names.append(name)
                self.episodes.append(Observation(sample, prompt, ids, len(ids), layout))

    def __len__(self) -> int:
        return len(self.episodes)

    def of(self, name: str) -> dict[str, int]:
        """Return the indices of a probe by sample id."""
        indices = range(len(self))
        return {self.episodes[index].sample.id: index for index in indices if self.names[index] == name}


def _texts(sample: Sample, samples: Sequence[Sample]) -> dict[str, str]:
    texts = {"empty": "", "repeated": " ".join(["the"] * 30), "prompt": sample.prompt_or_input_text}
    reference = _reference(sample)
    if reference is None:
        return texts
    words = reference.split()
    answers = [text for text in map(_reference, samples) if text is not None]
    texts |= {
        "reference": reference,
        "whitespace": f" \n {reference} \n\n",
        "padded": reference,
        "answer_list": " ".join([*map(str, range(31)), *answers, *map(str, range(31, 61))]),
        "long_tail": " ".join([reference, *["and then it went on"] * 40]),
    }
    if len(words) > 1:
        texts["truncated"] = " ".join(words[: len(words) // 2])
    if len(words) > 2:
        texts["keyword"] = " ".join([max(words, key=len)] * max(len(words), 8))
        texts["shuffled"] = " ".join([*words[1::2], *words[::2]])
    return texts


def _long_texts(samples: Sequence[Sample]) -> dict[str, str]:
    words = " ".join(f"{each.prompt_or_input_text} {_reference(each) or ''}" for each in samples).split() or ["the"]
    return {name: " ".join((words * (length // len(words) + 1))[:length]) for name, length in N_WORDS.items()}


def _reference(sample: Sample) -> str | None:
    return next((text for text in sample.references if text.strip()), None)


def _response(text: str, tokenizer: PreTrainedTokenizerBase, *, padded: bool) -> np.ndarray:
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    ids += [] if end is None else [end]
    ids += [pad] * N_PAD if padded and pad is not None else []
    return np.asarray(ids, dtype=np.int64)
