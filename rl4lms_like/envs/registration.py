"""Registration of the environment with Gymnasium: `gymnasium.make("rl4lms_like/TextGen-v0", ...)`."""

from __future__ import annotations

import gymnasium

ENV_ID = "rl4lms_like/TextGen-v0"


def register_envs() -> None:
    """Register the environment. Called when `rl4lms_like` is imported: Gymnasium 1.0 no longer loads plugins."""
    if ENV_ID not in gymnasium.registry:
        gymnasium.register(ENV_ID, entry_point="rl4lms_like.envs.env:TextGenEnv")
