"""What happens to a real language model: all algorithms on SmolLM2-135M, see `python -m benchmarks.study --help`.

tasks         prompts, rewards and metrics: film sentences, short stories; format and tool are those of `real_model`
opinions      the second scorer of film sentences: a classifier of labelled reviews, which no policy is trained on
arms          what is compared: for each arm the commands that make its model, and how it answers
measure       one model, or the initial one, on held-out prompts: reward, second scorer, perplexity, KL, samples
report        table, pictures and samples of all arms
"""
