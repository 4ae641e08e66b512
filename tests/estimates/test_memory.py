"""The memory estimate of `check`, against tensors that were really made."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, BartConfig, GPT2Config, LlamaConfig, T5Config

from rl4lms_like.algorithms.fisher import FisherMatrix, FlatParameters
from rl4lms_like.config.load import parse_config
from rl4lms_like.estimates.budget import plan_batches
from rl4lms_like.estimates.memory import (
    MemoryEstimate,
    NetworkShapes,
    estimate_memory,
    estimate_supervised_memory,
    gibibytes,
    main_memory,
)
from rl4lms_like.policies.arguments import PolicyArguments
from rl4lms_like.policies.faster_layers import fuse_activations
from rl4lms_like.policies.lora import add_lora
from rl4lms_like.policies.teacher_forcing import CausalReader, Seq2SeqReader
from rl4lms_like.preview import preview
from rl4lms_like.system.errors import ModelError
from rl4lms_like.training.averages import WeightAverage
from tests.builders import episodes_of_lengths, make_policy
from tests.configs import run_blocks, supervised_blocks

SMALL = {"vocab_size": 100, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
FAMILIES = {
    "gpt2": GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=128, **SMALL),
    "llama": LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        **SMALL,
    ),
    "t5": T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=2, **SMALL),
    "bart": BartConfig(
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        decoder_start_token_id=1,
        **SMALL,
    ),
}


@pytest.fixture
def run():
    return run_blocks()


@pytest.fixture(params=FAMILIES)
def family(request, run, tmp_path):
    """A config whose model is a tiny one of a family, and the family's transformers config."""
    config = copy.deepcopy(FAMILIES[request.param])
    config.save_pretrained(tmp_path / "model")
    causal = not config.is_encoder_decoder
    run["alg"]["policy"]["id"] = f"{'causal' if causal else 'seq2seq'}_lm_actor_critic_policy"
    run["alg"]["policy"]["args"]["model_name"] = str(tmp_path / "model")
    run["env"]["args"].update(max_prompt_length=16, max_episode_length=20)
    return run, config


def built(config):
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto_class.from_config(config).eval()
    fuse_activations(model)  # as the policy of a run without `speedups` in its config
    return model


def padded(mask):
    mask[0, 0] = 0  # a mask of ones would be dropped on the way
    return mask


def estimate(run, **policy_args):
    run["alg"]["policy"]["args"].update(policy_args)
    return estimate_memory(parse_config(run))


def test_weights_are_those_of_the_model(family):
    run, config = family
    parts = estimate(run).parts
    parameters = sum(p.numel() for p in built(config).parameters())
    assert parts["policy weights"] == parts["reference weights"] == 4 * parameters
    assert parts["critic weights"] == 4 * (parameters + config.hidden_size)  # their embeddings are tied
    assert parts["optimizer state"] == 2 * parts["gradients"]
    assert parts["gradients"] == parts["policy weights"] + parts["critic weights"]


def test_processes_split_the_weights_but_not_those_of_a_generation(family):
    run, config = family
    run["env"]["n_envs"] = 4
    whole = estimate_memory(parse_config(run), 2)
    split = estimate_memory(parse_config({**run, "distributed": {"strategy": "fsdp"}}), 2)
    for name in ("policy weights", "critic weights", "reference weights", "optimizer state", "gradients"):
        assert split.parts[name] == whole.parts[name] / 2
    assert split.parts["gathered policy"] == whole.parts["policy weights"]

    # An engine has weights of its own.
    engine = {"id": "vllm", "args": {"url": "http://127.0.0.1:1", "weights_dir": "w"}}
    if not config.is_encoder_decoder:
        run["alg"]["policy"]["args"]["engine"] = engine
        with_engine = parse_config({**run, "distributed": {"strategy": "fsdp"}})
        of_engine = estimate_memory(with_engine, 2)
        assert of_engine.parts["gathered policy"] == of_engine.parts["KV cache"] == 0
        del run["alg"]["policy"]["args"]["engine"]
    assert (
        split.parts["KV cache"] == whole.parts["KV cache"] == estimate_memory(parse_config(run)).parts["KV cache"] / 2
    )
    model = built(config)
    blocks = [m for m in model.modules() if type(m).__name__.endswith(("Block", "DecoderLayer", "EncoderLayer"))]
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
    outside = sum(p.numel() for p in model.parameters()) - sum(sizes)
    # weights and gradients of policy and critic, weights of the reference
    assert split.gathered == 4 * (3 * max(sizes) + 5 * outside)

    # whole weights of all blocks of policy and critic in place of those of two
    kept = estimate_memory(
        parse_config({**run, "distributed": {"strategy": "fsdp", "reshard_after_forward": False}}), 2
    )
    assert kept.gathered == split.gathered + 4 * (2 * sum(sizes) - 2 * max(sizes))


def test_each_network_splits_the_base_of_its_adapters(tiny_gpt2_dir):
    pytest.importorskip("peft")
    blocks = run_blocks()
    peft = {"r": 2, "target_modules": "all-linear"}
    blocks["alg"]["policy"]["args"] |= {"model_name": str(tiny_gpt2_dir), "peft": peft}
    blocks["env"]["n_envs"] = 4
    whole = estimate_memory(parse_config(blocks), 2)
    split = estimate_memory(parse_config({**blocks, "distributed": {"strategy": "fsdp"}}), 2)

    # The networks of a real policy, each of which processes would split.
    policy = make_policy("causal", tiny_gpt2_dir, peft=peft)
    sizes = {}
    for name, network in (("policy", policy.policy_model), ("critic", policy.value_model), ("ref", policy.ref_model)):
        sizes[name] = sum(weight.numel() for weight in network.parameters())
    trained = sum(weight.numel() for weight in policy.parameters() if weight.requires_grad)
    head = policy.value_head.weight.numel()
    assert split.parts["policy weights"] == 4 * sizes["policy"] / 2
    assert split.parts["critic weights"] == 4 * (sizes["critic"] + head) / 2
    assert split.parts["reference weights"] == 4 * sizes["ref"] / 2
    assert split.parts["gradients"] == 4 * trained / 2
    assert whole.parts["reference weights"] == 0 < whole.parts["critic weights"] < split.parts["critic weights"]

    # Nothing is merged; whole in the update are two blocks, and the rest of each network.
    assert split.parts["merged weights"] == 0 < whole.parts["merged weights"]
    block = sum(weight.numel() for weight in policy.policy_model.transformer.h[0].parameters())
    outside = sum(weight.numel() for weight in policy.policy_model.parameters()) - block
    assert split.gathered == 4 * (2 * block + 3 * outside)


def test_activations_are_those_a_real_forward_pass_keeps(family):
    run, config = family
    model, kept = built(config), {}
    own = {p.data_ptr() for p in model.parameters()}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    n, prompt, response = 6, 16, 20
    ids, taken = torch.ones(n, prompt + response, dtype=torch.long), torch.ones(n, response, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if config.is_encoder_decoder:
            mask = padded(torch.ones(n, prompt, dtype=torch.long))
            encoded = model.get_encoder()(input_ids=ids[:, :prompt], attention_mask=mask).last_hidden_state
            end = model.get_decoder()(
                input_ids=taken, encoder_hidden_states=encoded, encoder_attention_mask=mask, use_cache=False
            )
        else:
            ids = ids[:, :-1]  # the last token chooses none
            end = model.base_model(input_ids=ids, attention_mask=padded(torch.ones_like(ids)), use_cache=False)
    assert end is not None
    real = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    plan = plan_batches(parse_config(run))
    assert plan.micro_batch_episodes == n
    assert estimate(run).parts["activations"] == pytest.approx(2 * real, rel=0.02)


def test_the_cache_is_the_one_that_generation_fills(family):
    run, config = family
    model = built(config)
    n, prompt, response = 10, 16, 20
    ids = torch.ones(n, prompt, dtype=torch.long)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=response,
        min_new_tokens=response,
        return_dict_in_generate=True,
    )
    cache = out.past_key_values
    parts = [cache.self_attention_cache, cache.cross_attention_cache] if config.is_encoder_decoder else [cache]
    real = sum(t.nbytes for part in parts for layer in part.layers for t in (layer.keys, layer.values))
    assert estimate(run).parts["KV cache"] == pytest.approx(real, rel=0.05)


def test_each_lever_lowers_what_it_is_said_to_lower(family):
    run, _ = family
    whole = estimate(run)
    shared = estimate(run, critic="shared")
    assert shared.peak - shared.parts["process"] < whole.peak - whole.parts["process"]
    assert (
        estimate(run, critic="separate", gradient_checkpointing=True).parts["activations"]
        < (whole.parts["activations"])
    )
    run["alg"]["args"]["micro_batch_size"] = 20
    split = estimate(run, gradient_checkpointing=False)
    assert split.parts["activations"] < 0.5 * whole.parts["activations"]
    assert split.other_gradients == split.parts["gradients"]
    run["alg"]["kl_div"] = {"coeff": 0}
    assert estimate(run).parts["reference weights"] == 0


def test_half_precision_keeps_less(run, tmp_path):
    GPT2Config(n_layer=2, n_embd=64, n_head=2, **SMALL).save_pretrained(tmp_path / "model")
    arguments = PolicyArguments(model_name=str(tmp_path / "model"))
    plan = plan_batches(parse_config(run))
    halved = dataclasses.replace(arguments, dtype="bfloat16")
    full, half = (
        NetworkShapes(str(tmp_path / "model"), each, causal=True).activations(plan) for each in (arguments, halved)
    )
    assert half < 0.8 * full


def test_a_fused_activation_keeps_less(run, tmp_path):
    GPT2Config(n_layer=2, n_embd=64, n_head=2, **SMALL).save_pretrained(tmp_path / "model")
    plan = plan_batches(parse_config(run))
    kept = []
    for is_fused in (False, True):
        arguments = PolicyArguments(model_name=str(tmp_path / "model"), speedups={"fused_activations": is_fused})
        kept.append(NetworkShapes(arguments.model_name, arguments, causal=True).activations(plan))
    assert kept[1] < 0.8 * kept[0]


def test_a_model_that_is_out_of_reach_is_named(run):
    run["alg"]["policy"]["args"]["model_name"] = "no-such-owner/no-such-model"
    with pytest.raises(ModelError, match="'no-such-owner/no-such-model'"):
        estimate_memory(parse_config(run))


@pytest.mark.parametrize(("available", "word"), [(1300, "fits"), (1000, "tight"), (899, "does not fit")])
def test_the_verdict_leaves_room_for_the_allocator(available, word):
    parts = dict.fromkeys(["policy weights", "activations", "logits", "gradients", "KV cache"], 0)
    memory = MemoryEstimate(parts | {"policy weights": 1000 * 2**20}, 0, "cpu", available * 2**20)
    assert memory.peak == 1000 * 2**20
    assert memory.lower <= memory.peak <= memory.upper
    assert memory.verdict.startswith(word)


def test_the_upper_number_covers_rollouts_of_the_shortest_responses(family):
    run, _ = family
    long_prompts = {"max_prompt_length": 100, "max_episode_length": 20, "terminate_on_eos": True}
    run["env"] = {"n_envs": 10, "args": long_prompts}
    run["alg"]["args"] |= {"n_steps": 20, "batch_size": 200}
    memory = estimate(run)
    assert memory.shortest is not None

    # Ten times as many responses, each with a prompt of its own, in one pass.
    assert memory.shortest.parts["activations"] > 10 * memory.parts["activations"]
    assert memory.upper > memory.shortest.peak > memory.peak > memory.lower

    # In passes of a fixed number of tokens they need no more than long ones.
    run["alg"]["args"]["micro_batch_size"] = 1200
    split = estimate(run)
    assert split.parts["activations"] == memory.parts["activations"]
    assert split.shortest.parts["activations"] < 1.1 * split.parts["activations"]


def test_responses_that_cannot_be_short_are_not_covered(family):
    run, _ = family
    run["env"]["args"]["terminate_on_eos"] = False
    memory = estimate(run)
    assert memory.shortest.parts == memory.parts


@pytest.mark.parametrize("shares_prompts", [True, False])
def test_activations_of_groups_are_those_a_real_forward_pass_keeps(family, shares_prompts):
    run, config = family
    run["env"] = {"n_envs": 8, "args": {"max_prompt_length": 16, "max_episode_length": 20}}
    run["alg"] |= {"id": "grpo", "args": {"n_steps": 20, "batch_size": 160, "group_size": 4}}
    plan = plan_batches(parse_config(run), shares_prompts=shares_prompts)
    model, sizes = built(config), {}
    reader = (Seq2SeqReader if config.is_encoder_decoder else CausalReader)(model)
    reader.shares_prompts = shares_prompts
    episodes = episodes_of_lengths([20] * 8, prompt_lengths=[16] * 8, vocab_size=100, side=reader.prompt_side)
    episodes.prompt_mask[0, 0 if reader.prompt_side == "left" else -1] = False
    episodes = dataclasses.replace(episodes, prompt_rows=torch.arange(8) // 4)
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    alive = []

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        assert len(reader.states(episodes)) == 160
    name = str(run["alg"]["policy"]["args"]["model_name"])
    shapes = NetworkShapes(name, PolicyArguments(model_name=name), causal=not config.is_encoder_decoder)
    assert shapes.activations(plan) == pytest.approx(sum(sizes.values()), rel=0.1)


def test_sizes_are_written_for_people():
    assert [gibibytes(size) for size in (3 * 2**29, 12 * 2**20, 30 * 2**10)] == ["1.50 GiB", "12 MiB", "30 KiB"]
    assert main_memory() > 2**20


def test_trpo_keeps_the_graphs_of_its_fisher_products_and_no_state_for_the_policy(family):
    run, config = family
    config._attn_implementation = "eager"
    model, kept = built(config), {}
    model.set_attn_implementation("eager")
    reader = (Seq2SeqReader if config.is_encoder_decoder else CausalReader)(model)
    episodes = episodes_of_lengths(
        [20] * 3, prompt_lengths=[15, 16, 16], vocab_size=100, side=reader.prompt_side
    )  # fmt: skip
    reader.probe_head(episodes)
    own = {p.data_ptr() for p in model.parameters()}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        fisher = FisherMatrix(reader.action_logits, [episodes], FlatParameters(model.parameters()))
    assert fisher.n_tokens == 60
    real = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    ppo = estimate(run).parts
    run["alg"] |= {"id": "trpo", "args": {"n_steps": 6, "micro_batch_size": 3 * (16 + 20)}}
    parts = estimate(run).parts
    assert 0.8 * real < parts["activations"] < 2 * real
    assert parts["optimizer state"] == 2 * parts["critic weights"] < ppo["optimizer state"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_of_the_program_that_starts_a_check_is_not_counted(run, tmp_path):
    """Linux hands the peak of a process on to those that it starts."""
    FAMILIES["gpt2"].save_pretrained(tmp_path / "model")
    run["alg"]["policy"]["args"]["model_name"] = str(tmp_path / "model")
    (tmp_path / "run.yml").write_text(yaml.safe_dump(run))
    script = "import sys; from rl4lms_like.config.load import load_config as load;"
    script += "from rl4lms_like.estimates.memory import estimate_memory as estimate;"
    script += "print(estimate(load(sys.argv[1])).parts['process'])"

    ballast = bytearray(b"x" * 2**30)
    command = [sys.executable, "-c", script, str(tmp_path / "run.yml")]
    started = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(started.stdout) < len(ballast)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_separate_adapters_raise_only_the_upper_number(family, dtype):
    run, config = family
    whole = estimate(run, dtype=dtype)
    target = "q" if config.model_type == "t5" else "c_attn" if config.model_type == "gpt2" else "q_proj"
    peft = {"r": 2, "target_modules": [target]}
    merged = estimate(run, dtype=dtype, peft=peft)
    assert (merged.freed_by_adapters == 0) == (dtype == "float32")
    adapters = estimate(run, dtype=dtype, peft=peft, speedups={"merged_adapters": False})
    assert whole.freed_by_adapters == 0 < adapters.freed_by_adapters <= adapters.parts["activations"]
    plain = dataclasses.replace(adapters, freed_by_adapters=0, shortest=None)
    assert adapters.lower == plain.lower
    assert dataclasses.replace(adapters, shortest=None).upper == plain.upper + adapters.freed_by_adapters


@pytest.mark.parametrize(("tensors", "freed"), [(100, 100), (200, 128), (1000, 300)])
def test_small_runs_have_much_freed_memory_and_large_ones_a_part_of_their_tensors(tensors, freed):
    parts = dict.fromkeys(["activations", "logits", "gradients", "KV cache"], 0)
    parts |= {"process": 2**30, "policy weights": tensors * 2**20}
    memory = MemoryEstimate(parts, 0, "cpu", 2**40)
    assert memory.upper == 2**30 + (tensors + freed) * 2**20


# --- supervised runs -------------------------------------------------------------------------------------------------


def supervised_estimate(folder, alg=None, packed=None, n_processes=1, **training):
    blocks = supervised_blocks()
    if n_processes > 1:
        blocks["distributed"] = {"strategy": "fsdp"}
    blocks["alg"] |= {"model_name": str(folder), "training_args": training, "model_type": "causal", **(alg or {})}
    return estimate_supervised_memory(
        parse_config(blocks), prompt_tokens=6, response_tokens=4, packed=packed, n_processes=n_processes
    )


def test_packed_rows_need_the_memory_of_their_positions(tiny_gpt2_dir):
    options = {"per_device_train_batch_size": 12}
    vocab_size = AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir).config.vocab_size
    padded = supervised_estimate(tiny_gpt2_dir, **options)  # 12 rows of 10 tokens
    packed = supervised_estimate(tiny_gpt2_dir, packed=(4, 15), **options)
    assert packed.parts["logits"] == 4 * 4 * 4 * 15 * vocab_size == padded.parts["logits"] / 2
    assert 0.45 < packed.parts["activations"] / padded.parts["activations"] < 0.6
    for part in ("model weights", "gradients", "KV cache"):
        assert packed.parts[part] == padded.parts[part]


def test_a_supervised_run_needs_one_trained_network_and_logits_of_whole_texts(tiny_gpt2_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir)
    n_weights = sum(weight.numel() for weight in model.parameters())
    estimate = supervised_estimate(tiny_gpt2_dir, per_device_train_batch_size=3)
    assert estimate.parts["model weights"] == estimate.parts["gradients"] == 4 * n_weights
    assert estimate.parts["optimizer state"] == 8 * n_weights
    assert estimate.parts["logits"] == 4 * 4 * 3 * 10 * model.config.vocab_size
    assert estimate.parameters == f"{n_weights:,} of {n_weights:,}"

    larger = supervised_estimate(tiny_gpt2_dir, per_device_train_batch_size=6)
    assert larger.parts["activations"] == pytest.approx(2 * estimate.parts["activations"], rel=0.05)
    update, larger_update = (each.update - each.parts["process"] for each in (estimate, larger))
    assert update < larger_update
    assert larger.rollout - larger.parts["process"] == estimate.rollout - estimate.parts["process"]


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("peft", [None, {"r": 2, "target_modules": "all-linear"}])
def test_processes_of_a_supervised_run_split_its_weights_but_not_those_of_a_generation(reshards, peft, deeper_gpt2_dir):
    if peft is not None:
        pytest.importorskip("peft")
    blocks = supervised_blocks()
    blocks["alg"] |= {"model_name": str(deeper_gpt2_dir), "model_type": "causal", "training_args": {}, "peft": peft}
    config = parse_config({**blocks, "distributed": {"strategy": "fsdp", "reshard_after_forward": reshards}})
    of_each = {}
    for n in (1, 2):
        of_each[n] = estimate_supervised_memory(config, prompt_tokens=6, response_tokens=4, n_processes=n)
    alone, each = of_each[1], of_each[2]
    assert not alone.gathered and not alone.parts["gathered policy"]
    for name in ("model weights", "optimizer state", "gradients", "KV cache"):
        assert each.parts[name] == alone.parts[name] / 2
    assert each.parts["gathered policy"] == alone.parts["model weights"]
    assert each.parts["activations"] == pytest.approx(alone.parts["activations"] / 2, rel=0.05)  # of half a batch

    # Whole weights of two blocks, or of all of them, and of what is in no block; gradients of one block and of that.
    model = AutoModelForCausalLM.from_pretrained(deeper_gpt2_dir)
    if peft is not None:
        add_lora(model, peft, dropout=False)
    sizes = [sum(weight.numel() for weight in block.parameters()) for block in model.transformer.h]
    outside = sum(weight.numel() for weight in model.parameters()) - sum(sizes)
    weights = (2 * max(sizes) if reshards else sum(sizes)) + outside
    gradients = max(sizes) + outside if peft is None else 0
    assert len(sizes) > 1 and each.gathered == 4 * (weights + gradients)

    # Without texts, the model is never whole.
    silent = {**blocks["train_evaluation"], "generate": False, "metrics": []}
    quiet = parse_config({**blocks, "train_evaluation": silent, "distributed": {"strategy": "fsdp"}})
    estimate = estimate_supervised_memory(quiet, prompt_tokens=6, response_tokens=4, n_processes=2)
    assert estimate.parts["gathered policy"] == 0


def test_moments_of_a_supervised_run_may_have_8_bits(tiny_gpt2_dir):
    whole = supervised_estimate(tiny_gpt2_dir)
    in_8_bits = supervised_estimate(tiny_gpt2_dir, optim="adamw_torch_8bit")
    sizes = [weight.numel() for weight in AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir).parameters()]
    assert whole.parts["optimizer state"] == 8 * sum(sizes)

    # In 8 bits: a byte of each number, scales of 256 of them, and a table of 256 values.
    large = [size for size in sizes if size >= 4096 and size % 256 == 0]
    saved = sum(2 * (4 * size - size - size // 256 * 4 - 4 * 256) for size in large)
    assert in_8_bits.parts["optimizer state"] == whole.parts["optimizer state"] - saved
    assert saved > 0

    # Two processes split all but the tables. Of three, none has whole blocks: 43 of 128 rows, and 8 have a block.
    split = supervised_estimate(tiny_gpt2_dir, n_processes=2, optim="adamw_torch_8bit")
    tables = 2 * 4 * 256 * len(large)
    assert split.parts["optimizer state"] == (in_8_bits.parts["optimizer state"] - tables) // 2 + tables
    split = supervised_estimate(tiny_gpt2_dir, n_processes=3, optim="adamw_torch_8bit")
    assert split.parts["optimizer state"] == whole.parts["optimizer state"] // 3


def test_logits_above_the_budget_are_two_buffers_of_learned_tokens(tiny_gpt2_dir):
    vocab_size = AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir).config.vocab_size
    n_rows = 2**20 // (4 * 10 * vocab_size) + 1  # the texts of 10 tokens exceed 1 MiB, their 4 learned ones do not
    few = {"per_device_train_batch_size": n_rows}
    many = {"per_device_train_batch_size": 10 * n_rows}
    limited = supervised_estimate(tiny_gpt2_dir, {"logits_budget_mb": 1}, **few)
    assert limited.parts["logits"] == 2 * 4 * 4 * n_rows * vocab_size
    assert supervised_estimate(tiny_gpt2_dir, {"logits_budget_mb": 1}, **many).parts["logits"] == 2 * 2**20
    for whole in ({}, {"logits_budget_mb": None}):
        assert supervised_estimate(tiny_gpt2_dir, whole, **few).parts["logits"] == 4 * 4 * 10 * n_rows * vocab_size

    # Smoothed labels need whole ones, for any budget.
    smoothed = supervised_estimate(tiny_gpt2_dir, label_smoothing_factor=0.1, per_device_train_batch_size=10**5)
    assert smoothed.parts["logits"] == 4 * 4 * 10 * 10**5 * vocab_size


def test_adapters_train_few_weights_and_checkpointing_has_all_gradients_at_once(tiny_gpt2_dir):
    pytest.importorskip("peft")
    whole = supervised_estimate(tiny_gpt2_dir)
    lora = supervised_estimate(tiny_gpt2_dir, {"peft": {"r": 2}})
    assert lora.parts["optimizer state"] < 0.2 * whole.parts["optimizer state"]
    checkpointed = supervised_estimate(tiny_gpt2_dir, gradient_checkpointing=True)
    assert checkpointed.other_gradients == whole.parts["gradients"] > whole.other_gradients


@pytest.mark.parametrize(("average", "n_copies"), [(None, 0), ({}, 1), ({"bias_power": 0.2}, 3)])
def test_averaged_weights_are_copies_of_the_trained_ones(average, n_copies, tiny_gpt2_dir):
    blocks = run_blocks()
    blocks["alg"]["policy"]["args"]["model_name"] = str(tiny_gpt2_dir)
    blocks["train_evaluation"]["average"] = average
    config = parse_config(blocks)
    model = AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir)
    real = 0
    if average is not None:
        real = sum(tensor.nbytes for tensor in WeightAverage(config.train_evaluation.average, model).tensors().values())
    n_bytes = 4 * n_copies * sum(weight.numel() for weight in model.parameters())
    assert estimate_memory(config).parts["averaged weights"] == real == n_bytes


@pytest.mark.parametrize(
    "changes", [{}, {"critic": "shared"}, {"speedups": {"merged_adapters": False}}, {"peft": None}]
)
def test_merged_weights_are_those_of_a_policy(changes, tiny_gpt2_dir):
    pytest.importorskip("peft")
    blocks = run_blocks()
    arguments = {"peft": {"r": 2, "target_modules": "all-linear"}, **changes}
    blocks["alg"]["policy"]["args"] |= {"model_name": str(tiny_gpt2_dir), **arguments}
    estimate = estimate_memory(parse_config(blocks))

    policy = make_policy("causal", tiny_gpt2_dir, **arguments)
    policy.evaluate_actions(episodes_of_lengths([3, 2]))
    merged = sum(weight.nbytes for adapters in policy.merged_adapters.values() for weight in adapters.weights)
    assert estimate.parts["merged weights"] == merged
    is_merged = changes in ({}, {"critic": "shared"})
    assert (merged > 0) == is_merged


def test_long_texts_in_every_step_need_more_than_the_responses(tiny_gpt2_dir):
    blocks = run_blocks()
    blocks["alg"]["policy"]["args"]["model_name"] = str(tiny_gpt2_dir)
    plain = estimate_memory(parse_config(blocks))
    data = {"id": "dummy_pool", "args": {"prompt": "x"}}

    def update(estimate):  # that of the process changes from call to call
        return estimate.update - estimate.parts["process"]

    def with_texts(n_processes=1, **fields):
        blocks["alg"]["ptx"] = {"data": data, "coeff": 0.1, "max_length": 64, **fields}
        return estimate_memory(parse_config(blocks), n_processes)

    # Two buffers of 63 tokens of each text, and all gradients at once.
    vocab_size = AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir).config.vocab_size
    many = with_texts(batch_size=60)
    assert many.parts["logits"] == 2 * 4 * 60 * 63 * vocab_size > plain.parts["logits"]
    assert many.other_gradients == many.parts["gradients"] and update(many) > update(plain)
    assert many.parts["activations"] == pytest.approx(2 * with_texts(batch_size=30).parts["activations"], rel=0.05)
    assert with_texts(2, batch_size=60).parts["logits"] == 2 * 4 * 30 * 63 * vocab_size

    # Neither few short texts, nor those that have no weight, nor responses of the shortest length.
    for other in (with_texts(batch_size=1, max_length=2), with_texts(batch_size=60, coeff=0)):
        assert update(other) == update(plain)
    assert update(many.shortest) == update(plain.shortest)


def test_the_check_prints_the_memory_and_the_trained_parameters_of_a_supervised_run(tiny_gpt2_dir):
    blocks = supervised_blocks()
    blocks["tokenizer"]["model_name"] = blocks["alg"]["model_name"] = str(tiny_gpt2_dir)
    blocks["alg"]["model_type"] = "causal"
    blocks["datapool"] = {"id": "film_opinions", "args": {"n_train": 6, "n_eval": 3}}
    (training,) = [part for part in preview(parse_config(blocks)) if part.startswith("# training")]
    for name in ("trainable parameters", "model weights", "peak of the update", "fits: "):
        assert name in training


def test_the_check_prints_the_trained_parameters_of_an_rl_run(tiny_gpt2_dir):
    blocks = run_blocks()
    blocks["alg"]["policy"]["args"]["model_name"] = str(tiny_gpt2_dir)
    blocks["alg"]["policy"]["args"]["critic"] = "shared"
    parameters = estimate_memory(parse_config(blocks)).parameters
    n_weights = sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir).parameters())
    assert parameters.startswith(f"{n_weights:,} of {n_weights:,} of the policy, ") and "critic" in parameters


def test_the_memory_of_a_gpu_that_this_machine_does_not_have(family):
    run, _ = family
    here = estimate(run)
    on_gpu = estimate_memory(parse_config(run), gpu_bytes=10**9)
    assert on_gpu.verdict.startswith("fits: ") and on_gpu.verdict.endswith("of 954 MiB GPU memory")
    assert on_gpu.parts["process"] == 0 < here.parts["process"]
    assert on_gpu.parts["policy weights"] == here.parts["policy weights"]
    assert estimate_memory(parse_config(run), gpu_bytes=10**5).verdict.startswith("does not fit: ")
