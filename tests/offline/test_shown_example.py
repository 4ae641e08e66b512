"""`check` prints the first example as it is trained: which tokens are learned, which are only read."""

from __future__ import annotations

import json

import pytest

from rl4lms_like.config.load import parse_config
from rl4lms_like.offline.shown_example import example_lines, row_lines
from rl4lms_like.preview import preview
from rl4lms_like.testing import models
from rl4lms_like.training.examples import NOT_LEARNED
from tests.chat_models import BOS, END, START, save_chat_model
from tests.configs import supervised_blocks
from tests.offline.preferences.preference_runs import blocks, written
from tests.tokenizer_families import SEQ2SEQ, byte_level

CONVERSATION = [
    {"from": "human", "value": "Why?"},
    {"from": "gpt", "value": "So."},
    {"from": "human", "value": "And then?"},
    {"from": "gpt", "value": "Nothing."},
]


def shown(mapping, section="# training") -> list[tuple[str, str]]:
    """Names and values of a section of `check`."""
    (text,) = [part for part in preview(parse_config(mapping)) if part.startswith(section)]
    rows = [
        line.partition("  ") if not line.startswith(" ") else line.strip().partition("  ") for line in text.split("\n")
    ]
    return [(name, value.strip()) for name, _, value in rows]


def example_of(mapping) -> list[tuple[str, str]]:
    lines = shown(mapping)
    return lines[lines.index(("first example", "")) + 1 : -1]


def supervised(model, file, *, kind="causal", **args):
    mapping = supervised_blocks()
    files = {split: str(file) for split in ("train", "val", "test")}
    mapping["tokenizer"] = {"model_name": str(model)}
    mapping["datapool"] = {"id": "jsonl", "args": {"data_files": files, **args}}
    mapping["alg"] |= {"model_type": kind, "model_name": str(model)}
    return mapping


def test_a_conversation_in_a_published_format(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([{"conversations": CONVERSATION}]))
    mapping = supervised(save_chat_model(tmp_path / "chat"), file)
    mapping["tokenizer"]["chat_template"] = True
    turn = f"{START}user\nAnd then?{END}\n{START}assistant\n"
    assert example_of(mapping) == [
        ("not learned", repr(f"{BOS}{START}user\nWhy?{END}\n{START}assistant\n")),
        ("learned", repr(f"So.{END}")),
        ("not learned", repr(f"\n{turn}")),
        ("learned", repr(f"Nothing.{END}")),
        ("not learned", repr("\n")),
    ]
    formats = dict(shown(mapping, "# data"))
    assert formats["format of all splits"].startswith("sharegpt (recognised by")


@pytest.mark.parametrize("loss_on_prompt", [False, True])
def test_a_prompt_with_a_reference(loss_on_prompt, tmp_path, tiny_gpt2_dir):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"q": "it was", "a": "good"}\n')
    mapping = supervised(tiny_gpt2_dir, file, prompt_column="q", reference_column="a")
    mapping["alg"]["loss_on_prompt"] = loss_on_prompt
    first, *_, last = example_of(mapping)
    assert first[0] == "not learned" and last[0] == "learned"
    assert last[1].endswith("good<eos>'")
    # The first token of a sequence is predicted from nothing.
    assert (first[1] == "'it was'") != loss_on_prompt


def test_the_texts_of_a_seq2seq_model(tmp_path, tiny_t5_dir):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"q": "it was", "a": "good"}\n')
    mapping = supervised(tiny_t5_dir, file, kind="seq2seq", prompt_column="q", reference_column="a")
    (_, prompt), (name, response) = example_of(mapping)
    assert "it was" in prompt and name == "learned" and "good" in response


@pytest.mark.parametrize(
    ("id", "names"),
    [
        ("dpo", ["not learned", "learned: chosen", "learned: rejected"]),
        ("kto", ["not learned", "learned: good", "not learned: to another prompt, for z0"]),
        ("reward_model", ["chosen", "rejected"]),
    ],
)
def test_the_first_preference(id, names, tmp_path, tiny_gpt2_dir):
    pair = {"prompt": "it was", "chosen": "good", "rejected": "bad"}
    file = written(tmp_path, [pair, pair | {"prompt": "it is"}])
    lines = example_of(blocks(id, tiny_gpt2_dir, file))
    assert [name for name, _ in lines] == names
    (chosen,) = [text for name, text in lines if "good" in name or "chosen" in name]
    assert chosen.endswith(f"good{models.EOS_TOKEN}'")


def test_a_character_that_is_learned_in_part_is_in_what_is_learned():
    tokenizer = byte_level(merges=False)
    ids = tokenizer("a日b", add_special_tokens=False)["input_ids"]
    labels = [NOT_LEARNED, NOT_LEARNED, *ids[2:]]
    (_, read), (_, learned) = example_lines(tokenizer, {"input_ids": ids, "labels": labels}, is_encoder_decoder=False)
    assert read.startswith("'a") and learned == "'日b'"


def test_the_response_of_a_seq2seq_model_is_a_text_without_a_space_before_it():
    tokenizer = SEQ2SEQ["unigram"]()
    prompt, chosen, rejected = tokenizer(["The film was", "good", "a film"])["input_ids"]
    lines = row_lines(
        tokenizer,
        {"prompt": prompt[:-1], "responses": [chosen, rejected]},
        is_encoder_decoder=True,
        has_language_model=True,
        reads_labels=False,
    )
    texts = [tokenizer.decode(chosen), tokenizer.decode(rejected)]
    assert texts[1].startswith("a film") and [text for _, text in lines[1:]] == [repr(text) for text in texts]
