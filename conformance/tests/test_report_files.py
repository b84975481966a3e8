"""What a report becomes: its schema, JUnit, the table, the matrix in Markdown and HTML, the badge."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import msgspec
import pytest
from rich.console import Console

from vllm_conformance.badge import badge
from vllm_conformance.junit import write_junit
from vllm_conformance.matrix import BEGIN, END, claim_word, matrix, proof_of, replaced
from vllm_conformance.page import to_html
from vllm_conformance.report import Report, by_reference, calls_by_op, schema
from vllm_conformance.sources import host
from vllm_conformance.table import summary, to_table
from vllm_core.api import CAPABILITIES
from vllm_core.errors import ConfigError


@pytest.fixture
def mixed(report_of, row, judged_waiver):
    """A report with everything that has to be shown."""
    rows = (
        row("L0/loads", group="loads"),
        row("L1/no_graphs", "REFUSED", group="capability:graphs"),
        row("L1/sleep", "FAIL", group="capability:sleep", detail="weights <lost> \x00\nand more"),
        row("L2/a", group="op:a", calls={"kernel": 2, "reference": 1}),
        row("L2/b", group="op:b", calls={"reference": 3}),
        row("L2/c", "CRASH", group="op:c", detail="ended by SIGSEGV"),
        row("L2/d", "FAIL", verdict="WAIVED", group="op:d", waiver="L2/d"),
        row("L3/e", "NOT_RUN", group="missing", detail="no device"),
        row("L5/speed", group="speed", measured={"decode_tokens_per_s": 12.5}),
    )
    waivers = (judged_waiver("L2/d", "USED"), judged_waiver("L2/zz", "UNMATCHED"))
    return report_of(result="INCOMPLETE", reached=0, rows=rows, waivers=waivers)


# -- conformance.json


def test_every_field_of_a_report_is_in_the_schema():
    found = schema()
    body = found["$defs"]["Report"]
    assert set(body["properties"]) == set(Report.__struct_fields__)
    assert set(body["required"]) == set(Report.__struct_fields__) - {"digest"}
    outcomes = found["$defs"]["Row"]["properties"]["verdict"]["enum"]
    assert {"PASS", "WAIVED", "NOT_RUN", "ILLEGAL_SKIP"} < set(outcomes)


def test_a_file_has_one_row_a_line_and_only_what_the_schema_has(mixed, saved):
    text = saved(mixed).read_text()
    lines = [line.strip().rstrip(",") for line in text.splitlines() if line.startswith("    {")]
    assert [json.loads(line)["id"] for line in lines] == [row.id for row in mixed.rows]
    known = schema()["$defs"]["Row"]["properties"]
    assert all(set(json.loads(line)) <= set(known) for line in lines)
    assert set(json.loads(text)) == set(Report.__struct_fields__)


# -- JUnit


@pytest.fixture
def junit(mixed, tmp_path):
    write_junit(mixed, tmp_path / "junit.xml")
    return ElementTree.parse(tmp_path / "junit.xml").getroot()


def test_junit_counts_by_level(junit):
    counts = {one.get("name"): [int(one.get(key)) for key in ("tests", "failures", "errors", "skipped")] for one in junit}
    assert counts == {
        "L0": [1, 0, 0, 0],
        "L1": [2, 1, 0, 0],
        "L2": [4, 0, 1, 0],
        "L3": [1, 0, 0, 1],
        "L5": [1, 0, 0, 0],
        "waivers": [2, 1, 0, 0],
    }


def test_junit_has_the_detail_without_what_xml_cannot_hold(junit):
    (failure,) = junit.findall("testsuite[@name='L1']/testcase/failure")
    assert failure.get("type") == "FAIL"
    assert failure.get("message") == "weights <lost> ?"
    assert failure.text == "weights <lost> ?\nand more"


# -- table


def printed(report):
    console = Console(file=io.StringIO(), width=160)
    console.print(to_table(report))
    return console.file.getvalue()


def test_the_table_shows_what_is_bad_and_counts_the_rest(mixed):
    text = printed(mixed)
    assert re.search(r"CRASH +L2/c +ended by SIGSEGV", text)
    assert re.search(r"a +2 +1", text)
    assert "decode_tokens_per_s 12.5" in text
    assert "Bad: 2" in text
    assert "HANG" not in text


def test_the_summary_says_what_to_look_at(mixed):
    lines = summary(mixed)
    assert lines[0].startswith("INCOMPLETE: vllm-broken 1.0 on Broken 1, levels 0 to 5, 9 rows")
    assert "not run: 1 cases, such as L3/e: no device" in lines
    assert "by core's references: b" in lines
    assert "waivers to be looked at: L2/zz" in lines


def test_a_dirty_tree_is_said_when_it_is_run(report_of):
    report = report_of()
    dirty = msgspec.structs.replace(report, sources=tuple(msgspec.structs.replace(one, dirty=True) for one in report.sources))
    assert not [line for line in summary(report) if "verify" in line]
    assert [line for line in summary(dirty) if "`verify` will refuse it: vllm-core, vllm-conformance, vllm-broken" in line]


def test_calls_are_counted_by_op_and_kind(mixed):
    assert calls_by_op(mixed.rows)["a"] == {"kernel": 2, "reference": 1}
    assert by_reference(mixed.rows) == ("b",)


# -- matrix


@pytest.mark.parametrize(
    ("claim", "word"),
    [
        ({"kind": "full"}, "yes"),
        ({"kind": "versioned", "since": "driver>=550"}, "since driver>=550"),
        ({"kind": "partial", "reason": "slow", "cases": ["float32", "bfloat16"]}, "partly: float32, bfloat16"),
        ({"kind": "not_implemented", "issue": "#1"}, "not yet"),
        ({"kind": "unsupported", "why": "never"}, "no"),
    ],
)
def test_each_claim_has_its_word(claim, word):
    assert claim_word(claim) == word


def test_the_matrix_has_a_row_for_each_capability_and_the_level(report_of):
    lines = matrix([report_of()]).splitlines()
    assert lines[0] == "| | vllm-broken (beta) |"
    assert lines[2] == "| conformance | L4 |"
    assert len(lines) == 3 + len(CAPABILITIES)
    assert "| `graphs`: steps captured once and replayed | no |" in lines


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"result": "NOT_CONFORMANT", "reached": 1}, "L1"),
        ({"result": "NOT_CONFORMANT", "reached": -1}, "fails"),
        ({"result": "INCOMPLETE", "reached": 1}, "incomplete"),
        ({"subset": "ci"}, "not measured"),
        ({"host": {"simulated": "a chip that is not there"}}, "L4 simulated"),
        ({"options": {"deny_provider": ["fast", "faster"]}}, "L4, without fast and faster"),
    ],
)
def test_the_level_is_what_was_shown(report_of, changes, word):
    assert f"| conformance | {word} |" in matrix([report_of(**changes)])


def test_two_devices_of_one_distribution_are_told_apart(report_of):
    one = report_of()
    other = msgspec.structs.replace(one, devices=(replace(one.devices[0], name="Broken 2"),))
    assert matrix([one, other]).splitlines()[0] == "| | vllm-broken (beta, Broken 1) | vllm-broken (beta, Broken 2) |"


def test_the_table_of_a_text_is_replaced_and_nothing_else():
    text = f"# head\n{BEGIN}\nold\n{END}\ntail\n"
    assert replaced(text, "new") == f"# head\n{BEGIN}\nnew\n{END}\ntail\n"
    with pytest.raises(ConfigError, match="marks"):
        replaced("# head", "new")


def test_a_claim_is_proved_by_its_own_cases(mixed):
    assert proof_of(mixed, "graphs") == "proved"
    assert proof_of(mixed, "sleep") == "refuted"
    assert proof_of(mixed, "dtype.float32") == "unproved"


# -- page


def test_the_page_needs_nothing_else_and_escapes_what_others_wrote(mixed):
    page = to_html([mixed])
    assert not re.search(r"(src|href)=|url\(|@import|<script", page)
    assert "weights &lt;lost&gt;" in page
    assert "<lost>" not in page
    assert '<span class="refuted" title="refuted">yes</span>' in page
    assert all(name in page for name in CAPABILITIES)


def test_the_page_has_the_versions_that_a_platform_was_made_for(report_of):
    platform = report_of().platform
    assert "<td>any versions</td>" in to_html([report_of()])
    assert b"companions" not in msgspec.json.encode(platform)
    made = msgspec.structs.replace(platform, companions=("torch >=2.10", "HIP >=7.0 for acme9"))
    assert "<td>torch &gt;=2.10, HIP &gt;=7.0 for acme9</td>" in to_html([report_of(platform=made)])


def test_the_page_is_well_formed(mixed, report_of):
    page = to_html([mixed, report_of()])
    body = page.partition("<body>")[2].partition("</body>")[0]
    ElementTree.fromstring(f"<body>{body.replace(chr(0), '')}</body>")


def test_what_a_simulator_announces_is_in_the_report_and_said_everywhere(report_of):
    assert "simulated" not in host({})
    report = report_of(host=host({"SIMULATED_HARDWARE": "a chip that is not there"}))
    assert report.simulated == "a chip that is not there"
    assert "simulated, not run on hardware: a chip that is not there" in summary(report)
    assert "a chip that is not there" in to_html([report])


# -- badge


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "L4"),
        ({"result": "NOT_CONFORMANT", "reached": 2}, "failing"),
        ({"result": "INCOMPLETE", "reached": 2}, "incomplete"),
        ({"host": {"simulated": "a chip that is not there"}}, "L4 simulated"),
    ],
)
def test_a_badge_says_the_result(report_of, changes, text):
    root = ElementTree.fromstring(badge(report_of(**changes)))
    assert root.get("aria-label") == f"vllm conformance: {text}"
    assert [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")] == ["vllm conformance", text]


def test_a_subset_gets_no_badge(report_of):
    with pytest.raises(ConfigError, match="whole run"):
        badge(report_of(subset="ci"))


def test_a_run_without_a_provider_gets_no_badge_and_says_so(report_of):
    report = report_of(options={"deny_provider": ["fast"]})
    with pytest.raises(ConfigError, match="a run without fast"):
        badge(report)
    assert "left out, so that nothing is said of it: fast" in summary(report)
    assert ">fast<" in to_html([report])
