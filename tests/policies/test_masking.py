"""Writing with masks: the mask model sees its own history, the taken token is always allowed, nothing runs dry."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl4lms_like.core.token_masks import contains, n_allowed, pack, unpack
from rl4lms_like.policies import masked
from rl4lms_like.policies.masked import MaskablePolicy, MaskRule
from rl4lms_like.system.errors import ModelError, ParityError
from rl4lms_like.testing import models
from tests.builders import MASKABLE, make_env, make_policy

FAMILIES = [("causal", name) for name in models.CAUSAL_FAMILIES] + [("seq2seq", n) for n in models.SEQ2SEQ_FAMILIES]
TOP_P = {"mask_type": "learned_top_p", "top_mask": 0.6, "min_tokens_to_keep": 2}
END = 1


@pytest.fixture(scope="module", params=FAMILIES, ids=[name for _, name in FAMILIES])
def policy(request, tmp_path_factory, tiny_tokenizer):
    """A policy whose weights have moved away from its mask model's."""
    family, name = request.param
    make = models.make_causal_lm if family == "causal" else models.make_seq2seq_lm
    model = make(name, tiny_tokenizer, scale=1.0 if name == "t5" else 5.0)
    folder = models.save_model(tmp_path_factory.mktemp(name), model, tiny_tokenizer)
    built = make_policy(family, folder, policies=MASKABLE, special_token_ids=[END], **TOP_P)
    moved(built)
    return built


def maskable(model_dir, **arguments):
    family = "seq2seq" if "t5" in str(model_dir) else "causal"
    return make_policy(family, model_dir, policies=MASKABLE, **{"special_token_ids": [END], **TOP_P, **arguments})


def moved(policy: MaskablePolicy, by: float = 0.5) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in policy.policy_model.parameters():
            if weight.ndim > 1:
                noise = torch.randn(weight.shape, generator=generator)
                weight += by * weight.std() * noise


def written(policy, **arguments):
    """Six responses to prompts of unequal lengths."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, policy.vocab_size, (6, 9), generator=generator)
    lengths = torch.tensor([1, 9, 3, 7, 2, 5])[:, None]
    columns = torch.arange(9)
    mask = columns >= 9 - lengths if policy.reader.prompt_side == "left" else columns < lengths
    arguments = {"eos_token_ids": [END], "max_new_tokens": 12, "seed": 3, **arguments}
    return policy.generate(ids, mask, **arguments)


def masks_by_teacher_forcing(policy, episodes, model):
    """The masks of a model that reads the finished episodes in one pass."""
    reader = policy.reader_class(model)
    with torch.no_grad():
        return policy.generator.rule.allowed(reader.logits(replace(episodes, allowed=None)))


def test_the_recorded_masks_are_those_of_the_mask_model_alone(policy):
    """Of its own encoder, its own history, positions under left padding; not of the policy."""
    episodes = written(policy)
    recorded = unpack(episodes.allowed, policy.vocab_size)
    expected = masks_by_teacher_forcing(policy, episodes, policy.mask_model)
    assert int((recorded != expected).sum()) <= 1e-4 * expected.numel(), "rounding turns a bit now and then"
    of_the_policy = masks_by_teacher_forcing(policy, episodes, policy.policy_model)
    assert int((recorded != of_the_policy).sum()) > 0.01 * expected.numel()


def test_a_prompt_without_tokens_is_refused_where_generation_would_read_padding(policy):
    """A decoder-only model would go on from a pad token, at a position that families disagree on."""
    ids = torch.tensor([[5, 6, 7], [5, 6, 7]])
    mask = torch.tensor([[True, True, True], [False, False, False]])
    if policy.reader.prompt_side == "left":
        with pytest.raises(ModelError):
            policy.generate(ids, mask, eos_token_ids=[END], max_new_tokens=3)
    else:
        assert policy.generate(ids, mask, eos_token_ids=[END], max_new_tokens=3).n_episodes == 2


def test_every_taken_token_was_allowed_and_the_end_always_is(policy):
    episodes = written(policy)
    assert episodes.allowed.shape == (episodes.n_tokens, (policy.vocab_size + 7) // 8)
    assert bool(contains(episodes.allowed, episodes.actions).all())
    assert bool(contains(episodes.allowed, torch.full_like(episodes.actions, END)).all())
    counts = n_allowed(episodes.allowed)
    assert int(counts.min()) >= 2 and int(counts.max()) < policy.vocab_size


def test_masked_log_probs_are_renormalised(policy):
    """The probabilities of all allowed tokens sum to 1; the raw ones do not (D-01)."""
    episodes = written(policy)
    scores = policy.score(episodes)
    with torch.no_grad():
        logits = policy.reader.logits(episodes)
    allowed = unpack(episodes.allowed, policy.vocab_size)
    mass = logits.softmax(1).masked_fill(~allowed, 0).sum(1)
    assert float(mass.max()) < 0.999
    torch.testing.assert_close(scores.log_prob.exp() * mass, scores.raw_log_prob.exp(), atol=1e-6, rtol=1e-4)
    raw = logits.log_softmax(1).gather(1, episodes.actions[:, None]).squeeze(1)
    torch.testing.assert_close(scores.raw_log_prob, raw, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.ref_log_prob, policy.score(replace(episodes, allowed=None)).ref_log_prob)


def test_padding_packing_and_order_never_change_a_masked_number(policy):
    episodes = written(policy)
    scores = policy.score(episodes)
    order = torch.tensor([4, 0, 5, 2])
    tokens = episodes.token_index(order)
    for name, field in policy.score(episodes.widened(13, 17))._asdict().items():
        torch.testing.assert_close(field, getattr(scores, name), atol=1e-5, rtol=1e-5, msg=f"wider: {name}")
    for name, field in policy.score(episodes.select(order))._asdict().items():
        torch.testing.assert_close(field, getattr(scores, name)[tokens], atol=1e-5, rtol=1e-5, msg=f"packed: {name}")


def test_the_families_allow_the_same_tokens_for_the_same_logits(tiny_gpt2_dir, tiny_t5_dir):
    logits = 3 * torch.randn(5, 320, generator=torch.Generator().manual_seed(0))
    masks = [maskable(folder).generator.rule.allowed(logits.clone()) for folder in (tiny_gpt2_dir, tiny_t5_dir)]
    assert torch.equal(*masks)


@pytest.mark.parametrize("model", ["gpt2", "t5"])
def test_a_second_call_starts_anew(model, tiny_gpt2_dir, tiny_t5_dir):
    """No cache outlives its call: writing twice gives the same masks."""
    policy = maskable(tiny_gpt2_dir if model == "gpt2" else tiny_t5_dir)
    first, second = written(policy), written(policy)
    assert torch.equal(first.allowed, second.allowed) and torch.equal(first.response_ids, second.response_ids)


def test_where_nothing_allowed_is_left_everything_is_and_the_record_says_so(tiny_gpt2_dir):
    """The only allowed token is the end, and it is suppressed for three steps."""
    policy = maskable(tiny_gpt2_dir, generation_kwargs={"do_sample": True, "top_k": 0, "min_new_tokens": 3})
    policy.generator.rule = _OnlyTheEnd("learned_top_k", 1)
    episodes = written(policy)
    assert episodes.lengths.tolist() == [4] * 6
    assert episodes.pad(n_allowed(episodes.allowed)).tolist() == [[320, 320, 320, 1]] * 6


class _OnlyTheEnd(MaskRule):
    def allowed(self, logits):
        allowed = torch.zeros_like(logits, dtype=torch.bool)
        allowed[:, END] = True
        return allowed


def test_rules_that_turn_infinities_into_numbers_leave_nothing_either(tiny_gpt2_dir):
    """`remove_invalid_values` makes the suppressed end a finite number; it must not be written all the same."""
    kwargs = {"do_sample": True, "top_k": 0, "min_new_tokens": 3, "remove_invalid_values": True}
    policy = maskable(tiny_gpt2_dir, generation_kwargs=kwargs)
    policy.generator.rule = _OnlyTheEnd("learned_top_k", 1)
    assert written(policy).lengths.tolist() == [4] * 6


def test_one_allowed_token_and_a_least_length_do_not_stop_generation(tiny_gpt2_dir):
    kwargs = {"do_sample": True, "top_k": 0, "min_new_tokens": 6}
    policy = maskable(tiny_gpt2_dir, mask_type="learned_top_k", top_mask=1, generation_kwargs=kwargs)
    episodes = written(policy)
    assert int(episodes.lengths.min()) >= 6
    assert int(n_allowed(episodes.allowed).max()) <= 2, "the best token, and the end"


@pytest.mark.parametrize("model", ["gpt2", "t5"])
def test_the_record_is_the_rules_whatever_else_shapes_the_sampling(model, tiny_gpt2_dir, tiny_t5_dir):
    kwargs = {"do_sample": True, "top_k": 5, "temperature": 0.7, "min_new_tokens": 4, "repetition_penalty": 1.3}
    policy = maskable(tiny_gpt2_dir if model == "gpt2" else tiny_t5_dir, generation_kwargs=kwargs)
    episodes = written(policy)
    expected = masks_by_teacher_forcing(policy, episodes, policy.mask_model)
    assert torch.equal(episodes.allowed, pack(expected))


def test_logits_that_are_differentiated_twice_are_those_of_the_allowed_tokens(policy):
    episodes = written(policy)
    scores = policy.action_scores(episodes)
    log_probs = policy.action_logits(episodes).detach().log_softmax(dim=1)
    torch.testing.assert_close(log_probs.gather(1, episodes.actions[:, None]).squeeze(1), scores.log_prob.detach())
    assert float(log_probs.exp()[~unpack(episodes.allowed, policy.vocab_size)].max()) == 0


@pytest.mark.parametrize("model", ["gpt2", "t5"])
def test_single_steps_choose_from_what_the_mask_model_allows(model, deeper_gpt2_dir, tiny_t5_dir, tiny_tokenizer):
    """Stable-Baselines3's `predict`: the policy has moved, the one token its mask model likes best is what it takes."""
    folder = deeper_gpt2_dir if model == "gpt2" else tiny_t5_dir
    policy = maskable(folder, mask_type="learned_top_k", top_mask=1, special_token_ids=[])
    env = make_env(tiny_tokenizer, folder)
    policy.observation_space, observation = env.observation_space, env.reset()

    def steps(deterministic=True):
        return policy.predict(observation, deterministic=deterministic)[0].tolist()

    before = steps()
    moved(policy, by=2.0)
    assert steps() == steps(deterministic=False) == before
    policy.update_mask_model()
    assert steps() != before


def test_the_policys_own_best_tokens_need_no_mask_model(tiny_gpt2_dir):
    policy = maskable(tiny_gpt2_dir, mask_type="topk", top_mask=7)
    moved(policy)
    assert policy.mask_model is None
    episodes = written(policy)
    expected = masks_by_teacher_forcing(policy, episodes, policy.policy_model)
    assert torch.equal(episodes.allowed, pack(expected))
    policy.update_mask_model()


def test_the_policys_own_best_are_those_that_its_generation_leaves(tiny_gpt2_dir):
    """Half of the vocabulary is suppressed: the others' best, not everything for want of a possible token."""
    suppressed = list(range(0, 320, 2))
    kwargs = {"do_sample": True, "top_k": 0, "suppress_tokens": suppressed}
    policy = maskable(tiny_gpt2_dir, mask_type="topk", top_mask=4, special_token_ids=[], generation_kwargs=kwargs)
    episodes = written(policy)
    with torch.no_grad():
        logits = policy.reader.logits(episodes)
    logits[:, suppressed] = -torch.inf
    assert torch.equal(episodes.allowed, pack(policy.generator.rule.allowed(logits)))


@pytest.mark.parametrize("mask_type", ["learned_top_k", "topk"])
@pytest.mark.parametrize("model", ["gpt2", "t5"])
def test_evaluation_searches_beams_within_the_masks(model, mask_type, tiny_gpt2_dir, tiny_t5_dir):
    policy = maskable(tiny_gpt2_dir if model == "gpt2" else tiny_t5_dir, mask_type=mask_type, top_mask=6)
    moved(policy)
    episodes = written(policy, generation_kwargs={"num_beams": 3, "do_sample": False})
    assert episodes.allowed is None
    own = policy.policy_model if mask_type == "topk" else policy.mask_model
    allowed = masks_by_teacher_forcing(policy, episodes, own)
    taken = allowed.gather(1, episodes.actions[:, None])
    assert bool(taken.all())
    plain = make_policy("causal" if model == "gpt2" else "seq2seq", tiny_gpt2_dir if model == "gpt2" else tiny_t5_dir)
    plain.policy_model.load_state_dict(policy.policy_model.state_dict())
    free = written(plain, generation_kwargs={"num_beams": 3, "do_sample": False})
    assert free.actions.tolist() != episodes.actions.tolist() or mask_type == "topk"


def test_bfloat16_needs_no_second_look_at_the_masks(tiny_gpt2_dir):
    policy = maskable(tiny_gpt2_dir, dtype="bfloat16")
    moved(policy)
    episodes = written(policy)
    scores = policy.score(episodes)
    assert bool(contains(episodes.allowed, episodes.actions).all())
    assert float(scores.log_prob.min()) > -50 and all(torch.isfinite(field).all() for field in scores)


def test_generation_that_goes_several_tokens_at_once_is_refused(tiny_gpt2_dir):
    policy = maskable(tiny_gpt2_dir)
    prompt = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    arguments = {"eos_token_ids": [], "max_new_tokens": 8}
    assert policy.generate(prompt, torch.ones_like(prompt), **arguments).allowed is not None
    with pytest.raises(ModelError):
        several = {"do_sample": False, "prompt_lookup_num_tokens": 3}
        policy.generate(prompt, torch.ones_like(prompt), generation_kwargs=several, **arguments)


def test_a_family_without_keys_and_values_reads_the_whole_text_at_every_step(tmp_path, tiny_tokenizer):
    """Mamba's cache is a state."""
    special = {"pad_token_id": 0, "eos_token_id": END, "bos_token_id": END, "vocab_size": len(tiny_tokenizer)}
    config = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=2, state_size=8, **special)
    model = AutoModelForCausalLM.from_config(config)
    policy = maskable(models.save_model(tmp_path, model, tiny_tokenizer))
    moved(policy)
    episodes = written(policy)
    expected = masks_by_teacher_forcing(policy, episodes, policy.mask_model)
    assert int((unpack(episodes.allowed, policy.vocab_size) != expected).sum()) <= 1e-4 * expected.numel()


def test_a_mask_model_that_is_followed_wrongly_fails_when_the_policy_is_built(tiny_gpt2_dir, monkeypatch):
    original = masked.MaskDecoder.next_logits

    def without_padding(self, input_ids):
        self.prompt_mask = torch.ones_like(self.prompt_mask)
        return original(self, input_ids)

    monkeypatch.setattr(masked.MaskDecoder, "next_logits", without_padding)
    with pytest.raises(ParityError):
        maskable(tiny_gpt2_dir)
