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

import numpy as np

from rl4lms_like.core.observation import Observation, TextLayout
from rl4lms_like.core.sample import Sample

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
        # Of samples with one prompt the first one is used: from the back, it is written last.
        by_prompt = {sample.identity: sample for sample in reversed(samples)}
        self.samples = list(reversed(by_prompt.values()))[:N_SAMPLES]

        texts: list[tuple[str, Sample, str]] = []
        for sample in self.samples:
            texts += [(name, sample, text) for name, text in _texts(sample, self.samples).items()]
        # The long texts mix words of all samples, so they are scored once, for the first sample.
        texts += [(name, self.samples[0], text) for name, text in _long_texts(self.samples).items()]

        self.names: list[str] = []
        self.episodes: list[Observation] = []
        for name, sample, text in texts:
            ids = _response(sample, text, layout, padded=name == "padded")
            # Without an end token, an empty text has no token, and an episode has at least one.
            if len(ids):
                prompt = layout.encode(sample)
                self.names.append(name)
                self.episodes.append(Observation(sample, prompt, ids, n_actions=len(ids), layout=layout))

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

    # Texts that a reward for comparison with the reference should pay less for, or, with spaces around, the same.
    # The list has the numbers up to 60 and all samples' answers: a reward that searches for the answer finds it there.
    words = reference.split()
    answers = [text for text in map(_reference, samples) if text is not None]
    texts |= {
        "reference": reference,
        "whitespace": f" \n {reference} \n\n",
        "padded": reference,
        "answer_list": " ".join([*map(str, range(31)), *answers, *map(str, range(31, 61))]),
        "long_tail": " ".join([reference, *["and then it went on"] * 40]),
    }

    # With fewer words, these would be the reference itself or empty.
    if len(words) > 1:
        texts["truncated"] = " ".join(words[: len(words) // 2])
    if len(words) > 2:
        texts["keyword"] = " ".join([max(words, key=len)] * max(len(words), 8))
        texts["shuffled"] = " ".join([*words[1::2], *words[::2]])
    return texts


def _long_texts(samples: Sequence[Sample]) -> dict[str, str]:
    words: list[str] = []
    for sample in samples:
        words += f"{sample.prompt_or_input_text} {_reference(sample) or ''}".split()
    words = words or ["the"]

    texts = {}
    for name, n_words in N_WORDS.items():
        repeated = words * (n_words // len(words) + 1)
        texts[name] = " ".join(repeated[:n_words])
    return texts


def _reference(sample: Sample) -> str | None:
    return next((text for text in sample.references if text.strip()), None)


def _response(sample: Sample, text: str, layout: TextLayout, *, padded: bool) -> np.ndarray:
    """Return the token ids `[n]` of a finished response: text, end token, and padding if `padded`."""
    tokenizer = layout.tokenizer
    ids = layout.continuations.ids_or_alone(sample.prompt_or_input_text, text)
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    if padded and tokenizer.pad_token_id is not None:
        ids += [tokenizer.pad_token_id] * N_PAD
    return np.asarray(ids, dtype=np.int64)
