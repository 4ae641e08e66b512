"""Which code a config may name: real attacks are refused before anything of theirs is called or imported."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from rl4lms_like.config.binding import REGISTRIES
from rl4lms_like.config.load import parse_config
from rl4lms_like.system import import_paths
from rl4lms_like.system.errors import ConfigError
from rl4lms_like.system.import_paths import RefusedImportError, code_options, imported, use_code_from
from tests.config_errors import raises_at
from tests.configs import run_blocks, supervised_blocks

EVIL = "open({mark!r}, 'w').close()\n\n\ndef score(responses, **others):\n    return [0.0 for _ in responses]\n"
"""A module that leaves a mark when it is imported."""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder with a module of somebody else's, which is also the current one; gives the mark it leaves."""
    mark = tmp_path / "was_imported"
    (tmp_path / "attack_module.py").write_text(EVIL.format(mark=str(mark)))
    (tmp_path / "attack_package").mkdir()
    (tmp_path / "attack_package" / "inner.py").write_text(EVIL.format(mark=str(mark)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RL4LMS_LIKE_CODE")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield mark
    for name in ("attack_module", "attack_package", "attack_package.inner"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "path",
    [
        *(
            "os:system",
            "subprocess:Popen",
            "builtins:eval",
            "posix:system",
            "runpy:run_path",
            "importlib:import_module",
        ),
        *("os.path:join", "code:InteractiveInterpreter", "pickle:loads", "functools:partial"),
    ],
)
def test_the_standard_library_is_refused(path):
    with pytest.raises(RefusedImportError):
        imported(path)


@pytest.mark.parametrize("path", ["attack_module:score", "attack_package.inner:score"])
@pytest.mark.parametrize("entry", ["", "absolute"])
def test_the_current_folder_is_no_place_for_code_however_it_got_onto_the_path(elsewhere, path, entry, monkeypatch):
    sys.path.insert(0, str(elsewhere.parent) if entry == "absolute" else entry)
    monkeypatch.setenv("PYTHONPATH", os.pathsep)  # two empty entries, which Python takes for the current folder
    with pytest.raises(RefusedImportError, match=path.split(":")[0].split(".")[0]):
        imported(path)
    assert not elsewhere.exists(), "the module was imported"


def test_a_module_that_python_would_not_find_is_named_with_the_way_out(elsewhere):
    sys.path[:] = [entry for entry in sys.path if entry]
    with pytest.raises(RefusedImportError, match="attack_module"):
        imported("attack_module:score")
    with pytest.raises(ModuleNotFoundError):
        imported("nowhere_at_all:X")


def test_code_of_a_folder_that_is_named_is_found_also_by_processes_that_start_later(elsewhere, monkeypatch):
    monkeypatch.setenv("RL4LMS_LIKE_CODE", "")
    use_code_from(".")
    assert imported("attack_package.inner:score")([1]) == [0.0]
    assert code_options() == f" --code {elsewhere.parent}"
    code = "from rl4lms_like.system.import_paths import imported; print(imported('attack_module:score')(['x']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=60)
    assert done.stdout.strip() == "[0.0]", done.stderr


def test_a_named_folder_never_stands_in_for_an_installed_package(elsewhere, monkeypatch):
    monkeypatch.setenv("RL4LMS_LIKE_CODE", "")
    (elsewhere.parent / "yaml.py").write_text("raise SystemExit")
    use_code_from(".")
    assert sys.path[-1] == str(elsewhere.parent)


def test_a_folder_on_pythonpath_was_named_by_the_user(elsewhere, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(elsewhere.parent))
    sys.path.append(str(elsewhere.parent))
    assert imported("attack_module:score")


def test_what_lies_below_a_named_folder_goes_by_its_name_there(elsewhere, monkeypatch):
    """As where PYTHONPATH is the home folder, and the config came with code into one of its folders."""
    monkeypatch.setenv("PYTHONPATH", str(elsewhere.parents[1]))
    sys.path += [str(elsewhere.parents[1]), str(elsewhere.parent)]
    with pytest.raises(RefusedImportError):
        imported("attack_module:score")
    assert not elsewhere.exists(), "the module was imported"
    assert imported(f"{elsewhere.parent.name}.attack_module:score")


def test_a_folder_that_is_not_there_is_a_mistake_on_the_command_line(tmp_path):
    with raises_at("--code", mentions="nowhere"):
        use_code_from(tmp_path / "nowhere")


def test_what_the_program_imported_itself_may_be_named(monkeypatch):
    module = types.ModuleType("imported_before")
    module.Reward = type("Reward", (), {"__module__": "imported_before"})
    monkeypatch.setitem(sys.modules, "imported_before", module)
    assert imported("imported_before:Reward") is module.Reward
    monkeypatch.setattr(sys.modules["__main__"], "Mine", module.Reward, raising=False)
    assert imported("__main__:Mine") is module.Reward


def test_installed_packages_may_be_named_but_not_what_they_imported(monkeypatch):
    assert imported("yaml:SafeLoader").__name__ == "SafeLoader"
    import yaml

    monkeypatch.setattr(yaml, "shell", os.system, raising=False)
    monkeypatch.setattr(yaml, "later", functools.partial(functools.partial(os.system), "true"), raising=False)
    monkeypatch.setattr(yaml, "os", os, raising=False)
    with pytest.raises(RefusedImportError, match="system"):
        imported("yaml:shell")
    with pytest.raises(RefusedImportError, match="system"):
        imported("yaml:later")
    with pytest.raises(RefusedImportError, match="'os'"):
        imported("yaml:os.system")


def test_sources_of_editable_packages_count_as_installed(tmp_path, monkeypatch):
    site, sources = tmp_path / "site-packages", tmp_path / "src"
    (site / "theirs-1.0.dist-info").mkdir(parents=True)
    (site / "theirs-1.0.dist-info" / "direct_url.json").write_text(
        f'{{"dir_info": {{"editable": true}}, "url": "{sources.as_uri()}"}}'
    )
    (site / "theirs-1.0.dist-info" / "METADATA").write_text("Name: theirs\nVersion: 1.0\n")
    (site / "other.pth").write_text(f"# a comment\nimport os\n{tmp_path / 'by_path_file'}\n")
    assert list(import_paths._editable_sources(site)) == [sources]
    assert list(import_paths._folders_of_path_files(site)) == [tmp_path / "by_path_file"]


# --- in a config: a mistake at its key, before anything is called -----------------------------------------------------


def mistakes_of(blocks):
    with pytest.raises(ConfigError) as caught:
        parse_config(blocks)
    return [issue.path for issue in caught.value.issues]


@pytest.mark.parametrize(
    "id", ["os:system", "torch.hub:load", "torch:load", "huggingface_hub:HfApi", "attack_module:score"]
)
def test_no_place_of_a_config_takes_code_that_is_no_component(id, elsewhere):
    rl, supervised = run_blocks(), supervised_blocks()
    places = {
        "reward_fn.id": lambda: rl["reward_fn"].update(id=id, args={}),
        "datapool.id": lambda: rl["datapool"].update(id=id, args={}),
        "alg.id": lambda: rl["alg"].update(id=id, args={}),
        "alg.policy.id": lambda: rl["alg"]["policy"].update(id=id),
        "train_evaluation.metrics.0.id": lambda: rl["train_evaluation"].update(metrics=[{"id": id}]),
    }
    for place in places.values():
        place()
    found = mistakes_of(rl)
    assert set(places) <= set(found), found
    post = "alg.generation_kwargs.post_processing_fn"
    supervised["alg"]["generation_kwargs"]["post_processing_fn"] = {"id": id, "args": {}}
    assert f"{post}.id" in mistakes_of(supervised)
    nested = run_blocks() | {"reward_fn": {"id": "combine", "args": {"rewards": [{"id": id, "args": {}}]}}}
    assert "reward_fn.args.rewards.0.id" in mistakes_of(nested)
    shaped = run_blocks() | {"reward_fn": {"id": "sentiment", "args": {"shaping_fn": id}}}
    assert "reward_fn.args.shaping_fn" in mistakes_of(shaped)
    assert not elsewhere.exists(), "the module was imported"


def test_a_class_that_is_no_component_is_told_the_way_out(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "Duck", type("Duck", (), {"__call__": len}), raising=False)
    with raises_at("reward_fn.id", mentions="BatchedRewardFunction"):
        parse_config(run_blocks() | {"reward_fn": {"id": "__main__:Duck"}})
    REGISTRIES["rewards"].add("duck", sys.modules["__main__"].Duck)
    try:
        assert REGISTRIES["rewards"].resolve("duck") is sys.modules["__main__"].Duck
    finally:
        del REGISTRIES["rewards"]._table["duck"]


@pytest.mark.parametrize("function", ["os:system", "subprocess:run", "attack_module:score"])
def test_the_function_of_a_python_reward_comes_from_the_same_places(function, elsewhere):
    blocks = run_blocks() | {"reward_fn": {"id": "python", "args": {"function": function}}}
    with raises_at("reward_fn.args.function", among_others=True, mentions=repr(function)):
        parse_config(blocks)
    assert not elsewhere.exists(), "the module was imported"


def test_a_function_that_reads_no_responses_is_not_called():
    """torch.hub.load takes any keyword; with these it would fetch a repository and run it."""
    args = {"function": "torch.hub:load", "kwargs": {"repo_or_dir": "evil/repo", "model": "x", "trust_repo": True}}
    with pytest.raises(ValueError, match="'responses'"):
        REGISTRIES["rewards"].get("python", args)


@pytest.mark.parametrize("id", ["torch.utils.cpp_extension:load_inline", "yaml:load", "torch.nn:Linear"])
def test_a_post_processor_says_that_it_takes_a_text(id):
    with raises_at("", mentions="`text`"):
        REGISTRIES["post_processors"].resolve(id)


def test_an_entry_point_is_held_to_the_same_rules(monkeypatch):
    from importlib.metadata import EntryPoint

    from rl4lms_like.system import registry

    points = [EntryPoint("shell", "os:system", "g"), EntryPoint("hub", "torch.hub:load", "g")]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    rewards = registry.Registry("reward", group="g", table={}, misfit=registry.derived_from("a.b:RewardFunction"))
    with raises_at("", mentions="os:system"):
        rewards.resolve("shell")
    with raises_at("", mentions="RewardFunction"):
        rewards.resolve("hub")


def test_the_command_line_finds_modules_of_a_folder_only_if_it_is_named(elsewhere, tmp_path):
    command = [sys.executable, "-m", "rl4lms_like", "show", "attack_module:score"]
    environment = {key: value for key, value in os.environ.items() if key not in ("RL4LMS_LIKE_CODE", "PYTHONPATH")}
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environment, "timeout": 60}
    done = subprocess.run(command, **options)
    assert (done.returncode, elsewhere.exists()) == (2, False), done.stderr
    assert "--code ." in done.stderr
    subprocess.run([*command, "--code", "."], **options)
    assert Path(elsewhere).exists()


def test_the_processes_of_a_benchmark_take_no_module_of_the_current_folder(elsewhere, tmp_path):
    from rl4lms_like.benchmarking.processes import _WORKER

    (tmp_path / "yaml.py").write_text(EVIL.format(mark=str(elsewhere)))
    root = str(Path(import_paths.__file__).parents[2])
    command = [sys.executable, "-c", _WORKER, str(tmp_path / "no_such_job"), root]
    stdin, runner = os.pipe()  # a worker ends with its runner, whose end of the pipe stays open
    done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    os.close(runner)
    os.close(stdin)
    assert "No such file or directory" in done.stderr
    assert not elsewhere.exists(), "the module was imported"
