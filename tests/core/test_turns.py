"""The ids of a dialogue are those of the whole conversation, and nothing is encoded twice."""

import pytest

from rl4lms_like.core.chat_template import ChatTemplate
from rl4lms_like.core.observation import TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.turns import TurnTexts
from rl4lms_like.system.errors import ConfigError
from tests.chat_models import CHATML, END, FORGETFUL, MARKED, PLAIN, chat_tokenizer
from tests.tokenizer_families import llama_like

SYSTEM = "Play fair."


def texts_of(template=CHATML, system=SYSTEM):
    tokenizer = chat_tokenizer(template)
    return TurnTexts(TextLayout(tokenizer, 64, 64), ChatTemplate(tokenizer, system)), tokenizer


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize(
    "answer", ["Nobody knew", [{"role": "tool", "content": "4"}, {"role": "user", "content": "and?"}]]
)
def test_appended_ids_equal_the_rendered_conversation(template, is_cut, answer):
    texts, tokenizer = texts_of(template)
    opened = texts.opened(Sample("a", "", ["ref"], {"x": 1}), "Who wrote it?")
    assert (opened.references, opened.meta_data) == (["ref"], {"x": 1})
    ids = texts.layout.encode(opened).tolist()
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Who wrote it?"}]
    for turn in ("The museum", "A sister X7Q"):
        written = tokenizer(turn, add_special_tokens=False)["input_ids"]
        if not is_cut:
            written.append(tokenizer.convert_tokens_to_ids(END))
        ids += written
        ids += texts.answer_ids(answer, turn_text=turn, last_token=written[-1])
        messages.append({"role": "assistant", "content": turn})
        messages += [{"role": "user", "content": answer}] if isinstance(answer, str) else answer
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]


def test_a_turn_that_ends_with_another_token_gets_the_templates_own():
    texts, tokenizer = texts_of()
    end = tokenizer.convert_tokens_to_ids(END)
    assert texts.answer_ids("b", turn_text="a", last_token=tokenizer.eos_token_id)[0] == end
    assert texts.answer_ids("b", turn_text="a", last_token=end)[0] != end


def test_templates_without_special_tokens_and_those_that_forget():
    texts, tokenizer = texts_of(PLAIN)
    last = tokenizer("a")["input_ids"][-1]
    assert tokenizer.decode(texts.answer_ids("b", turn_text="a", last_token=last)) == "\nuser: b\nassistant: "
    with pytest.raises(ConfigError, match="leaves out earlier messages"):
        texts_of(FORGETFUL)[0].answer_ids("b", turn_text="a", last_token=last)


def test_plain_texts_are_joined(tiny_tokenizer):
    texts = TurnTexts(TextLayout(tiny_tokenizer, 64, 64))
    for answer in ("85;", " higher", "\nNobody knew", "é"):
        for turn in ("c37+48", "", "The film"):
            ids = texts.answer_ids(answer, turn_text=turn, last_token=1)
            assert tiny_tokenizer.decode(ids) == answer
    assert texts.answer_ids("", turn_text="a", last_token=1) == []


def test_an_answer_does_not_begin_with_a_space_of_the_tokenizer():
    tokenizer = llama_like()
    texts = TurnTexts(TextLayout(tokenizer, 64, 64))
    turn = tokenizer("The film", add_special_tokens=False)["input_ids"]
    for answer in ("s", " film", "4"):
        ids = texts.answer_ids(answer, turn_text="The film", last_token=turn[-1])
        assert tokenizer.decode([*turn, *ids]) == "The film" + answer
