"""Trains as a YAML file says: `python scripts/training/train_text_generation.py --config_path X.yml`."""

import sys

from rl4lms_like.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
