"""Rows of embeddings that are trained beside adapters: exact in every library, also after several stages."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl4lms_like.policies.loading import load_model, save_language_model
from rl4lms_like.policies.lora import add_lora, copy_sharing_frozen, load_adapters, merged
from rl4lms_like.system.errors import ModelError
from rl4lms_like.testing import models
from tests.policies.test_stacked import AUTO, changed, check_loads, logits_of, make_policy, saved

peft_package = pytest.importorskip("peft")

FAMILIES = {
    "gpt2": ("causal", {}),
    "llama": ("causal", {}),  # an output layer of its own
    "gemma": ("causal", {}),  # scaled embeddings
    "opt": ("causal", {}),
    "gpt_neox": ("causal", {}),
    "t5": ("seq2seq", {}),
    "untied_t5": ("seq2seq", {}),  # one weight for encoder and decoder, another one for the output
    "bart": ("seq2seq", {}),
    "marian": ("seq2seq", {}),
}
ROWS = [3, 17, 250]
PEFT = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear"}
WITH_ROWS = {**PEFT, "trainable_token_indices": ROWS}
OTHER_ROWS = [row for row in range(320) if row not in ROWS]


def make(family):
    tokenizer = models.make_tokenizer(append_eos=FAMILIES[family][0] == "seq2seq")
    if FAMILIES[family][0] == "causal":
        return models.make_causal_lm(family, tokenizer)
    model = models.make_seq2seq_lm(family.removeprefix("untied_"), tokenizer)
    if family == "untied_t5":
        head = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(0))
        model.lm_head.weight = torch.nn.Parameter(head)
    return model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    tokenizer = models.make_tokenizer()
    return {family: models.save_model(folder / family, make(family), tokenizer) for family in FAMILIES}


def tuned(kind, folder, peft, seed):
    model, _ = load_model(AUTO[kind], str(folder))
    add_lora(model, peft, dropout=False)
    return changed(model, seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_folder_has_the_rows_in_every_library(family, checkpoints, tmp_path):
    kind = FAMILIES[family][0]
    model = tuned(kind, checkpoints[family], WITH_ROWS, 1)
    expected = logits_of(model, kind)
    check_loads(saved(model, tmp_path / "adapters"), kind, expected)
    whole = save_language_model(model, tmp_path / "whole", checkpoint_dropout={}, merge=True)
    for loaded in (AUTO[kind].from_pretrained(whole), merged(model)):
        assert (logits_of(loaded, kind) - expected).abs().max() < 2e-5

    # A layer's other rows are those of the base, and its weight is still shared with the layers that shared it.
    base = AUTO[kind].from_pretrained(checkpoints[family])
    plain = merged(model)
    for layers in ((base, plain), (base, AUTO[kind].from_pretrained(whole))):
        for get in ("get_input_embeddings", "get_output_embeddings"):
            before, after = (getattr(each, get)().weight for each in layers)
            assert torch.equal(before[OTHER_ROWS], after[OTHER_ROWS])
            assert (before[ROWS] - after[ROWS]).abs().amax(dim=1).min() > 1e-3
        inputs, output = layers[1].get_input_embeddings(), layers[1].get_output_embeddings()
        assert (inputs.weight is output.weight) == (family not in ("llama", "gpt_neox", "untied_t5"))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_whole_weight(family, checkpoints):
    kind = FAMILIES[family][0]
    model = tuned(kind, checkpoints[family], WITH_ROWS, 1)
    whole = merged(model).requires_grad_(True)
    for each in (model, whole):
        ids = torch.tensor([[3, 9, 17, 40, 250, 3]])
        inputs = {"decoder_input_ids": ids} if kind == "seq2seq" else {}
        each.eval()(input_ids=ids, **inputs).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None]).sum().backward()
    rows = [weight for name, weight in model.named_parameters() if "trainable_tokens_delta" in name]
    ids = model.peft_config["default"].trainable_token_indices
    layers = [whole.get_input_embeddings()]
    if family in ("llama", "gpt_neox", "untied_t5"):
        layers.append(whole.get_output_embeddings())
    assert len(rows) == len(layers)
    orders = [next(iter(ids.values())), list(ids.values())[-1]][: len(layers)]
    for mine, layer, order in zip(rows, layers, orders, strict=True):
        expected = layer.weight.grad[order]
        assert expected.abs().max() > 1e-3
        assert (mine.grad - expected).abs().max() < 1e-5 * expected.abs().max().clamp_min(1)


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "untied_t5"])
@pytest.mark.parametrize(
    ("first", "second"), [(ROWS, ROWS), (ROWS, [17, 300]), (ROWS, None), (None, ROWS), (ROWS, [2, 5])]
)
def test_stages_are_one_adapter_in_which_the_last_trained_row_counts(family, first, second, checkpoints, tmp_path):
    kind = FAMILIES[family][0]
    folder = checkpoints[family]
    for number, rows in enumerate((first, second)):
        model = tuned(kind, folder, {**PEFT, "trainable_token_indices": rows}, number)
        folder = saved(model, tmp_path / str(number))
    check_loads(folder, kind, logits_of(model, kind))
    indices = json.loads((folder / "adapter_config.json").read_text())["trainable_token_indices"]
    assert all(sorted(ids) == sorted({*(first or ()), *(second or ())}) for ids in indices.values())

    # The part that the second stage trains is read again exactly.
    again, _ = load_model(AUTO[kind], str(tmp_path / "0"))
    add_lora(again, {**PEFT, "trainable_token_indices": second}, dropout=False)
    load_adapters(again, folder / "adapter_model.safetensors")
    for (name, mine), (_, theirs) in zip(again.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "untied_t5"])
def test_a_policy_trains_the_rows_with_a_critic_and_a_reference_of_its_own(family, checkpoints):
    kind = FAMILIES[family][0]
    policy = make_policy(kind, checkpoints[family], peft=WITH_ROWS, critic="separate")
    trained = [name for name in policy.training_state() if "trainable_tokens_delta" in name]
    n = 2 if family in ("llama", "untied_t5") else 1
    assert [name.partition(".")[0] for name in trained] == ["policy_model"] * n + ["value_model"]
    assert policy.reader.head_scale is not None  # log-probs are computed from the layer with these rows

    expected = logits_of(policy.ref_model, kind)
    assert (logits_of(policy.policy_model, kind) - expected).abs().max() < 1e-6
    changed(policy.policy_model, 1)
    assert torch.equal(logits_of(policy.ref_model, kind), expected)
    assert (logits_of(copy_sharing_frozen(policy.policy_model), kind) - expected).abs().max() > 1e-3


def test_new_adapters_on_rows_that_peft_alone_has_trained(checkpoints, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(checkpoints["llama"])
    config = peft_package.LoraConfig(r=2, task_type="CAUSAL_LM", trainable_token_indices=[3, 4])  # embeddings only
    foreign = changed(peft_package.get_peft_model(base, config), 1)
    foreign.save_pretrained(tmp_path / "foreign")
    model = tuned("causal", tmp_path / "foreign", WITH_ROWS, 2)
    check_loads(saved(model, tmp_path / "both"), "causal", logits_of(model, "causal"))
    indices = json.loads((tmp_path / "both" / "adapter_config.json").read_text())["trainable_token_indices"]
    assert indices == {"model.embed_tokens": [3, 4, 17, 250], "lm_head": ROWS}


def test_what_cannot_be_trained_is_refused(checkpoints, tmp_path):
    model = make("llama")
    model.lm_head = torch.nn.Linear(32, 320)
    with pytest.raises(ModelError, match="bias"):
        add_lora(model, WITH_ROWS, dropout=False)
    with pytest.raises(ModelError, match="single row"):
        add_lora(make("untied_t5"), {**PEFT, "trainable_token_indices": [5]}, dropout=False)
    with pytest.raises(ModelError, match="320"):
        add_lora(make("gpt2"), {**PEFT, "trainable_token_indices": [320]}, dropout=False)
    with pytest.raises(ModelError, match="trainable_token_indices"):
        add_lora(make("llama"), {**WITH_ROWS, "target_modules": ["q_proj", "lm_head"]}, dropout=False)
