"""SQuAD 1.1 and 2.0: the answer to a question, a span of its context, or none (paper sections 4.2, 4.3), as Tasks.

A span's score is S.T_i + E.T_j, that of no answer s_null = S.C + E.C. In 2.0 a question is answered when the best
span's score is above s_null + tau; tau is tuned on the dev set for best F1, as in the paper, and kept in the model's
configuration. The reference code's flag for it has the other sign: null_score_diff_threshold = -tau.

Differs from the paper: an epoch is one pass over all windows; the reference code counts questions, so its epoch stops
after as many windows as there are questions.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bertkit.data.formats.annotations import read_export
from bertkit.data.formats.rows import Columns, choose_reader, has_splits
from bertkit.data.formats.squad import HUB_SQUAD, read_own_squad, read_predictions, read_squad, read_squad_copy
from bertkit.data.scripts import is_chinese
from bertkit.data.sequences import EncodedInputs
from bertkit.data.spans import (
    Answer,
    Question,
    Windows,
    decode_windows,
    encode_questions,
    express,
    is_placed,
    keep_top,
    keep_top_arrays,
    rank,
)
from bertkit.data.splits import UNLABELLED, check_split_options, divide_train, name_split
from bertkit.errors import UsageError, raise_first
from bertkit.metrics.rows import WeightedScore, take_values
from bertkit.metrics.squad import (
    choose_tau,
    compare_answers,
    measure_questions,
    score_answers,
    score_squad1,
    score_squad2,
)
from bertkit.metrics.table import LABEL, NAMES, PREDICTION, make_rows, read_decided, read_numbers
from bertkit.reports.tables import ScoreLine
from bertkit.system.progress import Report, ignore
from bertkit.tasks.answers import Answers, Decisions, Result
from bertkit.tasks.examples import ExampleRows, select
from bertkit.tasks.finetuning import REPORT_PAGE, FineTuningTask, add_test_rows
from bertkit.tasks.inputs import take_text
from bertkit.tasks.option import SQUAD_OPTIONS, WINDOW_OPTIONS, list_defaults
from bertkit.tasks.schema import INDEX, NUMBER_SCHEMA, STRING, Schema, make_input, make_object
from bertkit.tasks.task import PredictionSettings, check_finite

if TYPE_CHECKING:
    from torch import Tensor

    from bertkit.model.config import BertConfig

SQUAD_SPLITS = {"train": "train", "dev": "validation"}
ANSWERS, NBEST, ODDS = "predictions.json", "nbest_predictions.json", "null_odds.json"  # the reference code's

SQUAD_BASE, SQUAD_LARGE = "BERT-base, dev", "BERT-large, dev"  # Tables 2 and 3
TRIVIAQA = "BERT-large, TriviaQA first, dev"  # Table 2


@dataclass(frozen=True)
class Version:
    """A row of the table below."""

    number: int  # the version on the command line
    release: str  # the version in the names of the files
    hub: str  # the copy on the Hub
    batch_size: int  # the paper's
    epochs: float  # the paper's
    unanswerable: bool  # whether a context may have no answer
    exact: str  # the name of exact match in metrics.json
    paper: Mapping[str, Mapping[str, float]]  # metric -> model -> published score

    @property
    def name(self) -> str:
        """Return the task's name."""
        return f"squad{self.number}"


VERSIONS = (
    Version(
        number=1,
        release="1.1",
        hub="rajpurkar/squad",
        batch_size=32,
        epochs=3.0,
        unanswerable=False,
        exact="exact_match",
        paper={
            "exact_match": {SQUAD_BASE: 80.8, SQUAD_LARGE: 84.1, TRIVIAQA: 84.2},
            "f1": {SQUAD_BASE: 88.5, SQUAD_LARGE: 90.9, TRIVIAQA: 91.1},
        },
    ),
    Version(
        number=2,
        release="2.0",
        hub="rajpurkar/squad_v2",
        batch_size=48,
        epochs=2.0,
        unanswerable=True,
        exact="exact",
        paper={"exact": {SQUAD_LARGE: 78.7}, "f1": {SQUAD_LARGE: 81.9}},
    ),
)


class OwnWindows(Windows):
    """Windows of a person's own questions, whose answers are also written as JSON lines."""


class SquadTask(FineTuningTask):
    """The task of a version."""

    head = "BertForQuestionAnswering"
    metric = "f1"
    is_combinable = True
    options = SQUAD_OPTIONS
    next_commands = (REPORT_PAGE, "bertkit predict {run} --input questions.jsonl --output answers.jsonl")

    def __init__(self, version: Version) -> None:
        self.version = version
        self.name, self.title = version.name, f"SQuAD {version.release}"
        self.command = f"squad --version {version.number}"
        self.copies = {name: (version.hub, HUB_SQUAD[version.hub], split) for name, split in SQUAD_SPLITS.items()}
        self.table = list_score_rows(version)
        self.recipe = self.make_recipe(
            version.batch_size,
            num_train_epochs=version.epochs,
            learning_rate=5e-5,  # sections 4.2, 4.3
            eval_strategy="no",
            save_strategy="steps",
            save_steps=0.1,  # a share of all updates
        )

    # --- The data -----------------------------------------------------------------------------------------------------

    def check(self, recipe: Any) -> None:
        """Check also that a question leaves room for its context, and the splits."""
        super().check(recipe)
        options = recipe.data
        check_split_options(options)
        troubles = {
            "folds and group are for your own questions; name them with --data FILE": (
                (options["folds"] or options["group"]) and self.is_official(options["dir"])
            ),
            f"max_length {options['max_length']} leaves no room for the context beside a question of max_query_length "
            f"{options['max_query_length']} and three special tokens; increase the first or lower the second": (
                options["max_length"] < options["max_query_length"] + 4
            ),
        }
        raise_first(troubles)

    def load(
        self, options: Mapping[str, Any], report: Report, config: "BertConfig | None" = None
    ) -> dict[str, list[Question]]:
        """Read the questions of train and dev; training questions with a misplaced answer are left out."""
        source, read = options["dir"], partial(read_export, read=choose_reader(options, report), report=report)
        if config is not None and self.is_official(source):
            return {"dev": read_squad(Path(source, self.name_file("dev")), self.version.number)}
        if config is not None:
            found = read_own_squad(source, self.version.number, needs_train=False, read=read)
            scored = {split: part for split, part in found.items() if split != "train"} or found
            return {split: part.questions for split, part in scored.items() if part.is_labelled}
        if options["extra_train"]:
            self.read_training(options["extra_train"])  # reports its errors before any training
        is_official = self.is_official(source)
        examples = self.read_official(options) if is_official else self.read_own(options, read, report)
        title = self.title if is_official else source
        train = [question for question in examples["train"] if is_placed(question)]
        if lost := len(examples["train"]) - len(train):
            report(f"{title}: skipping {lost:,} training questions whose answer is not at its answer_start")
        if not train:
            remedy = "give the official files with --data DIR" if title == self.title else "correct the answers"
            raise UsageError(f"{title} has no question to train on; {remedy}")
        examples["train"] = train[: options["max_train_samples"] or None]
        report(f"{title}: " + ", ".join(f"{name} {len(found):,} questions" for name, found in examples.items()))
        return examples

    def is_official(self, source: str) -> bool:
        """Return whether this is a folder of the official files, or one without splits of other data."""
        if not source:
            return True
        files = (os.path.join(source, self.name_file(split)) for split in SQUAD_SPLITS)
        return os.path.isdir(source) and (any(map(os.path.exists, files)) or not has_splits(source))

    def read_official(self, options: Mapping[str, Any]) -> dict[str, list[Question]]:
        """Read the official files or the Hub's copy, with `train_file` for training if given."""
        examples = {}
        if options["train_file"]:
            examples["train"] = self.read_training(options["train_file"])
        wanted = {name: hub for name, hub in SQUAD_SPLITS.items() if name not in examples}
        if not options["dir"]:
            return examples | read_squad_copy(self.version.hub, wanted)
        folder, number = Path(options["dir"]), self.version.number
        return examples | {name: read_squad(folder / self.name_file(name), number) for name in wanted}

    def read_own(
        self, options: Mapping[str, Any], read: Callable[[Path], Columns], report: Report
    ) -> dict[str, list[Question]]:
        """Read a person's own questions, and take dev and test from train by a hash of contexts or groups."""
        found = read_own_squad(options["dir"], self.version.number, options["group"], read=read)
        examples = {split: part.questions for split, part in found.items()}
        sources = {split: part.source for split, part in found.items()}
        keys = [question.group or question.context.strip() for question in examples["train"]]
        rows = divide_train(sources, keys, options, "question")
        examples |= {split: select(found["train"].questions, numbers) for split, numbers in rows.items()}
        if options["train_file"]:
            examples["train"] = self.read_training(options["train_file"])
        if "test" in found and not found["test"].is_labelled:
            report(f"{sources['test']}: no answers; predicted, not scored")
            examples[UNLABELLED] = examples.pop("test")
        return examples

    def read_training(self, file: str) -> list[Question]:
        """Read a file in SQuAD's form; for 2.0 its questions may all have answers."""
        return read_squad(file, None if self.version.unanswerable else self.version.number)

    def name_file(self, split: str) -> str:
        """Return the official name of a split's file."""
        return f"{split}-v{self.version.release}.json"

    def encode(
        self, examples: list[Question], tokenizer: Any, recipe: Any, split: str, report: Report = ignore
    ) -> Windows:
        """Return the windows of a split."""
        data = encode_questions(examples, tokenizer, **{key: recipe.data[key] for key in WINDOW_OPTIONS})
        report(describe_windows(data, split))
        language = choose_language(recipe.data["language"], examples)
        if language == "zh" and split != "train":
            report(f'{split}: exact match and F1 are those of CMRC, over Chinese characters (data.language = "zh")')
        kind = Windows if self.is_official(recipe.data["dir"]) else OwnWindows
        return kind(**vars(data) | {"language": language})

    def tabulate_examples(self, examples: Sequence[Question]) -> ExampleRows:
        """Return the questions and their contexts; the right answers of 2.0 may be none."""
        texts = {"question": [one.question for one in examples], "context": [one.context for one in examples]}
        groups = [one.group or one.context for one in examples]
        is_labelled = self.version.unanswerable or any(one.answers for one in examples)
        labels = [tuple(sorted(set(one.answers))) for one in examples] if is_labelled else None
        names = ("no answer", "answer")
        classes = [names[bool(one.answers)] for one in examples] if self.version.unanswerable else []
        return ExampleRows(texts, groups, labels, classes, [one.row for one in examples])

    # --- Scores -------------------------------------------------------------------------------------------------------

    def summarize(
        self, outputs: Any, batch: Mapping[str, "Tensor"], settings: PredictionSettings | None = None
    ) -> "Tensor | np.ndarray":
        """Return (B, 4 * N_BEST + 2): the best starts and ends, and the scores of [CLS]."""
        keep = keep_top_arrays if isinstance(outputs.start_logits, np.ndarray) else keep_top
        return keep(outputs.start_logits, outputs.end_logits)

    def decode(self, summaries: np.ndarray, data: Windows, decided: Decisions | None = None) -> "SpanAnswers":
        """Return the best answers to each question."""
        answers = decode_windows(check_answers(summaries), data)
        return SpanAnswers(self, data.questions, answers, (decided or {}).get("tau"), data.language)

    def tabulate_answers(
        self,
        questions: Sequence[Question],
        texts: Sequence[str],
        odds: Sequence[float],
        tau: float | None = None,
        language: str = "en",
    ) -> pa.Table:
        """Return the prediction table of some answers, without the questions.

        Args:
            texts: The best answer to each question that is not empty.
            odds: For 2.0: s_null minus the score of each answer.
            tau: The threshold of 2.0; None: the one with the best F1.
            language: As in `score_answers`.
        """
        gold = collect_answers(questions)
        columns: dict[str, Any] = {"id": list(gold), LABEL: pa.array([sorted(set(x)) for x in gold.values()], NAMES)}
        if not any(gold.values()) and not self.version.unanswerable:
            return make_rows({"id": list(gold), PREDICTION: texts})
        if not self.version.unanswerable:
            exact, f1 = score_answers(gold, dict(zip(gold, texts, strict=True)), 1, language)
            return make_rows(columns | {PREDICTION: texts, "em": list(exact.values()), "f1": list(f1.values())})
        best_em, best_f1, none = compare_answers(gold, texts, language)
        tau = choose_tau(odds, best_f1, none) if tau is None else tau
        is_given = np.asarray(odds) < -tau
        columns[PREDICTION] = choose_texts(texts, odds, tau)
        columns |= {"em": np.where(is_given, best_em, none), "f1": np.where(is_given, best_f1, none)}
        columns |= {"null_odds": odds, "best_em": best_em, "best_f1": best_f1, "none_em": none, "none_f1": none}
        return make_rows(columns, decided={"tau": tau})

    def score(self, rows: pa.Table) -> dict[str, WeightedScore | float]:
        """Return the scores in percent; of 2.0 at tau, and as `tau0_…` at 0."""
        exact, f1 = read_numbers(rows, "em"), read_numbers(rows, "f1")
        if not self.version.unanswerable:
            return measure_questions(exact, f1)
        answerable = list(map(bool, rows.column(LABEL).to_pylist()))
        found = measure_questions(exact, f1, answerable)
        if "null_odds" in rows.column_names:
            is_given = read_numbers(rows, "null_odds") < 0
            at_zero = (
                np.where(is_given, *(read_numbers(rows, f"{answer}_{name}") for answer in ("best", "none")))
                for name in ("em", "f1")
            )
            found |= {f"tau0_{name}": score for name, score in measure_questions(*at_zero, answerable).items()}
        found = {name: score for name, score in found.items() if not name.endswith("total")}
        if (tau := read_decided(rows).get("tau")) is not None:
            found |= {"tau": tau, "null_score_diff_threshold": -tau}
        return found

    def score_nothing(self, train: Windows, dev: Windows) -> dict[str, float]:
        """Return the scores of never answering on the dev set of 2.0."""
        if not self.version.unanswerable:
            return {}
        gold = collect_answers(dev.questions)
        none = compare_answers(gold, [""] * len(gold), dev.language)[2]
        found = take_values(measure_questions(none, none, list(map(bool, gold.values()))))
        return {"exact": found["exact"], "f1": found["f1"]}

    # --- Files --------------------------------------------------------------------------------------------------------

    def format_predictions(self, answers: "SpanAnswers", data: Windows, split: str) -> dict[str, str]:
        """Return the reference code's files: answers at tau, the best answers of each question, and the odds.

        The odds are s_null - best. One's own questions have JSON lines, too.
        """
        name = name_split(split)
        ranked = [rank(answer, self.version.unanswerable) for answer in answers.answers]
        files = self.format_answers(answers, ranked)
        files = {f"{name}_{file}" if name == "test" else file: text for file, text in files.items()}
        return files | ({f"{name}.jsonl": answers.format_lines()} if isinstance(data, OwnWindows) else {})

    def format_answers(self, answers: "SpanAnswers", ranked: Sequence[Any]) -> dict[str, str]:
        """Return the files of answers, name -> JSON, of which `ranked` are the best of each question."""
        ids = [question.id for question in answers.questions]
        files: dict[str, Sequence[Any]] = {ANSWERS: answers.texts, NBEST: ranked}
        if self.version.unanswerable:
            files[ODDS] = answers.odds
        return {
            name: json.dumps(dict(zip(ids, column, strict=True)), indent=4, ensure_ascii=False) + "\n"
            for name, column in files.items()
        }

    def score_files(
        self, gold: Path, predictions: Path, odds: Path | None = None, threshold: float = 1.0, report: Report = ignore
    ) -> dict[str, Any]:
        """Return the official script's scores of a file of answers beside an official file.

        Args:
            odds: For 2.0: the odds of each question having no answer (null_odds.json).
            threshold: Answers with odds above it count as none; the official script's na_prob_thresh.
        """
        can_be_none = self.version.unanswerable
        if (odds is not None or threshold != 1.0) and not can_be_none:
            raise UsageError("SQuAD 1.1 has no unanswerable questions; remove --null-odds and --na-prob-thresh")
        # The official script for 2.0 looks at the answers only, and so takes files of both versions.
        questions = read_squad(gold, None if can_be_none else self.version.number)
        references, answers = collect_answers(questions), read_predictions(predictions, str)
        if not can_be_none:
            if missing := len(references.keys() - answers):
                report(f"{missing:,} of {len(references):,} questions have no answer in {predictions} and score 0")
            return score_squad1(references, answers)
        return score_squad2(references, answers, None if odds is None else read_predictions(odds, float), threshold)

    def comment(self, metrics: Mapping[str, Any]) -> list[str]:
        """Return also a line that explains tau."""
        if (tau := metrics.get("tau")) is None:
            return super().comment(metrics)
        line = (
            f"a question is answered when its best span scores more than tau = {tau:.3f} above no answer "
            f"(null_score_diff_threshold = {-tau:.3f} in the reference code)"
        )
        return [line, *super().comment(metrics)]

    # --- Answers ------------------------------------------------------------------------------------------------------

    def schema(self, settings: PredictionSettings) -> tuple[Schema, Schema]:
        """Return the schemas of a question with its context and of the answer; with tau also the score without one."""
        context = "Ada Lovelace wrote the first published program, for a machine that Charles Babbage designed."
        sample = {"question": "Who designed the machine?", "context": context}
        best = make_object({"text": STRING, "start": INDEX, "end": INDEX, "score": NUMBER_SCHEMA})
        null = {} if settings.model.config.tau is None else dict.fromkeys(("null_score", "tau"), NUMBER_SCHEMA)
        return make_input(dict.fromkeys(sample, STRING), sample), make_object({"answer": STRING, "best": best, **null})

    def read_input(self, given: Mapping[str, Any], settings: PredictionSettings) -> Question:
        """Return a question about a context."""
        question, context = take_text(given, "question"), take_text(given, "context")
        if not context.strip():
            raise UsageError("context is empty; give the text that holds the answer")
        return Question("", question, context, (), ())

    def encode_inputs(self, examples: Sequence[Question], settings: PredictionSettings) -> EncodedInputs:
        """Return the windows of the questions."""
        lengths = {name: settings.lengths.get(name, value) for name, value in list_defaults(WINDOW_OPTIONS).items()}
        lengths["max_length"] = min(lengths["max_length"], settings.model.config.max_position_embeddings)
        lengths["max_query_length"] = min(lengths["max_query_length"], lengths["max_length"] // 2)
        data = encode_questions(examples, settings.tokenizer, **lengths)
        return EncodedInputs(data, data.locate_first() + data.lengths + 1, data.shortened)


@dataclass(frozen=True, eq=False)
class SpanAnswers(Answers):
    """The best answers to each question, spans of its context."""

    key = "answer"
    task: SquadTask
    questions: Sequence[Question]
    answers: Sequence[Answer]
    given_tau: float | None  # the tau that other data have decided
    language: str = "en"  # as in `score_answers`

    @property
    def odds(self) -> list[float]:
        """Return s_null minus the score of the best answer to each question."""
        return [answer.odds for answer in self.answers]

    @cached_property
    def rows(self) -> pa.Table:
        texts = [answer.best.text for answer in self.answers]
        return self.task.tabulate_answers(self.questions, texts, self.odds, self.given_tau, self.language)

    @cached_property
    def tau(self) -> float | None:
        """Return the threshold of no answer; None if every question is answered."""
        if self.given_tau is None and self.task.version.unanswerable:
            return read_decided(self.rows)["tau"]
        return self.given_tau

    @property
    def texts(self) -> list[str]:
        """Return the answer to each question; with tau it is empty unless the best span exceeds it (section 4.3)."""
        return choose_texts([answer.best.text for answer in self.answers], self.odds, self.tau)

    def list_results(self) -> list[Result]:
        results: list[Result] = []
        for text, answer in zip(self.texts, self.answers, strict=True):
            span = answer.best
            best = {"text": span.text, "start": span.first, "end": span.last, "score": span.start + span.end}
            null = {} if self.tau is None else {"null_score": sum(answer.null), "tau": self.tau}
            results.append({"answer": text, "best": best, **null})
        return results

    def format_lines(self) -> str:
        """Return a line of JSON for each question, with its right answers, the chosen answer, and its scores."""
        lines = []
        for question, answer, text in zip(self.questions, self.answers, self.texts, strict=True):
            row = {"id": question.id, "question": question.question, "answers": question.answers, "answer": text}
            row["score"] = answer.best.start + answer.best.end
            if self.tau is not None:
                row["odds"] = answer.odds
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        return "".join(lines)

    @staticmethod
    def describe(result: Result) -> str:
        text, best = result["answer"] or "(no answer)", result["best"]
        if "tau" not in result:
            return f"{text}  (score {best['score']:.2f})"
        margin = best["score"] - result["null_score"] - result["tau"]
        rejected = "" if result["answer"] else f", best span {best['text']!r}"
        return f"{text}  ({abs(margin):.2f} {'above' if margin > 0 else 'below'} the threshold{rejected})"

    @staticmethod
    def convert(result: Result, labels: Sequence[str]) -> Any:
        """Return an answer, whose score is a sum of logits, not a probability; none is empty, from 0 to 0."""
        best = result["best"]
        if "tau" in result and not result["answer"]:
            return {"answer": "", "score": result["null_score"], "start": 0, "end": 0}
        return {"answer": result["answer"], "score": best["score"], "start": best["start"], "end": best["end"]}


def choose_texts(texts: Sequence[str], odds: Sequence[float], tau: float | None) -> list[str]:
    """Return the text for each question; with tau an empty one where no span is above s_null + tau."""
    if tau is None:
        return list(texts)
    return [text if doubt < -tau else "" for text, doubt in zip(texts, odds, strict=True)]


def check_answers(summaries: np.ndarray) -> np.ndarray:
    """Check that no summary (S, 4 * N_BEST + 2) is NaN and those of [CLS] are finite, and return them."""
    check_finite(summaries[:, -2:])
    check_finite(np.nan_to_num(summaries, nan=np.nan, posinf=0.0, neginf=0.0))
    return summaries


def collect_answers(questions: Sequence[Question]) -> dict[str, tuple[str, ...]]:
    """Return question's id -> its right answers."""
    return {question.id: question.answers for question in questions}


def choose_language(given: str, questions: Sequence[Question]) -> str:
    """Return the language that is given, or the one that the contexts seem to be in, of those with rules of scores."""
    return given or ("zh" if is_chinese(dict.fromkeys(one.context for one in questions)) else "en")


def describe_windows(data: Windows, split: str) -> str:
    """Return a line on windows, truncated questions and answers that cannot be given."""
    questions = data.questions
    line = f"{split}: {len(data):,} windows of {len(questions):,} questions"
    if shortened := int(data.shortened.sum()):
        line += f"; {shortened:,} questions are truncated"
    placed = [index for index, question in enumerate(questions) if question.answers and is_placed(question)]
    found = set(data.owners[data.answers[:, 1] > 0].tolist())
    if lost := sum(index not in found for index in placed):
        line += f"; {lost:,} answers are in no window"
    if inexact := sum(not set(express(data, index)) & set(questions[index].answers) for index in placed):
        line += (
            f"; {inexact:,} answers cannot be predicted exactly because they begin or end within a token or have "
            f"more than {data.max_answer_length} tokens"
        )
    return line


def list_score_rows(version: Version) -> tuple[ScoreLine, ...]:
    """Return the lines of a version's table."""
    rows = []
    for name, key in (("EM", version.exact), ("F1", "f1")):
        baselines = {"never answering": f"majority_{key}"} if version.unanswerable else {}
        rows.append(ScoreLine(name, key, baselines, "percent", version.paper[key]))
    if version.unanswerable:
        rows += [
            ScoreLine("EM, tau = 0", "tau0_exact", unit="percent"),
            ScoreLine("F1, tau = 0", "tau0_f1", unit="percent"),
            ScoreLine("EM, answerable", "HasAns_exact", unit="percent"),
            ScoreLine("F1, answerable", "HasAns_f1", unit="percent"),
            ScoreLine("EM, unanswerable", "NoAns_exact", unit="percent"),
            ScoreLine("tau", "tau"),
        ]
    return add_test_rows(rows)


SQUAD = {task.name: task for task in map(SquadTask, VERSIONS)}
