"""Models, servers of a protocol, and policies that generate with them.

Each test module has the fixture `server_class`, the class of its servers.
"""

from __future__ import annotations

import pytest

from rl4lms_like.testing import models
from tests.builders import make_policy


@pytest.fixture(scope="session")
def folders(tmp_path_factory, tiny_tokenizer):
    """Models with tied and with untied weights, and one with another vocabulary."""
    made = tmp_path_factory.mktemp("models")
    for family in ("gpt2", "llama"):
        models.save_model(made / family, models.make_causal_lm(family, tiny_tokenizer, scale=3.0), tiny_tokenizer)
    smaller = models.make_tokenizer(vocab_size=270)
    models.save_model(made / "smaller", models.make_causal_lm("gpt2", smaller, scale=3.0), smaller)
    return made


@pytest.fixture
def serve(server_class, folders):
    """Start a server of a model."""
    started = []

    def start(family="gpt2"):
        started.append(server_class(folders / family))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def policy_of(server_class, folders, tmp_path):
    """Build a policy with servers as its engine."""

    def build(*servers, family="gpt2", policy=None, ahead=0, **arguments):
        urls = [server.url for server in servers]
        args = {"url": urls, "weights_dir": str(tmp_path / "weights"), "max_gap": 1e-4, "backoff": 0.0}
        engine = {"id": server_class.engine, "args": args | arguments, "ahead": ahead}
        return make_policy("causal", folders / family, engine=engine, **(policy or {}))

    return build
