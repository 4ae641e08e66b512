"""Runs whose prompts have pictures: they learn from them, are resumed and replayed, and their models load anywhere."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from rl4lms_like import Run
from rl4lms_like.config.load import parse_config
from rl4lms_like.core import processors
from rl4lms_like.core.observation import TextLayout
from rl4lms_like.core.pictures import Picture
from rl4lms_like.core.processors import load_processor, save_processor
from rl4lms_like.core.sample import Sample
from rl4lms_like.inference import evaluate_run, generate_texts
from rl4lms_like.offline.assemble_supervised import assemble_supervised
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.preview import preview
from rl4lms_like.rollouts.collector import RolloutCollector
from rl4lms_like.run import resume, train_config
from rl4lms_like.sharing import merge_run
from rl4lms_like.system.errors import DataPoolError, ModelError, RL4LMsLikeError
from rl4lms_like.training import components
from tests.config_errors import raises_at
from tests.configs import supervised_blocks
from tests.on_policy.test_replay import assert_equal, results_of
from tests.training.resuming.test_interruption import After, at_minibatch
from tests.vision_models import picture_encoder, png, save_vision_model, vision_config

LEARNING = {
    "grpo": (250, {"learning_rate": 2e-3, "ent_coef": 0.02}),
    "ppo": (150, {"learning_rate": 1e-3, "ent_coef": 0.02, "n_epochs": 4}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_vision_model(tmp_path_factory.mktemp("models") / "idefics3", "idefics3")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return save_vision_model(tmp_path_factory.mktemp("models") / "qwen2_vl", "qwen2_vl")


@pytest.fixture
def mapping(folder):
    """Two iterations of GRPO on a few pictures."""
    return small(vision_config(folder, n_train=16, n_eval=8))


def small(mapping):
    mapping["reward_fn"] = {"id": "tests.builders:LowTokens"}
    mapping["env"]["n_envs"] = 16
    mapping["env"]["args"]["max_episode_length"] = 3
    mapping["alg"]["policy"]["args"]["generation_kwargs"]["max_new_tokens"] = 3
    mapping["alg"]["args"] |= {"n_steps": 3, "batch_size": 24, "n_epochs": 2, "learning_rate": 1e-3}
    return mapping


def trained(mapping, folder, name="run", **values):
    mapping = copy.deepcopy(mapping)
    mapping["train_evaluation"] |= values
    return train_config(parse_config(mapping), base_path_to_store_results=folder, experiment_name=name, quiet=True)


def assert_loads(folder):
    """transformers alone loads the model, and generates for an image."""
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    inputs = processor(text=["<image>colour?"], images=[[Picture(contents=png()).open()]], return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=2).shape[1] == inputs["input_ids"].shape[1] + 2


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


ALGORITHMS = {
    "ppo": {},
    "vapo": {},
    "a2c": {"batch_size": None, "n_epochs": None},
    "trpo": {"n_epochs": None, "target_kl": 0.01},
    "grpo": {},
    "dapo": {"dynamic_sampling": None},
    "rloo": {},
    "reinforce_pp": {},
    "online_dpo": {},
}
"""Algorithm -> its arguments that differ from those of `small`; None removes one."""


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_starts_with_a_ratio_of_one_and_a_kl_of_zero(mapping, algorithm, tmp_path):
    mapping["alg"]["id"] = algorithm
    mapping["alg"]["kl_div"] = {"coeff": 0.1}
    args = mapping["alg"]["args"] | ALGORITHMS[algorithm]
    mapping["alg"]["args"] = {name: value for name, value in args.items() if value is not None}
    run = trained(mapping, tmp_path, n_iters=1)
    (rollout,) = lines_of(run / "rollout_info.jsonl")
    assert rollout["rollout_info/kl_div_mean"] == pytest.approx(0, abs=1e-5)
    update = lines_of(run / "training_info.jsonl")[0]
    assert update.get("train/ratio_gap", 0.0) < 1e-5


def test_a_shared_critic_and_adapters_train(mapping, tmp_path):
    mapping["alg"]["id"] = "ppo"
    policy = mapping["alg"]["policy"]["args"]
    policy |= {"critic": "shared", "peft": {"r": 2, "target_modules": "all-linear"}, "gradient_checkpointing": True}
    run = trained(mapping, tmp_path)
    names = load_file(run / "model" / "adapter_model.safetensors")
    assert names and not any("vision" in name or "connector" in name for name in names)

    # The adapters work with the base, and as part of a whole model.
    scores = lines_of(run / "test_split_metrics.jsonl")[-1]["metrics"]
    assert scores.items() <= evaluate_run(run, split="test").items()
    merge_run(run, tmp_path / "whole")
    assert_loads(tmp_path / "whole")


def test_the_policy_learns_from_a_teacher_with_pictures(mapping, tmp_path):
    teacher = save_vision_model(tmp_path / "teacher", "idefics3", seed=1)
    mapping["alg"]["id"] = "opd"
    mapping["alg"]["kl_div"] = {"coeff": 1.0}
    mapping["alg"]["policy"]["args"]["teacher_model"] = str(teacher)
    trained(mapping, tmp_path)


def test_an_interrupted_run_that_goes_on_ends_as_one_that_was_not(mapping, tmp_path, monkeypatch):
    whole = trained(mapping, tmp_path, "whole", save_every=1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        at_minibatch(patch, After(5))
        trained(mapping, tmp_path, "interrupted", save_every=1)
    resumed = resume(tmp_path / "rl4lm_exps" / "interrupted")
    assert_equal(results_of(resumed), results_of(whole))


def test_a_replayed_run_is_the_same_and_its_rollouts_have_no_pixels(mapping, tmp_path, monkeypatch):
    first = trained(mapping, tmp_path, "first", save_rollouts=True)
    stored = sum(file.stat().st_size for file in (first / "rollouts").glob("*.safetensors"))
    assert stored < 50_000

    def batch(self):
        raise AssertionError("a replay generated a rollout")

    monkeypatch.setattr(RolloutCollector, "generation_batch", batch)
    again = trained(mapping, tmp_path, "again", save_rollouts=True, replay=str(first))
    before = load_file(first / "model" / "model.safetensors")
    after = load_file(again / "model" / "model.safetensors")
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_a_saved_model_is_loaded_with_its_processor(mapping, tmp_path):
    run = trained(mapping, tmp_path)
    assert_loads(run / "model")

    # What resized the images is recorded.
    assert json.loads((run / "environment.json").read_text())[0]["images"].startswith("pillow ")


def test_a_family_without_videos_is_saved_without_settings_for_them(folder, tmp_path):
    # In the layout of earlier releases, where the settings of videos may be in the file of those of images.
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "processor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings.pop("image_processor")))
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))

    processor = load_processor(str(tmp_path), AutoConfig.from_pretrained(tmp_path))
    save_processor(processor, tmp_path / "saved", processor.tokenizer)
    saved = json.loads((tmp_path / "saved" / "processor_config.json").read_text())
    assert saved.keys() == {*settings, "image_processor"}


def test_a_model_of_a_local_folder_is_loaded_and_saved_without_a_request(qwen, tmp_path, monkeypatch):
    asked = []

    def refused(host, *args, **kwargs):
        asked.append(host)
        raise OSError("no network")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", refused)
    run = trained(small(vision_config(qwen, n_train=16, n_eval=8)), tmp_path, n_iters=1)
    assert generate_texts(run, ["<image>colour?"], images=[png()]) and asked == []


def test_settings_for_videos_are_read_with_the_processor_and_saved_without_reading_them_again(
    qwen, tmp_path, monkeypatch
):
    for file in qwen.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    video = {"video_processor_type": "Qwen2VLVideoProcessor", "min_pixels": 1234}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(video))
    processor = load_processor(str(tmp_path), AutoConfig.from_pretrained(tmp_path))

    def refused(*args, **kwargs):
        raise AssertionError("the hub is asked")

    monkeypatch.setattr(processors, "cached_file", refused)
    save_processor(processor, tmp_path / "saved", processor.tokenizer)
    saved = json.loads((tmp_path / "saved" / "processor_config.json").read_text())
    assert saved["video_processor"] == video and "video_settings" not in saved


@pytest.mark.parametrize("peft", [None, {"r": 2, "target_modules": ["q_proj"]}])
def test_the_model_card_has_the_prompt_that_the_policy_reads(qwen, peft, tmp_path):
    mapping = small(vision_config(qwen, n_train=16, n_eval=8))
    mapping["alg"]["policy"]["args"]["peft"] = peft
    run = trained(mapping, tmp_path, n_iters=1)
    card = (run / "model" / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card
    (prompt,) = re.findall(r"prompt = (.*)", card)
    expected = picture_encoder(qwen).encode(Sample("", "<image>your prompt", images=(Picture(contents=png()),)), 100)
    assert prompt == '"<|vision_start|><|image_pad|><|vision_end|>your prompt"'
    processor = load_processor(str(run / "model"), AutoConfig.from_pretrained(qwen))
    inputs = processor(text=[json.loads(prompt)], images=[[Picture(contents=png()).open()]])
    assert inputs["input_ids"][0] == expected.tolist()


def test_the_code_of_the_model_card_runs(mapping, tmp_path, capsys):
    run = trained(mapping, tmp_path)
    code = (run / "model" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    Picture(contents=png()).open().save(tmp_path / "photo.png")
    code = code.replace("photo.png", str(tmp_path / "photo.png"))
    exec(re.sub(r'from_pretrained\("[^"]*"', f'from_pretrained("{run / "model"}"', code))
    assert capsys.readouterr().out


def test_evaluate_gives_the_score_of_the_run(mapping, tmp_path):
    run = trained(mapping, tmp_path, n_iters=4)
    scores = lines_of(run / "test_split_metrics.jsonl")[-1]["metrics"]
    assert scores.items() <= evaluate_run(run, split="test").items()


def test_a_run_with_pictures_does_not_answer_a_text_without_one(mapping, tmp_path):
    run = trained(mapping, tmp_path, n_iters=1)
    with pytest.raises(RL4LMsLikeError, match="--image"):
        generate_texts(run, ["colour?"])

    # With one, it is what the policy writes for a prompt of its data.
    (texts,) = generate_texts(run, ["colour?"], n=2, images=[png()], decoding="greedy")
    assert len(texts) == 2 and texts[0] == texts[1]


def test_a_model_of_texts_gets_no_image(tiny_gpt2_dir):
    with pytest.raises(RL4LMsLikeError, match="texts only"):
        generate_texts(tiny_gpt2_dir, ["colour?"], images=[png()])


VLLM = {"id": "vllm", "args": {"url": "http://127.0.0.1:1", "weights_dir": "w"}}
REFUSED = {
    "env.dialogue": {"env": {"dialogue": {"id": "guess_number", "max_turn_length": 3}}},
    "env.vec_env": {"env": {"vec_env": "subproc"}},
    "distributed.strategy": {"distributed": {"strategy": "fsdp"}},
    "tokenizer.add_tokens": {"tokenizer": {"add_tokens": ["<think>"]}},
    "alg.policy.args.compile": {"policy": {"compile": True}},
    "alg.policy.args.engine.id": {
        "policy": {"engine": {"id": "vllm", "args": {"url": "http://127.0.0.1:1", "weights_dir": "w"}}}
    },
    "alg.policy.id": {"alg": {"id": "nlpo"}},
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_not_supported_is_refused_by_its_key(mapping, path):
    for block, values in REFUSED[path].items():
        target = mapping["alg"]["policy"]["args"] if block == "policy" else mapping.setdefault(block, {})
        target |= values
    with raises_at(path, among_others=True):
        parse_config(mapping)


def test_nlpo_of_python_with_images_names_the_policy(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("RL4LMS_LIKE_HOME", str(tmp_path))
    prompts = [{"prompt": "colour?", "image": Picture(contents=png())}]
    with raises_at("alg.policy.id", mentions="nlpo needs a policy with a mask model"):
        Run(str(folder), prompts=prompts, reward=lambda responses: [0.0] * len(responses), algorithm="nlpo")


def test_a_policy_of_texts_refuses_a_vision_language_model_and_the_vision_policy_one_of_texts(
    mapping, tiny_gpt2_dir, tiny_t5_dir
):
    mapping["alg"]["policy"]["id"] = "causal_lm_actor_critic_policy"
    with raises_at("alg.policy.args.model_name", mentions="vision-language"):
        assemble(parse_config(mapping))
    for folder, kind in ((tiny_gpt2_dir, "decoder-only"), (tiny_t5_dir, "encoder-decoder")):
        mapping["alg"]["policy"] = {"id": "vision_lm_actor_critic_policy", "args": {"model_name": str(folder)}}
        mapping["tokenizer"]["model_name"] = str(folder)
        with raises_at("alg.policy.args.model_name", mentions=kind):
            assemble(parse_config(mapping))


def test_a_supervised_run_of_texts_refuses_a_vision_language_model(folder):
    blocks = supervised_blocks()
    blocks["tokenizer"]["model_name"] = blocks["alg"]["model_name"] = str(folder)
    with raises_at("alg.model_type", mentions="write vision"):
        assemble_supervised(parse_config(blocks))


def test_a_policy_of_texts_refuses_prompts_with_pictures(mapping, tiny_gpt2_dir):
    mapping["alg"]["policy"] = {"id": "causal_lm_actor_critic_policy", "args": {"model_name": str(tiny_gpt2_dir)}}
    mapping["tokenizer"]["model_name"] = str(tiny_gpt2_dir)
    with pytest.raises(DataPoolError, match="'train_0' has images"):
        assemble(parse_config(mapping))


def test_a_prompt_that_is_too_long_with_its_pictures_is_refused_before_the_model_is_loaded(mapping, monkeypatch):
    monkeypatch.setattr("rl4lms_like.policies.base.load_networks", None)  # would fail
    mapping["env"]["args"]["max_prompt_length"] = 6
    with pytest.raises(DataPoolError, match=r"(?s)'train_0' has 13 tokens, 4 of them for images.*and 22 more"):
        assemble(parse_config(mapping))


def test_fewer_pixels_give_fewer_tokens_or_are_refused(mapping, qwen, folder):
    encoders = [picture_encoder(qwen, max_pixels=max_pixels) for max_pixels in (None, 3200)]
    sample = Sample("large", "<image>colour?", images=(Picture(contents=png(size=(112, 112))),))
    lengths = [len(encoder.encode(sample, 100)) for encoder in encoders]
    assert lengths[1] < lengths[0]
    for max_pixels in (3200, 2**27):
        with raises_at("alg.policy.args.max_pixels"):
            picture_encoder(folder, max_pixels=max_pixels)


def test_texts_with_a_placeholder_and_places_without_a_picture_are_refused(folder, qwen):
    encoder = picture_encoder(qwen)
    layout = TextLayout(encoder.processor.tokenizer, 100, 1, pictures=encoder)
    with pytest.raises(DataPoolError, match="stands for one"):
        layout.encode("a <|image_pad|> b")
    with pytest.raises(DataPoolError, match=r"'second'.*stands for one"):
        encoder.register([Sample("first", "a b"), Sample("second", "a <|image_pad|> b")], 100)
    one = (Picture(contents=png()),)
    with pytest.raises(DataPoolError, match=r"1 images"):
        layout.encode(Sample("two places", "<image> <image>", images=one))
    adjacent = Sample("adjacent", "", rendered_prompt="<|image_pad|><|image_pad|>a", images=one * 2)
    with pytest.raises(DataPoolError, match="without a token between"):
        layout.encode(adjacent)


def test_texts_of_ptx_have_no_placeholder(mapping, tmp_path):
    (tmp_path / "texts.jsonl").write_text(json.dumps({"q": "a", "a": "b <image> c"}) + "\n")
    data = {"path": str(tmp_path / "texts.jsonl"), "prompt_column": "q", "reference_column": "a"}
    data["split_ratios"] = [1, 0, 0]
    mapping["alg"]["ptx"] = {"data": {"id": "jsonl", "args": data}, "coeff": 1.0}
    with pytest.raises(DataPoolError, match=r"alg\.ptx\.data.*stands for an image"):
        assemble(parse_config(mapping))


def test_texts_of_ptx_have_no_images(mapping):
    mapping["alg"]["ptx"] = {"data": {"id": "shapes", "args": {"n_train": 2}}, "coeff": 1.0}
    with pytest.raises(DataPoolError, match=r"alg\.ptx\.data.*'train_0' has images"):
        assemble(parse_config(mapping))


def test_a_single_step_does_not_answer_without_the_picture(mapping):
    run = assemble(parse_config(mapping))
    with pytest.raises(ModelError, match="images"):
        run.policy.predict(run.env.reset())


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("constant", [False, True])
def test_a_run_learns_the_colours_of_pictures_and_nothing_from_a_constant_one(folder, algorithm, constant, tmp_path):
    mapping = vision_config(folder, algorithm=algorithm, constant=constant)
    n_iters, args = LEARNING[algorithm]
    mapping["alg"]["args"] |= args
    run = trained(mapping, tmp_path, n_iters=n_iters)
    score = lines_of(run / "test_split_metrics.jsonl")[-1]["metrics"]["answers/exact_match"]
    assert score < 0.35 if constant else score >= 0.85


@pytest.mark.parametrize("scope", ["none", "projector", "all"])
def test_only_the_trained_parts_of_the_vision_change(mapping, folder, scope, tmp_path):
    mapping["alg"]["policy"]["args"]["train_vision"] = scope
    run = trained(mapping, tmp_path)
    before = load_file(folder / "model.safetensors")
    after = load_file(run / "model" / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("text_model" in name for name in changed)
    assert any("connector" in name for name in changed) == (scope != "none")
    assert any("vision_model" in name for name in changed) == (scope == "all")


def test_check_counts_the_tokens_of_images_and_estimates_the_memory(mapping):
    output = "".join(preview(parse_config(mapping)))
    assert "all with images, of 4 tokens each" in output
    assert "peak of the update" in output


def test_check_counts_images_if_only_later_samples_have_some(folder, monkeypatch):
    encoder = picture_encoder(folder)
    samples = [Sample("text", "a"), Sample("picture", "<image>a", images=(Picture(contents=png()),))]
    outputs = []
    for n_counted in (1, 2):
        monkeypatch.setattr(components, "N_COUNTED", n_counted)
        outputs.append(components.data_lines({"train": samples}, encoder.processor.tokenizer, 9, pictures=encoder))
    assert "with images" not in str(outputs[0])
    assert "1 with images" in str(outputs[1])


def test_a_multimodal_checkpoint_is_also_trained_as_a_model_of_texts(mapping, tmp_path):
    gemma = str(save_vision_model(tmp_path / "gemma3", "gemma3"))
    mapping["tokenizer"]["model_name"] = gemma
    mapping["datapool"] = {"id": "dummy_pool", "args": {"prompt": "Count:", "n_samples": 6}}
    mapping["train_evaluation"]["metrics"] = [{"id": "length"}]
    mapping["alg"]["policy"]["id"] = "causal_lm_actor_critic_policy"
    mapping["alg"]["policy"]["args"]["model_name"] = gemma
    assert "peak of the update" in "".join(preview(parse_config(mapping)))
    trained(mapping, tmp_path, n_iters=1)


def test_a_changed_image_is_refused_when_a_run_goes_on(mapping, tmp_path, monkeypatch):
    files = tmp_path / "images"
    files.mkdir()
    lines = []
    for number in range(8):
        (files / f"{number}.png").write_bytes(png(number))
        lines.append(json.dumps({"prompt": "<image>colour?", "image": f"images/{number}.png"}))
    (tmp_path / "table.jsonl").write_text("\n".join(lines))
    columns = {"prompt_column": "prompt", "image_column": "image"}
    table = {split: str(tmp_path / "table.jsonl") for split in ("train", "val", "test")}
    mapping["datapool"] = {"id": "jsonl", "args": {"data_files": table, **columns}}
    mapping["train_evaluation"]["metrics"] = []

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        at_minibatch(patch, After(5))
        trained(mapping, tmp_path, save_every=1)
    (files / "3.png").write_bytes(png(100))
    with pytest.raises(RL4LMsLikeError, match=r"datapool|data"):
        resume(tmp_path / "rl4lm_exps" / "run")
