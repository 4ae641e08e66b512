"""Supervised runs on prompts with images: the loss is that of transformers, and RL runs begin with their models."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from rl4lms_like import Run
from rl4lms_like.config.load import parse_config
from rl4lms_like.core.chat_template import ChatTemplate
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.inference import evaluate_run
from rl4lms_like.offline.assemble_supervised import assemble_supervised
from rl4lms_like.offline.checked_readers import reads_prompts_in_order
from rl4lms_like.offline.training_arguments import make_training_arguments
from rl4lms_like.policies.vision_reader import VisionReader
from rl4lms_like.preview import preview
from rl4lms_like.run import resume, train_config
from rl4lms_like.system.errors import ConfigError, DataPoolError
from rl4lms_like.training.examples import NOT_LEARNED
from tests.config_errors import raises_at
from tests.offline.preferences.preference_runs import lines, run
from tests.offline.preferences.test_images import encoder_of, rows_of_two_processes
from tests.offline.supervised.test_resume import stopped
from tests.policies.test_vision import EXACT, plain_log_probs
from tests.robustness.killed_runs import files_of
from tests.training.test_vision_runs import assert_loads, small
from tests.vision_models import TURNS, given_texts_config, pictures, png, saved_models, vision_config

SAMPLES = (
    Sample("text", "Who wrote it?", ["she did"]),
    Sample("one", "see <image>?", [" a quiet sea"], images=pictures(1)),
    Sample("two", "<image> or <image>: tell", [" both", " the second one of them"], images=pictures(2, 3)),
    Sample("same text", "see <image>?", [" no"], images=pictures(4)),
)


class References(TextGenPool):
    """The samples above, in each split."""

    @classmethod
    def prepare(cls, split: str) -> References:
        return cls(SAMPLES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return saved_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def folder(folders):
    return folders("idefics3")


def blocks(model, *, pool=f"{__name__}:References", alg=None, **training_args):
    """Two epochs of the five references, in steps of three and two."""
    pool = pool if isinstance(pool, dict) else {"id": pool}
    return given_texts_config("supervised", model, pool, batch_size=3, alg=alg, **training_args)


def assembled(mapping):
    return assemble_supervised(parse_config(mapping))


def loss_and_gradient(made):
    objective = made.objective
    made.model.zero_grad()
    loss = objective.loss(made.model, objective.collate(made.examples["train"].rows))
    loss.backward()
    gradients = [weight.grad.flatten() for weight in made.model.parameters() if weight.grad is not None]
    return loss.detach(), torch.cat(gradients)


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["idefics3", "qwen2_vl", "paligemma", "gemma3"])
def test_the_loss_is_that_of_plain_passes_of_one_row_with_the_processors_own_arguments(family, folders):
    made = assembled(blocks(folders(family)))
    loss, gradient = loss_and_gradient(made)

    # Each reference with its end token, alone and not padded; a mean over the tokens of all of them.
    made.model.zero_grad()
    rows = iter(made.examples["train"].rows)
    log_probs = []
    for sample in SAMPLES:
        for _ in sample.references:
            row = next(rows)
            learned = torch.tensor([label for label in row["labels"] if label != NOT_LEARNED])
            assert learned[-1] == made.tokenizer.eos_token_id
            log_probs.append(plain_log_probs(made.model, made.pictures, sample, learned))
    expected = -torch.cat(log_probs).mean()
    expected.backward()
    assert abs(loss - expected.detach()) < EXACT
    found = [weight.grad.flatten() for weight in made.model.parameters() if weight.grad is not None]
    assert (gradient - torch.cat(found)).abs().max() < 1e-4 * gradient.abs().max()


def test_a_small_budget_of_logits_changes_no_number(folder, monkeypatch):
    whole = loss_and_gradient(assembled(blocks(folder, alg={"logits_budget_mb": None})))
    made = assembled(blocks(folder))
    made.objective.logits_budget = 400  # less than two tokens
    parts = loss_and_gradient(made)
    assert abs(whole[0] - parts[0]) < 1e-6
    assert torch.allclose(whole[1], parts[1], atol=1e-6)


def test_the_budget_is_that_of_the_config(folder):
    assert assembled(blocks(folder, alg={"logits_budget_mb": 2})).objective.logits_budget == 2 * 2**20 / 4


def test_a_model_without_a_linear_head_has_the_same_loss(folder):
    made = assembled(blocks(folder))
    expected, gradient = loss_and_gradient(made)
    made.objective.reader.head_scale = None  # as where the logits are no linear function of the states
    loss, other = loss_and_gradient(made)
    assert abs(loss - expected) < EXACT and torch.allclose(gradient, other, atol=1e-5)


def test_micro_batches_change_no_number(folder, tmp_path):
    whole = run(blocks(folder, per_device_train_batch_size=4, optim="sgd"), tmp_path, "whole")
    parts = run(
        blocks(folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, optim="sgd"), tmp_path, "parts"
    )
    before, after = (load_file(one / "model" / "model.safetensors") for one in (whole, parts))
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)
    losses = [[line["supervised/loss"] for line in lines(one / "training_info.jsonl")] for one in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@torch.no_grad()
def test_rows_of_two_processes_have_their_own_images(folder):
    made = assembled(blocks(folder))
    batch = made.objective.collate(made.examples["train"].rows)
    whole = made.objective.loss(made.model, batch, 10)
    parts = [made.objective.loss(made.model, part, 10) for part in rows_of_two_processes(made.objective, batch)]
    assert abs(sum(parts) - whole) < EXACT


# --- conversations ----------------------------------------------------------------------------------------------------


def conversation(*, learned="conversation"):
    messages = [
        {"role": "user", "content": "see <image>?"},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "and <image>?"},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "which?"},
    ]
    return replace(Sample.of_messages("one", messages, ["the first"], images=pictures(1, 2)), learned=learned)


@pytest.mark.parametrize(("learned", "texts"), [("response", []), ("conversation", ["red<eos>", "red<eos>"])])
def test_messages_of_the_assistant_are_learned_between_images(learned, texts, folders):
    encoder = encoder_of(folders("qwen2_vl"))
    encoder.tokenizer.chat_template = TURNS
    sample = ChatTemplate(encoder.tokenizer).with_rendered_prompt(conversation(learned=learned))
    (row,) = encoder.encode([sample]).rows

    # The prompt has the tokens of the processor, with several placeholders for each image.
    prompt = encoder.pictures.encode(sample, 1000).tolist()
    assert row["input_ids"][: row["n_prompt"]] == prompt
    assert prompt.count(encoder.pictures.image_token_id) > 2

    stretches = []
    for id, label, before in zip(row["input_ids"], row["labels"], [NOT_LEARNED, *row["labels"]], strict=False):
        if label != NOT_LEARNED:
            assert label == id
            if before == NOT_LEARNED:
                stretches.append([])
            stretches[-1].append(id)
    assert encoder.tokenizer.batch_decode(stretches) == [*texts, "the first<eos>"]


def test_the_loss_of_a_conversation_is_that_of_a_plain_pass(folders, monkeypatch):
    monkeypatch.setattr(References, "prepare", classmethod(lambda cls, split: cls([conversation()])))
    mapping = blocks(folders("qwen2_vl"))
    mapping["tokenizer"]["chat_template"] = True
    made = assembled(mapping)
    loss, _ = loss_and_gradient(made)

    # All that the processor returns for the whole conversation, and the loss that transformers computes with labels.
    (row,) = made.examples["train"].rows
    sample = made.samples["train"][0]
    text = sample.rendered_prompt + "the first<eos>\n"
    images = [picture.open() for picture in sample.images]
    inputs = made.pictures.processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)
    assert inputs["input_ids"].tolist() == [row["input_ids"]]
    with torch.no_grad():
        logits = made.model(**inputs).logits[0, :-1]
    logits[:, made.pictures.placeholder_ids] = -torch.inf
    labels = torch.tensor(row["labels"][1:])
    assert abs(loss - torch.nn.functional.cross_entropy(logits, labels)) < EXACT


@pytest.mark.parametrize(("family", "expected"), [("paligemma", False), ("gemma3", True), ("idefics3", True)])
def test_which_models_see_all_of_a_prompt_at_once(family, expected, folders):
    made = assembled(blocks(folders(family)))
    assert isinstance(made.objective.reader, VisionReader)
    assert reads_prompts_in_order(made.objective.reader) is expected


def test_prompts_are_not_truncated_for_long_references(folder, folders):
    long = [Sample("one", "see <image>?", ["dear " * 60], images=pictures(1))]
    with pytest.raises(DataPoolError, match=r"sample 'one' has \d+ tokens with its images"):
        encoder_of(folder, max_length=40).encode(long)
    encoder = encoder_of(folders("qwen2_vl"), max_length=40)
    encoder.tokenizer.chat_template = TURNS
    rendered = [ChatTemplate(encoder.tokenizer).with_rendered_prompt(sample) for sample in long]
    with pytest.raises(DataPoolError, match=r"sample 'one' has \d+ tokens with its images"):
        encoder.encode(rendered)


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_stopped_run_is_resumed_to_the_same_files(folder, tmp_path, monkeypatch):
    mapping = blocks(folder, save_steps=1)
    expected = run(mapping, tmp_path, "whole")
    resumed = resume(stopped(mapping, tmp_path, 2, monkeypatch), quiet=True)
    assert files_of(resumed) == files_of(expected)


def test_a_run_of_rl_begins_with_the_model_of_a_supervised_one(folder, tmp_path):
    warm = run(blocks(folder, alg={"train_vision": "all"}), tmp_path, "warm")
    assert_loads(warm / "model")
    scores = lines(warm / "test_split_metrics.jsonl")[-1]["metrics"]
    assert evaluate_run(warm, split="test").items() <= scores.items()

    mapping = small(vision_config(warm / "model", n_train=16, n_eval=8, n_iters=1))
    tuned = train_config(parse_config(mapping), base_path_to_store_results=tmp_path, experiment_name="rl", quiet=True)
    before, after = (load_file(one / "model" / "model.safetensors") for one in (warm, tuned))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not any("vision_model" in name for name in changed)  # `none`, the default of RL runs


def test_a_run_in_python_learns_a_column_of_images(folder, tmp_path):
    rows = [{"prompt": "colour?", "completion": " red", "image": Image.new("RGB", (56, 56), "red")}] * 4
    Run(str(folder), data=rows, algorithm="sft", max_steps=1, folder=tmp_path / "run").train()
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["alg"]["model_type"] == "vision"
    assert_loads(tmp_path / "run" / "model")


def test_a_jsonl_file_with_messages_and_an_image_column_trains(folders, tmp_path):
    (tmp_path / "1.png").write_bytes(png(1))
    rows = [
        {"messages": [{"role": "user", "content": "see?"}, {"role": "assistant", "content": "yes"}], "image": "1.png"}
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 20))
    pool = {"id": "jsonl", "args": {"path": str(tmp_path / "rows.jsonl"), "image_column": "image"}}
    mapping = blocks(folders("qwen2_vl"), pool=pool)
    mapping["tokenizer"]["chat_template"] = True
    assert (run(mapping, tmp_path) / "model" / "processor_config.json").is_file()


def test_check_counts_tokens_and_memory(folder):
    text = "".join(preview(parse_config(blocks(folder))))
    assert "with images, of 4 tokens each" in text and "peak of the update" in text


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [("label_smoothing_factor", 0.1), ("torch_compile", True), ("use_cache", True)],
)
def test_arguments_of_texts_alone_are_refused(key, value, folder):
    config = parse_config(blocks(folder, **{key: value}))
    with raises_at(f"alg.training_args.{key}"):
        make_training_arguments(config, "out")


def test_prompts_with_images_are_not_learned(folder):
    with raises_at("alg.loss_on_prompt"):
        parse_config(blocks(folder, alg={"loss_on_prompt": True}))


def test_a_model_that_sees_all_of_a_prompt_at_once_does_not_learn_conversations(folders, monkeypatch):
    monkeypatch.setattr(References, "prepare", classmethod(lambda cls, split: cls([conversation()])))
    folder = folders("paligemma")
    (folder / "chat_template.jinja").write_text(TURNS.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>"))
    mapping = blocks(folder)
    mapping["tokenizer"]["chat_template"] = True
    with pytest.raises(ConfigError, match="all of a prompt at once"):
        assembled(mapping)
