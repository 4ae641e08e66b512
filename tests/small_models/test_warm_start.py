"""The warm start: from our own texts to a folder that transformers loads, the same bits each time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from rl4lms_like.data_pools.film_opinions import film_opinions
from rl4lms_like.small_models.warm_start import (
    RECORD,
    WarmStartSettings,
    make_model,
    make_tokenizer,
    make_warm_start,
    one_thread,
    perplexity,
    train_language_model,
)

TINY = WarmStartSettings(n_texts=300, n_held_out=40, n_embd=16, n_head=2, steps=12)
FAMILIES = ("gpt2", "t5")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return film_opinions(300, seed=0)


@pytest.fixture(scope="module")
def tokenizer(texts):
    return make_tokenizer(texts)


def test_one_token_begins_ends_and_pads(tokenizer):
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id == 0


def test_known_words_are_one_token_each(texts, tokenizer):
    ids = tokenizer(texts[0])["input_ids"]
    words_and_stops = texts[0].replace(".", " .").replace(",", " ,").split()
    assert len(ids) == len(words_and_stops)
    assert 0 not in ids


@pytest.mark.parametrize("text", ["This Korean cartoon was superb.", "Naïve zebras — 42 of them!\n", "a  b", ""])
def test_every_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_vocabulary_is_bounded_and_keeps_the_most_frequent_words(texts):
    small = make_tokenizer(texts, vocab_size=300)
    assert len(small) == 300
    assert len(small(" the")["input_ids"]) == 1
    assert len(small(" documentary")["input_ids"]) > 1


def test_a_prompt_is_encoded_as_the_beginning_of_its_text(texts, tokenizer):
    for text in texts[:50]:
        prompt = " ".join(text.split(" ")[:6])
        ids = tokenizer(prompt)["input_ids"]
        assert tokenizer(text)["input_ids"][: len(ids)] == ids


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_come_from_the_seed_alone(tokenizer, family):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first = make_model(tokenizer, family=family, n_embd=16, n_head=2, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(456)
    assert_same_weights(first, make_model(tokenizer, family=family, n_embd=16, n_head=2, seed=0))
    other = make_model(tokenizer, family=family, n_embd=16, n_head=2, seed=1)
    assert not torch.equal(first.get_input_embeddings().weight, other.get_input_embeddings().weight)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_is_bit_identical_and_lowers_the_perplexity(texts, tokenizer, family):
    def trained(steps: int):
        model = make_model(tokenizer, family=family, n_embd=16, n_head=2)
        train_language_model(model, tokenizer, texts, steps=steps)
        return model

    first = trained(40)
    assert_same_weights(first, trained(40))
    untrained = make_model(tokenizer, family=family, n_embd=16, n_head=2)
    assert perplexity(first, tokenizer, texts[:50]) < 0.5 * perplexity(untrained, tokenizer, texts[:50])


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_never_changes_a_perplexity(tokenizer, family):
    # Seven words: every prompt has five. Words that the tokenizer must spell make the second text much longer.
    short = "This Korean legend was sweet and clever."
    long = "This Uzbekistani silhouette film was extraordinarily multifaceted."
    model = make_model(tokenizer, family=family, n_embd=16, n_head=2)

    def nats(*batch: str) -> float:
        return math.log(perplexity(model, tokenizer, batch)) * sum(n_learned(text) for text in batch)

    def n_learned(text: str) -> int:
        learned = " " + " ".join(text.split()[5:]) if family == "t5" else text
        return len(tokenizer(learned)["input_ids"]) + (1 if family == "t5" else 0)  # the end; GPT-2's first is given

    assert n_learned(long) > 3 * n_learned(short)
    assert nats(short, long) == pytest.approx(nats(short) + nats(long), rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_of_a_pair_only_the_answer_is_learned(tokenizer, family):
    prompt, answer = "This Korean legend was", " sweet and clever."
    model = make_model(tokenizer, family=family, n_embd=16, n_head=2)
    read, written = (torch.tensor([tokenizer(text)["input_ids"]]) for text in (prompt, answer))
    written = torch.nn.functional.pad(written, (0, 1))  # the end
    if family == "t5":
        logits = model(input_ids=read, decoder_input_ids=torch.nn.functional.pad(written, (1, -1))).logits[0]
    else:
        logits = model(input_ids=torch.cat([read, written], dim=1)).logits[0, read.shape[1] - 1 : -1]
    expected = torch.nn.functional.cross_entropy(logits, written[0]).item()
    assert math.log(perplexity(model, tokenizer, [(prompt, answer)])) == pytest.approx(expected, rel=1e-5)


def test_the_number_of_threads_is_given_back():
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("family", "auto_model"), [("gpt2", AutoModelForCausalLM), ("t5", AutoModelForSeq2SeqLM)])
def test_the_folder_loads_and_writes(tmp_path, family, auto_model):
    measured = make_warm_start(tmp_path, replace(TINY, family=family))
    model, tokenizer = auto_model.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    held_out = film_opinions(TINY.n_held_out, TINY.seed, split="val")
    assert perplexity(model, tokenizer, held_out) == pytest.approx(measured, rel=1e-6)
    prompts = tokenizer(["This Korean cartoon was shown"], return_tensors="pt")
    written = model.generate(**prompts, do_sample=True, max_new_tokens=5)
    assert written.shape[1] > 1


def test_a_folder_with_the_same_settings_is_reused_and_a_fresh_one_is_equal(tmp_path):
    first, second = tmp_path / "warm", tmp_path / "other"
    measured = make_warm_start(first, TINY)
    written = {file: file.stat().st_mtime_ns for file in first.iterdir()}
    assert make_warm_start(first, TINY) == make_warm_start(second, TINY) == measured
    assert {file: file.stat().st_mtime_ns for file in first.iterdir()} == written
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert make_warm_start(second, replace(TINY, seed=1)) != measured


def test_an_unfinished_folder_is_made_again(tmp_path):
    measured = make_warm_start(tmp_path, TINY)
    (tmp_path / RECORD).unlink()
    (tmp_path / "tokenizer.json").unlink()
    assert make_warm_start(tmp_path, TINY) == measured
    assert (tmp_path / "tokenizer.json").is_file()


def assert_same_weights(first, second) -> None:
    theirs = second.state_dict()
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, theirs[name]), name
