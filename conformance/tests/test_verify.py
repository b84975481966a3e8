"""What `verify` sees: edited rows, other lists, dirty trees; and what only running again shows."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import msgspec
import pytest

from vllm_conformance.report import digest_of, read_report, sealed
from vllm_conformance.run import run
from vllm_conformance.verify import VERIFY_STATUS, rerun, verify
from vllm_core.errors import ConfigError


@pytest.fixture
def clean(report_of, small_lists):
    """A report of a right platform, from commits and wheels."""
    return report_of(small_lists)


def changed(report, **changes):
    """The report with changes, and the digest that fits them."""
    return sealed(msgspec.structs.replace(report, **changes))


def with_row(report, id_, **changes):
    rows = tuple(msgspec.structs.replace(row, **changes) if row.id == id_ else row for row in report.rows)
    return changed(report, rows=rows)


def kinds(verification):
    return [problem.kind for problem in verification.problems]


def test_a_clean_report_is_confirmed(clean, small_lists):
    found = verify(clean, lists=small_lists)
    assert (found.result, found.reached, found.problems) == ("CONFORMANT", 4, ())
    assert VERIFY_STATUS[found.result] == 0


def test_a_report_survives_its_file(clean, saved):
    assert read_report(saved(clean)) == clean


def test_an_edited_file_is_tampered_with(clean, saved, small_lists):
    path = saved(with_row(clean, "L1/add/seed1", outcome="FAIL", verdict="FAIL"))
    path.write_text(path.read_text().replace('"outcome":"FAIL","verdict":"FAIL"', '"outcome":"PASS","verdict":"PASS"'))
    found = verify(read_report(path), lists=small_lists)
    assert found.result == "TAMPERED"
    assert "TAMPERED" in kinds(found)
    assert VERIFY_STATUS[found.result] == 1


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda one: with_row(one, "L1/add/seed1", outcome="FAIL"), "verdict that does not follow"),
        (lambda one: with_row(one, "L1/add/seed1", outcome="FAIL", verdict="FAIL"), "its rows say NOT_CONFORMANT, level 0"),
        (lambda one: changed(one, reached=5), "it says CONFORMANT, level 5"),
        (lambda one: changed(one, rows=one.rows[1:]), "required and missing, such as L0/loads"),
        (lambda one: changed(one, rows=(*one.rows, one.rows[0])), "there twice"),
        (lambda one: with_row(one, "L0/loads", id="L0/other"), "asked for by no list, such as L0/other"),
        (lambda one: changed(one, lists={**one.lists, "L1": "0" * 64}), "must-pass lists are not those of"),
        (lambda one: msgspec.structs.replace(one, seconds=0.1), "digest"),
    ],
)
def test_what_does_not_follow_from_the_rows_is_tampered_with(clean, small_lists, edit, text):
    found = verify(edit(clean), lists=small_lists)
    assert found.result == "TAMPERED"
    assert any(text in problem.text for problem in found.problems)
    assert found.reached == -1


def test_a_claim_that_is_taken_back_brings_other_rows(clean, small_lists):
    claims = {**clean.claims, "graphs": {"kind": "full"}}
    found = verify(changed(clean, claims=claims), lists=small_lists)
    assert {problem.text for problem in found.problems} == {
        "1 rows are required and missing, such as L1/graphs",
        "1 rows are asked for by no list, such as L1/no_graphs",
    }


def test_a_waiver_that_was_added_later_is_seen(clean, small_lists, judged_waiver):
    found = verify(changed(clean, waivers=(judged_waiver("L1/add/*", "USED"),)), lists=small_lists)
    assert "waivers have verdicts that do not follow" in [problem.text for problem in found.problems]


@pytest.mark.parametrize("source", [{"dirty": True}, {"kind": "files", "commit": ""}])
def test_a_tree_that_nobody_else_has_is_refused(clean, small_lists, source):
    sources = (*clean.sources[:2], msgspec.structs.replace(clean.sources[2], **source))
    found = verify(changed(clean, sources=sources), lists=small_lists)
    assert (found.result, kinds(found)) == ("REFUSED", ["DIRTY"])
    assert VERIFY_STATUS[found.result] == 1


def test_a_report_of_another_version_of_the_suite_is_refused(clean, small_lists):
    versions = msgspec.structs.replace(clean.versions, suite="9.9")
    assert kinds(verify(changed(clean, versions=versions, lists={}), lists=small_lists)) == ["OTHER_VERSION"]


def test_an_incomplete_report_stays_incomplete(clean, small_lists):
    report = with_row(clean, "L1/add/seed1", outcome="NOT_RUN", verdict="NOT_RUN")
    found = verify(changed(report, result="INCOMPLETE", reached=0), lists=small_lists)
    assert (found.result, found.problems) == ("INCOMPLETE", ())
    assert VERIFY_STATUS[found.result] == 3


def test_waivers_are_judged_for_the_day_of_the_run(clean, small_lists, judged_waiver):
    rows = with_row(clean, "L1/add/seed1", outcome="FAIL", verdict="WAIVED", waiver="L1/add/seed1")
    report = changed(rows, waivers=(judged_waiver("L1/add/seed1", "USED", expiry=date(2026, 5, 2)),))
    assert verify(report, lists=small_lists).result == "CONFORMANT"


def test_consistent_lies_are_not_seen_without_running_again(install, options):
    """The docs say so: `verify` alone excludes accidents."""
    install("wrong")
    honest = run(options)
    rows = tuple(
        msgspec.structs.replace(row, outcome="PASS", verdict="PASS") if row.outcome == "FAIL" else row for row in honest.rows
    )
    clean_sources = tuple(msgspec.structs.replace(one, kind="wheel", dirty=False) for one in honest.sources)
    lie = changed(honest, rows=rows, sources=clean_sources, result="CONFORMANT", reached=4)
    assert verify(lie, lists=options.lists).result == "CONFORMANT"
    found = rerun(lie, 20, options=options)
    assert found.result == "TAMPERED"
    assert {problem.text.partition(":")[0] for problem in found.problems} == {f"L1/add/seed{seed}" for seed in range(3)}
    assert len(found.repeated) == len([row for row in rows if row.level < 5])


def test_rows_that_come_out_the_same_are_confirmed(install, options):
    install()
    report = run(options)
    found = rerun(report, 2, seed=7, options=options)
    assert len(found.repeated) == 2
    assert set(kinds(found)) <= {"DIRTY"}
    assert found.repeated == rerun(report, 2, seed=7, options=options).repeated


def test_another_output_on_the_same_machine_is_seen(install, options):
    install()
    report = with_row(run(options), "L1/add/seed0", digest="0" * 64)
    texts = [problem.text for problem in rerun(report, 20, options=options).problems]
    assert "L1/add/seed0: another output than in the report" in texts


def test_running_again_with_other_code_is_refused(install, options):
    install()
    report = run(options)
    install("wrong")
    found = rerun(report, 1, options=options)
    assert "OTHER_VERSION" in kinds(found)
    assert found.result == "REFUSED"


@pytest.mark.parametrize("text", ["", "{}", '{"format": 1}', "[1]", "\xff"])
def test_a_file_that_is_no_report_is_an_error(tmp_path, text):
    (tmp_path / "conformance.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="Report cannot be read"):
        read_report(tmp_path / "conformance.json")


def test_a_report_of_another_format_is_an_error(clean, saved):
    path = saved(changed(clean, format=2))
    with pytest.raises(ConfigError, match="format 2"):
        read_report(path)


def test_a_list_that_is_not_the_one_shipped_is_an_error(clean, small_lists):
    (small_lists / "L1.txt").write_text("[]\n")
    with pytest.raises(ConfigError, match="not the one that was shipped"):
        verify(clean, lists=small_lists)


def test_the_digest_covers_everything_but_itself(clean):
    assert digest_of(clean) == clean.digest
    assert digest_of(msgspec.structs.replace(clean, digest="x")) == clean.digest
    assert digest_of(msgspec.structs.replace(clean, seconds=clean.seconds + 1)) != clean.digest


def test_options_are_carried_into_the_second_run(install, options):
    install()
    report = run(replace(options, options={"note": 1}))
    assert report.options == {"note": 1}
    assert "OTHER_RESULT" not in kinds(rerun(report, 1, options=options))
