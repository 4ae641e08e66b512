"""The tokenizer that is saved with a model does not depend on how it was loaded."""

from __future__ import annotations

import json

from rl4lms_like.policies.loading import load_tokenizer


def test_a_tokenizer_that_was_loaded_offline_is_saved_without_this_restriction(tmp_path, tiny_gpt2_dir):
    configs = []
    for is_offline in (False, True):
        load_tokenizer(str(tiny_gpt2_dir), local_files_only=is_offline).save_pretrained(tmp_path)
        configs.append(json.loads((tmp_path / "tokenizer_config.json").read_text()))
    assert configs[0] == configs[1]
    assert "local_files_only" not in configs[1]
