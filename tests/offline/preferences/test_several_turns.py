"""Preferences whose responses go on for several turns: the prompt, the tokens that are scored, and their log-probs."""

from __future__ import annotations

import pytest
import torch

from rl4lms_like.config.load import parse_config
from rl4lms_like.offline.assemble_preferences import assemble_preferences
from rl4lms_like.offline.pairs import encode_pairs, encode_texts
from rl4lms_like.system.errors import ConfigError, DataPoolError
from tests.chat_models import CHATML, END, FORGETFUL, MARKED, REASONING, chat_tokenizer, save_chat_model
from tests.offline.preferences.preference_runs import blocks, written
from tests.offline.test_whole_messages import encoder, learned, samples_of


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = [user("Was it good?")]
GOOD = [bot("Very."), user("Why?"), bot("The sea.")]
BAD = [bot("No."), user("Why not?"), bot("Rain.")]
ROWS = {
    "a prompt of its own": ({"prompt": FIRST, "chosen": GOOD, "rejected": BAD}, FIRST, GOOD, BAD),
    "a text as prompt": ({"prompt": "Was it good?", "chosen": GOOD, "rejected": BAD}, FIRST, GOOD, BAD),
    "the prompt repeated": (
        {"prompt": FIRST, "chosen": [*FIRST, *GOOD], "rejected": [*FIRST, *BAD]}, FIRST, GOOD, BAD
    ),
    "in common": ({"chosen": [SYSTEM, *FIRST, *GOOD], "rejected": [SYSTEM, *FIRST, *BAD]}, [SYSTEM, *FIRST], GOOD, BAD),
    "in common for three messages": (
        {"chosen": [*FIRST, *GOOD], "rejected": [*FIRST, *GOOD[:2], bot("Oh.")]},
        [*FIRST, *GOOD[:2]], GOOD[2:], [bot("Oh.")],
    ),
    "apart from the user's second message on": (
        {"chosen": [*FIRST, *GOOD], "rejected": [*FIRST, GOOD[0], *BAD[1:]]}, FIRST, GOOD, [GOOD[0], *BAD[1:]]
    ),
    "one goes on after the other": (
        {"chosen": [*FIRST, *GOOD], "rejected": [*FIRST, GOOD[0]]}, FIRST, GOOD, GOOD[:1]
    ),
    "the last user message as prompt": (
        {"prompt": "Why?", "chosen": [*FIRST, *GOOD], "rejected": [*FIRST, *GOOD[:2], bot("Oh.")]},
        [*FIRST, *GOOD[:2]], GOOD[2:], [bot("Oh.")],
    ),
}  # fmt: skip
TEMPLATES = pytest.mark.parametrize("template", [CHATML, MARKED, REASONING])


def response_ids(tokenizer, prompt, response):
    """All tokens after the prompt, up to the last end of a turn."""
    ids = tokenizer.apply_chat_template([*prompt, *response])["input_ids"]
    before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
    assert ids[: len(before)] == before
    end = tokenizer.convert_tokens_to_ids(END)
    return ids[len(before) : len(ids) - ids[::-1].index(end)]


@TEMPLATES
@pytest.mark.parametrize("name", ROWS)
def test_all_tokens_after_the_prompt_are_scored(name, template, tmp_path):
    row, prompt, chosen, rejected = ROWS[name]
    tokenizer = chat_tokenizer(template)
    (sample,) = samples_of(tmp_path, "preferences", [row], tokenizer)
    assert sample.messages == prompt
    (encoded,) = encode_pairs(encoder(tokenizer), [sample]).rows
    assert encoded["prompt"] == tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
    assert encoded["responses"] == [response_ids(tokenizer, prompt, response) for response in (chosen, rejected)]

    # The references are what the model would have to write: rewards and metrics read them.
    first, last = chosen[0]["content"], chosen[-1]["content"]
    assert sample.references[0].endswith(last) and first in sample.references[0]


@TEMPLATES
def test_a_reward_model_reads_the_whole_conversation(template, tmp_path):
    tokenizer = chat_tokenizer(template)
    row, prompt, chosen, rejected = ROWS["a prompt of its own"]
    (sample,) = samples_of(tmp_path, "preferences", [row], tokenizer)
    pairs = encode_texts(encoder(tokenizer), [sample], append_eos=False, split_beginning=False)
    for ids, response in zip(pairs.rows[0]["responses"], (chosen, rejected), strict=True):
        assert ids == tokenizer.apply_chat_template([*prompt, *response])["input_ids"]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_supervised_run_learns_the_messages_of_the_assistant_in_the_chosen_response(template, tmp_path):
    tokenizer = chat_tokenizer(template)
    earlier = [*FIRST, bot("Perhaps."), user("Sure?")]
    row = {"prompt": earlier, "chosen": GOOD, "rejected": BAD}
    (sample,) = samples_of(tmp_path, "preferences", [row], tokenizer)
    (encoded,) = encoder(tokenizer).encode([sample]).rows
    assert encoded["input_ids"] == tokenizer.apply_chat_template([*earlier, *GOOD])["input_ids"]
    assert learned(tokenizer, encoded) == f"Very.{END}The sea.{END}"


def test_log_probs_are_those_of_a_plain_loop(tmp_path):
    model = save_chat_model(tmp_path / "model")
    row, prompt, chosen, rejected = ROWS["a prompt of its own"]
    mapping = blocks("dpo", model, written(tmp_path, [row] * 4))
    mapping["tokenizer"]["chat_template"] = True
    run = assemble_preferences(parse_config(mapping))
    scores = run.objective.scores(run.objective.collate(run.examples["train"].rows[:1]))

    before = run.tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
    for score, response in zip(scores[0], (chosen, rejected), strict=True):
        ids = [*before, *response_ids(run.tokenizer, prompt, response)]
        log_probs = run.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = sum(log_probs[i - 1, ids[i]] for i in range(len(before), len(ids)))
        torch.testing.assert_close(score, expected, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [*FIRST, *GOOD], "rejected": [user("Other?"), *BAD]},
        {"chosen": [*FIRST, *GOOD], "rejected": [*FIRST, user("Again?"), *BAD]},
        {"prompt": FIRST, "chosen": GOOD[:2], "rejected": BAD},
        {"prompt": [user("Other?")], "chosen": [*FIRST, *GOOD], "rejected": [*FIRST, *BAD]},
    ],
)
def test_rows_without_a_prompt_or_a_response_are_errors(row, tmp_path):
    with pytest.raises(DataPoolError, match=r"rows\.jsonl, line 1"):
        samples_of(tmp_path, "preferences", [row], chat_tokenizer())


def test_several_turns_need_a_template_that_keeps_them(tmp_path):
    rows = [ROWS["a prompt of its own"][0]]
    with pytest.raises(ConfigError, match="need it"):
        samples_of(tmp_path, "preferences", rows, chat_tokenizer(), template=False)
    with pytest.raises(ConfigError, match="differently"):
        samples_of(tmp_path, "preferences", rows, chat_tokenizer(FORGETFUL))
