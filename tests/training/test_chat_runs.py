"""Runs with a chat template: rollouts, evaluations, `generate` and supervised runs read the same prompts."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl4lms_like.config.load import parse_config
from rl4lms_like.inference import evaluate_run, generate_texts
from rl4lms_like.offline.assemble_supervised import assemble_supervised
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.preview import preview
from rl4lms_like.run import train_config
from rl4lms_like.testing import models
from tests.chat_models import CHATML, END, NO_SYSTEM, chat_tokenizer, save_chat_model
from tests.config_errors import raises_at

QUESTION = "Who wrote the letter?"
GREEDY = {"do_sample": False, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def chat_dir(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def conversations(tmp_path):
    """Conversations of two turns, of which the last message is the assistant's."""
    rows = [
        [("user", f"{n} films?"), ("assistant", "No."), ("user", QUESTION), ("assistant", f"Nobody, {n} times.")]
        for n in range(10)
    ]
    lines = [json.dumps({"turns": [{"role": role, "content": text} for role, text in row]}) for row in rows]
    (tmp_path / "turns.jsonl").write_text("\n".join(lines))
    return {"path": str(tmp_path / "turns.jsonl"), "prompt_column": "turns", "last_message_as_reference": True}


@pytest.fixture
def rl(tiny_config, chat_dir, conversations):
    tiny_config["tokenizer"] = {"model_name": str(chat_dir), "chat_template": True, "system_prompt": "Be brief."}
    tiny_config["datapool"] = {"id": "jsonl", "args": conversations}
    tiny_config["env"]["args"]["max_prompt_length"] = 200
    tiny_config["alg"]["policy"]["args"]["model_name"] = str(chat_dir)
    tiny_config["train_evaluation"] |= {"n_iters": 0, "generation_kwargs": GREEDY, "metrics": [{"id": "length"}]}
    return tiny_config


@pytest.fixture
def supervised(chat_dir, conversations):
    return {
        "tokenizer": {"model_name": str(chat_dir), "chat_template": True, "system_prompt": "Be brief."},
        "datapool": {"id": "jsonl", "args": conversations},
        "alg": {
            "id": "supervised",
            "model_type": "causal",
            "model_name": str(chat_dir),
            "generation_kwargs": GREEDY,
            "training_args": {"max_steps": 1, "learning_rate": 0.0},
        },
        "train_evaluation": {"eval_batch_size": 4, "metrics": [{"id": "length"}]},
    }


def greedy_answer(folder, messages) -> str:
    """What transformers alone generates."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END)]
    settings = {"attention_mask": torch.ones_like(ids), "eos_token_id": ends, "pad_token_id": 0}
    answer = model.generate(ids, **GREEDY, **settings)[0, ids.shape[1] :]
    return tokenizer.decode(answer, skip_special_tokens=True)


def messages_of(sample_id: str) -> list[dict[str, str]]:
    n = int(sample_id.partition("_")[2])
    texts = [("system", "Be brief."), ("user", f"{n} films?"), ("assistant", "No."), ("user", QUESTION)]
    return [{"role": role, "content": text} for role, text in texts]


@pytest.mark.parametrize("kind", ["rl", "supervised"])
def test_every_evaluation_answers_the_rendered_prompts(kind, request, chat_dir, tmp_path):
    folder = train_config(parse_config(request.getfixturevalue(kind)), base_path_to_store_results=tmp_path, quiet=True)
    evaluate_run(folder, split="val", decoding="greedy")
    files = [folder / "epoch_0_val_split_predictions.json", folder / "evaluation/epoch_0_val_split_predictions.json"]
    for file in files:
        (prediction,) = json.loads(file.read_text())
        assert prediction["generated_text"] == greedy_answer(chat_dir, messages_of(prediction["sample_id"]))
        assert prediction["prompt_text"].endswith(f" films?\n\nNo.\n\n{QUESTION}")
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    assert generate_texts(folder, [QUESTION], decoding="greedy") == [[greedy_answer(chat_dir, asked)]]


def test_rollouts_have_these_prompts_and_end_with_the_turn(rl, chat_dir):
    run = assemble(parse_config(rl))
    observation = run.env.reset()
    tokenizer = AutoTokenizer.from_pretrained(chat_dir)
    for sample, ids in zip(run.env.samples, observation["prompt_or_input_encoded_pt"], strict=True):
        expected = tokenizer.apply_chat_template(messages_of(sample.id), add_generation_prompt=True)["input_ids"]
        assert ids[-len(expected) :].tolist() == expected
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END)}
    assert set(run.algorithm.collector.eos_token_ids) == ends and tokenizer.pad_token_id not in ends
    *_, infos = run.env.step([tokenizer.convert_tokens_to_ids(END), 0, tokenizer.eos_token_id, 300])
    assert ["terminal_observation" in info for info in infos] == [True, False, True, False]
    run.env.close()


@pytest.mark.parametrize("kind", ["rl", "supervised"])
def test_the_check_shows_a_rendered_prompt_and_its_ids(kind, request, chat_dir):
    shown = "".join(preview(parse_config(request.getfixturevalue(kind))))
    tokenizer = AutoTokenizer.from_pretrained(chat_dir)
    lines = dict(line.split("  ", 1) for line in shown.splitlines() if "  " in line)
    rendered = eval(shown.partition("rendered prompt")[2].splitlines()[0])
    assert rendered.startswith("<s><|im_start|>system\nBe brief.") and rendered.endswith("<|im_start|>assistant\n")
    assert lines["ids"].split() == list(map(str, tokenizer(rendered, add_special_tokens=False)["input_ids"]))
    assert END in lines["end of turn"]


def test_a_supervised_run_learns_the_tokens_of_the_assistant(supervised, chat_dir):
    run = assemble_supervised(parse_config(supervised))
    tokenizer = AutoTokenizer.from_pretrained(chat_dir)
    for row, sample in zip(run.examples["train"].rows, run.samples["train"], strict=True):
        turns = [*messages_of(sample.id), {"role": "assistant", "content": sample.references[0]}]
        assert row["input_ids"] == tokenizer.apply_chat_template(turns)["input_ids"]
        assert all(label in (-100, id) for id, label in zip(row["input_ids"], row["labels"], strict=True))
        learned = tokenizer.decode([label for label in row["labels"] if label != -100])
        assert learned == f"No.{END}{sample.references[0]}{END}"


def test_a_seq2seq_model_is_trained_on_the_prompts_of_its_evaluations(supervised, tmp_path):
    tokenizer = chat_tokenizer()
    folder = models.save_model(tmp_path / "t5", models.make_seq2seq_lm("t5", tokenizer), tokenizer)
    supervised["tokenizer"]["model_name"] = supervised["alg"]["model_name"] = str(folder)
    supervised["alg"]["model_type"] = "seq2seq"
    run = assemble_supervised(parse_config(supervised))
    for row, sample in zip(run.examples["train"].rows, run.samples["train"], strict=True):
        expected = tokenizer.apply_chat_template(messages_of(sample.id), add_generation_prompt=True)["input_ids"]
        assert row["input_ids"] == expected


def test_a_long_conversation_keeps_its_answer(supervised, chat_dir):
    supervised["tokenizer"]["max_length"] = 20
    run = assemble_supervised(parse_config(supervised))
    tokenizer = AutoTokenizer.from_pretrained(chat_dir)
    for row, sample in zip(run.examples["train"].rows, run.samples["train"], strict=True):
        answer = tokenizer.apply_chat_template([{"role": "assistant", "content": sample.references[0]}], tokenize=False)
        text = tokenizer.decode(row["input_ids"])
        assert text.endswith(f"<|im_start|>{answer.partition('<|im_start|>')[2]}")
        assert len(row["input_ids"]) == 20 + len(tokenizer(f"{sample.references[0]}{END}\n")["input_ids"]) - 1


def test_a_template_in_a_file_is_saved_with_the_model(rl, tmp_path):
    file = tmp_path / "shout.jinja"
    file.write_text(CHATML.replace("message.content", "message.content | upper"))
    rl["tokenizer"]["chat_template"] = str(file)
    folder = train_config(parse_config(rl), base_path_to_store_results=tmp_path, quiet=True)
    file.unlink()
    before = json.loads((folder / "epoch_0_val_split_predictions.json").read_text())
    evaluate_run(folder, split="val", decoding="greedy")
    assert json.loads((folder / "evaluation/epoch_0_val_split_predictions.json").read_text()) == before


@pytest.mark.parametrize("kind", ["rl", "supervised"])
def test_errors_of_templates_are_reported_by_the_check_and_the_run(kind, request, tmp_path_factory):
    blocks, build = request.getfixturevalue(kind), assemble if kind == "rl" else assemble_supervised

    def is_reported():
        with raises_at("tokenizer.chat_template"):
            "".join(preview(parse_config(blocks)))
        with raises_at("tokenizer.chat_template"):
            build(parse_config(blocks))

    for template in (None, NO_SYSTEM):
        folder = save_chat_model(tmp_path_factory.mktemp("model"), template)
        blocks["tokenizer"]["model_name"] = str(folder)
        is_reported()
    blocks["tokenizer"] |= {"chat_template": False, "system_prompt": None}
    is_reported()


def test_errors_of_keys_are_found_in_the_file(rl, supervised):
    rl["tokenizer"]["chat_template"] = "no/such.jinja"
    with raises_at("tokenizer.chat_template", mentions="no/such.jinja"):
        parse_config(rl)
    rl["tokenizer"]["chat_template"] = False
    with raises_at("tokenizer.system_prompt"):
        parse_config(rl)
    supervised["alg"]["separator"] = " "
    with raises_at("alg.separator"):
        parse_config(supervised)
