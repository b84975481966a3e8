"""Files of waivers: every field is due, and nothing else is taken."""

from __future__ import annotations

from datetime import date

import pytest

from vllm_conformance.waivers import MAX_BYTES, Waiver, read_waivers
from vllm_core.errors import ConfigError, UnknownOptionError

GOOD = """
[[waiver]]
id = "L2/rms_norm/*"
link = "https://example.org/7"
owner = "jane@example.org"
expiry = 2027-03-31
"""


@pytest.fixture
def read(tmp_path):
    def go(text):
        (tmp_path / "waivers.toml").write_text(text)
        return read_waivers(tmp_path / "waivers.toml")

    return go


def test_a_waiver_is_read(read):
    assert read(GOOD) == (
        Waiver(id="L2/rms_norm/*", link="https://example.org/7", owner="jane@example.org", expiry=date(2027, 3, 31)),
    )
    assert read(GOOD)[0].level == 2


def test_an_empty_file_has_none(read):
    assert read("") == ()


@pytest.mark.parametrize("field", ["id", "link", "owner", "expiry"])
def test_each_field_is_due(read, field):
    text = "\n".join(line for line in GOOD.splitlines() if not line.startswith(field))
    with pytest.raises(ConfigError, match=f"lacks {field}"):
        read(text)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("2027-03-31", '"2027-03-31"', "no date"),
        ("2027-03-31", "2027-03-31T10:00:00", "no date"),
        ('"jane@example.org"', '""', "owner is ''"),
        ('"https://example.org/7"', "7", "link is 7"),
        ("L2/rms_norm/*", "*", "begins with its level"),
        ("L2/rms_norm/*", "L9/x", "begins with its level"),
        ("[[waiver]]", "[waiver]", "no array of tables"),
        ("id =", "id", "Expected"),
    ],
)
def test_a_wrong_value_is_named(read, old, new, text):
    with pytest.raises(ConfigError, match=text):
        read(GOOD.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "near"), [("owner =", "ownr = 'x'\nowner =", "owner"), ("[[waiver]]", "[[waver]]", "waiver")]
)
def test_an_unknown_key_is_named_with_the_nearest(read, old, new, near):
    with pytest.raises(UnknownOptionError, match=f"did you mean '{near}'"):
        read(GOOD.replace(old, new))


def test_two_of_one_id_are_an_error(read):
    with pytest.raises(ConfigError, match="two waivers"):
        read(GOOD + GOOD)


def test_a_file_that_is_not_there_or_too_long_is_an_error(tmp_path, read):
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        read_waivers(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match="more than"):
        read("#" * (MAX_BYTES + 1))
