"""Generate texts with a trained model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rl4lms_like.cli.options import add_code, add_decoding, add_engine, add_trust, arguments_of, count, engine_of
from rl4lms_like.cli.printing import print_json
from rl4lms_like.system.errors import RL4LMsLikeError
from rl4lms_like.system.wording import printable

SUMMARY = "generate texts with a trained model"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `generate`."""
    parser.add_argument("model", metavar="MODEL_OR_RUN", help="a run's folder, a model's folder or a hub id")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="default: the lines of --file or standard input")
    parser.add_argument("--file", type=Path, help="prompts, one per line")
    parser.add_argument("--image", type=Path, action="append", dest="images", help="image of each prompt; repeatable")
    parser.add_argument("--n", type=count, default=1, help="texts per prompt (%(default)s)")

    add_decoding(parser)
    add_code(parser)
    add_trust(parser)
    parser.add_argument("--temperature", type=float, help="sampling temperature")
    parser.add_argument("--top_k", type=int, help="sample from the k most probable tokens; 0 means all tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line: prompt, texts")
    add_engine(parser)


def run(options: argparse.Namespace) -> None:
    """Print the texts that a model generates for each prompt."""
    # Before the import, which loads torch: a file that cannot be read is reported immediately.
    prompts = _prompts(options)
    from rl4lms_like.inference import generate_texts

    names = "n max_new_tokens decoding temperature top_k seed trust_remote_code"
    given = arguments_of(options, names) | engine_of(options)
    texts = generate_texts(options.model, prompts, images=options.images or (), **given)
    for prompt, responses in zip(prompts, texts, strict=True):
        if options.json:
            print_json({"prompt": prompt, "texts": responses})
        else:
            print(*(printable(f"{prompt} | {response}") for response in responses), sep="\n")


def _prompts(options: argparse.Namespace) -> list[str]:
    """Return the prompts in the command line, else the lines of a file, else those of standard input."""
    source = "the command line" if options.prompts else options.file or "standard input"
    try:
        if options.prompts:
            prompts = list(options.prompts)
        elif options.file is not None:
            prompts = options.file.read_text(encoding="utf-8").splitlines()
        elif sys.stdin is None:
            raise RL4LMsLikeError("no prompts: give them as arguments or with --file, since standard input is closed")
        else:
            prompts = sys.stdin.read().splitlines()

        # Python reads undecodable bytes of the command line as lone surrogates, which tokenizers reject.
        "".join(prompts).encode()
    except OSError as error:
        raise RL4LMsLikeError(f"cannot read the prompts in {source}: {error.strerror}") from error
    except UnicodeError as error:
        encoding = "UTF-8" if options.file is not None else sys.getfilesystemencoding()
        raise RL4LMsLikeError(f"the prompts in {source} are not text in {encoding}") from error
    return [prompt for prompt in prompts if prompt]
