"""MDP of text generation: a state is a prompt and the response so far, an action is the next token.

arguments   EnvArguments      the `env.args` block; does not import torch
env         TextGenEnv        one episode, token by token (Gymnasium)
vec_env     TextVecEnv        n episodes in one process; `play` scores whole responses at once
stepping    play_by_stepping  the same rewards from any vectorised TextGenEnv, token by token
workers     RewardWorkers     slow Python rewards in worker processes
make        make_vec_env      builds the vectorised environment selected by the config
"""
