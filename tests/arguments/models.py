"""How arguments act that rewards and metrics with models have in common; other models and texts to try them with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from rl4lms_like.core.sample import Sample
from tests.arguments.model_sights import batches, devices, names, precisions, scores_of_stand_in, trusted
from tests.arguments.seen import Acts, Texts
from tests.catalogue import Places

# --- models and texts ------------------------------------------------------------------------------------------------


def other(role: str) -> Callable[[Places], str]:
    """A tiny model of the same form, of other weights."""

    def folder(places: Places) -> str:
        first = Path(places.model(role))
        copy = first.with_name(f"other_{role}")
        if not copy.is_dir():
            shutil.copytree(first, copy)
            save_file(drawn_anew(first), copy / "model.safetensors", metadata={"format": "pt"})
        return str(copy)

    return folder


def dated_regressor(places: Places) -> str:
    """A regressor whose chat template writes today's date."""
    first = Path(places.model("regressor"))
    copy = first.with_name("dated_regressor")
    if not copy.is_dir():
        shutil.copytree(first, copy)
        tokenizer = AutoTokenizer.from_pretrained(copy)
        tokenizer.chat_template = "{{ strftime_now('%d') }}{% for m in messages %} {{ m['content'] }}{% endfor %}"
        tokenizer.save_pretrained(copy)
    return str(copy)


def other_weights(role: str) -> Callable[[Places], str]:
    """A file of torch's own format with other weights of a tiny model."""

    def file(places: Places) -> str:
        path = places.root / f"other_{role}.pt"
        torch.save(drawn_anew(Path(places.model(role))), path)
        return str(path)

    return file


def drawn_anew(folder: Path) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    return {name: torch.randn(weight.shape, generator=draw) / 2 for name, weight in weights.items()}


def references_file(places: Places) -> str:
    """What people say of films, a sample a line."""
    return places.file("references.txt", "The film was good.\nA long film.\nIt was sad, and it was bad.\n1 2 3\n")


def dialogues(places: Places) -> Texts:
    """Responses with each of the four intents asked for."""
    answers = ("Yes, I saw it.", "Who wrote it?", "Count with me!", "I will start.", "1 2 3", "no", "The sea, slow and")
    samples = [
        Sample(f"turn_{number}_{intent}", f"Did you see the film? <EOU> {number}", ["I saw it."], {"intent": [intent]})
        for number in range(len(answers))
        for intent in (1, 2, 3, 4)
    ]
    return Texts(samples, [answer for answer in answers for _ in (1, 2, 3, 4)])


def concepts(places: Places) -> Texts:
    """Sentences of which some lack a concept."""
    rows = (("dog run", "The dog runs."), ("man drive car", "A man has a car."), ("film sea", "A cold ending."))
    samples = [
        Sample(words, f"generate a sentence with: {words}.", [f"A {words}."], {"concepts": words.split()})
        for words, _ in rows
    ]
    return Texts(samples, [written for _, written in rows])


# --- rows ------------------------------------------------------------------------------------------------------------

BATCH_SIZE = Acts(2, sees=batches)
DEVICE = Acts("cuda:1", sees=devices, others={"device": "cpu"})
DTYPE = Acts("bfloat16", sees=precisions)
TRUST_REMOTE_CODE = Acts(True, sees=trusted)
OF_WEIGHTS = {"batch_size": BATCH_SIZE, "device": DEVICE, "dtype": DTYPE}

LEARNED_REWARD = {
    "model_name": Acts(other("classifier")),
    "label_ix": Acts(0),
    "include_prompt_for_eval": Acts(False),
    "trust_remote_code": TRUST_REMOTE_CODE,
    **OF_WEIGHTS,
}

REWARD_MODEL = {
    "model_name": Acts(other("regressor")),
    "template": Acts("response"),
    "label": Acts(1, others={"model_name": lambda places: places.model("classifier"), "label": 0}),
    "value": Acts("probability"),
    "scale": Acts(0.5),
    "clip": Acts(0.001),
    "append_eos": Acts(True, others={"model_name": lambda places: places.model("causal_regressor")}),
    "template_date": Acts(
        "2026-11-20", others={"model_name": dated_regressor, "template": "chat", "template_date": "2026-11-03"}
    ),
    "trust_remote_code": TRUST_REMOTE_CODE,
    **OF_WEIGHTS,
}

BERT_SCORE = {
    "language": Acts("zh", sees=names, without=("model_type",)),
    "model_type": Acts(other("encoder")),
    "num_layers": Acts(1),
    "rescale_with_baseline": Acts(True, sees=scores_of_stand_in, others={"model_type": "roberta-large"}),
    **OF_WEIGHTS,
}

BLEURT = {
    "max_length": Acts(8),
    **OF_WEIGHTS,
}

INTENT_ACCURACY = {
    "model_name": Acts(other("intents"), texts=dialogues),
    "batch_size": Acts(2, sees=batches, texts=dialogues),
    "device": Acts("cuda:1", sees=devices, others={"device": "cpu"}, texts=dialogues),
    "dtype": Acts("bfloat16", sees=precisions, texts=dialogues),
}
