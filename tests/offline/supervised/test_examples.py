"""Prompts and references as ids: the border between them, the end, and what does not fit."""

import itertools
from dataclasses import replace

import pytest
import torch

from rl4lms_like.core.chat_template import ChatTemplate
from rl4lms_like.core.observation import TextLayout
from rl4lms_like.core.sample import Preference, Sample
from rl4lms_like.offline.pairs import encode_pairs
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.testing.models import make_tokenizer, make_word_tokenizer
from rl4lms_like.training.examples import NOT_LEARNED, ExampleCollator, ExampleEncoder
from tests.chat_models import CHATML, MARKED, chat_tokenizer
from tests.config_errors import raises_at
from tests.tokenizer_families import CAUSAL


@pytest.fixture
def tokenizer():
    return make_tokenizer()


def encoder(tokenizer, **changes):
    arguments = {
        "tokenizer": tokenizer, "is_encoder_decoder": False, "max_prompt_length": 64, "max_length": 128,
        "end_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    return ExampleEncoder(**(arguments | changes))


def learned(row):
    return [label for label in row["labels"] if label != NOT_LEARNED]


def test_the_prompt_is_the_one_an_environment_sees(tokenizer):
    tokenizer.truncation_side = "right"
    text = "Count with me: 1 2 3 4 5 6 7 8"
    (row,) = encoder(tokenizer, max_prompt_length=9).encode([Sample("0", text, ["9"])]).rows
    prompt = TextLayout(tokenizer, 9, 1, prompt_truncation_side="right").encode(text).tolist()
    assert row["input_ids"] == [*prompt, *learned(row)]
    assert row["labels"][: len(prompt)] == [NOT_LEARNED] * len(prompt)


def test_every_reference_is_an_example_of_its_own(tokenizer):
    samples = [Sample("0", "a", ["b", "c"]), Sample("1", "d", []), Sample("2", "e", ["f"])]
    examples = encoder(tokenizer).encode(samples)
    assert [tokenizer.decode(row["input_ids"]) for row in examples.rows] == ["a b<eos>", "a c<eos>", "e f<eos>"]
    assert examples.notices("train") == ["train: 1 samples have no reference and are not used"]
    assert examples.n_learned == sum(len(learned(row)) for row in examples.rows) == 7


@pytest.mark.parametrize("is_encoder_decoder", [False, True])
def test_no_end_follows_a_truncated_response(is_encoder_decoder, tokenizer):
    sample = Preference("0", "a", ["b c"], rejected="d", truncated=frozenset({"b c"}))
    texts = encoder(tokenizer, is_encoder_decoder=is_encoder_decoder)
    (row,) = texts.encode([sample]).rows
    assert tokenizer.decode(learned(row)).strip() == "b c"
    pairs = encode_pairs(texts, [sample])
    assert [tokenizer.decode(ids).strip() for ids in pairs.rows[0]["responses"]] == ["b c", "d<eos>"]
    assert pairs.n_without_end == 1


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_no_end_of_a_turn_follows_a_truncated_message(template):
    tokenizer = chat_tokenizer(template)
    question = {"role": "user", "content": "Is it cold?"}
    whole = ChatTemplate(tokenizer).with_rendered_prompt(Sample.of_messages("0", [question], ["It is"]))
    end = tokenizer.convert_ids_to_tokens(ChatTemplate(tokenizer).end_of_turn)
    cut = replace(whole, truncated=frozenset({"It is"}))
    texts = [tokenizer.decode(learned(row)) for row in encoder(tokenizer).encode([whole, cut]).rows]
    assert texts == ["It is" + end, "It is"]
    assert [tokenizer.decode(ids) for ids in encoder(tokenizer).responses([(cut, "It is")])] == ["It is"]


@pytest.mark.parametrize("kind", ["byte-level", "llama", "metaspace always"])
@pytest.mark.parametrize(("prompt", "reference", "separator", "text"), [
    ("The sea", "is blue.", None, "The sea is blue."),
    ("The sea ", "is blue.", None, "The sea is blue."),
    ("The sea", " is blue.", None, "The sea is blue."),
    ("The sea:\n", "blue", None, "The sea:\nblue"),
    ("The sea", "is blue.", "", "The seais blue."),
    ("The sea", "is blue.", "\n", "The sea\nis blue."),
    ("", "Blue.", None, "Blue."),
    ("2+2=", "4", "", "2+2=4"),
    ("if x:\n", "    return 1", "", "if x:\n    return 1"),
])  # fmt: skip
def test_what_stands_between_prompt_and_reference(prompt, reference, separator, text, kind):
    tokenizer = CAUSAL[kind]()
    (row,) = encoder(tokenizer, separator=separator).encode([Sample("0", prompt, [reference])]).rows
    assert tokenizer.decode(row["input_ids"], skip_special_tokens=True) == text
    assert row["input_ids"][-1] == tokenizer.eos_token_id
    prompt_ids = tokenizer(prompt)["input_ids"]
    assert row["input_ids"][: len(prompt_ids)] == prompt_ids


def test_a_tokenizer_that_spaces_by_itself_gets_no_second_space():
    tokenizer = make_word_tokenizer(["sea", "is", "blue"])
    samples = [Sample("0", "sea is", ["blue"])]
    (row,) = encoder(tokenizer).encode(samples).rows
    assert tokenizer.decode(row["input_ids"], skip_special_tokens=True) == "sea is blue"


def test_a_reference_that_no_tokens_continue_is_an_error_with_its_sample():
    """Such a tokenizer cannot write "seais", only "sea is", which is not what the example has."""
    tokenizer = make_word_tokenizer(["sea", "is", "blue"])
    with pytest.raises(DataPoolError, match=r"sample 's7'.*separator"):
        encoder(tokenizer, separator="").encode([Sample("s7", "sea", ["is blue"])])


@pytest.mark.parametrize("append_eos", [True, False])
def test_a_seq2seq_reference_ends_once(append_eos):
    tokenizer = make_tokenizer(append_eos=append_eos)
    (row,) = encoder(tokenizer, is_encoder_decoder=True).encode([Sample("0", "a sea", ["blue"])]).rows
    assert tokenizer.decode(row["labels"]) == "blue<eos>"
    assert tokenizer.decode(row["input_ids"]) == ("a sea<eos>" if append_eos else "a sea")


def test_a_prompt_gives_way_to_its_reference(tokenizer):
    tokenizer.truncation_side = "left"
    sample = Sample("0", "1 2 3 4 5 6 7 8", ["nine"])
    whole = encoder(tokenizer).encode([sample]).rows[0]
    n = len(whole["input_ids"])
    examples = encoder(tokenizer, max_length=n - 4).encode([sample])
    (row,) = examples.rows
    assert len(row["input_ids"]) == n - 4 and learned(row) == learned(whole)
    assert row["input_ids"] == whole["input_ids"][4:]
    assert examples.notices("val") == ["val: 1 prompts were truncated further to make room for their references"]


def test_a_reference_that_does_not_fit_is_cut_and_has_no_end(tokenizer):
    sample = Sample("0", "1 2 3", ["nine times nine is more than fits"])
    examples = encoder(tokenizer, max_length=6).encode([sample])
    (row,) = examples.rows
    assert len(row["input_ids"]) == 6 and len(learned(row)) == 5
    assert tokenizer.eos_token_id not in row["labels"]
    assert examples.n_cut_references == 1 and "no end token" in examples.notices("train")[-1]
    examples = encoder(tokenizer, max_length=6, is_encoder_decoder=True).encode([sample])
    assert len(examples.rows[0]["labels"]) == 6 and examples.n_cut_references == 1
    assert examples.n_shorter_prompts == 0


@pytest.mark.parametrize("kind", ["byte-level", "llama"])
def test_every_token_of_a_text_without_a_prompt_is_learned_once(kind):
    tokenizer = CAUSAL[kind]()
    text = "The sea is blue, and the sky is too."
    end = tokenizer.eos_token_id
    (whole,) = encoder(tokenizer, end_token_id=end).encode([Sample("0", "", [text], learned="text")]).rows
    tokens = whole["input_ids"]
    assert tokens[-1] == end and tokenizer.decode(tokens, skip_special_tokens=True) == text
    assert learned(whole) == tokens[1:]

    for length in (2, 3, 5, len(tokens)):
        cut = encoder(tokenizer, end_token_id=end, block_length=length)
        examples = cut.encode([Sample("0", "", [text], learned="text"), Sample("1", "", [text], learned="text")])
        blocks = [row["input_ids"] for row in examples.rows]
        assert all(2 <= len(block) <= length for block in blocks)
        assert [token for row in examples.rows for token in learned(row)] == 2 * tokens[1:]
        assert all(first[-1] == second[0] for first, second in itertools.pairwise(blocks[: len(blocks) // 2]))
        assert examples.n_texts == 2


@pytest.mark.parametrize(("changes", "learned_of", "key"), [
    ({"block_length": 4}, "response", "alg.block_length"),
    ({"separator": "x"}, "text", "alg.separator"),
    ({"loss_on_prompt": True}, "text", "alg.loss_on_prompt"),
])  # fmt: skip
def test_settings_of_the_other_kind_of_data_are_refused(changes, learned_of, key, tokenizer):
    prompt = "" if learned_of == "text" else "The sea"
    with raises_at(key, mentions="has no effect"):
        encoder(tokenizer, **changes).encode([Sample("0", prompt, ["is blue"], learned=learned_of)])


def test_texts_with_nothing_to_learn_are_counted(tokenizer):
    examples = encoder(tokenizer).encode(
        [Sample(str(i), "", [text], learned="text") for i, text in enumerate(["", "a"])]
    )
    assert len(examples.rows) == 1
    assert examples.notices("train") == ["train: 1 texts have fewer than two tokens and are not used"]


def test_a_seq2seq_model_has_nothing_to_read_of_a_text(tokenizer):
    with pytest.raises(DataPoolError, match="only causal models learn"):
        encoder(tokenizer, is_encoder_decoder=True).encode([Sample("0", "", ["Blue."], learned="text")])


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_of_a_dialogue_the_response_alone_is_learned_or_all_messages_of_the_assistant(template):
    tokenizer = chat_tokenizer(template)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    sample = ChatTemplate(tokenizer).with_rendered_prompt(Sample.of_messages("0", turns, ["d"]))
    texts = {}
    for kind in ("response", "conversation"):
        (row,) = encoder(tokenizer).encode([replace(sample, learned=kind)]).rows
        texts[kind] = tokenizer.decode(learned(row))
    assert "b" not in texts["response"] and "d" in texts["response"]
    assert texts["conversation"].endswith(texts["response"]) and "b" in texts["conversation"]


def test_the_collator_pads_what_is_not_learned():
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    batch = ExampleCollator(0)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [8, -100, -100]]
    assert "decoder_input_ids" not in batch


@pytest.mark.parametrize("family", ["t5", "bart", "marian", "mbart"])
def test_decoders_read_what_their_own_shift_would_give(family, tiny_tokenizer):
    from rl4lms_like.policies.teacher_forcing import decoder_start_token_id
    from rl4lms_like.testing.models import make_seq2seq_lm

    model = make_seq2seq_lm(family, tiny_tokenizer)
    labels = [[9, 8, 7, tiny_tokenizer.eos_token_id], [6, tiny_tokenizer.eos_token_id]]
    rows = [{"input_ids": [3, 4], "labels": row} for row in labels]
    batch = ExampleCollator(tiny_tokenizer.pad_token_id, decoder_start_token_id(model))(rows)
    own = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    seen = batch["labels"] != NOT_LEARNED
    assert torch.equal(batch["decoder_input_ids"][seen], own[seen])
