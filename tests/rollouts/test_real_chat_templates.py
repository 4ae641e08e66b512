"""Ids of played dialogues are those of the rendered conversation, for real chat templates."""

from __future__ import annotations

import re

import gymnasium
import pytest
import torch
from transformers import AutoTokenizer

from rl4lms_like.config.load import parse_config
from rl4lms_like.core.chat_template import PLACEHOLDER_TURN, ChatTemplate
from rl4lms_like.core.episodes import real_ids
from rl4lms_like.preview import preview
from rl4lms_like.rollouts.play_dialogues import play_dialogues
from rl4lms_like.testing import models
from tests.builders import SAMPLING, make_policy
from tests.core.test_tool_messages import ADD, template_named
from tests.dialogues import dialogue_env
from tests.training.test_dialogue_runs import run_blocks

PLAIN = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3_1", "lfm2_2_5", "gemma4_v2")
"""Templates that write a message without reasoning in the same way whether others follow or not, also with tools."""
DROPS_REASONING = {
    "qwen2_5": False,
    "qwen3": True,
    "llama3_1": False,
    "lfm2_2_5": True,
    "nemotron_3_nano": True,
    "qwen3_training": False,
}
"""Whether a template leaves `<think>` out of earlier messages, as one reads in it."""

SPECIAL = re.compile(r"<\|[^<>\s]+>|<[a-z]+\|>")
"""Texts of special tokens, such as `<|im_end|>`, and `<turn|>` of Gemma 4."""

N_TURNS = 3
QUESTIONS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 4?"}]
RESULT = [{"role": "tool", "name": "add", "content": "seven"}]


class Asking(gymnasium.Env):
    """Asks; with tools, the first answer is the result of one."""

    def __init__(self, tools=None):
        self.tools = tools

    def reset(self, *, seed=None, options=None):
        self.answers = iter([RESULT if self.tools else "Are you sure?", "And 4 + 5?"])
        return QUESTIONS, {"tools": self.tools} if self.tools else {}

    def step(self, action):
        return next(self.answers, "Thanks."), 1.0, False, False, {}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Return the folder of a tiny model by the name of its template, whose special texts are tokens."""
    folders = {}

    def folder_of(name):
        if name not in folders:
            tokenizer = models.make_tokenizer()
            tokenizer.chat_template = template_named(name).tokenizer.chat_template
            tokenizer.add_special_tokens({"bos_token": "<s>"})
            written = ChatTemplate(tokenizer).render([QUESTIONS[0], *PLACEHOLDER_TURN])
            written += ChatTemplate(tokenizer).render([*PLACEHOLDER_TURN, *RESULT], tools=[ADD])
            tokenizer.add_tokens(sorted(set(SPECIAL.findall(written))), special_tokens=True)
            model = models.make_causal_lm("gpt2", tokenizer, scale=4.0, n_positions=4096)
            folders[name] = models.save_model(tmp_path_factory.mktemp(name), model, tokenizer)
        return folders[name]

    return folder_of


@pytest.mark.parametrize("tools", [None, [ADD]], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", PLAIN)
def test_the_ids_are_those_of_the_rendered_conversation(name, tools, model_of):
    folder = model_of(name)
    policy = make_policy("causal", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = ChatTemplate(tokenizer)
    env = dialogue_env(
        tokenizer,
        folder,
        lambda: Asking(tools),
        n_envs=24,
        template=template,
        max_turns=N_TURNS,
        max_turn_length=4,
        max_episode_length=400,
        max_prompt_length=2000,
    )
    env.reset()

    # Only the end of a turn is sampled of the tokens that templates write.
    end = template.end_of_turn
    suppressed = sorted({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder} - {end})
    kwargs = SAMPLING | {"suppress_tokens": suppressed}
    episodes = play_dialogues(policy, env.dialogues, eos_token_ids=[end], generation_kwargs=kwargs, seed=3)

    # The whole conversation, rendered once. Contents of the assistant are unique texts, around which it is cut.
    conversation = list(QUESTIONS)
    for number, answer in enumerate([RESULT if tools else "Are you sure?", "And 4 + 5?"]):
        conversation.append({"role": "assistant", "content": f"Y{number}Z"})
        conversation += answer if isinstance(answer, list) else [{"role": "user", "content": answer}]
    rest = template.render(conversation, tools=tools, add_generation_prompt=True)
    pieces = []
    for number in range(N_TURNS - 1):
        before, _, rest = rest.partition(f"Y{number}Z")
        pieces.append(before)
    pieces = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in [*pieces, rest]]

    has_ended = []
    for prompt_ids, response_ids, is_observed in zip(
        real_ids(episodes.prompt_ids, episodes.prompt_mask),
        real_ids(episodes.response_ids, episodes.response_mask),
        episodes.observed,
        strict=True,
    ):
        turns = _turns(response_ids, is_observed[: len(response_ids)])
        assert len(turns) == N_TURNS
        ended = [turn[-1] == end for turn in turns]
        has_ended += ended

        # A piece after a turn begins with the token that ends it, whether it was sampled or not.
        expected = list(pieces[0])
        for turn, is_ended, piece in zip(turns[:-1], ended[:-1], pieces[1:], strict=True):
            expected += turn[:-1] if is_ended else turn
            expected += piece
        assert prompt_ids + response_ids == expected + turns[-1]
    assert any(has_ended) and not all(has_ended), "turns that end and turns that are cut"


def _turns(ids, is_observed):
    """Return the ids of each turn, of which answers are in between."""
    borders = torch.nonzero(is_observed.diff()).flatten().add(1).tolist()
    starts = [0, *borders]
    turns = []
    for start, stop in zip(starts, [*borders, len(ids)], strict=True):
        if not is_observed[start]:
            turns.append(ids[start:stop])
    return turns


@pytest.mark.parametrize("name", DROPS_REASONING)
def test_check_says_where_a_template_drops_reasoning(name, model_of):
    mapping = run_blocks(model_of(name))
    mapping["tokenizer"]["chat_template"] = True
    mapping["env"]["args"] |= {"max_prompt_length": 200, "max_episode_length": 400}
    mapping["env"]["dialogue"]["id"] = f"{__name__}:Asking"
    (section,) = [part for part in preview(parse_config(mapping)) if part.startswith("# environment")]
    assert ("leaves out <think> of earlier turns" in section) == DROPS_REASONING[name]
