from __future__ import annotations

import os
import time

import pytest

from vllm_core.api import ProbeReport
from vllm_core.errors import ConfigError
from vllm_core.registry.discover import find
from vllm_core.registry.load import load
from vllm_core.registry.plan import Failed
from vllm_core.registry.probe import probe, timeout_of


@pytest.fixture
def probing(site, source, tmp_path):
    """Install a plugin whose probe runs the given statement, and return (probe it, how often the statement ran)."""

    def install(statement="pass", setup=""):
        runs = tmp_path / "runs"
        count = f"open({str(runs)!r}, 'a').write('x'); "
        site.add("dist-a", {"fake": source("fake", probe=count + statement, setup=setup)})
        (found,) = [one for one in find() if one.key == "dist-a:fake"]
        loaded = load(found)

        def run(**arguments):
            return probe(loaded, **{"environ": site.environ, **arguments})

        return run, lambda: len(runs.read_text()) if runs.exists() else 0

    return install


def test_a_probe_reports_devices_and_checks(probing):
    report = probing()[0]()
    assert isinstance(report, ProbeReport)
    assert [device.id for device in report.devices] == ["dev-0"]
    assert report.checks[0].detail == "found"


def test_a_report_is_cached_and_read_back_equal(probing):
    run, runs = probing()
    assert run() == run()
    assert runs() == 1


def test_the_cache_can_be_passed_by(probing):
    run, runs = probing()
    run()
    run(use_cache=False)
    assert runs() == 2


@pytest.mark.parametrize("change", [{"FAKE_VISIBLE": "1"}, {"LD_LIBRARY_PATH": "/elsewhere"}])
def test_what_the_user_makes_visible_is_part_of_the_cache_key(probing, site, change):
    run, runs = probing()
    run()
    run(environ={**site.environ, **change})
    assert runs() == 2


def test_an_edited_plugin_is_probed_again(probing, site):
    run, runs = probing()
    run()
    os.utime(site.folder / f"{site.modules[0]}.py", (time.time() + 10, time.time() + 10))
    run()
    assert runs() == 2


def test_a_damaged_cache_file_is_probed_again(probing, site, tmp_path):
    run, runs = probing()
    run()
    (file,) = (tmp_path / "cache" / "probes").iterdir()
    file.write_bytes(b'{"devices": [')
    assert isinstance(run(), ProbeReport)
    assert runs() == 2


def test_a_cache_folder_that_cannot_be_made_does_not_matter(probing, site, tmp_path):
    (tmp_path / "file").write_text("")
    run, _ = probing()
    assert isinstance(run(environ={**site.environ, "VLLM_CORE_CACHE": str(tmp_path / "file" / "below")}), ProbeReport)


def test_a_probe_without_devices_is_not_cached(probing):
    run, runs = probing("return ProbeReport(devices=(), checks=())")
    assert run().devices == ()
    run()
    assert runs() == 2


def test_a_hanging_probe_is_killed_with_what_it_started(probing, tmp_path):
    pids = tmp_path / "pids"
    start = "p = subprocess.Popen(['sleep', '600']); "
    note = f"open({str(pids)!r}, 'w').write(str(os.getpid()) + ' ' + str(p.pid)); "
    run, _ = probing(start + note + "time.sleep(600)", setup="import os, subprocess, time")
    failed = run(timeout_s=4.0)
    assert isinstance(failed, Failed)
    assert failed.stage == "probe"
    assert "no answer within 4 s" in failed.cause
    for pid in map(int, pids.read_text().split()):
        while is_running(pid):  # a killed orphan ends when the kernel gets to it; the suite's time limit is the judge
            time.sleep(0.01)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_crashing_probe_names_the_signal_and_is_not_cached(probing):
    run, runs = probing("ctypes.string_at(0)", setup="import ctypes")
    failed = run()
    assert isinstance(failed, Failed)
    assert "SIGSEGV" in failed.cause
    run()
    assert runs() == 2


@pytest.mark.parametrize(
    ("statement", "cause"),
    [
        ("raise RuntimeError('driver too old')", "RuntimeError: driver too old"),
        ("return None", "NoneType"),
        ("os._exit(7)", "exit status 7"),
        ("sys.exit(0)", "sys.exit(0)"),
        ("return ProbeReport(devices=('gpu',), checks=())", "cannot be read"),
        ("return ProbeReport(devices=(object(),), checks=())", "not plain data"),
        (
            "d = DeviceFacts(id='a', name='', device_type='', architecture='', memory_kind='host', memory_bytes=1); "
            "return ProbeReport(devices=(d, d), checks=())",
            "two devices have one id",
        ),
    ],
)
def test_a_probe_that_fails_says_why(probing, statement, cause):
    failed = probing(statement, setup="import os, sys")[0]()
    assert isinstance(failed, Failed)
    assert (failed.key, failed.stage) == ("dist-a:fake", "probe")
    assert cause in failed.cause


def test_what_a_probe_prints_is_not_its_report(probing):
    assert isinstance(probing("print('{}'); print('noise', file=sys.stderr)", setup="import sys")[0](), ProbeReport)


def test_probing_leaves_this_process_without_torch_and_the_plugins_imports(site, source):
    site.add("dist-a", {"fake": source("fake", probe="import wave")})
    code = (
        "import json, os, sys\nfrom vllm_core.registry import discover, load, probe\n"
        "found = next(f for f in discover.find() if f.entry_point == 'fake')\n"
        "report = probe.probe(load.load(found), environ=os.environ)\n"
        "print(json.dumps([len(report.devices), sorted({'torch', 'pydantic', 'wave'} & set(sys.modules))]))"
    )
    assert site.child(code) == [1, []]


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "inf", "nan"])
def test_a_time_limit_that_is_none_is_an_error(text):
    with pytest.raises(ConfigError, match="VLLM_CORE_PROBE_TIMEOUT_S"):
        timeout_of({"VLLM_CORE_PROBE_TIMEOUT_S": text})


def test_the_time_limit_is_read_from_the_environment():
    assert timeout_of({"VLLM_CORE_PROBE_TIMEOUT_S": "2.5"}) == 2.5
    assert timeout_of({}) == 20.0
