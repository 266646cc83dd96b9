"""The parts of a name on the Hub, and paths that look like one."""

import pytest

from bertkit.system.hub import parse_dataset, parse_hub_name, split_revision

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("bert-base-uncased", ("bert-base-uncased", None, None)),
        ("ada/bert@v1.0", ("ada/bert", None, "v1.0")),
        (f"ada/reviews:new@{COMMIT}", ("ada/reviews", "new", COMMIT)),
        ("name@refs/pr/1", ("name", None, "refs/pr/1")),
        ("ada/reviews@v1.csv", None),
        ("ada/bert@", None),
        ("a/b/c@v1", None),
        ("./ada@v1", None),
    ],
)
def test_a_name_may_have_a_configuration_and_a_revision(source, parts):
    assert parse_hub_name(source) == parts
    assert (parse_dataset(source) is not None) == bool(parts and "/" in parts[0])


def test_a_path_that_exists_stays_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert split_revision("ada/bert@v1") == ("ada/bert", "v1")
    (tmp_path / "ada" / "bert@v1").mkdir(parents=True)
    assert parse_hub_name("ada/bert@v1") is parse_dataset("ada/bert@v1") is None
    assert split_revision("ada/bert@v1") == ("ada/bert@v1", "main")
