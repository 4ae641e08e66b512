"""Reward models of prompts with images: trained on pairs, saved, and used as a reward and a metric."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from rl4lms_like.config.load import parse_config
from rl4lms_like.core.chat_template import ChatTemplate
from rl4lms_like.core.vision_rewards import AutoVisionRewardModel
from rl4lms_like.inference import evaluate_run, generate_texts
from rl4lms_like.offline.pairs import encode_texts_with_pictures
from rl4lms_like.policies.vision_reader import VisionReader
from rl4lms_like.preview import preview
from rl4lms_like.rewards.learned import RewardModel
from rl4lms_like.run import resume, train_config
from rl4lms_like.scoring.score import Texts
from rl4lms_like.scoring.vision_rewards import VisionRewardModel, reads_images
from rl4lms_like.sharing import merge_run
from rl4lms_like.system.errors import DataPoolError, ModelError, ParityError, RL4LMsLikeError
from tests.config_errors import raises_at
from tests.offline.preferences.preference_runs import lines, run
from tests.offline.preferences.test_images import (
    PAIRS,
    assembled,
    blocks,
    encoder_of,
    pair,
)
from tests.offline.supervised.test_resume import stopped
from tests.policies.test_vision import EXACT
from tests.robustness.killed_runs import files_of
from tests.training.test_vision_runs import small
from tests.vision_models import TURNS, pictures, plain_inputs, saved_models, vision_config


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return saved_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def folder(folders):
    return folders("idefics3")


def reward_blocks(model, *, alg=None, **options):
    mapping = blocks("reward_model", model, alg=alg, **options)
    del mapping["alg"]["generation_kwargs"]
    mapping["train_evaluation"] = {"eval_batch_size": 4}
    return mapping


def texts_of(pairs):
    """Both responses of each pair, as a reward gets them."""
    chosen = [sample.chosen for sample in pairs]
    rejected = [sample.rejected for sample in pairs]
    prompts = [sample.prompt_or_input_text for sample in pairs]
    n = len(pairs)
    images = [sample.images for sample in pairs]
    return Texts(prompts * 2, chosen + rejected, [[]] * 2 * n, [None] * 2 * n, images * 2)


def plain_reward(model, encoder, sample, response_ids):
    """The reward in a plain forward pass of one unpadded row, fed by the processor."""
    inputs = plain_inputs(model, encoder, sample, torch.tensor(response_ids))
    return model.score(model.base_model(**inputs).last_hidden_state[0, -1])[0]


@torch.no_grad()
def scores_of(made):
    """The scores of both texts of the pairs `[4, 2]`, in one padded batch."""
    return made.objective.scores(made.objective.collate(made.examples["train"].rows))


@pytest.mark.parametrize("family", ["idefics3", "qwen2_vl", "paligemma", "gemma3"])
@torch.no_grad()
def test_rewards_are_those_of_a_plain_pass_of_one_row_with_the_processors_own_arguments(family, folders):
    made = assembled(reward_blocks(folders(family)))
    rows = made.examples["train"].rows
    scores = scores_of(made)
    expected = []
    for sample, row in zip(PAIRS, rows, strict=True):
        rewards = [plain_reward(made.model, made.pictures, sample, ids) for ids in row["responses"]]
        assert all(ids[-1] == made.tokenizer.eos_token_id for ids in row["responses"])
        expected.append(torch.stack(rewards))
    assert (scores - torch.stack(expected)).abs().max() < EXACT
    assert abs(scores[1, 0] - scores[3, 0]) > 1e-4  # equal texts, other images


@pytest.mark.parametrize("family", ["idefics3", "qwen2_vl", "gemma3"])
def test_the_reward_of_the_saved_model_is_the_score_that_was_trained(family, folders, tmp_path):
    trained = run(reward_blocks(folders(family)), tmp_path)
    reward = RewardModel(str(trained / "model"), batch_size=3)
    rewards = torch.tensor(reward.per_text(texts_of(PAIRS))).view(2, -1).T  # [4, 2]

    again = assembled(reward_blocks(trained / "model"))
    scores = scores_of(again)
    assert (rewards - scores).abs().max() < EXACT
    assert reward.ends_with_eos is True

    # Its numbers on held-out pairs are those of the run.
    logged = lines(trained / "test_split_metrics.jsonl")[-1]["metrics"]
    assert logged["rewards/accuracies"] == pytest.approx(float((rewards[:, 0] > rewards[:, 1]).float().mean()))
    assert logged["rewards/chosen"] == pytest.approx(float(rewards[:, 0].mean()), abs=1e-5)


def test_conversations_are_scored_as_they_were_trained(folders, tmp_path):
    model = folders("qwen2_vl")
    mapping = reward_blocks(model)
    mapping["tokenizer"]["chat_template"] = True
    scores = scores_of(assembled(mapping))
    mapping["alg"]["training_args"] |= {"learning_rate": 0.0, "max_steps": 1}
    trained = run(mapping, tmp_path)
    reward = RewardModel(str(trained / "model"), template="chat")
    rewards = torch.tensor(reward.per_text(texts_of(PAIRS))).view(2, -1).T
    assert (rewards - scores).abs().max() < EXACT


def test_a_run_of_rl_learns_from_the_reward_model(folder, tmp_path):
    trained = run(reward_blocks(folder), tmp_path, "rewards")
    mapping = small(vision_config(folder, n_train=16, n_eval=8, n_iters=1))
    mapping["reward_fn"] = {"id": "reward_model", "args": {"model_name": str(trained / "model")}}
    mapping["train_evaluation"]["metrics"] = [{"id": "reward_model", "args": {"model_name": str(trained / "model")}}]
    tuned = train_config(parse_config(mapping), base_path_to_store_results=tmp_path, experiment_name="rl", quiet=True)
    (rollout,) = lines(tuned / "rollout_info.jsonl")
    assert rollout["rollout_info/ep_rew_std"] > 0


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_stopped_run_is_resumed_to_the_same_files(folder, tmp_path, monkeypatch):
    mapping = reward_blocks(folder, save_steps=1)
    expected = run(mapping, tmp_path, "whole")
    resumed = resume(stopped(mapping, tmp_path, 2, monkeypatch), quiet=True)
    assert files_of(resumed) == files_of(expected)


def test_micro_batches_change_no_number(folder, tmp_path):
    whole = run(reward_blocks(folder, per_device_train_batch_size=4, optim="sgd"), tmp_path, "whole")
    parts = run(reward_blocks(folder, gradient_accumulation_steps=2, optim="sgd"), tmp_path, "parts")
    before, after = (load_file(one / "model" / "model.safetensors") for one in (whole, parts))
    assert "score.weight" in before and "lm_head.weight" not in before
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)


@pytest.mark.parametrize("train_vision", ["none", "all"])
@pytest.mark.parametrize("peft", [None, {"r": 2, "target_modules": ["q_proj", "v_proj"]}])
def test_only_the_trained_parts_and_the_layer_of_the_reward_change(train_vision, peft, folder, tmp_path):
    alg = {"train_vision": train_vision, "peft": peft, "merge_on_save": peft is not None}
    trained = run(reward_blocks(folder, alg=alg, save_steps=2), tmp_path)
    before, after = load_file(folder / "model.safetensors"), load_file(trained / "model" / "model.safetensors")
    changed = {name.split(".")[1] for name in after if name in before and not torch.equal(before[name], after[name])}
    expected = {"text_model"} | ({"vision_model"} if train_vision == "all" else set())
    assert changed - {"connector"} == expected

    # The reward of a checkpoint with adapters is that of the merged model.
    if peft is not None:
        checkpoint = sorted((trained / "checkpoints").iterdir())[-1]
        merge_run(checkpoint, tmp_path / "merged")
        two = [RewardModel(str(one)).per_text(texts_of(PAIRS)) for one in (tmp_path / "merged", trained / "model")]
        assert two[0] == pytest.approx(two[1], abs=1e-5)


def test_the_first_layer_of_the_reward_depends_on_the_seed_alone(folder):
    weights = [assembled(reward_blocks(folder) | {"seed": seed}).model.score.weight for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_max_pixels_is_kept_with_the_model(folders, tmp_path):
    trained = run(reward_blocks(folders("qwen2_vl"), alg={"max_pixels": 1000}), tmp_path)
    config = json.loads((trained / "model" / "config.json").read_text())
    assert config["reward_images"] == {"max_pixels": 1000} and config["append_eos"] is True
    reward = RewardModel(str(trained / "model"))
    assert reward.classifier.loaded.pictures.max_pixels == 1000


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_an_error_in_the_reading_of_images_is_caught_when_the_run_is_built(folder, monkeypatch):
    read = VisionReader._inputs

    def without_pixels(self, episodes, **options):
        return read(self, replace(episodes, pictures=episodes.pictures.roll(1)), **options)

    monkeypatch.setattr(VisionReader, "_inputs", without_pixels)
    with pytest.raises((ParityError, ModelError)):
        assembled(reward_blocks(folder))


def test_texts_that_do_not_fit_are_refused(folder, tmp_path):
    long = pair("one", "see <image>?", pictures(1), " dear" * 40)
    with pytest.raises(DataPoolError, match=r"sample 'one' has \d+ tokens with its images"):
        encode_texts_with_pictures(encoder_of(folder, max_length=30), [long], append_eos=True)
    trained = run(reward_blocks(folder), tmp_path)
    reward = RewardModel(str(trained / "model"))
    with pytest.raises(ModelError, match="takes 512"):
        reward.per_text(texts_of([pair("one", "see <image>?", pictures(1), " dear" * 600)]))


def test_other_templates_are_refused(folder, tmp_path):
    trained = run(reward_blocks(folder), tmp_path)
    with pytest.raises(ValueError, match="template: pair"):
        RewardModel(str(trained / "model"), template="pair")
    with pytest.raises(RL4LMsLikeError, match="writes no text"):
        evaluate_run(trained)
    with pytest.raises(RL4LMsLikeError, match="writes no text"):
        generate_texts(trained, ["a"])


def test_a_model_of_texts_is_refused(tiny_gpt2_dir):
    with raises_at("alg.model_type", mentions="write causal"):
        assembled(reward_blocks(tiny_gpt2_dir))


def test_check_describes_the_run(folder):
    text = "".join(preview(parse_config(reward_blocks(folder))))
    assert "with images, of 4 tokens each" in text and "chosen" in text


def test_a_response_that_spells_an_image_shows_none(folder, tmp_path):
    trained = run(reward_blocks(folder), tmp_path)
    reward = RewardModel(str(trained / "model"))
    spelled, plain = (texts_of([pair("one", "see <image>?", pictures(1), chosen)]) for chosen in (" a<image>", " a"))
    assert reward.per_text(spelled)[0] == pytest.approx(reward.per_text(plain)[0], abs=1e-6)


def test_the_template_of_a_conversation_is_the_one_of_the_prompt(folders):
    encoder = encoder_of(folders("qwen2_vl"))
    encoder.tokenizer.chat_template = TURNS
    sample = ChatTemplate(encoder.tokenizer).with_rendered_prompt(pair("one", "see <image>?", pictures(1), "red", "no"))
    (row,) = encode_texts_with_pictures(encoder, [sample], append_eos=False).rows
    assert row["prompt"] == encoder.pictures.encode(sample, 1000).tolist()
    assert encoder.tokenizer.batch_decode(row["responses"]) == ["red<eos>\n", "no<eos>\n"]


def test_a_reward_model_has_the_weights_of_a_language_model_but_for_the_output_layer(folders):
    config = AutoConfig.from_pretrained(folders("idefics3"))
    names = AutoVisionRewardModel.from_config(config).state_dict().keys()
    of_language_model = load_file(folders("idefics3") / "model.safetensors").keys()
    assert names == of_language_model - {"lm_head.weight"} | {"score.weight"}


def test_a_hub_id_is_recognized_by_its_config(folder, tmp_path, monkeypatch):
    trained = run(reward_blocks(folder), tmp_path, "run") / "model"
    cached = tmp_path / "hub" / "models--owner--rewards"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    shutil.copytree(trained, cached / "snapshots" / "abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    by_id, by_folder = RewardModel("owner/rewards"), RewardModel(str(trained))
    assert type(by_id.classifier) is type(by_folder.classifier) is VisionRewardModel
    texts = texts_of(PAIRS)
    assert by_id.per_text(texts) == by_folder.per_text(texts)
    assert not reads_images("owner/unknown") and not reads_images("no id at all")
