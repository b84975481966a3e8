"""CI's runs of the conformance suite: what each platform is given, and that one that fails fails all."""

from __future__ import annotations

import sys

import pytest

from tools import claims


def test_a_platform_runs_as_it_is_where_nothing_need_be_simulated():
    words = claims.command("cpu", ["--subset", "ci"])
    assert words[1:] == ["conformance", "run", "--platform", "cpu", "--out", "conformance-report/cpu", "--subset", "ci"]


@pytest.mark.parametrize("platform", claims.SIMULATED)
def test_a_platform_whose_hardware_is_not_here_runs_on_two_simulated_devices_up_to_level_3(platform):
    words = claims.command(platform, ["--subset", "ci"])
    machine, suite = words[: words.index("--")], words[words.index("--") + 1 :]
    assert machine[1:] == ["-m", "vllm_simulator", "--pose", claims.SIMULATED[platform], "--devices", "2"]
    assert suite[suite.index("--level") + 1] == "3"
    assert {name for name, word in zip(suite[1:], suite, strict=False) if word == "--deny-provider"} == set(
        claims.KERNELS.get(platform, ())
    )


@pytest.mark.parametrize(("statuses", "expected"), [({"a": 0, "b": 0}, 0), ({"a": 0, "b": 3}, 1), ({"a": 3, "b": 0}, 1)])
def test_one_run_that_fails_fails_all_and_each_is_printed(monkeypatch, capsys, statuses, expected):
    def command(platform, options):
        return [sys.executable, "-c", f"print('{platform} said', {options}); raise SystemExit({statuses[platform]})"]

    monkeypatch.setattr(claims, "command", command)
    assert claims.main([*statuses, "--subset", "ci"]) == expected
    printed = capsys.readouterr().out
    for platform, status in statuses.items():
        assert f"{platform} said ['--jobs', '1', '--subset', 'ci']" in printed
        assert f"{platform}: exit status {status} after" in printed


def test_a_run_alone_shares_no_core(monkeypatch, capsys):
    monkeypatch.setattr(claims, "command", lambda platform, options: [sys.executable, "-c", f"print({options})"])
    assert claims.main(["a"]) == 0
    assert capsys.readouterr().out.startswith("[]\n")
