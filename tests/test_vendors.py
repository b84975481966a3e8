"""Where the index does not give the vendors' packages, CI says so and goes on; a session that is for them fails."""

from __future__ import annotations

import pytest

from tools import intel_kernels, vendors

WRONG = "ERROR: no matching distribution"


@pytest.mark.parametrize("tool", [vendors, intel_kernels])
def test_packages_that_are_not_to_be_had_are_told_and_fail_where_they_are_required(tool, monkeypatch, capsys):
    monkeypatch.setattr(tool, "fetch", lambda folder: WRONG)
    monkeypatch.setattr(tool.subprocess, "call", lambda *arguments, **options: pytest.fail("nothing is run without them"))
    assert tool.main([]) == 0
    assert tool.main(["--required"]) == 1
    said = capsys.readouterr().out
    assert said.count(WRONG) == 2
    for part in ("not to be had", "found:", "expected:", "fix:"):
        assert part in said


def test_the_environment_of_intels_compiler_sees_what_this_one_has(tmp_path):
    python = intel_kernels.environment_in(tmp_path)
    code = "import pytest, sys; print(sys.prefix)"
    found = intel_kernels.subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(tmp_path)
