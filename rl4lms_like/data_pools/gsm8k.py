"""GSM8K: word problems of grade-school mathematics (arXiv 2110.14168), from a local copy of its files.

row        {"question": "How many ...?", "answer": "She sold 48/2 = 24. ... #### 72"}
sample     prompt from the question, reference 72, meta_data {"solution": "She sold 48/2 = 24. ... #### 72"}
"""

from __future__ import annotations

from itertools import islice

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool, flattened
from rl4lms_like.data_pools.files import DataFiles
from rl4lms_like.data_pools.splits import names_of
from rl4lms_like.data_pools.tables import json_line_rows, text_cell
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.system.numbers import Count

MARK = "####"
"""Separator of solution and final answer."""


class Gsm8k(TextGenPool):
    """Word problems, each with its final answer as the reference and its solution in `meta_info`."""

    @classmethod
    @flattened
    def prepare(
        cls, split: str, prompt_prefix: str = "", prompt_suffix: str = "", n_val: Count = 500, *, files: DataFiles
    ) -> TextGenPool:
        r"""Build the pool of a split.

        Args:
            prompt_prefix: text prepended to every question.
            prompt_suffix: text appended to every question, such as a request to write the answer after `####`.
            n_val: number of rows at the end of the file of `train` that are `val`, if `data_files` has no file for it.
            data_files: one JSON Lines file for each split; that of `val` may be missing.
        """
        names_of(split)

        # GSM8K is published as `train.jsonl` and `test.jsonl`: the last rows of `train` are `val`.
        is_divided = files.path is None and files.data_files is not None and "val" not in files.data_files
        if is_divided and split != "test":
            source = str(files.file("train"))
            all_rows = list(enumerate(islice(json_line_rows(files.file("train")), files.max_rows)))
            if 0 < len(all_rows) <= n_val:
                raise DataPoolError(
                    f"{source}: n_val: {n_val} takes all of the {len(all_rows)} rows that are read, and none is left "
                    f"for train; lower n_val, or give data_files a file for val"
                )
            rows_of_split = all_rows[:-n_val] if split == "train" else all_rows[-n_val:]
            rows = iter(rows_of_split[: files.max_size])
        else:
            rows, source = files.rows(split, json_line_rows)

        samples = []
        for index, (where, row) in rows:
            question = text_cell(row, "question", where)
            solution = text_cell(row, "answer", where)

            # The last mark: a solution may quote the mark. An empty answer would equal every empty response.
            answer = solution.rpartition(MARK)[2].strip()
            if MARK not in solution or not answer:
                raise DataPoolError(f"{where}, column 'answer': there is no final answer after {MARK}")

            prompt = f"{prompt_prefix}{question}{prompt_suffix}"
            samples.append(Sample(f"{split}_{index}", prompt, [answer], {"solution": solution}))
        return cls.of(samples, split, source)
