"""Evaluate a run's model, or any model, on a split."""

from __future__ import annotations

import argparse
from pathlib import Path

from rl4lms_like.cli.options import add_code, add_decoding, add_engine, add_trust, arguments_of, count, engine_of

SUMMARY = "evaluate a run's model, or any model, on a split"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `evaluate`."""
    parser.add_argument("run_or_model", metavar="RUN_OR_MODEL", help="a run's folder, a model's folder or a hub id")
    parser.add_argument("--config_path", help="YAML file with data pool and metrics; default: the run's own")
    parser.add_argument("--split", choices=("train", "val", "test"), default="test", help="(%(default)s)")
    add_decoding(parser)
    add_code(parser)
    add_trust(parser)
    parser.add_argument("--num_beams", type=count, help="number of beams for --decoding beam (5)")
    parser.add_argument("--batch_size", type=count, help="prompts per generation call; default: the config's")
    parser.add_argument("--limit", type=count, help="use only the first N samples")
    parser.add_argument("--output", type=Path, help="folder for metrics and predictions; default: the run's")
    add_engine(parser)


def run(options: argparse.Namespace) -> None:
    """Evaluate the model of a run, or any other model."""
    from rl4lms_like.inference import evaluate_run

    names = "split config_path output decoding num_beams max_new_tokens batch_size limit seed trust_remote_code"
    evaluate_run(options.run_or_model, **arguments_of(options, names), **engine_of(options))
