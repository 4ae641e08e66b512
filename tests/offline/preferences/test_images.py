"""Preferences on prompts with images: the numbers are those of transformers, and runs do what those of texts do."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from rl4lms_like import Run
from rl4lms_like.config.load import parse_config
from rl4lms_like.core.chat_template import ChatTemplate
from rl4lms_like.core.pictures import Picture
from rl4lms_like.core.sample import Preference
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.inference import evaluate_run, generate_texts
from rl4lms_like.offline.assemble_preferences import assemble_preferences
from rl4lms_like.offline.pairs import encode_labels, encode_pairs, token_ids
from rl4lms_like.preview import preview
from rl4lms_like.run import resume
from rl4lms_like.sharing import merge_run
from rl4lms_like.system.errors import CheckpointError, ConfigError, DataPoolError, RL4LMsLikeError
from rl4lms_like.system.ranks import Ranks
from rl4lms_like.training.examples import ExampleEncoder
from tests.config_errors import raises_at
from tests.offline.preferences.preference_runs import lines, run
from tests.offline.supervised.test_resume import stopped
from tests.policies.test_vision import EXACT, plain_log_probs
from tests.robustness.killed_runs import files_of
from tests.training.test_vision_runs import assert_loads
from tests.vision_models import TURNS, given_texts_config, picture_encoder, pictures, png, saved_models

OBJECTIVES = ("dpo", "ipo", "kto", "orpo", "simpo")
POOL = f"{__name__}:Pairs"


def pair(id, prompt, images=(), chosen=" quiet and dear", rejected=" cold"):
    return Preference(id, prompt, [chosen], images=images, rejected=rejected)


PAIRS = (
    pair("text", "Who wrote it?"),
    pair("one", "see <image>?", pictures(1)),
    pair("two", "<image> or <image>: tell", pictures(2, 3), rejected=" slow and a little cold"),
    pair("same text", "see <image>?", pictures(4)),
)


class Pairs(TextGenPool):
    """The pairs above, in each split."""

    @classmethod
    def prepare(cls, split: str, seed: int = 4) -> Pairs:
        return cls([*PAIRS[:3], pair("same text", "see <image>?", pictures(seed))])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return saved_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def folder(folders):
    return folders("idefics3")


def blocks(id, model, *, args=None, pool=None, alg=None, **training_args):
    """Two epochs of the four pairs, two pairs in a step."""
    pool = {"id": POOL, "args": pool or {}}
    mapping = given_texts_config(id, model, pool, batch_size=2, alg=alg, **training_args)
    mapping["alg"]["args"] = args or {}
    return mapping


def assembled(mapping):
    return assemble_preferences(parse_config(mapping))


def encoder_of(folder, **options):
    pictures = picture_encoder(folder)
    tokenizer = pictures.processor.tokenizer
    limits = {"max_prompt_length": 200, "max_length": 300, **options}
    return ExampleEncoder(tokenizer=tokenizer, is_encoder_decoder=False, end_token_id=1, pictures=pictures, **limits)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["idefics3", "qwen2_vl", "paligemma", "gemma3"])
@torch.no_grad()
def test_log_probs_are_those_of_a_plain_pass_of_one_row_with_the_processors_own_arguments(family, folders):
    made = assembled(blocks("dpo", folders(family)))
    rows = made.examples["train"].rows
    scores = made.objective.scores(made.objective.collate(rows))  # [4, 2], padded, each prompt computed once

    expected = []
    for sample, row in zip(PAIRS, rows, strict=True):
        of_row = [
            plain_log_probs(made.model, made.pictures, sample, torch.tensor(ids)).sum() for ids in row["responses"]
        ]
        expected.append(torch.stack(of_row))
    assert (scores - torch.stack(expected)).abs().max() < EXACT

    # Equal texts with different images have different log-probs.
    assert PAIRS[1].references == PAIRS[3].references and abs(scores[1, 0] - scores[3, 0]) > 1e-3


@pytest.mark.parametrize("id", OBJECTIVES)
def test_micro_batches_change_no_number(id, folder, tmp_path):
    # Steps of four rows, or of twice two. Adam would enlarge the rounding of gradients that are 0.
    whole = run(blocks(id, folder, per_device_train_batch_size=4, optim="sgd"), tmp_path, "whole")
    parts = run(blocks(id, folder, gradient_accumulation_steps=2, optim="sgd"), tmp_path, "parts")
    before, after = (load_file(one / "model" / "model.safetensors") for one in (whole, parts))
    for name, weights in before.items():
        assert torch.allclose(weights, after[name], atol=1e-5), name
    losses = [[line["preference/loss"] for line in lines(one / "training_info.jsonl")] for one in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def rows_of_two_processes(objective, batch):
    """The rows of a batch that each of two processes computes."""
    parts = []
    for rank in range(2):
        objective.ranks = Ranks()
        objective.ranks.rank, objective.ranks.size = rank, 2
        parts.append(objective.own_rows(batch))
    return parts


@torch.no_grad()
def test_rows_of_two_processes_have_their_own_images(folder):
    made = assembled(blocks("simpo", folder))
    batch = made.objective.collate(made.examples["train"].rows)
    parts = rows_of_two_processes(made.objective, batch)
    scores = torch.cat([made.objective.scores(part) for part in parts])
    # Scores are sums of -60, where neighbouring float32 numbers are 4e-6 apart.
    assert torch.allclose(scores, made.objective.scores(batch), rtol=1e-6, atol=0)


@pytest.mark.parametrize("train_vision", ["none", "all"])
def test_gradient_checkpointing_changes_no_number(train_vision, folder, tmp_path):
    runs = []
    for recomputes in (False, True):
        alg = {"train_vision": train_vision}
        mapping = blocks("dpo", folder, gradient_checkpointing=recomputes, optim="sgd", alg=alg)
        runs.append(load_file(run(mapping, tmp_path, f"run_{recomputes}") / "model" / "model.safetensors"))
    before, after = runs
    assert all(torch.allclose(before[name], after[name], atol=1e-5) for name in before)


# --- encoding ---------------------------------------------------------------------------------------------------------


def test_equal_texts_with_different_images_are_different_prompts(folder):
    encoder = encoder_of(folder)
    samples = [pair(str(seed), "see <image>?", pictures(seed), chosen=f" {seed}") for seed in (1, 1, 2)]
    encoded = encode_labels(encoder, samples)
    good = [row for row in encoded.rows if row["is_desirable"]]
    one, again, other = (row["responses"][0] for row in good)

    # The response to another prompt is that of the third one; the first two have the same prompt.
    assert [row["responses"][1] for row in good] == [other, other, one]
    assert one == again
    assert encoded.n_same_mismatched == 0
    assert good[0]["prompt"] == good[2]["prompt"] and good[0]["pictures"] != good[2]["pictures"]


def test_the_reference_is_that_of_the_images(folder):
    encoder = encoder_of(folder)
    of_seeds = [token_ids(encode_pairs(encoder, [pair("", "see <image>?", pictures(seed))]).rows) for seed in (1, 2, 1)]
    assert of_seeds[0] == of_seeds[2] != of_seeds[1]


def test_conversations_have_the_tokens_of_the_processor_and_the_responses_of_the_template(folders):
    encoder = encoder_of(folders("qwen2_vl"))
    encoder.tokenizer.chat_template = TURNS
    template = ChatTemplate(encoder.tokenizer)
    sample = template.with_rendered_prompt(pair("one", "see <image>?", pictures(1), chosen="red", rejected="so blue"))
    (row,) = encode_pairs(encoder, [sample]).rows
    assert row["prompt"] == encoder.pictures.encode(sample, 1000).tolist()
    assert row["prompt"].count(encoder.pictures.image_token_id) > 1
    assert encoder.tokenizer.batch_decode(row["responses"]) == ["red<eos>", "so blue<eos>"]


def test_prompts_with_images_are_not_truncated(folder, tmp_path):
    mapping = blocks("dpo", folder)
    mapping["tokenizer"]["max_length"] = 8
    with pytest.raises(DataPoolError) as raised:
        assembled(mapping)
    for text in ("'one'", "'two'", "'same text'", "tokenizer.max_length", "alg.max_pixels"):
        assert text in str(raised.value)

    # Nor for a long response: this is known without loading the model, too.
    with pytest.raises(DataPoolError, match=r"sample 'one' has \d+ tokens with its images"):
        encode_pairs(encoder_of(folder, max_length=20), [pair("one", "see <image>?", pictures(1), " dear" * 30)])


def test_a_response_cannot_have_the_token_of_an_image(folder):
    with pytest.raises(DataPoolError, match="'one' has the text '<image>'"):
        encode_pairs(encoder_of(folder), [pair("one", "see <image>?", pictures(1), rejected="a <image>")])


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("id", "args"), [("kto", {}), ("dpo", {"reference_update_iterations": 2})])
def test_a_stopped_run_is_resumed_to_the_same_files(id, args, folder, tmp_path, monkeypatch):
    mapping = blocks(id, folder, args=args, save_steps=1)
    expected = run(mapping, tmp_path, "whole")
    resumed = resume(stopped(mapping, tmp_path, 2, monkeypatch), quiet=True)
    assert files_of(resumed) == files_of(expected)


def test_a_run_whose_images_have_changed_is_not_continued(folder, tmp_path, monkeypatch):
    unfinished = stopped(blocks("dpo", folder, save_steps=1), tmp_path, 2, monkeypatch)
    monkeypatch.setattr(Pairs.prepare.__func__, "__defaults__", (5,))
    with pytest.raises(CheckpointError):
        resume(unfinished, quiet=True)


@pytest.mark.parametrize("train_vision", ["none", "projector", "all"])
@pytest.mark.parametrize("peft", [None, {"r": 2, "target_modules": "all-linear"}])
def test_only_the_trained_parts_of_the_vision_change(train_vision, peft, folder, tmp_path):
    alg = {"train_vision": train_vision, "peft": peft, "merge_on_save": peft is not None}
    model = run(blocks("simpo", folder, alg=alg), tmp_path) / "model"
    before, after = (load_file(one / "model.safetensors") for one in (folder, model))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    parts = {"none": set(), "projector": {"connector"}, "all": {"connector", "vision_model"}}[train_vision]
    assert {name.split(".")[1] for name in changed} - {"weight"} == {"text_model", *parts}


def test_the_model_of_a_run_is_loaded_and_evaluated_anywhere(folder, tmp_path):
    alg = {"peft": {"r": 2, "target_modules": ["q_proj", "v_proj"]}}
    whole = run(blocks("dpo", folder), tmp_path, "whole")
    assert_loads(whole / "model")
    scores = lines(whole / "test_split_metrics.jsonl")[-1]["metrics"]
    evaluated = evaluate_run(whole, split="test")
    assert evaluated and evaluated.items() <= scores.items()
    assert json.loads((whole / "environment.json").read_text())[0]["images"].startswith("pillow ")

    # A model of images does not answer a text alone.
    file = tmp_path / "one.png"
    file.write_bytes(png(1))
    assert len(generate_texts(whole, ["see this?"], images=[file])) == 1
    with pytest.raises(RL4LMsLikeError, match="--image"):
        generate_texts(whole, ["see this?"])

    adapters = run(blocks("dpo", folder, alg=alg), tmp_path, "adapters")
    assert not any("vision_model" in name for name in load_file(adapters / "model" / "adapter_model.safetensors"))
    merge_run(adapters, tmp_path / "merged")
    assert_loads(tmp_path / "merged")


def test_a_run_in_python_takes_pairs_with_images_of_pil(folder, tmp_path):
    rows = [
        {"prompt": "see this?", "chosen": " red", "rejected": " blue", "figure": Picture(contents=png(seed)).open()}
        for seed in range(4)
    ]
    made = Run(str(folder), data=rows, algorithm="dpo", max_steps=1, folder=tmp_path / "run", eval_prompts=None)
    made.train()
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["alg"]["model_type"] == "vision"
    assert_loads(tmp_path / "run" / "model")


def test_check_counts_the_tokens_of_images(folder):
    text = "".join(preview(parse_config(blocks("dpo", folder))))
    assert "with images, of 4 tokens each" in text


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_model_of_the_other_kind_is_refused(folder, tiny_gpt2_dir):
    mapping = blocks("dpo", folder, alg={"model_type": "causal"})
    with raises_at("alg.model_type", mentions="write vision"):
        assembled(mapping)
    with raises_at("alg.model_type", mentions="write causal"):
        assembled(blocks("dpo", tiny_gpt2_dir))


def test_a_model_of_texts_does_not_get_prompts_with_images(tiny_gpt2_dir):
    mapping = blocks("dpo", tiny_gpt2_dir, alg={"model_type": "causal"})
    with pytest.raises(DataPoolError, match="model_type: vision"):
        assembled(mapping)


def test_settings_of_images_need_a_model_of_images(folder):
    alg = {"model_type": "causal", "train_vision": "all", "max_pixels": 100}
    with pytest.raises(ConfigError) as raised:
        parse_config(blocks("dpo", folder, alg=alg))
    assert [issue.path for issue in raised.value.issues] == ["alg.train_vision", "alg.max_pixels"]


def test_tokens_are_not_added_to_a_model_of_images(folder):
    mapping = blocks("dpo", folder)
    mapping["tokenizer"]["add_tokens"] = ["<think>"]
    with raises_at("tokenizer.add_tokens"):
        parse_config(mapping)


def test_max_pixels_makes_prompts_shorter_or_is_refused(folder, folders):
    long, short = (
        assembled(blocks("dpo", folders("qwen2_vl"), alg={"max_pixels": limit}))
        .examples["train"]
        .longest(is_encoder_decoder=False)
        for limit in (None, 1000)
    )
    assert short < long
    with raises_at("alg.max_pixels", mentions="has no effect"):
        assembled(blocks("dpo", folder, alg={"max_pixels": 400}))
