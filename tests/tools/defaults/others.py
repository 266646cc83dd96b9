"""Train another program on the rows of a table: SetFit on texts, or CRFsuite on words. Run by `tests.tools.defaults`.

    python tests/tools/defaults/others.py setfit|crf MODEL GIVEN ANSWERS

GIVEN is a JSON file with the inputs `train`, their `labels` and the inputs `dev`; ANSWERS gets a list with the labels
of dev. It needs an environment of its own, with setfit and python-crfsuite, and imports nothing of bertkit.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ITERATIONS = 5  # of SetFit: pairs of each kind and row
STRENGTH = 100  # of its head: with 1, its default, topics with 50 rows have a macro F1 of 24 in place of 69
# CRFsuite's, the best of four pairs on dev, for seed 1 with 300 and with 3,000 sentences.
PENALTIES = {"c1": 0.1, "c2": 0.01, "max_iterations": 100, "feature.possible_transitions": True}
SHAPES = ((r"[A-Z]", "X"), (r"[^\W\d_A-Z]", "x"), (r"\d", "0"))


def run_setfit(model: str, given: dict[str, Any]) -> list[str]:
    """Return the labels of dev by SetFit with its defaults, except the number of pairs."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer
    from setfit import SetFitModel, Trainer, TrainingArguments
    from sklearn.linear_model import LogisticRegression

    names = sorted(set(given["labels"]))
    rows = Dataset.from_dict({"text": given["train"], "label": [names.index(label) for label in given["labels"]]})
    learner = SetFitModel(SentenceTransformer(model, device="cpu"), LogisticRegression(C=STRENGTH, max_iter=1000))
    with TemporaryDirectory() as directory:
        settings = {"num_iterations": ITERATIONS, "num_epochs": 1, "save_strategy": "no", "report_to": "none"}
        args = TrainingArguments(output_dir=directory, **settings)
        Trainer(model=learner, args=args, train_dataset=rows).train()
    return [names[int(number)] for number in learner.predict(given["dev"], as_numpy=True)]


def run_crf(model: str, given: dict[str, Any]) -> list[list[str]]:
    """Return the tags of dev by a linear-chain CRF on usual features."""
    import pycrfsuite

    trainer = pycrfsuite.Trainer(verbose=False, params=PENALTIES)
    for words, tags in zip(given["train"], given["labels"], strict=True):
        trainer.append(describe_words(words), tags)
    with TemporaryDirectory() as directory:
        path = str(Path(directory) / "crf")
        trainer.train(path)
        tagger = pycrfsuite.Tagger()
        tagger.open(path)
        return [tagger.tag(describe_words(words)) for words in given["dev"]]


def describe_words(words: Sequence[str]) -> list[list[str]]:
    """Return the features of each word of a sentence: its own, and some of its neighbours'."""
    own = [describe_word(word) for word in words]
    padded = [["edge"], *own, ["edge"]]
    return [
        ["bias", *terms, *(f"-1 {term}" for term in before[:4]), *(f"+1 {term}" for term in after[:4])]
        for before, terms, after in zip(padded, own, padded[2:], strict=False)
    ]


def describe_word(word: str) -> list[str]:
    """Return the features of a word; neighbours have the first four."""
    shape, lower = word, word.lower()
    for form, mark in SHAPES:
        shape = re.sub(form, mark, shape)
    facts = [f"lower={lower}", f"shape={shape}", f"title={word.istitle()}", f"digit={word.isdigit()}", f"word={word}"]
    return facts + [f"{side}={part}" for n in (1, 2, 3) for side, part in (("starts", lower[:n]), ("ends", lower[-n:]))]


def main(way: str, model: str, given: str, answers: str) -> None:
    """Read the rows, train, and write the answers."""
    run = {"setfit": run_setfit, "crf": run_crf}[way]
    found = run(model, json.loads(Path(given).read_text(encoding="utf-8")))
    Path(answers).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
