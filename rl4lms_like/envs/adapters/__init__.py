"""Environments of other libraries as environments that answer.

textarena          TextArenaGame     games of TextArena for one player
trl_environment    TrlEnvironment    classes that were written for TRL's `environment_factory`
retries            Retries           questions with several tries, such as those of reasoning-gym
"""
