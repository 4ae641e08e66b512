"""Generation and reference with products in bfloat16: near the float32 ones, corrected, and of half the size."""

import pytest
import torch

from rl4lms_like.algorithms.a2c import A2C
from rl4lms_like.algorithms.policy_gradient import GRPO, OnlineDPO
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.algorithms.trpo import TRPO
from rl4lms_like.config.load import parse_config
from rl4lms_like.estimates.memory import estimate_memory
from rl4lms_like.policies.faster_layers import replaced_forwards, use_onednn
from rl4lms_like.policies.generating_weights import forwards_to_generate
from rl4lms_like.rollouts.kl import FixedKLController
from rl4lms_like.system.errors import ConfigError, ModelError
from rl4lms_like.testing import models
from tests.algorithms.test_update import build
from tests.builders import POLICIES, SAMPLING, make_env, make_policy
from tests.config_errors import raises_at
from tests.configs import run_blocks

FAMILIES = {"gpt2": "causal", "llama": "causal", "gemma2": "causal", "t5": "seq2seq"}
BFLOAT16 = 0.1
"""Largest accepted difference of log-probs, nats, for models far from uniform."""
CORRECTED = {"importance_correction": "tis"}
ADAPTERS = {"r": 4, "target_modules": "all-linear", "init_lora_weights": "gaussian"}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory, tiny_tokenizer):
    """Family and folder of a random model far from uniform."""
    is_causal = FAMILIES[request.param] == "causal"
    make = models.make_causal_lm if is_causal else models.make_seq2seq_lm
    model = make(request.param, tiny_tokenizer, scale=5.0 if is_causal else 1.0)
    return FAMILIES[request.param], models.save_model(tmp_path_factory.mktemp(request.param), model, tiny_tokenizer)


def generate(policy, dtype):
    ids = torch.arange(24).reshape(4, 6)
    options = {"eos_token_ids": [], "max_new_tokens": 12, "record_log_prob": True, "seed": 1}
    return policy.generate(ids, torch.ones_like(ids), **options, dtype=dtype)


def moved_adapters(policy):
    """Adapters that change the outputs, as after some steps."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in policy.policy_model.named_parameters():
        if "lora_B" in name:
            weight.data.copy_(0.1 * torch.randn(weight.shape, generator=generator))


@pytest.mark.parametrize("peft", [None, ADAPTERS], ids=["whole", "adapters"])
def test_generation_in_bfloat16_has_its_own_log_probs_near_those_of_the_policy(family, peft):
    kind, folder = family
    policy = make_policy(kind, folder, peft=peft, critic="none")
    if peft is not None:
        moved_adapters(policy)
    before = generate(policy, None).behavior_log_prob
    for dtype, tolerance in ((None, 1e-5), ("float32", 1e-5), ("bfloat16", BFLOAT16)):
        episodes = generate(policy, dtype)
        gaps = (episodes.behavior_log_prob - policy.score(episodes).log_prob).abs()
        assert float(gaps.max()) <= tolerance
    assert float(gaps.max()) > 1e-4, "in bfloat16 they are rounded"
    assert torch.equal(generate(policy, None).behavior_log_prob, before), "every layer is restored"


def test_the_context_restores_every_layer_also_after_an_error(tiny_gpt2_dir):
    policy = make_policy("causal", tiny_gpt2_dir, peft={"r": 2}, critic="none")
    ids = torch.arange(6)[None]
    expected = policy.policy_model(ids).logits
    head = policy.policy_model.get_output_embeddings()
    head.forward = lambda hidden: torch.nn.functional.linear(hidden, head.weight) + 1.0  # of another component
    forwards = forwards_to_generate(policy.policy_model, in_bfloat16=True, packs=False)
    with pytest.raises(KeyError), replaced_forwards(forwards):
        assert not torch.allclose(policy.policy_model(ids).logits, expected + 1.0, atol=1e-6)
        raise KeyError
    torch.testing.assert_close(policy.policy_model(ids).logits, expected + 1.0)


def test_layers_of_onednn_multiply_in_bfloat16_too(tiny_gpt2_dir):
    for peft in (None, {"r": 2}):
        policy = make_policy("causal", tiny_gpt2_dir, peft=peft, critic="none")
        use_onednn(policy.policy_model)
        ids = torch.arange(6)[None]
        exact = policy.policy_model(ids).logits
        with replaced_forwards(forwards_to_generate(policy.policy_model, in_bfloat16=True, packs=False)):
            assert 1e-4 < float((policy.policy_model(ids).logits - exact).abs().max()) < BFLOAT16


def test_rollouts_are_corrected_and_evaluations_are_those_of_the_policy(tiny_gpt2_dir, tiny_tokenizer):
    options = {"policy_kwargs": {"generation_dtype": "bfloat16"}, "group_size": 4, **CORRECTED}
    built = build(GRPO, tiny_gpt2_dir, tiny_tokenizer, **options)
    assert not built.collector.uses_sampler_log_probs
    built.learn_iteration(0, 1)
    buffer = built.rollout_buffer
    gaps = (buffer.episodes.behavior_log_prob - torch.as_tensor(buffer.log_probs)).abs()
    assert 0 < float(gaps.max()) < BFLOAT16
    assert float(built.logger.name_to_value["train/ratio_gap"]) < 1e-4, "scored and updated in float32"
    assert built.logger.name_to_value["rollout_info/importance_weight"] != 1.0

    plain = make_policy("causal", tiny_gpt2_dir)
    low = make_policy("causal", tiny_gpt2_dir, generation_dtype="bfloat16")
    ids = torch.arange(12).reshape(2, 6)
    texts = [p.generate(ids, torch.ones_like(ids), eos_token_ids=[], max_new_tokens=9, seed=1) for p in (plain, low)]
    assert torch.equal(texts[0].response_ids, texts[1].response_ids)


@pytest.mark.parametrize("algorithm", [PPO, GRPO])
def test_without_a_correction_the_ratios_are_to_the_sampling_in_bfloat16(algorithm, tiny_gpt2_dir, tiny_tokenizer):
    options = {"policy_kwargs": {"generation_dtype": "bfloat16"}, "n_epochs": 1, "batch_size": 10_000}
    if algorithm is GRPO:
        options |= {"group_size": 4, "kl_controller": FixedKLController(0.1, placement="loss")}
    built = build(algorithm, tiny_gpt2_dir, tiny_tokenizer, **options)
    make_pass = built.policy.reader.scores
    n_passes = []
    built.policy.reader.scores = lambda *args, **settings: n_passes.append(1) or make_pass(*args, **settings)

    built.learn_iteration(0, 1)
    assert len(n_passes) == 1, "the pass of the only step"
    buffer = built.rollout_buffer
    old = torch.as_tensor(buffer.log_probs)
    in_float32 = make_policy("causal", tiny_gpt2_dir).score(buffer.episodes).log_prob  # the weights before the step
    gaps = (in_float32 - old).abs()
    assert 1e-5 < float(gaps.max()) < BFLOAT16
    logged = built.logger.name_to_value
    assert logged["train/ratio_gap"] == pytest.approx(float(((in_float32 - old).exp() - 1).abs().max()), rel=1e-3)
    assert "rollout_info/importance_weight" not in logged


def test_a_sampling_of_another_distribution_is_found_in_bfloat16_too(tiny_gpt2_dir, tiny_tokenizer):
    built = build(PPO, tiny_gpt2_dir, tiny_tokenizer, policy_kwargs={"generation_dtype": "bfloat16"})
    generate = built.policy.generator.generate
    colder = {**SAMPLING, "temperature": 0.1}
    built.policy.generator.generate = lambda *args, **options: generate(
        *args, **{**options, "generation_kwargs": colder}
    )
    with pytest.raises(ModelError, match="sampler_log_probs: false"):
        built.learn_iteration(0, 1)


class OwnScores(POLICIES["causal"]):
    """A user's policy, with another distribution than the one that is sampled."""

    def action_scores(self, observations):
        raise NotImplementedError


def test_a_policy_that_scores_itself_cannot_use_the_log_probs_of_a_sampling_in_bfloat16(tiny_gpt2_dir, tiny_tokenizer):
    own = {"model_name": str(tiny_gpt2_dir), "generation_kwargs": SAMPLING, "generation_dtype": "bfloat16"}
    with raises_at("policy_kwargs.generation_dtype"):
        PPO(OwnScores, make_env(tiny_tokenizer, tiny_gpt2_dir), n_steps=20, policy_kwargs=own, device="cpu")


def test_autocast_of_everything_but_generation(tiny_gpt2_dir, tiny_tokenizer):
    dtypes = {"dtype": "bfloat16", "generation_dtype": "float32"}
    built = build(PPO, tiny_gpt2_dir, tiny_tokenizer, policy_kwargs=dtypes, **CORRECTED)
    built.rollout_buffer.reset()
    built.collector.collect(built.rollout_buffer, 20)
    episodes = built.rollout_buffer.episodes
    plain = make_policy("causal", tiny_gpt2_dir)  # the same weights, in float32
    torch.testing.assert_close(episodes.behavior_log_prob, plain.score(episodes).log_prob, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "arguments", "key"),
    [
        (A2C, {}, "policy_kwargs.generation_dtype"),
        (TRPO, {}, "policy_kwargs.generation_dtype"),
        (PPO, {}, None),
        (PPO, CORRECTED, None),
        (PPO, {"policy_kwargs": {"critic": "shared"}}, "policy_kwargs.generation_dtype"),
        (PPO, {"policy_kwargs": {"speedups": {"sampler_log_probs": False}}}, "policy_kwargs.generation_dtype"),
        (PPO, {"policy_kwargs": {"generation_kwargs": {**SAMPLING, "top_k": 5}}}, "policy_kwargs.generation_dtype"),
        (OnlineDPO, {"group_size": 2, "kl_controller": FixedKLController(0.1, placement="loss")}, None),
    ],
)
def test_generation_in_another_dtype_needs_a_correction(algorithm, arguments, key, tiny_gpt2_dir, tiny_tokenizer):
    options = {**arguments, "policy_kwargs": {"generation_dtype": "bfloat16", **arguments.get("policy_kwargs", {})}}
    if key is None:
        build(algorithm, tiny_gpt2_dir, tiny_tokenizer, **options)
        return
    with raises_at(key):
        build(algorithm, tiny_gpt2_dir, tiny_tokenizer, **options)


@pytest.mark.parametrize("peft", [None, ADAPTERS], ids=["whole", "adapters"])
def test_a_reference_in_bfloat16_is_near_the_float32_one_and_smaller(family, peft):
    kind, folder = family
    low, plain = (make_policy(kind, folder, peft=peft, reference_dtype=dtype) for dtype in ("bfloat16", "float32"))
    episodes = generate(plain, None)
    expected, scores = plain.score(episodes), low.score(episodes)
    gaps = (scores.ref_log_prob - expected.ref_log_prob).abs()
    assert 0 < float(gaps.max()) < BFLOAT16
    torch.testing.assert_close(scores.log_prob, expected.log_prob, atol=1e-6, rtol=1e-6)  # the policy has its own

    head = low.ref_model.get_output_embeddings().weight
    dtypes = {weight.dtype for weight in low.ref_model.parameters() if weight.ndim == 2 and weight is not head}
    assert head.dtype == torch.float32 and torch.bfloat16 in dtypes
    assert all(weight.dtype == torch.float32 for weight in low.policy_model.parameters())


def test_a_reference_from_another_checkpoint_passes_its_checks(family, tmp_path, tiny_tokenizer):
    kind, folder = family
    policy = make_policy(kind, folder, reference_model=str(folder.resolve()) + "/.", reference_dtype="bfloat16")
    assert policy.score(generate(policy, None)).ref_log_prob.isfinite().all()


def test_a_reference_that_follows_the_policy_is_refused(tiny_gpt2_dir, tiny_tokenizer):
    options = {"policy_kwargs": {"reference_dtype": "bfloat16"}, "reference_update_iterations": 2}
    with raises_at("reference_update_iterations"):
        build(GRPO, tiny_gpt2_dir, tiny_tokenizer, kl_controller=FixedKLController(0.1), group_size=4, **options)


@pytest.mark.parametrize("peft", [None, {"r": 2}], ids=["whole", "adapters"])
def test_the_estimate_has_the_bytes_of_the_weights(peft, tiny_gpt2_dir):
    blocks = run_blocks()
    policy = blocks["alg"]["policy"]["args"]
    policy |= {"model_name": str(tiny_gpt2_dir), "peft": peft, "reference_dtype": "bfloat16"}
    policy |= {"generation_dtype": "bfloat16", "generation_kwargs": {**SAMPLING, "max_new_tokens": 5}}
    blocks["alg"]["args"] |= CORRECTED
    parts = estimate_memory(parse_config(blocks)).parts

    made = make_policy("causal", tiny_gpt2_dir, peft=peft, reference_dtype="bfloat16")
    shared = {weight.data_ptr() for weight in made.policy_model.parameters()}
    own = [weight for weight in made.ref_model.parameters() if weight.data_ptr() not in shared]
    assert parts["reference weights"] == sum(weight.numel() * weight.element_size() for weight in own)
    assert 0 < parts["generating weights"] < parts["policy weights"]


def test_an_engine_has_its_own_dtype():
    blocks = run_blocks()
    engine = {"id": "vllm", "args": {"url": "http://127.0.0.1:1", "weights_dir": "w"}}
    blocks["alg"]["policy"]["args"] |= {"engine": engine, "generation_dtype": "bfloat16"}
    with pytest.raises(ConfigError, match=r"alg\.policy\.args\.generation_dtype: is for the policy's own model"):
        parse_config(blocks)
