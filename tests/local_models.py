"""Tiny stand-ins for the models that scores load by name: what `from_pretrained` reads, made in milliseconds.

LOCAL_MODELS["classifier"](folder)     a BERT with two labels, its tokenizer beside it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertTokenizerFast,
)

from rl4lms_like.testing.models import SENTENCES, make_causal_lm, make_seq2seq_lm, make_tokenizer, save_model

JUDGED = (
    "the film was good\n",
    "1 2 3 7 8\n",
    "it was bad. it was bad, it was Bad and sad.\n",
    "A: a film B: the sea\n",
    "A: the sea B: a film\n",
)
"""Messages that the role `judge` rates."""
WORDS = sorted({word.strip(".,!?:").lower() for sentence in SENTENCES for word in sentence.split()} - {""})


def bert_tokenizer(folder: Path) -> BertTokenizerFast:
    characters = [chr(code) for code in range(ord("a"), ord("z") + 1)] + [str(digit) for digit in range(10)]
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *WORDS,
        *characters,
        *(f"##{character}" for character in characters),
    ]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(pieces)) + "\n", encoding="utf-8")
    return BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=64)


def save_bert(folder: Path, auto: Any, **config: Any) -> None:
    """A random BERT of two layers under one of transformers' auto classes."""
    tokenizer = bert_tokenizer(folder)
    settings = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    settings |= {"max_position_embeddings": 64, "vocab_size": len(tokenizer), "initializer_range": 0.5}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(AutoConfig.for_model("bert", **settings, **config))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def classifier(folder: Path) -> None:
    save_bert(folder, AutoModelForSequenceClassification, num_labels=2)


def intents(folder: Path) -> None:
    save_bert(folder, AutoModelForSequenceClassification, num_labels=4)


def natural_language_inference(folder: Path) -> None:
    labels = {0: "ENTAILMENT", 1: "NEUTRAL", 2: "CONTRADICTION"}
    save_bert(folder, AutoModelForSequenceClassification, num_labels=3, id2label=labels)


def regressor(folder: Path) -> None:
    save_bert(folder, AutoModelForSequenceClassification, num_labels=1)


def causal_regressor(folder: Path) -> None:
    """A reward model of a decoder-only family, whose tokenizer ends no text itself."""
    tokenizer = make_tokenizer()
    settings = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    settings |= {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 128}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", num_labels=1, **settings)
        save_model(folder, AutoModelForSequenceClassification.from_config(config), tokenizer)


def step_classifier(folder: Path) -> None:
    """A process reward model of a decoder-only family."""
    tokenizer = make_tokenizer()
    settings = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    settings |= {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "initializer_range": 0.5}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", num_labels=2, **settings)
        save_model(folder, AutoModelForTokenClassification.from_config(config), tokenizer)


def encoder(folder: Path) -> None:
    save_bert(folder, AutoModel)


def causal(folder: Path) -> None:
    tokenizer = make_tokenizer()
    save_model(folder, make_causal_lm("gpt2", tokenizer), tokenizer)


def _judge(folder: Path, answers: Sequence[str]) -> None:
    """A causal model that has learned an answer to each message of `JUDGED`."""
    tokenizer = make_tokenizer()
    model = make_causal_lm("gpt2", tokenizer, n_positions=512)
    rows = []
    for message, answer in zip(JUDGED, answers, strict=True):
        rows.append(tokenizer(f"{message}{answer}")["input_ids"] + [tokenizer.eos_token_id])
    ids = torch.full((len(rows), max(map(len, rows))), -100)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.eval()  # without dropout
    for _ in range(150):
        loss = model(input_ids=ids.clamp(min=0), attention_mask=(ids >= 0).long(), labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.5, loss
    save_model(folder, model, tokenizer)


def judge(folder: Path) -> None:
    _judge(folder, ["Score: 2", "Score: 3", "Score: 4", "Winner: A", "Winner: B"])


def other_judge(folder: Path) -> None:
    _judge(folder, ["Score: 9", "Score: 8", "Score: 7", "Winner: B", "Winner: A"])


def seq2seq(folder: Path) -> None:
    tokenizer = make_tokenizer(append_eos=True)
    save_model(folder, make_seq2seq_lm("t5", tokenizer), tokenizer)


LOCAL_MODELS: dict[str, Callable[[Path], None]] = {
    "classifier": classifier,
    "intents": intents,
    "nli": natural_language_inference,
    "regressor": regressor,
    "causal_regressor": causal_regressor,
    "step_classifier": step_classifier,
    "encoder": encoder,
    "causal": causal,
    "judge": judge,
    "other_judge": other_judge,
    "seq2seq": seq2seq,
}
"""By the role they stand in for."""
