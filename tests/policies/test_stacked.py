"""Adapters trained on adapters: the saved folder is one adapter of the original base, which every library loads."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from gymnasium import spaces
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from rl4lms_like.policies import POLICIES
from rl4lms_like.policies.loading import load_model, load_tokenizer, save_language_model, whole_checkpoint
from rl4lms_like.policies.lora import add_lora, load_adapters
from rl4lms_like.system.errors import ModelError
from rl4lms_like.testing import models

peft_package = pytest.importorskip("peft")

FAMILIES = {"gpt2": "causal", "llama": "causal", "t5": "seq2seq", "bart": "seq2seq"}
AUTO = {"causal": AutoModelForCausalLM, "seq2seq": AutoModelForSeq2SeqLM}
PEFT_AUTO = {"causal": peft_package.AutoPeftModelForCausalLM, "seq2seq": peft_package.AutoPeftModelForSeq2SeqLM}
STAGES = {
    "plain": {"r": 4, "lora_alpha": 16},
    "rslora": {"r": 3, "lora_alpha": 6, "use_rslora": True},
    "dora": {"r": 2, "lora_alpha": 8, "use_dora": True},
    "all_linear": {"r": 5, "lora_alpha": 7, "target_modules": "all-linear"},
    "patterns": {
        "r": 2,
        "target_modules": "all-linear",
        "rank_pattern": {r".*\.1\..*": 3},
        "alpha_pattern": {r".*\.0\..*": 5},
    },
}
"""Blocks of `peft`, which differ in rank, scale, layers and kind."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    saved = {}
    for family, kind in FAMILIES.items():
        tokenizer = models.make_tokenizer(append_eos=kind == "seq2seq")
        make = models.make_causal_lm if kind == "causal" else models.make_seq2seq_lm
        saved[family] = models.save_model(folder / family, make(family, tokenizer), tokenizer)
    return saved


def logits_of(model, kind):
    ids = torch.arange(2, 14)[None]
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if kind == "seq2seq" else {})
    with torch.no_grad():
        return model.eval()(**inputs).logits


def changed(model, seed):
    """Change the weights that are trained, as training would."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    return model


def tuned(kind, model_name, peft, seed):
    """Return a model with changed new adapters, on whatever is in the folder."""
    model, _ = load_model(AUTO[kind], str(model_name))
    add_lora(model, peft, dropout=False)
    return changed(model, seed)


def saved(model, folder, tokenizer=None):
    return save_language_model(model, folder, tokenizer, checkpoint_dropout={})


def make_policy(kind, model_name, **arguments):
    torch.manual_seed(0)
    vocabulary = AutoConfig.from_pretrained(whole_checkpoint(str(model_name))).vocab_size
    return POLICIES.resolve(f"{kind}_lm_actor_critic_policy")(
        spaces.Dict({}), spaces.Discrete(vocabulary), lambda _: 1e-3, model_name=str(model_name), **arguments
    )


def check_loads(folder, kind, expected):
    """Check the logits of a folder loaded by transformers, by PEFT and by this library."""
    loaded = {
        "transformers": AUTO[kind].from_pretrained(folder),
        "peft": PEFT_AUTO[kind].from_pretrained(folder),
        "this library": load_model(AUTO[kind], str(folder))[0],
    }
    for library, model in loaded.items():
        difference = (logits_of(model, kind) - expected).abs().max()
        assert difference < 2e-5, f"{library}: {difference}"


@pytest.mark.parametrize(("first", "second"), list(itertools.product(STAGES, repeat=2)))
def test_two_stages_are_one_adapter_of_the_base(first, second, checkpoints, tmp_path):
    stage = saved(tuned("causal", checkpoints["gpt2"], STAGES[first], 1), tmp_path / "first")
    model = tuned("causal", stage, STAGES[second], 2)
    folder = saved(model, tmp_path / "second")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(checkpoints["gpt2"].resolve())

    # Neither stage is without effect, and nothing in the first folder is needed any more.
    expected = logits_of(model, "causal")
    for earlier in (checkpoints["gpt2"], stage):
        assert (logits_of(load_model(AutoModelForCausalLM, str(earlier))[0], "causal") - expected).abs().max() > 1e-3
    shutil.rmtree(stage)
    check_loads(folder, "causal", expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stages", [("plain", "dora", "rslora"), ("dora", "all_linear", "dora"), ("plain",) * 3])
def test_three_stages_are_one_adapter_of_the_base(family, stages, checkpoints, tmp_path):
    kind = FAMILIES[family]
    folder = checkpoints[family]
    for i, stage in enumerate(stages):
        model = tuned(kind, folder, STAGES[stage], i)
        folder = saved(model, tmp_path / str(i))
        check_loads(folder, kind, logits_of(model, kind))


def test_equal_stages_have_the_sum_of_their_ranks_and_no_patterns(checkpoints, tmp_path):
    stage = saved(tuned("causal", checkpoints["gpt2"], STAGES["plain"], 1), tmp_path / "first")
    folder = saved(tuned("causal", stage, STAGES["plain"], 2), tmp_path / "second")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 32)
    assert not config["rank_pattern"] and not config["alpha_pattern"]


def test_a_chain_of_folders_of_earlier_versions_becomes_one_adapter(checkpoints, tmp_path):
    first = saved(tuned("causal", checkpoints["gpt2"], STAGES["plain"], 1), tmp_path / "first")
    chain = tmp_path / "chain"
    model = tuned("causal", first, STAGES["rslora"], 2)

    # As version 0.2.0 saved the second adapter: alone, with the first folder as its base.
    weights = peft_package.get_peft_model_state_dict(model, save_embedding_layers=False)
    chain.mkdir()
    named = {f"base_model.model.{name}": weight.contiguous() for name, weight in weights.items()}
    save_file(named, chain / "adapter_model.safetensors", metadata={"format": "pt"})
    model.peft_config["default"].save_pretrained(chain)
    assert json.loads((chain / "adapter_config.json").read_text())["base_model_name_or_path"] == str(first.resolve())

    expected = logits_of(model, "causal")
    loaded, _ = load_model(AutoModelForCausalLM, str(chain))
    torch.testing.assert_close(logits_of(loaded, "causal"), expected, rtol=0, atol=1e-5)
    third = tuned("causal", chain, STAGES["plain"], 3)
    check_loads(saved(third, tmp_path / "third"), "causal", logits_of(third, "causal"))

    # The adapters that are trained are read from such a file too.
    again, _ = load_model(AutoModelForCausalLM, str(first))
    add_lora(again, STAGES["rslora"], dropout=False)
    load_adapters(again, chain / "adapter_model.safetensors")
    torch.testing.assert_close(logits_of(again, "causal"), expected, rtol=0, atol=0)


@pytest.mark.parametrize(("first", "second"), list(itertools.product(STAGES, repeat=2)))
def test_the_trained_adapter_is_read_again_from_the_saved_one(first, second, checkpoints, tmp_path):
    stage = saved(tuned("causal", checkpoints["gpt2"], STAGES[first], 1), tmp_path / "first")
    model = tuned("causal", stage, STAGES[second], 2)
    folder = saved(model, tmp_path / "second")
    again = tuned("causal", stage, STAGES[second], 3)
    load_adapters(again, folder / "adapter_model.safetensors")

    # To the last bit, unless the rows of the first adapter were scaled.
    tolerance = 1e-6 if STAGES[first].get("use_dora") else 0
    expected = dict(model.named_parameters())
    for name, weight in again.named_parameters():
        torch.testing.assert_close(weight, expected[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("critic", ["separate", "shared"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_on_an_adapter_has_the_tuned_model_as_its_reference(family, critic, checkpoints, tmp_path):
    kind = FAMILIES[family]
    model_dir = checkpoints[family]
    first = tuned(kind, model_dir, STAGES["all_linear"], 1)
    stage = saved(first, tmp_path / "first", load_tokenizer(str(model_dir)))
    policy = make_policy(kind, stage, critic=critic, peft=STAGES["plain"])
    for network in (policy.policy_model, policy.ref_model):
        torch.testing.assert_close(logits_of(network, kind), logits_of(first, kind), rtol=0, atol=1e-5)
    changed(policy, 2)
    check_loads(policy.save_model(tmp_path / "second"), kind, logits_of(policy.policy_model, kind))


@pytest.mark.parametrize("stage", ["plain", "dora"])
def test_a_critic_on_an_adapter_is_saved_with_it(stage, checkpoints, tmp_path):
    first = saved(
        tuned("causal", checkpoints["llama"], {**STAGES[stage], "target_modules": "all-linear"}, 1), tmp_path / "1"
    )
    policy = changed(make_policy("causal", first, peft=STAGES["plain"]), 2)
    critic = policy.save_critic(tmp_path / "critic")
    config = json.loads((critic / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(checkpoints["llama"].resolve())
    again = make_policy("causal", first, critic_model=str(critic), peft=STAGES["plain"])
    ids = torch.arange(2, 14)[None]
    with torch.no_grad():
        states = [p.value_head(p.value_model(ids).logits) for p in (policy, again)]
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=1e-5)


def test_merging_on_save_merges_all_stages(checkpoints, tmp_path):
    stage = saved(tuned("causal", checkpoints["gpt2"], STAGES["plain"], 1), tmp_path / "first")
    policy = changed(make_policy("causal", stage, peft=STAGES["dora"], merge_on_save=True), 2)
    folder = policy.save_model(tmp_path / "whole")
    assert not (folder / "adapter_config.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    expected = logits_of(policy.policy_model, "causal")
    torch.testing.assert_close(logits_of(loaded, "causal"), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "foreign",
    [
        {"modules_to_save": ["lm_head"]},
        {"bias": "all"},
        {"init_lora_weights": "pissa"},
        {"target_modules": ["embed_tokens", "q_proj"]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_an_adapter_of_another_kind_needs_merge_on_save(foreign, checkpoints, tmp_path):
    """Made with PEFT; this library trains none of them."""
    family = "gpt2" if "bias" in foreign else "llama"  # which has no biases
    base = AutoModelForCausalLM.from_pretrained(checkpoints[family])
    config = peft_package.LoraConfig(r=2, task_type="CAUSAL_LM", **foreign)
    adapted = changed(peft_package.get_peft_model(base, config), 1)
    adapted.save_pretrained(tmp_path / "foreign")
    expected = logits_of(adapted, "causal")
    with pytest.raises(ModelError, match="merge_on_save"):
        make_policy("causal", tmp_path / "foreign", peft=STAGES["plain"])
    policy = make_policy("causal", tmp_path / "foreign", peft=STAGES["plain"], merge_on_save=True)
    torch.testing.assert_close(logits_of(policy.policy_model, "causal"), expected, rtol=0, atol=1e-5)
    loaded = AutoModelForCausalLM.from_pretrained(changed(policy, 2).save_model(tmp_path / "whole"))
    torch.testing.assert_close(logits_of(loaded, "causal"), logits_of(policy.policy_model, "causal"), rtol=0, atol=1e-5)
