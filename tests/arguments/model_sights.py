"""What a component's models are seen to be asked: batches, precision, devices, names; and SPICE's program.

Each listens to torch, transformers or a stand-in for Java, and lets the component score its texts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from rl4lms_like.scoring import captions, frozen
from rl4lms_like.system.errors import RL4LMsLikeError
from tests.arguments.seen import Tried
from tests.scoring.test_spice import STAND_IN

LOADERS = (
    AutoConfig,
    AutoTokenizer,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)


# --- models ----------------------------------------------------------------------------------------------------------


def batches(tried: Tried) -> list[int]:
    """How many texts each forward pass of a model has."""
    return [size for size, _ in forward_passes(tried)]


def precisions(tried: Tried) -> list[torch.dtype]:
    """Of the weights, at each forward pass of a model."""
    return [dtype for _, dtype in forward_passes(tried)]


def passes_of_two(tried: Tried) -> int:
    """How many forward passes it costs to score the same texts twice."""
    return len(forward_passes(tried, n_times=2))


def forward_passes(tried: Tried, n_times: int = 1) -> list[tuple[int, torch.dtype]]:
    """The size of the batch and the precision of the weights, at each forward pass of a whole model."""
    found: list[tuple[int, torch.dtype]] = []
    inside: list[PreTrainedModel] = []
    call = torch.nn.Module.__call__

    def listening(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if inside or not isinstance(module, PreTrainedModel):
            return call(module, *args, **kwargs)
        found.append((len(kwargs["input_ids"] if "input_ids" in kwargs else args[0]), module.dtype))
        inside.append(module)
        try:
            return call(module, *args, **kwargs)
        finally:
            inside.pop()

    tried.patch.setattr(torch.nn.Module, "__call__", listening)
    for _ in range(n_times):
        tried.scores()
    return found


def devices(tried: Tried) -> list[str]:
    """Where models are put, on a machine that seems to have two GPUs; nothing is moved."""
    found: list[str] = []
    move_module, move_tensor = torch.nn.Module.to, torch.Tensor.to

    def put(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        found.extend(str(place) for place in (*args, *kwargs.values()) if is_place(place))
        return stay(move_module, module, *args, **kwargs)

    def stay(move: Callable[..., Any], moved: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(each for each in args if not is_place(each))
        kwargs = {name: each for name, each in kwargs.items() if not is_place(each)}
        return move(moved, *args, **kwargs) if args or kwargs else moved

    load_anew(tried)
    tried.patch.setattr(torch.cuda, "device_count", lambda: 2)
    tried.patch.setattr(torch.nn.Module, "to", put)
    tried.patch.setattr(torch.Tensor, "to", lambda tensor, *args, **kwargs: stay(move_tensor, tensor, *args, **kwargs))
    tried.scores()
    return found


def is_place(argument: Any) -> bool:
    return isinstance(argument, str | torch.device)


def trusted(tried: Tried) -> bool:
    """Whether a checkpoint's own code may run, wherever a part of the checkpoint is loaded."""
    allowed: list[bool] = []

    def listened(load: Callable[..., Any]) -> Callable[..., Any]:
        def listening(name: str, **kwargs: Any) -> Any:
            allowed.append(kwargs.get("trust_remote_code", False))
            return load(name, **kwargs)

        return listening

    load_anew(tried)
    for loader in LOADERS:
        tried.patch.setattr(loader, "from_pretrained", listened(loader.from_pretrained))
    tried.scores()
    assert len(allowed) > 1
    return all(allowed)


def names(tried: Tried) -> set[str]:
    """The models that are asked for; a tiny encoder is loaded in the place of each."""
    return stand_in_for_all(tried)[0]


def scores_of_stand_in(tried: Tried) -> Any:
    """Scores, by a tiny encoder whatever the model's name."""
    return stand_in_for_all(tried)[1]


def stand_in_for_all(tried: Tried) -> tuple[set[str], Any]:
    """The names of models that are asked for, and the scores by a tiny encoder."""
    asked: set[str] = set()

    def replaced(load: Callable[..., Any]) -> Callable[..., Any]:
        def loading(name: str, **kwargs: Any) -> Any:
            asked.add(name)
            return load(tried.places.model("encoder"), **kwargs)

        return loading

    load_anew(tried)
    for loader in (AutoTokenizer, AutoModel):
        tried.patch.setattr(loader, "from_pretrained", replaced(loader.from_pretrained))
    return asked, tried.scores()


def load_anew(tried: Tried) -> None:
    """Models that others still hold are not shared."""
    tried.patch.setattr(frozen, "_ALIVE", WeakValueDictionary())


# --- SPICE's program -------------------------------------------------------------------------------------------------


def scores_with_java(tried: Tried) -> Any:
    """Scores, where a stand-in for Java answers."""
    java(tried)
    return tried.scores()


def memory_of_java(tried: Tried) -> list[str]:
    """The memory that Java is started with."""
    folder = java(tried)
    tried.scores()
    command = json.loads((folder / "command.json").read_text())
    return [option for option in command if option.startswith("-X")]


def stopped(tried: Tried) -> bool:
    """Whether Java is stopped before it has answered."""
    java(tried)
    try:
        tried.scores()
    except RL4LMsLikeError as error:
        assert "SPICE took more than" in str(error)
        return True
    return False


def java(tried: Tried) -> Path:
    """A stand-in for Java and CoreNLP, in the folder where it leaves what it was asked."""
    folder = tried.places.root / "spice"
    program = folder / "bin" / "java"
    if not program.is_file():
        (folder / "lib").mkdir(parents=True)
        for jar in captions.CORENLP_JARS:
            (folder / "lib" / jar).touch()
        program.parent.mkdir()
        program.write_text(STAND_IN.format(python=sys.executable, version="11.0.6", action="", folder=folder))
        program.chmod(0o755)
    (folder / "command.json").unlink(missing_ok=True)
    tried.patch.setenv("JAVA_HOME", str(folder))
    tried.patch.setitem(sys.modules, "pycocoevalcap", SimpleNamespace(__path__=[str(tried.places.root)]))
    return folder
