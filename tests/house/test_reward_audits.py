"""The audit of the library's rewards is recorded in docs/reward_audit.md, and each finding is explained."""

from __future__ import annotations

import pytest

from rl4lms_like.catalogue import page as catalogue_page
from rl4lms_like.cli import main
from rl4lms_like.rewards import EXPLAINED_FINDINGS, REWARDS
from scripts.docs import reward_audits
from scripts.docs.reward_audits import AUDITED, NOT_AUDITED, OF_THE_MACHINE, page
from tests.conftest import REPOSITORY


@pytest.fixture(scope="module")
def audits(language_data):
    return reward_audits.audits()


def test_every_reward_is_audited_or_named_with_a_reason():
    assert sorted({*(id for id, *_ in AUDITED), *NOT_AUDITED}) == sorted(REWARDS)


def test_the_page_in_the_documentation_is_the_one_that_is_made_today(audits):
    written = (REPOSITORY / "docs/reward_audit.md").read_text(encoding="utf-8")
    assert written == page(audits), "run: python -m scripts.docs.reward_audits docs/reward_audit.md"


def test_every_finding_is_explained_and_every_explanation_is_of_a_finding(audits):
    rows = zip(AUDITED, audits, strict=True)
    found = {(id, finding.kind) for (id, *_), audit in rows for finding in audit.findings}
    explained = {(id, kind) for id, kinds in EXPLAINED_FINDINGS.items() for kind in kinds}
    assert {key for key in found ^ explained if key[1] not in OF_THE_MACHINE} == set()
    catalogue = catalogue_page()
    for id, kinds in EXPLAINED_FINDINGS.items():
        entry = catalogue.split(f"\n### {id} (reward)\n")[1].partition("\n### ")[0]
        for kind, text in kinds.items():
            assert f"* `{kind}`: {text}\n" in entry


def test_show_explains_the_findings(capsys):
    assert main(["show", "math_equal"]) == 0
    printed = capsys.readouterr().out.split("math_equal (metric)")
    assert "word_order" in printed[0] and EXPLAINED_FINDINGS["math_equal"]["word_order"] in printed[0]
    assert "word_order" not in printed[1]
