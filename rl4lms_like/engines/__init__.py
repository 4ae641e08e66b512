"""Generation engines: what generates the responses of a policy.

from rl4lms_like.engines import ENGINES
ENGINES.resolve("vllm")     imports torch; the table does not
"""

from __future__ import annotations

from rl4lms_like.system.registry import Entry, Registry, derived_from

ENGINES = Registry(
    "engine",
    group="rl4lms_like.engines",
    misfit=derived_from("rl4lms_like.engines.base:GenerationEngine"),
    table={
        "transformers": Entry(
            "rl4lms_like.policies.generation:TextGenerator",
            "the policy's own model, by transformers' `generate`",
            arguments="rl4lms_like.engines.arguments:TransformersArguments",
        ),
        "vllm": Entry(
            ".vllm:VllmEngine",
            "a vLLM server with the policy's weights",
            arguments="rl4lms_like.engines.arguments:VllmArguments",
            needs="a vLLM server",
        ),
        "sglang": Entry(
            ".sglang:SglangEngine",
            "an SGLang server with the policy's weights",
            arguments="rl4lms_like.engines.arguments:SglangArguments",
            needs="an SGLang server",
        ),
    },
)
"""Engines by id (`alg.policy.args.engine.id`)."""

__all__ = ["ENGINES"]
