"""Weights that are passed on and saved one transformer block after the other."""

from __future__ import annotations

import copy
import json
import weakref
from collections import defaultdict

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from rl4lms_like.policies import full_weights as module
from rl4lms_like.policies.full_weights import full_weights, write_full_weights
from rl4lms_like.policies.loading import save_language_model
from rl4lms_like.policies.lora import add_lora
from rl4lms_like.testing import models
from tests.expert_models import FAMILIES as EXPERTS
from tests.expert_models import save_experts

SEQ2SEQ = ("t5", "bart", "marian")
FAMILIES = ("gpt2", "llama", "gpt_neox", "opt", "gemma2", *EXPERTS, *SEQ2SEQ)
ADAPTERS = {
    "lora": {"target_modules": "all-linear", "r": 3, "lora_alpha": 5},
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "rslora_and_rows": {"target_modules": "all-linear", "use_rslora": True, "trainable_token_indices": [3, 17]},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_tokenizer):
    base = tmp_path_factory.mktemp("families")
    saved = {}
    for family in FAMILIES:
        if family in EXPERTS:
            saved[family] = save_experts(base / family, family, tiny_tokenizer)
            continue
        make = models.make_seq2seq_lm if family in SEQ2SEQ else models.make_causal_lm
        saved[family] = models.save_model(base / family, make(family, tiny_tokenizer), tiny_tokenizer)
    return saved


def load(family, folder):
    auto_class = AutoModelForSeq2SeqLM if family in SEQ2SEQ else AutoModelForCausalLM
    return auto_class.from_pretrained(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_files_have_the_bytes_of_save_pretrained(family, folders, tmp_path):
    model = load(family, folders[family])
    expected, written = tmp_path / "expected", tmp_path / "written"
    model.save_pretrained(expected)
    save_language_model(model, written, checkpoint_dropout={})
    names = sorted(path.name for path in expected.iterdir())
    assert names == sorted(path.name for path in written.iterdir())
    for name in names:
        assert (written / name).read_bytes() == (expected / name).read_bytes(), name


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral", "t5", "marian"])
def test_adapters_are_merged_as_by_peft(family, kind, folders, tmp_path):
    """Names and values are those of the plain model that PEFT returns, as transformers saves it."""
    peft_package = pytest.importorskip("peft")
    if family in EXPERTS and kind == "dora":
        pytest.skip("PEFT has no DoRA for experts")
    model = load(family, folders[family])
    add_lora(model, ADAPTERS[kind], dropout=False)
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    before = copy.deepcopy(model.state_dict())

    write_full_weights(model, tmp_path, tied=False)
    whole = dict(full_weights(model))
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())

    base = load(family, folders[family])
    save_language_model(model, tmp_path / "adapters", checkpoint_dropout={})
    by_peft = peft_package.PeftModel.from_pretrained(base, tmp_path / "adapters").merge_and_unload()
    by_peft._hf_peft_config_loaded = False
    by_peft.save_pretrained(tmp_path / "peft")
    expected = load_file(tmp_path / "peft" / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == expected.keys() <= whole.keys()
    for name, weight in expected.items():
        assert float((saved[name] - weight).abs().max()) <= 1e-6, name
        assert torch.equal(whole[name], saved[name]), name


def test_tied_weights_come_under_each_of_their_names(folders, tmp_path):
    model = load("gpt2", folders["gpt2"])
    assert dict(full_weights(model)).keys() == model.state_dict().keys()
    without = model.state_dict().keys() - dict(full_weights(model, tied=False)).keys()
    assert without == {"lm_head.weight"}
    write_full_weights(model, tmp_path, tied=True)
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved["lm_head.weight"], saved["transformer.wte.weight"])


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_large_models_are_several_files_with_an_index(family, folders, tmp_path, monkeypatch):
    model = load(family, folders[family])
    model.save_pretrained(tmp_path / "expected", max_shard_size="40KB")
    monkeypatch.setattr(module, "LARGEST_FILE", "40KB")
    save_language_model(model, tmp_path / "written", checkpoint_dropout={})
    index = json.loads((tmp_path / "written" / module.INDEX).read_text())
    expected = json.loads((tmp_path / "expected" / module.INDEX).read_text())
    assert index["metadata"] == expected["metadata"] and index["weight_map"].keys() == expected["weight_map"].keys()
    assert len(set(index["weight_map"].values())) > 2
    loaded = load(family, tmp_path / "written").state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in model.state_dict().items())


def test_a_block_is_dropped_before_the_next_one_is_merged(folders):
    """At most the weights of one block are copies at a time."""
    pytest.importorskip("peft")
    model = load("llama", folders["llama"])
    add_lora(model, {"target_modules": "all-linear"}, dropout=False)
    in_model = {tensor.data_ptr() for tensor in model.parameters()}
    copies = defaultdict(list)  # block -> merged weights, as long as they are in memory
    for name, tensor in full_weights(model):
        if tensor.data_ptr() not in in_model:
            block = name.split(".")[2]
            copies[block].append(weakref.ref(tensor))
            earlier = [reference() for other in copies.keys() - {block} for reference in copies[other]]
            assert all(weight is None for weight in earlier), name
        del tensor
    assert [len(references) for references in copies.values()] == [7] * model.config.num_hidden_layers
