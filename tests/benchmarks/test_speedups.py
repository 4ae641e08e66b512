"""The variants of the benchmark of speedups, and its ratios."""

from __future__ import annotations

import pytest

from benchmarks.speedups import PARTS, PRECISIONS, speedup_variants, summary
from rl4lms_like.policies.arguments import PolicyArguments
from rl4lms_like.policies.speedups import all_speedups, no_speedups


def test_a_variant_has_one_speedup_none_or_all():
    variants = speedup_variants(["onednn"])
    assert list(variants) == ["none", "onednn", "all"]
    blocks = [policy["speedups"] for policy in variants.values()]
    assert blocks == [no_speedups(), no_speedups() | {"onednn": True}, all_speedups()]


def test_variants_of_the_precision_differ_in_what_is_in_bfloat16():
    arguments = [PolicyArguments(model_name="model", **policy) for policy in PRECISIONS.values()]
    used = [(policy.generation_dtype or policy.dtype, policy.dtype, policy.reference_dtype) for policy in arguments]
    assert used[0] == ("float32", "float32", "float32") and len(set(used)) == len(used)


def test_the_ratio_is_the_median_of_ratios_to_the_first_variant_within_a_round():
    def system(seconds):
        parts = dict.fromkeys(PARTS.values(), 1.0)
        return {"iterations": [{"cpu_s": s, "peak_mb": 1.0, "parts": parts} for s in seconds]}

    rows = summary({"none": system([2.0, 4.0, 10.0]), "onednn": system([1.0, 4.0, 3.0])})
    assert rows["onednn"]["cpu_times_first"] == pytest.approx(0.5) and rows["none"]["cpu_times_first"] == 1.0
    assert rows["onednn"]["cpu_s"] == 3.0 and rows["onednn"]["generate"] == 1.0
