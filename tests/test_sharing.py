"""A run's model in a folder or repository of its own: merged, pushed, loaded back by other programs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig

from rl4lms_like.cli import main
from rl4lms_like.config.load import parse_config
from rl4lms_like.run import train_config
from rl4lms_like.sharing import merge_run
from rl4lms_like.system.errors import ConfigError, RL4LMsLikeError
from tests.conftest import REPOSITORY
from tests.hub import TOKEN, Hub, serving
from tests.offline.preferences.preference_runs import blocks, written

LORA = {"r": 4, "lora_alpha": 8}
IDS = torch.tensor([[5, 9, 23, 40]])


@pytest.fixture(scope="module")
def hub():
    with serving() as hub:
        yield hub


def trained(config, folder, name="run") -> Path:
    return train_config(parse_config(config), base_path_to_store_results=folder, experiment_name=name, quiet=True)


def python(hub: Hub, folder: Path, *arguments: object, token: str | None = TOKEN) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own: `huggingface_hub` reads the address of the hub when it is imported."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment |= {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder / "hf_home"),
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(REPOSITORY),
    }
    if token is not None:
        environment["HF_TOKEN"] = token
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def push(hub: Hub, *arguments: object, token: str | None = TOKEN) -> subprocess.CompletedProcess[str]:
    return python(hub, Path(arguments[0]).parent, "-m", "rl4lms_like", "push", *arguments, token=token)


def loaded_back(hub: Hub, folder: Path, imported: str, repo_id: str) -> torch.Tensor:
    """Return the scores of a model of the hub that another program loads, with its tokenizer."""
    program = f"""
import torch
from transformers import AutoTokenizer
from safetensors.torch import save_file
{imported}
assert AutoTokenizer.from_pretrained({repo_id!r}).decode([5])
model = {imported.split()[-1]}.from_pretrained({repo_id!r}).eval()
with torch.no_grad():
    save_file({{"scores": model(torch.tensor({IDS.tolist()})).logits}}, "scores.safetensors")
"""
    outcome = python(hub, folder, "-c", program)
    assert outcome.returncode == 0, outcome.stderr
    return load_file(folder / "scores.safetensors")["scores"]


def interrupted(run: Path) -> Path:
    """Leave of a finished run what one leaves that was stopped after its last checkpoint."""
    (run / "finished.json").unlink()
    shutil.rmtree(run / "model")
    return run


def scores(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


# --- push -------------------------------------------------------------------------------------------------------------


def test_a_pushed_run_is_loaded_back_by_plain_transformers(hub, tiny_config, tmp_path):
    run = trained(tiny_config, tmp_path)
    (run / "model" / "notes.txt").write_text("mine")
    outcome = push(hub, run, "my-model")
    assert outcome.returncode == 0, outcome.stderr
    assert f"{run}/model -> {hub.url}/me/my-model (private)" in outcome.stdout
    assert "not uploaded: notes.txt" in outcome.stdout

    repository = hub.repositories["me/my-model"]
    assert repository.is_private and repository.n_commits == 1
    assert set(repository.files) == {path.name for path in (run / "model").iterdir()} - {"notes.txt"}
    assert '.from_pretrained("me/my-model")' in repository.files["README.md"].decode()

    loaded = loaded_back(hub, tmp_path, "from transformers import AutoModelForCausalLM", "me/my-model")
    assert torch.equal(loaded, scores(AutoModelForCausalLM.from_pretrained(run / "model")))


def test_of_an_interrupted_run_the_model_of_generate_is_pushed_without_its_training_state(hub, tiny_config, tmp_path):
    run = interrupted(trained(tiny_config, tmp_path))
    outcome = push(hub, run, "me/interrupted")
    assert outcome.returncode == 0, outcome.stderr
    checkpoint = run / "checkpoints" / "iteration_00002"
    assert f"the run {run} is not finished: using its model {checkpoint}" in outcome.stderr
    assert f"{checkpoint} -> " in outcome.stdout
    assert "training_state.safetensors" in outcome.stdout.partition("not uploaded: ")[2]

    loaded = loaded_back(hub, tmp_path, "from transformers import AutoModelForCausalLM", "me/interrupted")
    assert torch.equal(loaded, scores(AutoModelForCausalLM.from_pretrained(checkpoint)))

    files = hub.repositories["me/interrupted"].files
    assert "README.md" in files and "model.safetensors" in files
    assert not any("state" in name or "manifest" in name or name.endswith(".jsonl") for name in files)
    card = files["README.md"].decode()
    assert "not the final model of its run but `checkpoints/iteration_00002`" in card
    assert "| val | before training | after 2 iterations |" in card
    assert "The first prompts of the split `val`." in card and "Response after 2 iterations" in card


def test_an_adapter_is_loaded_back_by_peft_and_replaces_whole_weights(hub, tiny_config, tmp_path):
    pytest.importorskip("peft")
    assert push(hub, trained(tiny_config, tmp_path, "whole"), "me/adapter").returncode == 0
    assert "model.safetensors" in hub.repositories["me/adapter"].files

    tiny_config["alg"]["policy"]["args"]["peft"] = LORA
    run = trained(tiny_config, tmp_path, "adapter")
    n_requests = len(hub.requests)
    outcome = push(hub, run, "me/refused")
    base = tiny_config["alg"]["policy"]["args"]["model_name"]
    assert outcome.returncode == 1 and len(hub.requests) == n_requests
    assert f"the adapter's base model is {base}, a folder that others do not have: push the" in outcome.stderr

    # The base model is on the hub, under the name that its adapter has for it there.
    copy = shutil.copytree(base, tmp_path / "base")
    assert push(hub, copy, "me/base").returncode == 0
    file = run / "model" / "adapter_config.json"
    local_config = file.read_text()
    file.write_text(local_config.replace(json.dumps(base), '"me/base"'))
    outcome = push(hub, run, "me/adapter")
    assert outcome.returncode == 0, outcome.stderr
    assert not {"config.json", "model.safetensors"} & set(hub.repositories["me/adapter"].files)

    loaded = loaded_back(hub, tmp_path, "from peft import AutoPeftModelForCausalLM", "me/adapter")
    file.write_text(local_config)
    merge_run(run, tmp_path / "merged")
    merged = scores(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(loaded, merged)


def test_a_preference_run_is_pushed_and_loaded_back(hub, tiny_gpt2_dir, tmp_path):
    run = trained(blocks("dpo", tiny_gpt2_dir, written(tmp_path)), tmp_path)
    outcome = push(hub, run, "me/preferred")
    assert outcome.returncode == 0, outcome.stderr
    loaded = loaded_back(hub, tmp_path, "from transformers import AutoModelForCausalLM", "me/preferred")
    assert torch.equal(loaded, scores(AutoModelForCausalLM.from_pretrained(run / "model")))

    card = hub.repositories["me/preferred"].files["README.md"].decode()
    assert "| Algorithm | `dpo` |" in card and "`rewards/accuracies`" in card and "after 2 epochs" in card
    assert ModelCard(card).data.to_dict()["tags"] == ["rl4lms-like", "fine-tuning", "dpo"]


def test_nothing_is_uploaded_to_a_public_repository_unless_asked(hub, tiny_config, tmp_path):
    run = trained(tiny_config, tmp_path)
    assert push(hub, run, "me/public", "--public").returncode == 0
    assert not hub.repositories["me/public"].is_private

    outcome = push(hub, run, "me/public")
    assert outcome.returncode == 1
    assert outcome.stderr == "the repository me/public is public: add --public to upload the model to it\n"
    assert hub.repositories["me/public"].n_commits == 1


def test_the_token_is_that_of_the_environment_and_its_absence_or_refusal_is_an_error(hub, tiny_config, tmp_path):
    run = trained(tiny_config, tmp_path)
    n_requests = len(hub.requests)
    outcome = push(hub, run, "me/without", token=None)
    assert outcome.returncode == 1 and "set HF_TOKEN, or run `hf auth login`" in outcome.stderr
    assert len(hub.requests) == n_requests

    outcome = push(hub, run, "me/without", token="hf_another")
    assert outcome.returncode == 1 and "cannot push to me/without" in outcome.stderr
    assert "hf_another" not in outcome.stderr and "me/without" not in hub.repositories


def test_a_link_in_the_folder_is_not_followed(tiny_config, tmp_path, capsys):
    run = trained(tiny_config, tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("private")
    (run / "model" / "merges.txt").symlink_to(secret)
    assert main(["push", str(run), "me/linked"]) == 1
    assert "merges.txt is a symbolic link and will not be uploaded" in capsys.readouterr().err


def test_a_folder_without_a_model_is_named(tmp_path, capsys):
    assert main(["push", str(tmp_path), "me/nothing"]) == 1
    assert capsys.readouterr().err == f"{tmp_path} is neither the folder of a run nor of a model\n"


@pytest.mark.parametrize("base", ["/moved/away", "./models/mine", "models/of/mine", "gpt2-local"])
def test_an_adapter_of_a_local_model_is_refused_whether_it_exists_or_not(base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2-local").mkdir()
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    (folder / "adapter_model.safetensors").touch()
    assert main(["push", str(folder), "me/refused"]) == 1
    assert f"the adapter's base model is {base}, a folder that others do not have" in capsys.readouterr().err


def test_only_names_of_transformers_and_peft_are_of_a_model(hub, tiny_config, tmp_path):
    tiny_config["train_evaluation"]["n_iters"] = 1
    run = trained(tiny_config, tmp_path)
    own = ("clients.model", "notes.spm", "model_of_last_year.safetensors", "model-a-of-b.safetensors")
    for name in (*own, "spiece.model", "source.spm"):
        (run / "model" / name).write_text("mine")
    assert push(hub, run, "me/own-files").returncode == 0
    files = hub.repositories["me/own-files"].files
    assert not set(own) & set(files) and {"spiece.model", "source.spm"} <= set(files)


def test_a_card_that_is_not_utf_8_is_named(tiny_config, tmp_path, capsys):
    tiny_config["train_evaluation"]["n_iters"] = 1
    run = trained(tiny_config, tmp_path)
    card = run / "model" / "README.md"
    card.write_bytes("Größe".encode("latin-1"))
    for command in (["push", str(run), "me/latin"], ["merge", str(run), str(tmp_path / "merged")]):
        assert main(command) == 1
        assert f"{card} is not UTF-8" in capsys.readouterr().err


def test_samples_that_the_user_removed_come_back_in_no_card(hub, tiny_config, tmp_path):
    tiny_config["train_evaluation"] |= {"n_iters": 2, "save_every": 1}
    run = trained(tiny_config, tmp_path)
    checkpoint = run / "checkpoints" / "iteration_00001"
    card = run / "model" / "README.md"
    text = card.read_text()
    assert "Count with me:\n" in text

    # With an option, whatever the card has.
    merge_run(run, tmp_path / "without", has_samples=False)
    without = (tmp_path / "without" / "README.md").read_text()
    assert without == text.partition("## Samples")[0] + "## Training" + text.partition("## Training")[2]
    assert push(hub, run, "me/without", "--no_samples").returncode == 0
    pushed = hub.repositories["me/without"].files["README.md"].decode()
    assert pushed.replace("me/without", "FOLDER_OR_REPOSITORY") == without

    merge_run(run, tmp_path / "with")
    assert "## Samples" in (tmp_path / "with" / "README.md").read_text()
    card.write_text(without)
    merge_run(run, tmp_path / "removed")
    assert (tmp_path / "removed" / "README.md").read_text() == without
    assert push(hub, checkpoint, "me/earlier").returncode == 0
    assert "## Samples" not in hub.repositories["me/earlier"].files["README.md"].decode()


# --- merge ------------------------------------------------------------------------------------------------------------


def test_a_merged_adapter_equals_the_policy_and_is_pushed_with_its_card(hub, tiny_config, tmp_path, capsys):
    pytest.importorskip("peft")
    tiny_config["alg"]["policy"]["args"] |= {"peft": LORA}
    run = trained(tiny_config, tmp_path, "adapter")
    tiny_config["alg"]["policy"]["args"] |= {"merge_on_save": True}
    whole = trained(tiny_config, tmp_path, "whole")

    out = tmp_path / "merged"
    capsys.readouterr()
    assert main(["merge", str(run), str(out)]) == 0
    assert capsys.readouterr().out == f"{run}/model -> {out}\n"
    torch.testing.assert_close(
        scores(AutoModelForCausalLM.from_pretrained(out)), scores(AutoModelForCausalLM.from_pretrained(whole / "model"))
    )
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_text() == (whole / "model" / name).read_text()
    assert ModelCard.load(out / "README.md").data.library_name == "transformers"
    assert push(hub, out, "me/merged").returncode == 0
    assert set(hub.repositories["me/merged"].files) == {path.name for path in out.iterdir()}


@pytest.mark.parametrize("peft", [None, LORA], ids=["whole", "adapters"])
def test_a_reward_model_of_an_interrupted_run_is_merged_with_its_output_layer(peft, tiny_gpt2_dir, tmp_path, capsys):
    if peft is not None:
        pytest.importorskip("peft")
    mapping = blocks("reward_model", tiny_gpt2_dir, written(tmp_path), save_strategy="steps", save_steps=6)
    mapping["alg"] |= {"peft": peft, "merge_on_save": peft is not None}
    run = trained(mapping, tmp_path)
    final = AutoModelForSequenceClassification.from_pretrained(run / "model")

    interrupted(run)
    if peft is not None:
        assert main(["push", str(run), "me/reward"]) == 1
        assert "write whole weights with `rl4lms-like merge`" in capsys.readouterr().err
    assert merge_run(run, tmp_path / "merged") == run / "checkpoints" / "checkpoint-6"
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(scores(again), scores(final))
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card and "AutoModelForSequenceClassification" in card


def test_a_model_is_found_from_within_its_folder(tiny_config, tmp_path, monkeypatch, capsys):
    tiny_config["train_evaluation"] |= {"n_iters": 1, "save_every": 1}
    run = trained(tiny_config, tmp_path)
    checkpoint = run / "checkpoints" / "iteration_00001"
    monkeypatch.chdir(checkpoint)
    capsys.readouterr()
    assert main(["merge", ".", str(tmp_path / "merged")]) == 0
    assert capsys.readouterr().out.startswith(f"{checkpoint} -> ")


def test_of_a_finished_run_without_its_last_model_the_best_one_is_used(tiny_config, tmp_path, capsys):
    run = trained(tiny_config, tmp_path)
    shutil.rmtree(run / "model")
    capsys.readouterr()
    merge_run(run, tmp_path / "merged")
    assert f"the run {run} has no folder model/: using its model {run}/checkpoints/" in capsys.readouterr().err


def test_an_existing_folder_is_not_overwritten(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match="exists already; name a new folder"):
        merge_run(tmp_path / "run", tmp_path / "model")


def test_only_runs_are_merged(tiny_gpt2_dir, tmp_path):
    with pytest.raises(RL4LMsLikeError, match="is not the folder of a run"):
        merge_run(tiny_gpt2_dir, tmp_path / "merged")


# --- the saved generation config --------------------------------------------------------------------------------------


@pytest.mark.parametrize("peft", [None, LORA], ids=["whole", "adapters"])
def test_plain_generation_ends_with_the_tokens_that_ended_responses(peft, tiny_config, tiny_gpt2_dir, tmp_path):
    if peft is not None:
        pytest.importorskip("peft")
    model = shutil.copytree(tiny_gpt2_dir, tmp_path / "model")
    GenerationConfig(eos_token_id=[1, 7], pad_token_id=0).save_pretrained(model)
    config = tiny_config
    config["tokenizer"]["model_name"] = config["alg"]["policy"]["args"]["model_name"] = str(model)
    config["alg"]["policy"]["args"]["peft"] = peft
    config["train_evaluation"]["n_iters"] = 1
    run = trained(config, tmp_path)
    assert GenerationConfig.from_pretrained(run / "model").eos_token_id == [1, 7]
