"""The directory of a run: who holds it, and what is taken for its scores."""

import json

import pytest

from bertkit.directory import hold_directory, read_metrics
from bertkit.errors import UsageError


def test_a_directory_is_held_by_one_at_a_time(tmp_path):
    """The system ties the hold to an open file, so that a second one in this process is refused like another's."""
    with hold_directory(tmp_path / "runs" / "mine"):
        (tmp_path / "runs" / "mine" / "recipe.toml").touch()
        with (
            pytest.raises(UsageError, match=r"runs/mine is in use by another process; wait for it, or name another"),
            hold_directory(tmp_path / "runs" / "mine", patience=0.2),
        ):
            pass
        with hold_directory(tmp_path / "runs" / "other"):
            pass
    with hold_directory(tmp_path / "runs" / "mine", patience=0.0):
        assert (tmp_path / "runs" / "mine" / "recipe.toml").exists()


def test_what_stays_empty_is_removed_again(tmp_path):
    with pytest.raises(UsageError, match="a mistake"), hold_directory(tmp_path / "runs" / "deep" / "mine"):
        raise UsageError("a mistake")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "there").mkdir()
    with hold_directory(tmp_path / "there"):
        pass
    assert (tmp_path / "there").is_dir()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "5", "null", '{"score": null}', '{"score": "good"}'])
def test_metrics_that_are_none_are_one_line(tmp_path, content):
    (tmp_path / "metrics.json").write_text(content)
    with pytest.raises(
        UsageError, match=r"metrics\.json is damaged .*; delete it, and the same command evaluates again"
    ):
        read_metrics(tmp_path / "metrics.json")


def test_metrics_of_data_without_labels_have_no_score(tmp_path):
    (tmp_path / "metrics.json").write_text(json.dumps({"updates": 0}))
    assert read_metrics(tmp_path / "metrics.json") == {"updates": 0}
