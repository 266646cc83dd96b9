"""The directory of a run: its lock and its scores."""

import errno
import fcntl
import os
import platform

import pytest

from bertkit.errors import UsageError
from bertkit.system import files
from bertkit.system.files import hold_directory
from bertkit.tasks import TASKS
from bertkit.training.recipe import merge, save_recipe
from bertkit.training.run_dir import find_finished, read_environment, read_metrics, write_environment
from tests.conftest import draft


def test_options_that_are_new_leave_older_runs_what_they_are(tmp_path, refused):
    saved = merge(TASKS["rte"].recipe)
    del saved["data"]["tune_share"]
    save_recipe(saved, tmp_path / "recipe.toml")
    (tmp_path / "metrics.json").write_text('{"score": 0.5}')
    (tmp_path / "training_log.jsonl").touch()
    assert find_finished(tmp_path, draft(TASKS["rte"])) == {"score": 0.5}
    with refused():
        find_finished(tmp_path, draft(TASKS["rte"], {"data": {"tune_share": 0.5}}))


@pytest.mark.parametrize(
    "change",
    [
        {"baseline": False},
        {"data": {"max_tokens": 512}},
        {"train": {"per_device_train_batch_size": 2}},
        {"train": {"per_device_eval_batch_size": 2}},
        {"train": {"gradient_checkpointing": True}},
        {"train": {"dataloader_num_workers": 1}},
    ],
)
def test_a_run_on_another_machine_is_the_same_run(tmp_path, change):
    save_recipe(draft(TASKS["rte"]).to_dict(), tmp_path / "recipe.toml")
    (tmp_path / "metrics.json").write_text('{"score": 0.5}')
    (tmp_path / "training_log.jsonl").touch()
    assert find_finished(tmp_path, draft(TASKS["rte"], change)) == {"score": 0.5}


def test_a_directory_is_held_by_one_at_a_time(tmp_path, monkeypatch):
    """The lock belongs to an open file, so a second lock in the same process fails as in another process."""
    monkeypatch.setattr(files, "LOCK_PATIENCE", 0.2)
    mine = tmp_path / "runs" / "mine"
    with hold_directory(mine):
        (mine / "recipe.toml").touch()
        holder = f"process {os.getpid()} on {platform.node()}"
        with pytest.raises(UsageError, match=f"^{mine} is in use by {holder}; wait for it, or"), hold_directory(mine):
            pass
        with hold_directory(tmp_path / "runs" / "other"):
            pass
    with hold_directory(mine):
        assert (mine / "recipe.toml").exists()
    assert os.listdir(mine) == ["recipe.toml"]


def test_a_file_system_without_locks_is_not_locked(tmp_path, monkeypatch):
    def refuse(handle, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with hold_directory(tmp_path), hold_directory(tmp_path):
        pass


def test_a_run_that_goes_on_has_the_data_and_the_weights_that_it_began_with(tmp_path, refused):
    write_environment(tmp_path, {"train": "a", "dev": "b"}, "first", {"ada/bert": "c1"}, goes_on=False)
    write_environment(tmp_path, {"train": "a", "dev": "b"}, "second", {"ada/bert": "c2"}, goes_on=True)
    found = read_environment(tmp_path)
    assert (found["data"], found["weights_at_start"]) == ({"train": "a", "dev": "b"}, "first")
    assert found["commits"] == {"ada/bert": "c1"}
    for splits in ({"dev": "c"}, {}, {"dev": "b", "test": "new"}):
        with refused():
            write_environment(tmp_path, {"train": "a"} | splits, "second", {}, goes_on=True)
        assert read_environment(tmp_path) == found
    write_environment(tmp_path, {"train": "a", "dev": "c"}, "second", {}, goes_on=False)  # it starts again
    found = read_environment(tmp_path)
    assert (found["data"], found["weights_at_start"]) == ({"train": "a", "dev": "c"}, "second")


def test_what_stays_empty_is_removed_again(tmp_path):
    with pytest.raises(UsageError, match="a mistake"), hold_directory(tmp_path / "runs" / "deep" / "mine"):
        raise UsageError("a mistake")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "there").mkdir()
    with hold_directory(tmp_path / "there"):
        pass
    assert (tmp_path / "there").is_dir()


def test_metrics_that_are_none_are_refused(tmp_path, refused):
    for content in ("", "{", "[]"):
        (tmp_path / "metrics.json").write_text(content)
        with refused():
            read_metrics(tmp_path / "metrics.json")
