"""Every rule of `plugin check`, broken in a plugin that is otherwise right."""

from __future__ import annotations

import ast
import re
import sys
import zipfile

import msgspec
import pytest

from vllm_core.authoring import offer_rules
from vllm_core.authoring.check import check
from vllm_core.authoring.source_rules import core_imports, patched_names
from vllm_core.errors import ConfigError, UnknownPlatformError

OFFER = "OPS: Mapping[str, str] = {}"
NORM = "def rms_norm(out, x, weight, eps):\n    out.copy_(x)\n"


def only(findings, rule):
    assert [one.rule for one in findings] == [rule], findings
    return findings[0]


@pytest.mark.parametrize(
    "line",
    [
        "from vllm_core.engine import scheduler",
        "from vllm_core import LLM",
        "import vllm_core.registry.plan",
        "import importlib; importlib.import_module('vllm_core.ops.norm')",
    ],
)
def test_an_import_of_core_beside_the_contract_is_seen(line):
    ((number, name),) = core_imports(ast.parse(f"def f():\n    {line}\n"))
    assert number == 2
    assert name.startswith("vllm_core.")


def test_the_contract_may_be_imported():
    assert list(core_imports(ast.parse("import vllm_core.api.ops\nfrom vllm_core.api import Device\n"))) == []


@pytest.mark.parametrize(
    "line",
    [
        "torch.nn.Linear.forward = None",
        "setattr(torch, 'empty', None)",
        "del torch.empty",
        "torch.__dict__['empty'] = None",
        "import vllm_core.api.hooks as hooks; hooks.PROJECT = 'mine'",
        "from vllm_core.api import Device; Device.allocate = None",
        "import sys; sys.modules['torch'] = None",
        "from torch import nn; nn.Linear.forward += 1",
    ],
)
def test_a_patch_is_seen_wherever_it_is_made(line):
    ((number, name),) = patched_names(ast.parse(f"import torch\ndef f():\n    {line}\n"))
    assert number == 3
    assert "torch" in name or "vllm_core" in name


@pytest.mark.parametrize(
    "line", ["torch.backends.mkldnn.enabled = False", "class Mine: pass\nMine.torch = torch", "x = torch.empty(1)\nx.mine = 1"]
)
def test_switches_and_ones_own_names_are_no_patches(line):
    assert list(patched_names(ast.parse(f"import torch\n{line}\n"))) == []


def test_faults_of_the_text_are_found_where_they_stand(add, failures):
    add("later.py", "import torch\ndef f():\n    from vllm_core.engine import scheduler\n    torch.empty = None\n")
    assert [(one.rule, one.on) for one in failures()] == [
        ("imports", "vllm_acme/later.py:3"),
        ("patches", "vllm_acme/later.py:4"),
    ]


def test_a_patch_at_import_is_found_however_it_is_written(add, failures):
    add("plugin.py", "import vllm_core.api.capability as c\nvars(c)['describe'] = lambda support: ''\n")
    assert "vllm_core.api.capability.describe" in only(failures(), "patches").found


def test_a_heavy_import_is_found(edit, failures):
    edit("plugin.py", "from vllm_acme import platform\n", "import pydantic\nfrom vllm_acme import platform\n")
    assert only(failures(), "import").found == "imports pydantic"


def test_a_file_that_is_not_python_is_named(add, failures):
    add("later.py", "def f(:\n")
    assert only(failures(), "source").on == "vllm_acme/later.py"


@pytest.mark.parametrize(
    ("old", "new", "rule", "part"),
    [
        ('name="acme"', 'name="acne"', "manifest", "the manifest says 'acne'"),
        ('"graphs": NotImplementedYet(LATER),\n', "", "claims", "no claim for graphs"),
        ('"graphs"', '"graphz"', "claims", "no claim for graphs"),
        ('"attention.decoder": Full()', '"attention.decoder": NotImplementedYet(LATER)', "claims", "not implemented"),
        ('"graphs": NotImplementedYet(LATER)', '"graphs": NotImplementedYet("")', "claims", "NotImplementedYet(issue='')"),
        ('api_version="0.2"', 'api_version="7.0"', "version", "built for API 7.0"),
        ('core_range=">=0.1.0.dev0,<0.2"', 'core_range=">=0.1.0.dev0,<0.3"', "versions", "in the dependencies"),
        ('core_range=">=0.1.0.dev0,<0.2"', 'core_range=">=5"', "version", "asks for vllm-core >=5"),
        ("def programs(device", "def programmes(device", "hooks", "unknown hook 'programmes'"),
        ("def offers(device:", "def offers(card:", "hooks", "card"),
        ("return probing.probe()", "raise RuntimeError('no driver')", "probe", "RuntimeError: no driver"),
        ("return probing.probe()", "return None", "probe", "returned NoneType"),
        ("return platform.configure(config, explicit)", "return 3", "configure", "returned int"),
    ],
)
def test_a_manifest_or_hook_that_is_wrong_is_named(edit, failures, old, new, rule, part):
    edit("plugin.py", old, new)
    finding = only(failures(), rule)
    assert part in finding.found


PROBING = """
from importlib import metadata
from vllm_core.api import Check, Companion, ProbeReport

companion = Companion(name="tomli", versions=">=1.5", distribution="tomli-acme")

def probe():
    try:
        version = metadata.version("tomli-acme")
    except metadata.PackageNotFoundError:
        version = "none"
    return ProbeReport(devices=(), checks=(Check(name="tomli", outcome="{outcome}", detail={detail}, hint="install it"),))
"""


@pytest.mark.parametrize(
    ("outcome", "detail", "said"),
    [
        ("failed", "companion.refusal(version)", None),
        ("failed", "f'{version} is too old'", "0.0.0.1 is too old"),
        ("ok", "companion.refusal(version)", "found tomli 0.0.0.1, expected tomli >=1.5"),
        ("failed", "'too old'", "no check names that version"),
    ],
)
def test_a_wrong_version_of_a_companion_is_refused_with_both_numbers(edit, add, checked, outcome, detail, said):
    edit("plugin.py", "        claims=CLAIMS,\n", "        claims=CLAIMS,\n        companions=(probing.companion,),\n")
    add("probe.py", PROBING.format(outcome=outcome, detail=detail))
    versions = [one for one in checked().findings if one.rule == "versions"]
    finding = only(versions, "versions")
    assert finding.outcome == ("ok" if said is None else "failed")
    assert (said or "found tomli 0.0.0.1, expected tomli >=1.5") in finding.found


def test_a_versioned_claim_must_be_readable(edit, failures):
    edit("plugin.py", "    Full,\n", "    Full,\n    Versioned,\n")
    edit("plugin.py", '"graphs": NotImplementedYet(LATER)', '"graphs": Versioned("recent")')
    assert "driver" in only(failures(), "claims").expected


@pytest.mark.parametrize(
    ("changes", "reasons", "part"),
    [
        ("{'block_sise': 16}", "{'block_sise': 'why'}", "no such option"),
        ("{'block_size': 16}", "{}", "no reason given"),
        ("{'block_size': __import__('time').perf_counter_ns()}", "{'block_size': 'now'}", "two answers"),
    ],
)
def test_configure_must_be_pure_and_give_reasons_for_options_that_exist(edit, failures, changes, reasons, part):
    edit("platform.py", "ConfigPatch(changes={}, reasons={})", f"ConfigPatch(changes={changes}, reasons={reasons})")
    assert part in only(failures(), "configure").found


@pytest.mark.parametrize(
    ("ops", "module", "rule", "part"),
    [
        ('{"rms_norm": "vllm_acme.ops.norm:rms_norm"}', NORM, None, ""),
        ('{"rms_norm": "vllm_acme.ops.norms:rms_norm"}', NORM, "entry", "no such module"),
        ('{"rms_norm": "no_such_package_here.norm:rms_norm"}', NORM, "entry", "no such module"),
        ('{"rms_norm": "vllm_acme.ops.norm:norm"}', NORM, "entry", "has no norm"),
        ('{"rms_norm": "vllm_acme.ops.norm:rms_norm"}', "def rms_norm(out, x, weight): ...\n", "signature", "out, x, weight"),
        ('{"rms_norm": "vllm_acme.ops.norm:rms_norm"}', "def rms_norm(a, b, c, d, e): ...\n", "signature", "a, b, c, d, e"),
        ('{"rms_norm": "vllm_acme.ops.norm:rms_norm"}', "def rms_norm(*tensors): ...\n", None, ""),
        ('{"rms_norm": "vllm_acme.ops.norm:rms_norm"}', "def rms_norm(a, b, c, d, *, tile): ...\n", "signature", "tile"),
        ('{"rms_norm": "vllm_acme.ops.norm:rms_norm"}', "rms_norm = print\n", None, ""),
        ('{"rms_nrom": "vllm_acme.ops.norm:rms_norm"}', NORM, "offers for acme1", "rms_nrom"),
        ('{"rms_norm": "vllm_core.ops.norm:rms_norm"}', NORM, "imports", "vllm_core.ops.norm"),
    ],
)
def test_an_offer_is_held_against_the_schema(edit, add, failures, ops, module, rule, part):
    edit("backends/generic.py", OFFER, f"OPS: Mapping[str, str] = {ops}")
    add("ops/norm.py", module)
    found = failures()
    if rule is None:
        assert found == []
    else:
        assert part in only(found, rule).found


@pytest.mark.parametrize(("last", "is_right"), [("", True), (", sinks=None", True), (", sinks", False)])
def test_arguments_that_have_a_default_in_the_schema_need_not_be_taken(last, is_right):
    source = f"def paged_attention(out, q, kv, start, lens, table, most, longest, scale, window, cap{last}): ..."
    (function,) = ast.parse(source).body
    assert (offer_rules._check_signature("here", "paged_attention", function) is None) == is_right


def test_an_op_of_an_older_schema_is_named_with_the_schema_of_now(edit, add, failures):
    edit("backends/generic.py", OFFER, 'OPS: Mapping[str, str] = {"rms_norm": "vllm_acme.ops.norm:rms_norm"}')
    edit("backends/generic.py", "ops=OPS,", 'ops=OPS, op_versions={"rms_norm": 7},')
    add("ops/norm.py", NORM)
    finding = only(failures(), "signature")
    assert "version 7" in finding.found
    assert "eps" in finding.expected


def test_an_offer_for_an_architecture_that_the_manifest_does_not_have_is_named(edit, add, failures):
    edit("plugin.py", "architectures=(),", 'architectures=("acme1",),')
    edit("backends/generic.py", OFFER, 'OPS: Mapping[str, str] = {"rms_norm": "vllm_acme.ops.norm:rms_norm"}')
    edit("backends/generic.py", "ops=OPS,", 'ops=OPS, architectures=frozenset({"acme1", "acme2"}),')
    add("ops/norm.py", NORM)
    finding = only(failures(), "architectures")
    assert (finding.found, "acme1" in finding.expected) == ("acme2", True)


def test_a_failed_check_of_the_probe_needs_a_hint(edit, failures):
    edit("probe.py", 'outcome="ok"', 'outcome="failed"')
    assert only(failures(), "probe").found == "failed without a hint: driver"


def test_a_device_has_memory_and_an_id_of_its_own(edit, failures):
    edit("probe.py", "memory_bytes=MEMORY_BYTES", "memory_bytes=0")
    edit("probe.py", "devices=(facts,)", "devices=(facts, facts)")
    found = only(failures(), "probe").found
    assert found == "device '0' has 0 bytes; device '0' has 0 bytes; 2 devices with the id '0'"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("import os; os._exit(3)", "exit status 3"),
        ("import os; print('bye', flush=True); os._exit(3)", "exit status 3, after 'bye'"),
        ("raise ImportError('libacme.so.1')", "libacme.so.1"),
    ],
)
def test_a_plugin_that_dies_at_import_is_one_finding(add, failures, line, why):
    add("plugin.py", line + "\n")
    finding = only(failures(), "import")
    assert why in finding.found


def test_a_hook_that_hangs_is_named_by_its_step(edit, written, environ):
    edit("plugin.py", "return probing.probe()", "import time; time.sleep(600)")
    (result,) = check(str(written), environ, timeout_s=10.0)  # the import before it takes seconds of a busy machine
    finding = only([one for one in result.findings if one.outcome == "failed"], "probe")
    assert "no answer within 10 s" in finding.found


@pytest.mark.parametrize(
    ("old", "new", "rule", "part"),
    [
        ('"vllm-core>=0.1.0.dev0,<0.2", ', "", "versions", "no dependency on vllm-core"),
        ('"vllm-core>=0.1.0.dev0,<0.2"', '"vllm-core"', "versions", "vllm-core"),
        ('requires-python = ">=3.10"\n', "", "metadata", "none"),
        ('version = "0.1.0"', 'version = "one"', "versions", "one"),
        ('acme = "vllm_acme.plugin"', 'cuda = "vllm_acme.plugin"', "entry point", "vllm-cuda"),
    ],
)
def test_metadata_that_pip_reads_is_checked(edit, failures, old, new, rule, part):
    edit("pyproject.toml", old, new)
    assert any(one.rule == rule and part in one.found for one in failures())


def test_a_distribution_without_an_entry_point_is_no_plugin(edit, failures):
    edit("pyproject.toml", '[project.entry-points."vllm.platforms"]', '[project.entry-points."others"]')
    assert "entry point" in {one.rule for one in failures()}


def test_the_checking_process_imports_nothing_of_the_plugin(checked):
    checked()
    assert not [name for name in sys.modules if name.partition(".")[0] == "vllm_acme"]


def test_a_failed_finding_has_four_parts_and_findings_are_plain_data(edit, checked):
    edit("plugin.py", 'name="acme"', 'name="acne"')
    result = checked()
    text = str(next(one for one in result.findings if one.outcome == "failed"))
    assert re.fullmatch(r"manifest: .*\n  found:    .*\n  expected: .*\n  fix:      .*", text)
    assert msgspec.json.decode(msgspec.json.encode(result.findings))[0]["outcome"] == "failed"


def wheel_of(written, path, **more):
    """A wheel of the written distribution, packed by hand."""
    files = {f"vllm_acme/{p.relative_to(written / 'src/vllm_acme')}": p.read_bytes() for p in written.rglob("src/**/*.py")}
    info = "vllm_acme-0.1.0.dist-info"
    needs = "Requires-Python: >=3.10\nRequires-Dist: vllm-core<0.2,>=0.1.0.dev0\n"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: vllm-acme\nVersion: 0.1.0\n{needs}".encode()
    files[f"{info}/entry_points.txt"] = b"[vllm.platforms]\nacme = vllm_acme.plugin\n"
    files[f"{info}/RECORD"] = b""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**files, **more}.items():
            if data is not None:
                archive.writestr(name, data)
    return str(path)


def test_a_wheel_is_checked_like_its_project(written, tmp_path, environ):
    (result,) = check(wheel_of(written, tmp_path / "acme.whl"), environ)
    assert result.passed, [str(one) for one in result.findings]
    assert result.name == "vllm-acme 0.1.0"


@pytest.mark.parametrize(
    ("more", "rule", "part"),
    [
        ({"vllm_core/engine/core.py": b""}, "metadata", "vllm_core/"),
        ({"vllm_acme-0.1.0.dist-info/RECORD": None}, "metadata", "no RECORD"),
        ({"vllm_acme/kernels.so": b"\x7fELF"}, "architectures", "kernels.so"),
    ],
)
def test_what_a_wheel_must_not_have_is_named(written, tmp_path, environ, more, rule, part):
    (result,) = check(wheel_of(written, tmp_path / "acme.whl", **more), environ)
    finding = only([one for one in result.findings if one.outcome == "failed"], rule)
    assert part in finding.found


def test_a_wheel_that_would_write_elsewhere_is_refused(written, tmp_path, environ):
    with pytest.raises(ConfigError, match="outside of the wheel"):
        check(wheel_of(written, tmp_path / "acme.whl", **{"../evil.py": b""}), environ)


@pytest.mark.parametrize("target", ["no/such/folder", "nothing.whl"])
def test_a_path_that_is_nothing_is_an_error(tmp_path, environ, target):
    with pytest.raises(ConfigError, match="Nothing to check"):
        check(str(tmp_path / target), environ)


def test_a_folder_without_a_project_is_an_error(tmp_path, environ):
    with pytest.raises(ConfigError, match=re.escape("pyproject.toml")):
        check(str(tmp_path), environ)


def test_an_unknown_name_is_an_error(environ):
    with pytest.raises(UnknownPlatformError, match="no entry point has this name"):
        check("no_such_platform", environ)


def test_what_is_the_same_for_every_architecture_is_told_once(edit, add, failures, checked):
    edit("plugin.py", "architectures=(),", 'architectures=("acme1", "acme2", "acme3"),')
    assert [one.rule for one in checked().findings if one.rule in ("offers", "ops")] == ["offers", "ops"]
    edit("backends/generic.py", OFFER, 'OPS: Mapping[str, str] = {"rms_nrom": "vllm_acme.ops.norm:rms_nrom"}')
    assert only(failures(), "offers for acme1").fix == "did you mean 'rms_norm'?"
