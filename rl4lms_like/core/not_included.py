"""Features that are not included, and what to use instead: one table for errors of configs and for a page.

    deepspeed: zero.json      unknown key; not included: DeepSpeed; `torchrun` starts ... (docs/not_included.md)

The page is made from it: `python -m rl4lms_like.core.not_included docs/not_included.md`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from rl4lms_like.core.marked_parts import with_part

PAGE = "docs/not_included.md"


class NotIncluded(NamedTuple):
    """Row of the table.

    Attributes:
        name: what is not included.
        instead: what to use instead.
        keys: names of its settings elsewhere, separated by spaces.
    """

    name: str
    instead: str
    keys: str = ""

    @property
    def sentence(self) -> str:
        """The message of an error."""
        return f"not included: {self.name}; {self.instead}"


GGUF_FILES = NotIncluded(
    "GGUF files as models",
    "convert the file to a folder of safetensors with transformers, as docs/quantization.md shows",
    "gguf_file",
)
NOT_INCLUDED = (
    NotIncluded(
        "DeepSpeed",
        "`torchrun` starts several processes, and `distributed.strategy: fsdp` splits weights, gradients and optimizer "
        "state over them",
        "deepspeed deepspeed_plugin ds3_gather_for_generation zero_stage zpg adam_offload deepcompile overlap_comm "
        "grad_accum_dtype disable_ds use_universal_ckpt",
    ),
    NotIncluded(
        "tensor and sequence parallelism, and ring attention",
        "`distributed.strategy: fsdp` splits a model that one GPU cannot hold, and `gradient_checkpointing` and "
        "`logits_budget_mb` limit the memory of long texts; a vLLM server may use tensor parallelism",
        "parallelism_config tensor_parallel_size ring_attn_size ring_attn_head_stride context_parallel_size",
    ),
    NotIncluded(
        "placing the models of a run on separate groups of GPUs",
        "each process holds all of them; `critic_device` and `reference_device` name another GPU for one model, and "
        "`engine: {id: vllm}` generates on other GPUs",
        "actor.num_nodes actor.num_gpus_per_node critic.num_nodes critic.num_gpus_per_node ref.num_nodes "
        "ref.num_gpus_per_node reward.num_nodes reward.num_gpus_per_node train.colocate_all train.colocate_actor_ref "
        "train.colocate_critic_reward ref.offload reward.offload",
    ),
    NotIncluded(
        "vLLM within the training process",
        "start `vllm serve` and set `engine: {id: vllm}` to its address; its options are those of the server",
        "vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_max_model_length vllm_enable_sleep_mode "
        "vllm_model_impl vllm_group_port vllm.gpu_memory_utilization vllm.tensor_parallel_size vllm.enable_sleep "
        "vllm.enable_prefix_caching vllm.enforce_eager vllm.sync_backend vllm.sync_with_ray vllm_generate_batch_size",
    ),
    NotIncluded(
        "training audio and video models",
        "train on texts, such as transcripts, and on images, such as single frames",
        "audio_key audio_column video_key video_column",
    ),
    NotIncluded(
        "Unsloth",
        "`peft` with `dtype: bfloat16`, `gradient_checkpointing` and `compile` save memory and time for any model",
        "use_unsloth unsloth",
    ),
    NotIncluded(
        "mergekit",
        "`rl4lms-like merge` writes a run's model with whole weights, which mergekit reads",
        "mergekit_config merge_config",
    ),
    NotIncluded(
        "PairRM and the judge classes of TRL",
        "the reward `llm_judge` with `compare_with: responses` compares the responses to a prompt, and `reward_model` "
        "is trained on pairs",
        "judge judge_model pairrm",
    ),
    NotIncluded(
        "methods of PEFT other than LoRA",
        "`peft` trains LoRA, also with `use_rslora` and `use_dora`",
        "prompt_tuning prefix_tuning ia3 adalora",
    ),
    NotIncluded(
        "loading checkpoints of TRL with a value head (`AutoModelForCausalLMWithValueHead`)",
        "save its `pretrained_model`; the critic begins with the weights of the policy, and `rl4lms-like "
        "pretrain-critic` trains it before a run",
        "v_head_init_strategy summary_dropout_prob value_head_prefix",
    ),
    NotIncluded(
        "device maps of transformers",
        "`device` names the device of a run, and `distributed.strategy: fsdp` splits a large model",
        "device_map max_memory",
    ),
    NotIncluded(
        "reading `.env` files",
        "export the variables before the command, for example with `set -a; . ./.env; set +a`",
        "env_file dotenv",
    ),
    NotIncluded("training in FP8", "use `dtype: bfloat16`", "fp8 fp8_backend"),
    GGUF_FILES,
)
"""Each feature once; `accelerate launch` is refused with a message of its own (`system.ranks`)."""


def with_table(page: str) -> str:
    """Return the page with its table made from the rows above; it is between two comments."""
    lines = ["| not included | instead | keys that are refused with this sentence |", "|---|---|---|"]
    for row in NOT_INCLUDED:
        keys = ", ".join(f"`{key}`" for key in row.keys.split())
        lines.append(f"| {row.name} | {row.instead} | {keys} |")
    return with_part(page, "not included", "\n".join(lines) + "\n")


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(with_table(file.read_text(encoding="utf-8")), encoding="utf-8")
