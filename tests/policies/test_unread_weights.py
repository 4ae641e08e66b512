"""Models whose weights are read after they have been split: what they have, and when they are loaded whole instead."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2LMHeadModel, GPT2Model

from rl4lms_like.policies.loading import auto_class_of, load_model, load_model_config
from rl4lms_like.policies.lora import add_lora, copy_sharing_frozen
from rl4lms_like.policies.low_precision import store_in_bfloat16
from rl4lms_like.policies.sharding import require_values
from rl4lms_like.policies.unread_weights import UnreadTensor, tensors_in_parts, unread_checkpoint
from rl4lms_like.system.errors import ModelError
from rl4lms_like.testing import models
from tests.expert_models import save_experts


def loaded(folder: Path, *, unread: bool):
    name = str(folder)
    model, _ = load_model(auto_class_of(load_model_config(name)), name, unread=unread)
    return model


def values(model) -> dict[str, torch.Tensor]:
    """Return all weights and buffers, tied ones under each name, after reading those that are not read."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    read = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, UnreadTensor):
            # As two processes would read it.
            half = (len(tensor) + 1) // 2
            read[name] = torch.cat([tensor.rows(0, half), tensor.rows(half, len(tensor))])
        else:
            read[name] = tensor.detach()
    return read


def assert_same(model, whole) -> None:
    expected = values(whole)
    result = values(model)
    assert result.keys() == expected.keys()
    for name, tensor in expected.items():
        assert result[name].dtype == tensor.dtype and torch.equal(result[name], tensor), name
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in whole.named_parameters()]
    assert model.name_or_path == whole.name_or_path
    assert vars(model.config) == vars(whole.config)
    assert vars(model.generation_config) == vars(whole.generation_config)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "opt", "t5", "bart"])
def test_a_model_without_values_is_otherwise_that_of_a_whole_load(family, tmp_path):
    if family in ("t5", "bart"):
        tokenizer = models.make_tokenizer(append_eos=True)
        model = models.make_seq2seq_lm(family, tokenizer, n_layers=1)
    else:
        tokenizer = models.make_tokenizer()
        model = models.make_causal_lm(family, tokenizer, n_layers=1)
    models.save_model(tmp_path, model, tokenizer)

    model = loaded(tmp_path, unread=True)
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    assert matrices and all(isinstance(weight, UnreadTensor) for weight in matrices)
    assert_same(model, loaded(tmp_path, unread=False))


def in_several_files(model, folder: Path) -> None:
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2


def in_bfloat16(model, folder: Path) -> None:
    model.bfloat16().save_pretrained(folder)


def without_prefix(model, folder: Path) -> None:
    model.save_pretrained(folder)
    GPT2Model.from_pretrained(folder).save_pretrained(folder)
    assert "wte.weight" in load_file(folder / "model.safetensors")


def without_generation_config(model, folder: Path) -> None:
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()


@pytest.mark.parametrize("save", [in_several_files, in_bfloat16, without_prefix, without_generation_config])
def test_any_layout_of_the_files_can_be_read_later(save, tiny_gpt2_dir, tmp_path):
    save(GPT2LMHeadModel.from_pretrained(tiny_gpt2_dir), tmp_path)
    model = loaded(tmp_path, unread=True)
    assert isinstance(model.lm_head.weight, UnreadTensor) and model.lm_head.weight is model.transformer.wte.weight
    assert_same(model, loaded(tmp_path, unread=False))


def experts(folder: Path, t5: Path, gpt2: Path) -> None:
    """transformers stacks the experts of a layer."""
    save_experts(folder, "mixtral", models.make_tokenizer())


def both_names_of_a_tied_weight(folder: Path, t5: Path, gpt2: Path) -> None:
    """transformers compares the values, and ties equal ones."""
    shutil.copytree(gpt2, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def other_values_of_a_tied_weight(folder: Path, t5: Path, gpt2: Path) -> None:
    shutil.copytree(t5, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["shared.weight"] + 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def pickles(folder: Path, t5: Path, gpt2: Path) -> None:
    shutil.copytree(gpt2, folder, dirs_exist_ok=True)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    "save",
    [experts, both_names_of_a_tied_weight, other_values_of_a_tied_weight, pickles],
    ids=lambda save: save.__name__,
)
def test_a_model_is_loaded_whole_where_values_are_needed(save, tiny_t5_dir, tiny_gpt2_dir, tmp_path, caplog):
    save(tmp_path, tiny_t5_dir, tiny_gpt2_dir)
    model = loaded(tmp_path, unread=True)
    require_values(model)
    assert "CONVERSION" not in caplog.text
    assert_same(model, loaded(tmp_path, unread=False))


def test_an_incomplete_checkpoint_has_the_error_of_a_whole_load(tiny_gpt2_dir, tmp_path):
    shutil.copytree(tiny_gpt2_dir, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["transformer.h.0.mlp.c_fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"no weights for transformer\.h\.0\.mlp\.c_fc\.weight"):
        loaded(tmp_path, unread=True)


def test_a_torn_file_has_the_error_of_a_whole_load(tiny_gpt2_dir, tmp_path):
    shutil.copytree(tiny_gpt2_dir, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ModelError, match="SafetensorError"):
        loaded(tmp_path, unread=True)


def test_adapters_have_the_values_of_those_on_a_whole_model(tiny_gpt2_dir):
    pytest.importorskip("peft")
    adapters = []
    for unread in (True, False):
        model = loaded(tiny_gpt2_dir, unread=unread).requires_grad_(False)
        torch.manual_seed(0)
        add_lora(model, {"target_modules": "all-linear"}, dropout=False)
        adapters.append({name: weight for name, weight in model.named_parameters() if weight.requires_grad})
    assert adapters[0].keys() == adapters[1].keys()
    assert all(torch.equal(adapters[0][name], weight) for name, weight in adapters[1].items())


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_copy_reads_the_same_values(is_frozen, tiny_gpt2_dir):
    model = loaded(tiny_gpt2_dir, unread=True).requires_grad_(not is_frozen)
    copied = copy_sharing_frozen(model)
    assert (copied.lm_head.weight is model.lm_head.weight) == is_frozen
    assert copied.lm_head.weight is copied.transformer.wte.weight
    assert copied.lm_head.weight.requires_grad == (not is_frozen)
    assert_same(copied, loaded(tiny_gpt2_dir, unread=False))


def test_weights_of_a_reference_in_bfloat16_are_rounded_as_those_of_a_whole_load(tiny_gpt2_dir):
    whole = loaded(tiny_gpt2_dir, unread=False).requires_grad_(False)
    model = loaded(tiny_gpt2_dir, unread=True).requires_grad_(False)
    for reference in (whole, model):
        store_in_bfloat16(reference)
    weight = model.transformer.h[0].mlp.c_fc.weight
    assert isinstance(weight, UnreadTensor) and weight.dtype == torch.bfloat16
    assert_same(model, whole)


def test_nothing_is_computed_from_values_that_have_not_been_read(tiny_gpt2_dir):
    weight = loaded(tiny_gpt2_dir, unread=True).lm_head.weight
    for compute in (lambda: weight + 1, lambda: weight.sum(), lambda: torch.stack([weight]), lambda: weight.T):
        with pytest.raises(RuntimeError, match="which have not been read"):
            compute()


@pytest.mark.parametrize("device", ["unread", "meta"])
def test_a_weight_without_values_is_an_error(device, tiny_gpt2_dir):
    model = loaded(tiny_gpt2_dir, unread=False)
    weight = loaded(tiny_gpt2_dir, unread=True).transformer.wpe.weight
    model.transformer.wpe.weight = (
        weight if device == "unread" else torch.nn.Parameter(torch.empty(2, 2, device="meta"))
    )
    with pytest.raises(ModelError, match=r"have not been read: transformer\.wpe\.weight$"):
        require_values(model)


def test_a_quantized_checkpoint_is_not_read_later(tiny_gpt2_dir, tmp_path):
    config = load_model_config(str(tiny_gpt2_dir))
    assert unread_checkpoint(str(tiny_gpt2_dir), config) is not None
    config.quantization_config = json.loads('{"quant_method": "fp8"}')
    assert unread_checkpoint(str(tiny_gpt2_dir), config) is None


def test_rows_of_several_files_follow_each_other(tmp_path):
    """Also where a file has none, as that of a process with a weight that has fewer rows than there are processes."""
    weight = torch.arange(12.0).view(3, 4)
    files = []
    for number, rows in enumerate((weight[:2], weight[2:2], weight[2:])):
        files.append(tmp_path / f"{number}.safetensors")
        save_file({"weight": rows.contiguous(), "bias": torch.full((1,), float(number))}, files[-1])
    tensors = tensors_in_parts(files)
    assert tensors["weight"].shape == (3, 4)
    for start in range(4):
        for end in range(start, 4):
            assert torch.equal(tensors["weight"].rows(start, end), weight[start:end])
    assert tensors["bias"].rows(0, 3).tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("other", [{"bias": torch.zeros(2, 4)}, {"weight": torch.zeros(2, 5)}])
def test_parts_that_do_not_belong_together_are_an_error(other, tmp_path):
    save_file({"weight": torch.zeros(2, 4)}, tmp_path / "1.safetensors")
    save_file(other, tmp_path / "2.safetensors")
    with pytest.raises(ValueError, match="rows of"):
        tensors_in_parts([tmp_path / "1.safetensors", tmp_path / "2.safetensors"])
