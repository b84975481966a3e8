"""A plugin is imported in a child process before it is imported here: what its import does to a process, it does there."""

from __future__ import annotations

import os
import time

import pytest

from vllm_core.registry.candidates import collect
from vllm_core.registry.discover import find
from vllm_core.registry.vet import vet

COLLECT = (
    "import json, os\nfrom vllm_core.registry.candidates import collect\n"
    "candidates, failed = collect(environ=os.environ)\n"
    "print(json.dumps([sorted(c.distribution for c in candidates),"
    " {f.key: [f.stage, f.cause, f.fix] for f in failed if f.key.startswith('dist-')}]))"
)


@pytest.fixture
def counted(site, source, tmp_path):
    """Install a platform that writes a letter when it is imported (i) and when it is probed (p); returns what was written."""
    log = tmp_path / "log"
    note = f"with open({str(log)!r}, 'a') as log: log.write"
    site.add("dist-a", {"fake": source("fake", setup=f"{note}('i')", probe=f"{note}('p')")})
    return lambda: "".join(sorted(log.read_text())) if log.exists() else ""


@pytest.fixture
def collecting(site, empty_root):
    """Collect in this process, from the plugins of the site alone."""

    def run(**options):
        environ = {**site.environ, "VLLM_CORE_PLUGINS": "dist-a"}
        return collect(environ=environ, root=empty_root, **options)

    return run


@pytest.mark.parametrize(
    ("statement", "cause"),
    [
        ("ctypes.string_at(0)", "ended by SIGSEGV"),
        ("os.abort()", "ended by SIGABRT"),
        ("os._exit(3)", "exit status 3"),
        ("time.sleep(600)", "no answer within 4 s"),
    ],
)
def test_an_import_that_ends_or_blocks_the_process_is_reported_with_distribution_and_cause(site, source, statement, cause):
    site.add("dist-bad", {"bad": f"import ctypes, os, time\n{statement}\n"})
    site.add("dist-good", {"good": source("good")})
    good, failed = site.child(COLLECT, VLLM_CORE_PLUGINS="dist-bad,dist-good", VLLM_CORE_PROBE_TIMEOUT_S="4")
    assert good == ["dist-good"]
    stage, found, fix = failed["dist-bad:bad"]
    assert stage == "import"
    assert cause in found
    assert fix


def test_a_kernel_package_that_crashes_at_import_leaves_its_platform_usable(site, source):
    site.add("dist-k", {"good.fast": "import ctypes\nctypes.string_at(0)\n"})
    site.add("dist-good", {"good": source("good")})
    good, failed = site.child(COLLECT, VLLM_CORE_PLUGINS="dist-k,dist-good")
    assert good == ["dist-good"]
    assert failed["dist-k:good.fast"][0] == "import"


def test_a_crash_at_import_is_not_forgotten(site):
    site.add("dist-bad", {"bad": "import ctypes\nctypes.string_at(0)\n"})
    for _ in range(2):
        assert site.child(COLLECT, VLLM_CORE_PLUGINS="dist-bad")[1]["dist-bad:bad"][0] == "import"


def test_an_import_that_raises_is_reported_with_its_own_exception(site, collecting):
    site.add("dist-a", {"bad": "raise ImportError('stale')"})
    (failed,) = [one for one in collecting()[1] if one.stage != "foreign"]
    assert (failed.stage, str(failed.error)) == ("import", "stale")


def test_a_first_look_imports_and_probes_once_and_then_nothing_runs_in_a_child(counted, collecting):
    assert [one.entry_point for one in collecting()[0]] == ["fake"]
    assert counted() == "iip", "imported and probed in the child, imported here"
    collecting()
    assert counted() == "iip", "this process has the module already, and the report is cached"


def test_without_the_cache_everything_is_looked_at_afresh(counted, collecting):
    collecting()
    collecting(use_cache=False)
    assert counted() == "iiipp"


def test_an_edited_plugin_is_a_stranger_again(site, counted, collecting):
    collecting()
    later = time.time() + 10
    os.utime(site.folder / f"{site.modules[0]}.py", (later, later))
    collecting()
    assert counted() == "iiipp"


def test_a_cache_folder_that_cannot_be_made_does_not_matter(site, source, tmp_path):
    site.add("dist-a", {"fake": source("fake")})
    (tmp_path / "file").write_text("")
    environ = {**site.environ, "VLLM_CORE_CACHE": str(tmp_path / "file" / "below")}
    (found,) = [one for one in find() if one.key == "dist-a:fake"]
    vetted = vet([found], environ=environ)
    assert vetted.safe == (found,)
    assert vetted.reports["dist-a:fake"].devices


def test_a_look_may_leave_out_the_probe(site, source, tmp_path):
    site.add("dist-a", {"fake": source("fake", probe=f"open({str(tmp_path / 'probed')!r}, 'w')")})
    (found,) = [one for one in find() if one.key == "dist-a:fake"]
    assert vet([found], environ=site.environ, look=False).reports == {}
    assert not (tmp_path / "probed").exists()


@pytest.mark.parametrize("known", [False, True])
def test_probes_run_side_by_side(site, source, tmp_path, empty_root, known):
    """Each waits for the other: one after the other, both would run into the limit."""
    meet = "import pathlib, time; here = pathlib.Path({folder!r}); (here / {me!r}).touch(); exec({wait!r})"
    folder = tmp_path / "meeting"
    folder.mkdir()
    for me, other in (("a", "b"), ("b", "a")):
        wait = f"while not (here / {other!r}).exists(): time.sleep(0.01)"
        probe = meet.format(folder=str(folder), me=me, wait=wait)
        site.add(f"dist-{me}", {me: source(me, probe=probe)})
    environ = {**site.environ, "VLLM_CORE_PLUGINS": "dist-a,dist-b", "VLLM_CORE_PROBE_TIMEOUT_S": "15"}
    if known:  # the imports are known to be harmless, so that only the probes are left to run
        vet([one for one in find() if one.distribution in ("dist-a", "dist-b")], environ=environ, look=False)
    candidates, _ = collect(environ=environ, root=empty_root)
    assert [one.entry_point for one in candidates] == ["a", "b"]
