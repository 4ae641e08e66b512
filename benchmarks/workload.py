"""The work that every system is given: one model, one tokenizer, prompts of full length, responses of full length.

    Shape        how much work an iteration is: prompt + response tokens, episodes, epochs, episodes a minibatch
    save_model   writes a random GPT-2 of that shape and its tokenizer, from one seed; every system loads this folder
    prompts      [episodes, prompt_len] token ids of iteration k, from one seed
    reward       the share of response tokens that are larger than their predecessor, [n]

A model of natural language (`grpo_real`) comes with the `words` that its prompts consist of, and with
`share_of_vowels` as the reward.

Token `k` is the word `k`. The padding and end-of-sequence token is one past the model's vocabulary, so that no model
can sample it: every response has full length, and all systems process the same number of tokens.

Run as a program, it writes a model: `python -m benchmarks.workload SHAPE_JSON FOLDER SEED`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SPECIAL = "[END]"  # padding and end of sequence
LEARNING_RATE = 1e-5
KL_COEF = 0.1
CLIP_RANGE = 0.2
VF_COEF = 0.5
GAMMA, GAE_LAMBDA = 1.0, 0.95


@dataclass(frozen=True)
class Shape:
    """How much work one iteration is.

    Args:
        name: of the shape, in tables and results.
        prompt_len: tokens of every prompt.
        response_len: tokens of every response.
        episodes: in one iteration.
        n_epochs: passes over them.
        minibatch: episodes in a minibatch; one optimizer step each.
        n_layer: layers of the GPT-2.
        n_embd: its width; heads are 64 wide, or 4 where that would be fewer.
        vocab_size: of its embedding.
        family: of the model.
    """

    name: str
    prompt_len: int
    response_len: int
    episodes: int = 64
    n_epochs: int = 5
    minibatch: int = 16
    n_layer: int = 4
    n_embd: int = 128
    vocab_size: int = 2048
    family: str = "GPT-2"

    @property
    def response_tokens(self) -> int:
        """Tokens generated in one iteration."""
        return self.episodes * self.response_len

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps in one iteration."""
        return self.n_epochs * (self.episodes // self.minibatch)

    @property
    def parameters(self) -> int:
        """Weights of one network, about."""
        return self.n_embd * (self.vocab_size + 12 * self.n_layer * self.n_embd)

    def to_json(self) -> str:
        """The shape as one line of JSON; `Shape(**json.loads(line))` reads it back."""
        return json.dumps(asdict(self))


SHAPES = {
    "i": Shape("i", prompt_len=5, response_len=20),
    "ii": Shape("ii", prompt_len=64, response_len=48),
    "ii-long": Shape("ii-long", prompt_len=256, response_len=48),
    "iv": Shape("iv", prompt_len=5, response_len=20, n_layer=8, n_embd=512),
    "iii": Shape(
        "iii", prompt_len=64, response_len=48, episodes=16, n_epochs=1, n_layer=12, n_embd=768, vocab_size=50257
    ),
}


def quick(shape: Shape) -> Shape:
    """The same shape with a sixteenth of the work or less: to see that everything runs, not to measure."""
    return replace(
        shape,
        name=f"{shape.name}-quick",
        prompt_len=min(shape.prompt_len, 8),
        response_len=min(shape.response_len, 8),
        episodes=16,
        n_epochs=2,
        minibatch=8,
        n_layer=min(shape.n_layer, 2),
        n_embd=min(shape.n_embd, 64),
        vocab_size=min(shape.vocab_size, 2048),
    )


def save_model(shape: Shape, folder: Path, *, seed: int = 0) -> None:
    """Write a random GPT-2 of this shape and its tokenizer to `folder`.

    Args:
        shape: of the model.
        folder: is made if it is not there.
        seed: of the weights.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    end = shape.vocab_size
    words = {str(number): number for number in range(shape.vocab_size)} | {SPECIAL: end}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = GPT2Config(
        n_layer=shape.n_layer,
        n_embd=shape.n_embd,
        n_head=max(4, shape.n_embd // 64),
        vocab_size=shape.vocab_size,
        n_positions=1024,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    GPT2LMHeadModel(config).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL, eos_token=SPECIAL, unk_token=SPECIAL, padding_side="left"
    ).save_pretrained(folder)


def prompts(shape: Shape, iteration: int, *, seed: int = 0, words: Sequence[int] | None = None) -> torch.Tensor:
    """The prompts of one iteration.

    Args:
        shape: of the work.
        iteration: counts from 0; each has its own prompts.
        seed: of all of them.
        words: token ids to draw from; default: the vocabulary.

    Returns:
        Token ids `[episodes, prompt_len]`.
    """
    import torch

    generator = torch.Generator().manual_seed(1_000_003 * seed + iteration)
    drawn_from = torch.arange(shape.vocab_size) if words is None else torch.tensor(words)
    return drawn_from[torch.randint(len(drawn_from), (shape.episodes, shape.prompt_len), generator=generator)]


def reward(response_ids: torch.Tensor) -> torch.Tensor:
    """The share of tokens larger than their predecessor: cheap, and the same for every system.

    Args:
        response_ids: `[n, response_len]`.

    Returns:
        `[n]`, from 0 to 1.
    """
    return (response_ids[:, 1:] > response_ids[:, :-1]).float().mean(dim=1)


def share_of_vowels(responses: Sequence[str]) -> list[float]:
    """The reward for a model of natural language: cheap, different for most responses, the same for every system."""
    return [sum(letter in "aeiou" for letter in response) / max(1, len(response)) for response in responses]


if __name__ == "__main__":
    save_model(Shape(**json.loads(sys.argv[1])), Path(sys.argv[2]), seed=int(sys.argv[3]))
