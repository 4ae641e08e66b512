"""The MDP of text: a state is a prompt and the response so far, an action is the next token.

arguments   EnvArguments      the `env.args` block; loads no torch
env         TextGenEnv        one episode, token by token (Gymnasium)
vec_env     TextVecEnv        n episodes in one process; `play` scores whole responses at once
stepping    play_by_stepping  the same rewards from any vectorised TextGenEnv, token by token
workers     RewardWorkers     slow Python rewards in processes of their own
make        make_vec_env      which of these a config asks for
"""
