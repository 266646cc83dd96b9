"""The curves of a run."""

from PIL import Image

from bertkit.directory import read_log
from bertkit.report import plot_log
from bertkit.tasks.task import Row

ROWS = (
    Row("loss", "mlm_loss", {"ln V": "uniform_loss"}),
    Row("accuracy", "nsp_accuracy", {"the larger class": "nsp_majority"}, unit="fraction"),
    Row("never logged", "clm_loss", {"ln V": "uniform_loss"}),
)


def test_curves_have_a_panel_for_every_score_that_was_logged(tmp_path):
    (tmp_path / "training_log.jsonl").write_text(
        '{"step": 0, "eval_mlm_loss": 9.0, "eval_nsp_accuracy": 0.5}\n'
        '{"step": 1, "mlm_loss": 8.0}\n'
        '{"step": 2, "eval_mlm_loss": 7.0, "eval_nsp_accuracy": 0.6}\n'
    )
    log = read_log(tmp_path)
    assert [entry["step"] for entry in log] == [0, 1, 2]
    metrics = {"uniform_loss": 9.0, "nsp_majority": 0.6}
    plot_log(log, ROWS, metrics, tmp_path / "two.png")
    plot_log(log, ROWS[:1], metrics, tmp_path / "one.png")
    two, one = (Image.open(tmp_path / name) for name in ("two.png", "one.png"))
    assert two.width == 2 * one.width
    assert len(two.convert("L").getcolors()) > 50, "the picture is empty"
