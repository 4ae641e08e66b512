"""The documentation is true: its code runs, its YAML is accepted, its commands, links and tests exist.

What a page may rely on without saying so stands in `workplace`: a folder in which `gpt2` and `t5-small` are tiny
models, `rl4lm_exps/warm_start/model` is what a supervised run left and `questions.jsonl` is a small data file.
Everything else stands on the page. Of one page,

* Python blocks run in their order and share their names; one that begins with `# my_project/x.py` is saved as that;
* a YAML block is a run, or a fragment that takes the place of the same keys in the README's run; one that begins with
  `# a benchmark` is a spec.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import json
import pydoc
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rl4lms_like.benchmarking.spec import load_benchmark
from rl4lms_like.cli.commands import build_parser
from rl4lms_like.config.binding import REGISTRIES, run_kind
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.yaml_file import dump_yaml, parse_yaml
from rl4lms_like.offline.pipeline import parse_pipeline
from rl4lms_like.quickstart import _parser as quickstart_parser
from rl4lms_like.run import train_config
from scripts.docs.catalogue_page import PAGE as CATALOGUE
from scripts.docs.repository_pages import PAGES as REPOSITORY_PAGES
from tests.config_errors import raises_at

ROOT = Path(__file__).resolve().parents[2]
PROGRAM_FOLDERS = ("benchmarks", "tests/robustness")
"""Folders of programs, each with a README that lists them."""
PAGES = sorted(page.relative_to(ROOT).as_posix() for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PAGES += [f"{folder}/README.md" for folder in PROGRAM_FOLDERS]

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
PROJECT_FILE = re.compile(r"# (my_project/\w+\.py)\n")
OWN_HELP = {"quickstart"}


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str, *languages: str) -> list[tuple[str, str]]:
    """Language and content of the page's code blocks, in order."""
    return [(language, code) for language, code in BLOCK.findall(text_of(page)) if language in languages]


def pages_with(*languages: str) -> list[str]:
    return [page for page in PAGES if blocks_of(page, *languages)]


@pytest.fixture
def workplace(tmp_path, monkeypatch, tiny_gpt2_dir, tiny_t5_dir, tiny_gguf_dir) -> Path:
    """Where a reader's commands and code run; see the module's docstring."""
    (tmp_path / "gpt2").symlink_to(tiny_gpt2_dir)
    (tmp_path / "t5-small").symlink_to(tiny_t5_dir)
    (tmp_path / "merged").symlink_to(tiny_gpt2_dir)
    for name in ("llama", "downloads"):
        (tmp_path / name).symlink_to(tiny_gguf_dir / name)
    (tmp_path / "rl4lm_exps" / "warm_start").mkdir(parents=True)
    (tmp_path / "rl4lm_exps" / "warm_start" / "model").symlink_to(tiny_gpt2_dir)
    rows = [{"question": f"What is {i} and {i}?", "answers": [f"{i + i}."], "topic": "sums"} for i in range(10)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_project").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RL4LMS_LIKE_CODE", str(tmp_path))
    yield tmp_path
    for module in [name for name in sys.modules if name.partition(".")[0] == "my_project"]:
        del sys.modules[module]


@pytest.fixture
def registries_as_they_were(monkeypatch):
    """A page may register components of its own; other tests must not meet them."""
    for registry in REGISTRIES.values():
        monkeypatch.setattr(registry, "_table", dict(registry._table))


def run_python(page: str) -> None:
    names: dict = {"__name__": "a_page"}
    for _, code in blocks_of(page, "python"):
        code = code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "gpt2")  # a tiny one; see `workplace`
        file = PROJECT_FILE.match(code)
        if file is None:
            exec(compile(code, page, "exec"), names)
            continue
        Path(file[1]).write_text(code)
        importlib.invalidate_caches()
        importlib.import_module(file[1].removesuffix(".py").replace("/", "."))


def readme_run() -> dict:
    (_, text), *_ = blocks_of("README.md", "yaml")
    return parse_yaml(text, "README.md")[0]


def check_benchmark(text: str, folder: Path) -> None:
    """A spec is accepted; the configs that it names are the README's run."""
    (folder / "benchmark.yml").write_text(text)
    for config in re.findall(r"config: (\w+\.yml)", text):
        (folder / config).write_text(dump_yaml(readme_run()))
    assert load_benchmark(folder / "benchmark.yml").cells


def with_fragment(run: dict, fragment: dict) -> dict:
    """A run with a fragment's keys; a component with another id comes with its own arguments (and KL, if given).

    A supervised or preference run has other blocks, and stands by itself. So does a whole file.
    """
    if run_kind(fragment) != "on_policy" or {"tokenizer", "alg", "train_evaluation"} <= fragment.keys():
        return fragment
    merged = copy.deepcopy(run)
    for key, value in fragment.items():
        if not isinstance(value, dict):
            merged[key] = value
            continue
        before = dict(merged.get(key) or {})
        if "id" in value and value["id"] != before.get("id"):
            before.pop("args", None)
            before = {name: own for name, own in before.items() if name != "kl_div" or name not in value}
        merged[key] = with_fragment(before, value)
    return merged


# --- code and configs ------------------------------------------------------------------------------------------------


TRAINED = ["docs/extend/policy.md", "docs/extend/algorithm.md", "docs/extend/callback.md"]
"""Pages whose code is run by `test_policies_and_algorithms_of_ones_own_train`."""
READ = [page for page in pages_with("python", "yaml") if page not in TRAINED and "tutorials/" not in page]
"""The tutorials are run by `test_tutorials`."""


@pytest.mark.parametrize("page", READ)
def test_the_code_runs_and_the_configs_are_accepted(page, workplace, registries_as_they_were):
    run_python(page)
    for _, text in blocks_of(page, "yaml"):
        if text.startswith("# a benchmark\n"):
            check_benchmark(text, workplace)
            continue
        mapping, repeated = parse_yaml(text, page)
        assert repeated == []
        if "post_training" in mapping:
            parse_pipeline(mapping, source=page)
            continue
        parse_config(with_fragment(readme_run(), mapping), source=page)


def test_a_fragment_with_a_mistake_is_not_accepted(workplace):

    with raises_at("alg.args.clip_rnge"):
        parse_config(with_fragment(readme_run(), {"alg": {"args": {"clip_rnge": 0.1}}}))


@pytest.mark.parametrize("algorithm", ["ppo", "a2c", "trpo"])
def test_the_readmes_run_trains_and_every_number_it_logs_is_explained(algorithm, workplace):
    own = {} if algorithm == "ppo" else {"alg": {"id": algorithm, "args": {"n_steps": 4}}}
    shorter = {"env": {"n_envs": 4}, "train_evaluation": {"n_iters": 2, "max_eval_samples": 4}}
    run = with_fragment(with_fragment(readme_run(), own), shorter)
    folder = train_config(parse_config(run), base_path_to_store_results=workplace, quiet=True)
    explained = text_of("docs/metrics_explained.md")
    for file in ("rollout_info.jsonl", "training_info.jsonl"):
        lines = [json.loads(line) for line in (folder / file).read_text().splitlines()]
        assert len(lines) == 2
        assert [key for key in lines[0] if f"`{key}`" not in explained] == [], file


def test_the_supervised_run_trains_and_every_number_it_logs_is_explained(workplace):
    run = parse_yaml(blocks_of("docs/supervised.md", "yaml")[0][1], "docs/supervised.md")[0]
    run["datapool"]["args"] = {"n_train": 40, "n_eval": 4}
    run["alg"]["training_args"]["logging_steps"] = 5
    folder = train_config(parse_config(run), base_path_to_store_results=workplace, quiet=True)
    explained = text_of("docs/metrics_explained.md")
    lines = [json.loads(line) for line in (folder / "training_info.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert [key for key in lines[0] if f"`{key}`" not in explained] == []


@pytest.mark.parametrize("page", TRAINED)
def test_policies_and_algorithms_of_ones_own_train(page, workplace, registries_as_they_were):
    run_python(page)
    shorter = {"env": {"n_envs": 4}, "train_evaluation": {"n_iters": 1, "max_eval_samples": 4, "save_model": False}}
    for _, text in blocks_of(page, "yaml"):
        fragment = parse_yaml(text, page)[0]
        run = with_fragment(with_fragment(readme_run(), fragment), shorter)
        folder = train_config(parse_config(run), base_path_to_store_results=workplace, quiet=True)
        assert len((folder / "training_info.jsonl").read_text().splitlines()) == 1


# --- commands --------------------------------------------------------------------------------------------------------


def commands_of(page: str) -> Iterator[list[str]]:
    for _, code in blocks_of(page, "sh"):
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


@pytest.mark.parametrize("page", pages_with("sh"))
def test_the_commands_exist_and_take_these_options(page, monkeypatch):
    def refuse(self: argparse.ArgumentParser, message: str) -> None:
        raise AssertionError(f"{page}: {self.prog}: {message}")

    monkeypatch.setattr(argparse.ArgumentParser, "error", refuse)
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands_of(page):
        if words[0] == "make":
            assert words[1] in targets, words
        elif words[0] == "python" and words[1] == "scripts/training/train_text_generation.py":
            build_parser().parse_args(["train", *words[2:]])
        elif words[0] == "python" and words[1].startswith("my_project/"):
            assert f"# {words[1]}\n" in text_of(page), words
        elif words[0] == "python" and words[1] == "-m":
            assert importlib.util.find_spec(words[2]) is not None, words
        elif words[0] == "sh":
            assert (ROOT / words[1]).exists(), words
        elif words[0] == "torchrun":
            build_parser().parse_args(words[words.index("rl4lms_like") + 1 :])
        elif words[0] == "rl4lms-like":
            _, rest = build_parser().parse_known_args(words[1:])
            if words[1] in OWN_HELP:
                quickstart_parser().parse_args(rest)
            else:
                assert rest == [], words
        else:
            assert words[0] in {"pip", "docker", "tensorboard", "wandb", "export", "vllm", "sglang"}, (
                f"{page}: nothing checks {words}"
            )


def test_files_and_ids_that_commands_name_are_there():
    missing = []
    for page in pages_with("sh"):
        for words in commands_of(page):
            paths = [word for word in words if word.startswith(("task_configs/", "scripts/", "benchmarks/"))]
            missing += [f"{page}: {path}" for path in paths if not (ROOT / path).exists()]
            if words[:2] == ["rl4lms-like", "show"] and ":" not in words[2]:
                known = any(words[2] in registry for registry in REGISTRIES.values())
                missing += [] if known else [f"{page}: {words}"]
    assert missing == []


# --- what pages point to ---------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The names that a page's headings have in links."""
    headings = HEADING.findall(BLOCK.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    broken = []
    for page in PAGES:
        for target in LINK.findall(BLOCK.sub("", text_of(page))):
            if target.startswith(("http://", "https://", "mailto:")):
                continue
            path, _, anchor = target.partition("#")
            file = (ROOT / page).parent / path if path else ROOT / page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{page}: {target}")
    assert broken == []


def test_tests_that_pages_name_exist():
    named = [(page, file, name) for page in PAGES for file, name in NAMED_TEST.findall(text_of(page))]
    missing = [
        f"{page}: {file}::{name}"
        for page, file, name in named
        if not (ROOT / file).is_file() or not re.search(rf"^\s*def {name}\(", text_of(file), re.MULTILINE)
    ]
    assert named and missing == []


def test_rl4lms_imports_are_mapped_to_what_exists():
    """The right column of the table: `package.name` and `package.{one, two}`."""
    ((_, _, table),) = [text_of("docs/coming_from_rl4lms.md").partition("## Imports\n")]
    table = table.partition("\n```")[0]
    here = re.findall(r"`(rl4lms_like[\w.]*?)(?:\.\{([^}]*)\})?`", table)
    assert len(here) > 15
    for dotted, names in here:
        for name in names.split(", ") if names else [""]:
            path = f"{dotted}.{name}" if name else dotted
            assert pydoc.locate(path) is not None, path


def test_the_lists_of_programs_have_every_program_and_every_result():
    """A program has no other place where a reader finds it, and a result that no page names is not kept."""
    lists = "".join(text_of(f"{folder}/README.md") for folder in PROGRAM_FOLDERS)
    unnamed = []
    for folder in PROGRAM_FOLDERS:
        programs = [path for path in (ROOT / folder).glob("[!_]*.py") if not path.name.startswith("test_")]
        results = [f"{path.name}/" if path.is_dir() else path.name for path in (ROOT / folder / "results").iterdir()]
        assert programs and results
        unnamed += [f"{folder}: {name}" for name in (*(path.name for path in programs), *results) if name not in lists]
    assert unnamed == []


@pytest.mark.parametrize(("kind", "overview"), [("algorithms", "algorithms"), ("objectives", "preferences")])
def test_every_algorithm_and_objective_has_a_page_that_its_overview_links(kind, overview):
    text = text_of(f"docs/{overview}.md")
    assert [id for id in REGISTRIES[kind] if f"docs/algorithms/{id}.md" not in PAGES] == []
    assert [id for id in REGISTRIES[kind] if f"(algorithms/{id}.md" not in text] == []


def test_the_site_has_every_page():
    named = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2])
    written = [REPOSITORY_PAGES.get(page, page.removeprefix("docs/")) for page in PAGES]
    assert sorted(named) == sorted([*written, CATALOGUE])


def test_the_site_has_five_tabs_and_no_long_list():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    tabs = yaml.safe_load(nav)
    assert [name for tab in tabs for name in tab] == ["Start", "Guides", "Algorithms", "Reference", "Project"]
    groups = [entries for tab in tabs for entries in tab.values()]
    for group in groups:
        assert len(group) <= 10, group
        groups += [entries for entry in group for entries in entry.values() if isinstance(entries, list)]
    assert len(groups) > 10


# --- ids -------------------------------------------------------------------------------------------------------------


def test_every_id_has_a_summary_of_one_line():
    summaries = {(kind, id): registry.entry(id).summary for kind, registry in REGISTRIES.items() for id in registry}
    wrong = {
        key: summary
        for key, summary in summaries.items()
        if not 10 < len(summary) < 110 or "\n" in summary or summary.endswith(".")
    }
    assert len(summaries) > 80 and wrong == {}
