"""MDP of text generation: a state is a prompt and the response so far, an action is the next token.

arguments   EnvArguments      the `env.args` block; does not import torch
env         TextGenEnv        one episode, token by token (Gymnasium)
vec_env     TextVecEnv        n episodes in one process; `play` scores whole responses at once
stepping    play_by_stepping  the same rewards from any vectorised TextGenEnv, token by token
            make_vec_env      builds the vectorised environment selected by the config
workers     RewardWorkers     slow Python rewards in worker processes
"""

import gymnasium

ENV_ID = "rl4lms_like/TextGen-v0"


def register_envs() -> None:
    """Register `gymnasium.make("rl4lms_like/TextGen-v0", ...)`, when `rl4lms_like` is imported.

    Gymnasium 1.0 no longer loads plugins.
    """
    if ENV_ID not in gymnasium.registry:
        gymnasium.register(ENV_ID, entry_point="rl4lms_like.envs.env:TextGenEnv")
