"""`vllm-core conformance`: what each command prints, writes and exits with."""

from __future__ import annotations

import msgspec
import pytest

from vllm_conformance.matrix import BEGIN, END
from vllm_conformance.report import read_report, sealed
from vllm_core.cli.main import main


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run it in an empty folder; returns status, output and errors."""
    monkeypatch.chdir(tmp_path)

    def go(*arguments):
        status = main(["conformance", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return go


@pytest.fixture
def shipped(report_of, saved):
    """A report in a file, made as if with the lists of the package."""

    def make(**changes):
        from vllm_conformance.lists import read_lists

        hashes = {f"L{level}": one.sha256 for level, one in read_lists().items()}
        return saved(sealed(msgspec.structs.replace(report_of(), lists=hashes, **changes)))

    return make


def test_run_writes_a_report_and_says_what_is_bad(command, install, tmp_path):
    install()
    status, out, _ = command("run", "--platform", "broken", "--level", "0", "--out", "r")
    report = read_report(tmp_path / "r" / "conformance.json")
    assert (status, report.result) == (1, "NOT_CONFORMANT")
    assert "FAIL L0/installed" in out
    assert "NOT_CONFORMANT: vllm-broken 1.0 on Broken 1, levels 0 to 0" in out
    assert (tmp_path / "r" / "junit.xml").exists()


def test_run_takes_a_choice_and_waivers_and_exits_with_3(command, install, tmp_path):
    install()
    (tmp_path / "w.toml").write_text(
        '[[waiver]]\nid = "L0/installed"\nlink = "https://example.org/1"\nowner = "jane"\nexpiry = 2999-01-01\n'
    )
    choice = ("-k", "L0/inst*", "-k", "L0/probe", "--maxfail", "9", "--jobs", "1")
    status, out, _ = command("run", "--platform", "vllm-broken", "--level", "0", "--waivers", "w.toml", *choice)
    rows = {row.id: row.verdict for row in read_report(tmp_path / "conformance-report" / "conformance.json").rows}
    assert (status, rows["L0/installed"], rows["L0/probe"], rows["L0/loads"]) == (3, "WAIVED", "PASS", "NOT_RUN")
    assert "INCOMPLETE" in out
    assert "cases chosen: 2 good, 0 bad" in out


def test_a_choice_with_a_bad_case_exits_with_1(command, install):
    install()
    status, out, _ = command("run", "--platform", "vllm-broken", "--level", "0", "-k", "L0/inst*", "--jobs", "1")
    assert (status, "cases chosen: 0 good, 1 bad" in out) == (1, True)


def test_a_pattern_that_no_case_has_is_an_error(command, install):
    install()
    status, _, err = command("run", "--platform", "vllm-broken", "--level", "0", "-k", "L0/instaled")
    assert status == 2
    assert "No case has such an id: L0/instaled" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--platform", "nowhere"), "No such platform: nowhere"),
        (("run", "--platform", "broken", "--device", "9", "--level", "0"), ""),
        (("run", "--platform", "broken", "--level", "6"), "Value does not exist"),
        (("run", "--platform", "broken", "--levle", "1"), "did you mean '--level'"),
        (("run", "--platform", "broken", "--waivers", "no.toml"), "File of waivers cannot be read: no.toml"),
        (("verify", "no.json"), "Report cannot be read: no.json"),
    ],
)
def test_what_cannot_be_started_is_an_error_of_four_parts(command, install, arguments, message):
    install()
    status, _, err = command(*arguments)
    if message:
        assert (status, message in err) == (2, True), err
    else:
        assert status in (1, 3)


def test_verify_prints_what_speaks_against_a_report(command, shipped):
    status, out, _ = command("verify", shipped())
    assert status == 1
    assert "TAMPERED: " in out
    assert "rows are required and missing" in out


def test_verify_of_a_right_report_says_what_it_did_not_look_at(command, install, tmp_path, monkeypatch):
    """The sources of the report are replaced: this checkout may be dirty."""
    install()
    command("run", "--platform", "broken", "--level", "0", "-k", "L0/probe", "--out", "r")
    report = read_report(tmp_path / "r" / "conformance.json")
    sources = tuple(msgspec.structs.replace(one, kind="wheel", dirty=False) for one in report.sources)
    from vllm_conformance.report import write_report

    write_report(sealed(msgspec.structs.replace(report, sources=sources)), tmp_path / "c.json")
    status, out, _ = command("verify", "c.json")
    assert (status, "this excludes accidents, not intent" in out, "INCOMPLETE" in out) == (3, True, True)
    status, out, _ = command("verify", "c.json", "--rerun", "3", "--seed", "1")
    assert (status, "1 rows were run again here" in out) == (3, True)


def test_matrix_prints_or_writes(command, shipped, tmp_path):
    path = shipped()
    status, out, _ = command("matrix", path)
    assert (status, out.splitlines()[0]) == (0, "| | vllm-broken (beta) |")
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    assert command("matrix", path, path, "--readme", "README.md", "--html", "m.html")[:2] == (0, "")
    assert "| conformance | L4 | L4 |" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "m.html").read_text().startswith("<!doctype html>")
    (tmp_path / "README.md").write_text("no marks")
    status, _, err = command("matrix", path, "--readme", "README.md")
    assert (status, "No place for the support matrix: README.md" in err) == (2, True)
    assert command("matrix", path, "--readme", "nowhere.md")[0] == 2


def test_badge_writes_svg_and_refuses_a_subset(command, shipped, tmp_path):
    assert command("badge", shipped())[0] == 0
    assert (tmp_path / "conformance.svg").read_text().startswith("<svg")
    status, _, err = command("badge", shipped(subset="ci"))
    assert (status, "A badge needs a whole run" in err) == (2, True)
