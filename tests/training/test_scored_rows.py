"""The file of a run's scored rows: keys by content, exact values, equal bytes, errors of damaged files."""

import io
from dataclasses import replace
from zipfile import ZipFile

import numpy as np
import pytest

from bertkit.errors import UsageError
from bertkit.metrics.rows import RowScore, measure_classes, measure_mean, measure_numbers
from bertkit.tasks.task import RowAnswer
from bertkit.training.scored_rows import gather_rows, narrow, pack_rows, read_rows

ROWS = [RowAnswer(("Good.", "x" * 200), "yes", "no"), RowAnswer(("Bad.", ""), "no", "no")]


def make_rows(rows=ROWS):
    right = np.array([row.right == row.answer for row in rows])
    return gather_rows(measure_mean(right), rows)


def test_keys_follow_texts_and_right_answers_only():
    keys = make_rows().keys.tolist()
    assert make_rows([row._replace(answer="other") for row in reversed(ROWS)]).keys.tolist() == keys[::-1]
    assert not set(keys) & set(make_rows([row._replace(right="other") for row in ROWS]).keys.tolist())
    twice = make_rows([ROWS[0], *ROWS]).keys.tolist()
    assert len(set(twice)) == 3
    assert twice[::2] == keys, "equal rows are numbered"


@pytest.mark.parametrize(
    "score",
    [
        measure_mean(np.array([0.1, 1.0])),
        measure_classes(np.array([0, 1]), np.array([1, 1]), 2)["matthews_correlation"],
        measure_numbers(np.array([0.1, 2.0]), np.array([3.8, np.float32(0.7)]))["spearmanr"],
    ],
)
def test_a_file_keeps_every_bit_and_has_the_same_bytes_again(score, tmp_path):
    found = gather_rows(score, ROWS)
    (tmp_path / "dev.rows.npz").write_bytes(pack_rows(found))
    again = read_rows(tmp_path / "dev.rows.npz")
    assert again.score.rows.tolist() == score.rows.tolist()
    assert (again.score.rate, again.score.points) == (score.rate, score.points)
    assert again.rows == found.rows
    assert pack_rows(again) == pack_rows(found)
    assert all(len(text) <= 80 for row in again.rows for text in row.texts)


def test_arrays_are_narrowed_only_where_nothing_is_lost():
    kinds = [narrow(np.array(values, np.float64)).dtype for values in ([1, 0], [256], [-1], [0.5], [0.1])]
    assert kinds == [np.uint8, np.uint16, np.int32, np.float32, np.float64]


def replace_part(content, name, **parts):
    """Return the file with another content of an array."""
    with ZipFile(io.BytesIO(content)) as old, ZipFile(made := io.BytesIO(), "w") as new:
        for member in old.namelist():
            new.writestr(
                member, old.read(member).replace(*parts[name]) if member == f"{name}.npy" else old.read(member)
            )
    return made.getvalue()


WHOLE = pack_rows(make_rows())
DAMAGED = {
    "empty": b"",
    "beginning": b"PK",
    "half": WHOLE[: len(WHOLE) // 2],
    "other bytes": WHOLE[:90] + b"\0\0\0\0" + WHOLE[94:],
    "header": replace_part(WHOLE, "keys", keys=(b"{'descr'", b"{'descr(")),
    "unknown rate": pack_rows(gather_rows(RowScore(np.ones((2, 2)), "unknown"), ROWS)),
    "no shape": pack_rows(gather_rows(RowScore(np.ones(2), "spearmanr"), ROWS)),
    "NaN": pack_rows(gather_rows(RowScore(np.full((2, 2), np.nan), "mean"), ROWS)),
    "points": pack_rows(gather_rows(replace(measure_mean(np.ones(2)), points="x"), ROWS)),
    "equal keys": pack_rows(replace(make_rows(), keys=np.zeros(2, np.uint64))),
    "other keys": pack_rows(replace(make_rows(), keys=np.arange(2.0))),
    "row": pack_rows(replace(make_rows(), rows=[ROWS[0], [["x"], "a", ["b"]]])),
    "missing row": pack_rows(replace(make_rows(), rows=ROWS[:1])),
    "short column": pack_rows(replace(make_rows(), columns={"a": ["x"]})),
    "column": pack_rows(replace(make_rows(), columns={"a": [["x"], "y"]})),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_one_line(name, tmp_path):
    path = tmp_path / "dev.rows.npz"
    path.write_bytes(DAMAGED[name])
    with pytest.raises(UsageError, match=r"dev.rows.npz is damaged .*; delete it and train the run again"):
        read_rows(path)
