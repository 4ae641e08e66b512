"""DailyDialog (Li et al. 2017): the next utterance of a dialogue.

    utterances   a  b  c  d                                 context_size: 2
    prompt       a<EOU>b <EOU>     b<EOU>c <EOU>            the last two, joined by `<EOU>`, then a space and `<EOU>`
    reference    c<EOU>            d<EOU>
    meta_data    {"emotion": [0..6], "intent": [1..4]}      of the utterance that is the reference

`<EOU>` is plain text, not a special token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl4lms_like.core.errors import DataPoolError
from rl4lms_like.core.numbers import Count
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.wording import shown
from rl4lms_like.data_pools.columns import cell, text_cell, texts_cell
from rl4lms_like.data_pools.dialogues import ORIGINAL, PAIRS, utterances_of
from rl4lms_like.data_pools.hub import CONVERTED, HubTable
from rl4lms_like.data_pools.published import Published, PublishedPool, Source
from rl4lms_like.data_pools.splits import not_empty

HUB = HubTable("li2017dailydialog/daily_dialog", "default", CONVERTED)


class DailyDialog(PublishedPool):
    """Last utterances of a dialogue as prompts, with the next one as the reference."""

    EOU_TOKEN = "<EOU>"
    """End-of-utterance mark."""

    @classmethod
    def prepare(
        cls,
        split: str,
        context_size: Count,
        data_dir: str | None = None,
        hub_id: str | None = None,
        hub_config: str | None = None,
        revision: str | None = None,
        max_size: Count | None = None,
    ) -> DailyDialog:
        """Build the pool of a split: one sample per utterance with `context_size` utterances before it.

        Args:
            split: `train`, `val` or `test`.
            context_size: number of utterances in a prompt.
            data_dir: a local copy: DailyDialog's own `dialogues_train.txt`, `dialogues_act_train.txt` and
                `dialogues_emotion_train.txt` (validation, test), directly there or in a subfolder per split; or
                `{train,dev,test}.txt` with lines `context,response` (no `meta_data`; a line without response has no
                reference); or tables with the columns dialog, act, emotion or context, response (see `published`).
            hub_id: another hub repository with these columns.
            hub_config: configuration of the hub repository.
            revision: branch, tag or commit of the hub repository.
            max_size: maximum number of samples per split.

        Raises:
            DataPoolError: the data cannot be loaded or found, or no dialogue is long enough.
            MissingExtraError: `datasets` is needed and not installed.
        """
        published = Published("daily_dialog", "dialog, act, emotion (or context, response)", (ORIGINAL, PAIRS))
        samples: list[Sample] = []
        number, longest = 0, 0
        for where, row in published.rows(split, Source(data_dir, hub_id, hub_config, revision), HUB):
            utterances = list(_turns(row, where))
            longest = max(longest, len(utterances) - 1)
            earlier = [text for text, _ in utterances if text is not None]
            for turn, (text, meta_data) in enumerate(utterances):
                if turn >= context_size and (meta_data is not None or turn == len(utterances) - 1):
                    context = cls.EOU_TOKEN.join(earlier[turn - context_size : turn])
                    references = [] if text is None else [f"{text}{cls.EOU_TOKEN}"]
                    prompt = f"{context} {cls.EOU_TOKEN}"
                    samples.append(Sample(f"{split}_{number}", prompt, references, meta_data))
                number += 1
            if max_size is not None and len(samples) >= max_size:
                break
        if longest and not samples:
            raise DataPoolError(
                f"daily_dialog: no utterance of the split {split!r} has {context_size} before it, at most {longest}: "
                "reduce context_size"
            )
        return cls(not_empty(samples[:max_size], split, "daily_dialog"))


def _turns(row: Mapping[str, Any], where: str) -> Iterator[tuple[str | None, dict[str, Any] | None]]:
    """Yield utterances with metadata; of a context-response pair only the last is a reference, None if missing."""
    if "dialog" not in row and "context" in row:
        response = cell(row, "response", where)
        yield from ((text, None) for text in utterances_of(text_cell(row, "context", where)))
        yield (None if response is None else text_cell(row, "response", where)), None
        return
    texts = texts_cell(row, "dialog", where)
    emotions, acts = (_labels(row, name, len(texts), where) for name in ("emotion", "act"))
    for text, emotion, act in zip(texts, emotions, acts, strict=True):
        yield text, {"emotion": [emotion], "intent": [act]}


def _labels(row: Mapping[str, Any], name: str, count: int, where: str) -> Sequence[int]:
    labels = cell(row, name, where)
    if not isinstance(labels, list) or len(labels) != count:
        raise DataPoolError(
            f"{where}, column {name!r}: expected a number for each of {count} utterances, got {shown(labels)}"
        )
    return labels
