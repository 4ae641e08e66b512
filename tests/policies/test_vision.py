"""Policies that see: log-probs are those of a plain forward pass of what the processor returns, for seven families."""

from dataclasses import replace

import pytest
import torch

from rl4lms_like.core import picture_inputs
from rl4lms_like.core.episodes import EpisodeBatch, padded
from rl4lms_like.core.picture_encoder import PictureEncoder
from rl4lms_like.core.pictures import Picture
from rl4lms_like.core.sample import Sample
from rl4lms_like.policies import generation, vision_parity, vision_reader
from rl4lms_like.policies.vision_reader import VisionReader
from rl4lms_like.system.errors import ModelError, ParityError
from tests.vision_models import (
    FAMILIES,
    QWEN,
    make_vision_model,
    make_vision_policy,
    picture_encoder,
    pictures,
    plain_inputs,
    png,
    save_vision_model,
)

EXACT = 1e-5

SAMPLES = (
    Sample("text", "Who wrote it?"),
    Sample("one", "see <image>?", images=pictures(1)),
    Sample("two", "<image> or <image>: tell", images=pictures(2, 3)),
    Sample("same text", "see <image>?", images=pictures(4)),
)
LENGTHS = torch.tensor([5, 3, 4, 5])


def prompt_ids(encoder, sample):
    if sample.images:
        return encoder.encode(sample, 1000).tolist()
    return encoder.processor.tokenizer(sample.prompt_or_input_text)["input_ids"]


def episodes_of(encoder, samples=SAMPLES, lengths=LENGTHS):
    """Episodes with random responses, in one batch that is padded on the left."""
    ids, mask = padded([prompt_ids(encoder, sample) for sample in samples], side="left")
    width = int(lengths.max())
    responses = torch.randint(0, 300, (len(samples), width), generator=torch.Generator().manual_seed(0))
    is_token = torch.arange(width) < lengths[:, None]
    numbers = torch.tensor([encoder.number(sample) for sample in samples])
    return EpisodeBatch(ids, mask, responses, is_token, is_token[:, 0], pictures=numbers)


def plain_log_probs(model, encoder, sample, response):
    """Log-probs of a response in the model's own forward pass of one unpadded row, fed by the processor."""
    # The logits at a token are those of the next one.
    logits = model(**plain_inputs(model, encoder, sample, response)).logits[0, -len(response) - 1 : -1].float()
    possible = [id for id in range(logits.shape[1]) if id not in encoder.placeholder_ids]
    log_probs = torch.full_like(logits, -torch.inf)
    log_probs[:, possible] = logits[:, possible].log_softmax(dim=1)
    return log_probs.gather(1, response[:, None]).squeeze(1)


@pytest.fixture(scope="module", params=FAMILIES)
def model_and_encoder(request):
    model, processor = make_vision_model(request.param)
    return model, PictureEncoder(processor, model.config)


def reader_of(model, encoder):
    reader = VisionReader(model, encoder)
    reader.probe_head(episodes_of(encoder))
    return reader


def scored(reader, episodes):
    return reader.scores(episodes, logits_budget=10**9).log_prob


@torch.no_grad()
def test_scores_are_those_of_a_plain_pass_of_one_row_with_the_processors_own_arguments(model_and_encoder):
    model, encoder = model_and_encoder
    reader = reader_of(model, encoder)
    episodes = episodes_of(encoder)

    expected = []
    for sample, response, is_token in zip(SAMPLES, episodes.response_ids, episodes.response_mask, strict=True):
        expected.append(plain_log_probs(model, encoder, sample, response[is_token]))
    assert (scored(reader, episodes) - torch.cat(expected)).abs().max() < EXACT

    # Another batch, other padding, and each prompt computed once for its responses.
    rows = torch.tensor([2, 0, 3, 1, 2, 3])
    expected_there = torch.cat([expected[row] for row in rows.tolist()])
    some = replace(episodes.select(rows), prompt_rows=rows)
    assert (scored(reader, some) - expected_there).abs().max() < EXACT
    assert (scored(reader, some.widened(60, 9)) - expected_there).abs().max() < EXACT
    reader.shares_prompts = True
    assert (scored(reader, some) - expected_there).abs().max() < EXACT


def test_gradients_of_shared_prompts_are_those_of_separate_ones(model_and_encoder):
    model, encoder = model_and_encoder
    reader = reader_of(model, encoder)
    rows = torch.tensor([1, 2, 3, 2, 1, 0])
    episodes = replace(episodes_of(encoder).select(rows), prompt_rows=rows)
    gradients = []
    for shares in (False, True):
        reader.shares_prompts = shares
        model.zero_grad()
        scored(reader, episodes).sum().backward()
        found = [weight.grad for weight in model.parameters() if weight.grad is not None]
        gradients.append(torch.cat([gradient.flatten() for gradient in found]))
    assert (gradients[0] - gradients[1]).abs().max() < 1e-4 * gradients[0].abs().max()


def test_training_mode_scores_the_same(model_and_encoder):
    model, encoder = model_and_encoder
    reader = reader_of(model, encoder)
    episodes = episodes_of(encoder)
    with torch.no_grad():
        expected = scored(reader, episodes)
        model.train()
        found = scored(reader, episodes)
        model.eval()
    assert (found - expected).abs().max() < EXACT


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    """A saved model with its initial weights."""
    return save_vision_model(tmp_path_factory.mktemp("models") / request.param, request.param, moved=False)


def test_a_policy_on_untrained_weights_is_accepted_and_its_weights_stay_the_same(folder):
    policy = make_vision_policy(folder)
    assert policy.reader.shares_prompts and policy.ref_reader.shares_prompts and policy.value_reader.shares_prompts
    loaded = type(policy.policy_model).from_pretrained(folder)
    for name, weight in loaded.named_parameters():
        assert torch.equal(policy.policy_model.get_parameter(name), weight), name


def plant(monkeypatch, name, function):
    """Replace a function of `core.picture_inputs` in both modules that call it."""
    for module in (picture_inputs, vision_reader):
        monkeypatch.setattr(module, name, function)


def wrong_positions(monkeypatch):
    original = vision_reader.prompt_inputs

    def cumulative(model, encoder, ids, mask, numbers):
        positions = (mask.long().cumsum(dim=1) - 1).clamp_min(0)
        return {**original(model, encoder, ids, mask, numbers), "position_ids": positions}

    plant(monkeypatch, "prompt_inputs", cumulative)


def wrong_response_types(monkeypatch):
    original = vision_reader.continued_inputs

    def zeros(*args):
        found = original(*args)
        return {name: value if name == "position_ids" else torch.zeros_like(value) for name, value in found.items()}

    plant(monkeypatch, "continued_inputs", zeros)


def types_one_token_too_wide(monkeypatch):
    original = vision_reader.prompt_inputs

    def wide(*args):
        inputs = original(*args)
        types = inputs["token_type_ids"]
        inputs["token_type_ids"] = types | torch.nn.functional.pad(types, (1, 0))[:, :-1]
        return inputs

    plant(monkeypatch, "prompt_inputs", wide)


def missing_pictures(monkeypatch):
    monkeypatch.setattr(PictureEncoder, "tensors", lambda self, numbers: {})


def exchanged_pictures(monkeypatch):
    original = PictureEncoder.tensors
    other = Sample("other", "", images=(Picture(contents=png(50)),))

    def exchanged(self, numbers):
        # Another picture of the same size in place of a prompt's only one.
        alone = [number for number, images in self._images.items() if len(images) == 1]
        return original(self, [self.number(other) if number in alone else number for number in numbers])

    monkeypatch.setattr(PictureEncoder, "tensors", exchanged)


@pytest.mark.parametrize(
    ("plant", "families"),
    [
        (wrong_positions, QWEN),
        (wrong_response_types, ("paligemma",)),
        (types_one_token_too_wide, ("gemma3",)),
        (missing_pictures, tuple(FAMILIES)),
        (exchanged_pictures, tuple(FAMILIES)),
    ],
)
def test_a_planted_error_is_caught_when_the_policy_is_built(folder, plant, families, monkeypatch):
    if folder.name not in families:
        pytest.skip("not an error of this family")
    plant(monkeypatch)
    with pytest.raises(ParityError, match=r"teacher-forced log-probs differ|depend on the padding"):
        make_vision_policy(folder, use_reference=False, critic="none")


def test_types_that_differ_from_the_processors_are_an_error(folder, monkeypatch):
    if folder.name != "gemma3":
        pytest.skip("has no types of pictures")
    original = PictureEncoder.types
    monkeypatch.setattr(PictureEncoder, "types", lambda self, name, ids: original(self, name, ids).roll(1, dims=-1))
    with pytest.raises(ModelError, match="are not those"):
        make_vision_policy(folder, use_reference=False, critic="none")


def test_prompts_that_are_shared_by_their_text_alone_are_not_shared(folder, monkeypatch):
    original = generation.shared_prompt_inputs

    def by_text(model, ids, mask, pictures, inputs_of):
        # Rows with equal ids get the pictures of the first of them.
        same = (ids[:, None] == ids[None]).all(dim=2).long().argmax(dim=1)
        return original(model, ids, mask, pictures[same], inputs_of)

    monkeypatch.setattr(generation, "shared_prompt_inputs", by_text)
    if folder.name == "gemma3":
        pytest.skip("sliding windows are not shared in generation")
    with vision_parity.moved_weights(model := make_vision_model(folder.name)[0]):
        reader = reader_of(model, picture_encoder(folder))
        assert vision_parity.vision_sharing_gap(reader) > 0.01


def test_the_tower_sees_each_prompt_once_in_each_pass(folder, monkeypatch):
    policy = make_vision_policy(folder, train_vision="all")
    rows = torch.arange(3).repeat_interleave(8)
    prompts = replace(episodes_of(policy.pictures, SAMPLES[1:], LENGTHS[1:]).select(rows), prompt_rows=rows)
    counted = []

    def count(module, inputs, output):
        counted.append(sum(value.numel() for value in inputs if isinstance(value, torch.Tensor)))

    def pixels_in(work):
        counted.clear()
        work()
        return sum(counted)

    def passes_over(episodes):
        policy.reader.scores(episodes, logits_budget=10**9).log_prob.sum().backward()

    (convolution,) = [
        module
        for name, module in policy.policy_model.named_modules()
        if name.endswith("patch_embed.proj") or name.endswith("patch_embedding")
    ]
    convolution.register_forward_hook(count)
    once = pixels_in(lambda: passes_over(prompts.select([0, 8, 16])))
    assert once > 0
    assert pixels_in(lambda: passes_over(prompts)) == once

    def generate():
        policy.generate(
            prompts.prompt_ids,
            prompts.prompt_mask,
            eos_token_ids=[],
            max_new_tokens=3,
            seed=0,
            pictures=prompts.pictures,
        )

    # Nor are tensors of the repetitions made.
    read = []
    tensors_of = PictureEncoder.tensors

    def tensors(encoder, numbers):
        read.extend(numbers)
        return tensors_of(encoder, numbers)

    monkeypatch.setattr(PictureEncoder, "tensors", tensors)

    # A cache of sliding windows cannot be continued by several responses.
    repeated = 8 if folder.name == "gemma3" else 1
    assert pixels_in(generate) == repeated * once
    assert len(read) == repeated * 3


def sampled(policy, n_tokens):
    """Sampled responses to the prompts, none of which ends early."""
    prompts = episodes_of(policy.pictures)
    options = {"eos_token_ids": [], "max_new_tokens": n_tokens, "seed": 0, "record_log_prob": True}
    return policy.generate(prompts.prompt_ids, prompts.prompt_mask, pictures=prompts.pictures, **options)


def test_a_model_that_prefers_a_placeholder_never_writes_it(folder):
    policy = make_vision_policy(folder, use_reference=False)
    head = policy.policy_model.get_output_embeddings()
    with torch.no_grad():
        head.weight[policy.pictures.placeholder_ids] = 100 * head.weight.mean(dim=0)
    episodes = sampled(policy, 8)
    assert not torch.isin(episodes.response_ids, torch.tensor(policy.pictures.placeholder_ids)).any()

    # The recorded distribution is the one that is scored; the ratio of the first minibatch is 1.
    values, log_prob, entropy = policy.evaluate_actions(episodes)
    assert (log_prob - episodes.behavior_log_prob).abs().max() < EXACT
    assert torch.isfinite(entropy).all() and (entropy > 0).all()
    (log_prob.sum() + entropy.sum() + values.sum()).backward()
    assert all(torch.isfinite(weight.grad).all() for weight in policy.parameters() if weight.grad is not None)


def test_the_recorded_distribution_is_that_of_the_generation_arguments(folder):
    kwargs = {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.8}
    policy = make_vision_policy(folder, use_reference=False, critic="none", generation_kwargs=kwargs)
    episodes = sampled(policy, 6)
    computed = policy.generation_log_prob(episodes, eos_token_ids=[], max_new_tokens=6)
    assert (computed - episodes.behavior_log_prob).abs().max() < EXACT


def test_the_check_sees_pictures_as_small_as_max_pixels_makes_them(tmp_path):
    folder = save_vision_model(tmp_path / "qwen", "qwen2_5_vl")
    encoder = picture_encoder(folder, max_pixels=1600)  # less than the pictures of the probe have
    assert make_vision_policy(folder, pictures=encoder).pictures is encoder
