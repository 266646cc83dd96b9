"""Write the zip for GLUE's leaderboard from the test predictions of finished runs (section 4.1).

    python recipes/glue/submission.py glue.zip runs/glue
    python recipes/glue/submission.py glue.zip runs/cola runs/mnli runs/rte …

A study, such as that of `bertkit glue --task all`, gives the runs that it has chosen. The first run that has predicted
a file counts; AX comes from the model of MNLI. Files that no run has predicted, and WNLI as in the paper, are filled
with the majority class.
"""

import argparse
import json
import zipfile
from pathlib import Path

FILES = {  # name -> the most frequent training label or the mean score, and the number of rows of test
    "CoLA.tsv": ("1", 1063),
    "SST-2.tsv": ("1", 1821),
    "MRPC.tsv": ("1", 1725),
    "STS-B.tsv": ("2.701", 1379),
    "QQP.tsv": ("0", 390_965),
    "MNLI-m.tsv": ("contradiction", 9796),
    "MNLI-mm.tsv": ("contradiction", 9847),
    "AX.tsv": ("contradiction", 1104),
    "QNLI.tsv": ("not_entailment", 5463),
    "RTE.tsv": ("entailment", 3000),
    "WNLI.tsv": ("0", 146),
}


def list_runs(source: Path) -> list[Path]:
    """Return the runs that a study has chosen, or the run itself."""
    study = source / "study.json"
    return [source / one["run"] for one in json.loads(study.read_text())["chosen"]] if study.exists() else [source]


def main() -> None:
    """Write the zip named on the command line."""
    parser = argparse.ArgumentParser(description="Write the zip for GLUE's leaderboard.")
    parser.add_argument("zip", type=Path, help="file to write")
    parser.add_argument("runs", type=Path, nargs="+", help="finished runs and studies")
    given = parser.parse_args()
    folders = [run / "predictions" for source in given.runs for run in list_runs(source)]
    with zipfile.ZipFile(given.zip, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (majority, rows) in FILES.items():
            found = [folder / name for folder in folders if (folder / name).exists() and name != "WNLI.tsv"]
            if found:
                text = found[0].read_text()
                print(f"{name}: {found[0]}, {text.count(chr(10)) - 1:,} of {rows:,} answers")
            else:
                text = "index\tprediction\n" + "".join(f"{index}\t{majority}\n" for index in range(rows))
                print(f"{name}: filled with {majority}")
            archive.writestr(name, text)


if __name__ == "__main__":
    main()
