"""Classification and regression of one text or a pair (section 4.1), from any table or as a task of GLUE.

The kind of problem and the labels of a person's own table are decided by its training rows (`bertkit.data.labels`),
splits by a hash of the texts (`bertkit.data.splits`). Left out: what differs between classes, several labels and
numbers (`bertkit.tasks.kinds`), and GLUE's table and files (`bertkit.tasks.glue`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bertkit.data.formats.choices import read_labelled_export
from bertkit.data.formats.rows import Columns, choose_reader, read_splits
from bertkit.data.formats.writer import write_beside
from bertkit.data.labels import (
    AS_TRAINED,
    LABEL_NAMES,
    LabelSpace,
    check_class_weights,
    check_missing,
    choose_columns,
    drop_blank,
    expand_columns,
    fit_space,
    has_labels,
    iterate_keys,
    make_label_space,
    name_shares,
    read_labelled,
    read_weights,
)
from bertkit.data.long_texts import POOLED, encode_long, join_windows
from bertkit.data.sequences import EncodedInputs, Groups, Items, Sequences, report_cut, stack_summaries
from bertkit.data.splits import (
    MOST_SHOWN,
    UNLABELLED,
    check_split_options,
    describe_shares,
    divide_train,
    name_split,
)
from bertkit.errors import UsageError, pluralize
from bertkit.metrics.classification import FIXED_THRESHOLD, ThresholdRule
from bertkit.metrics.rows import WeightedScore
from bertkit.metrics.table import WEIGHT, read_facts, read_numbers
from bertkit.reports.tables import ScoreLine, show_number
from bertkit.system.files import take_fingerprint
from bertkit.system.progress import Report, ignore
from bertkit.tasks.answers import Answers, Decisions, PairAnswers, judge_pairs
from bertkit.tasks.examples import ExampleRows
from bertkit.tasks.finetuning import (
    EVERY_EPOCH,
    REPORT_PAGE,
    FineTuningTask,
    add_test_rows,
    name_baselines,
)
from bertkit.tasks.inputs import describe_texts, read_texts
from bertkit.tasks.kinds import (
    LABEL_KINDS,
    ONE_NUMBER,
    SEVERAL_LABELS,
    SINGLE_LABEL,
    Gold,
    get_kind,
    get_trained_kind,
)
from bertkit.tasks.option import CLASSIFY_OPTIONS, TEXT_OPTIONS, list_defaults
from bertkit.tasks.schema import PROBABILITY, Schema, make_object
from bertkit.tasks.task import CHOSEN_ON_DEV, PredictionSettings, check_finite, score_summaries

if TYPE_CHECKING:
    from bertkit.model.config import BertConfig

AGREEMENT = "agreement"  # the score of soft labels where the right ones are unknown
LEAST_CLASS_SHARE = 1e-3  # of a class in a soft label
RARE_ROWS = 3  # least rows of a label in train without a warning
SAMPLE_PAIR = ("The man went to the store.", "He bought a gallon of milk.")  # as in section A.2


@dataclass(frozen=True, eq=False)
class TextExamples:
    """The texts or pairs of a split with their labels: a sequence of tuples, converted from Arrow when it is sliced."""

    rows: Columns  # the rows of a person's own table, or the texts of an official file
    text: tuple[str, ...]  # one or two columns of `rows`
    labels: np.ndarray | None  # as `LabelSpace.read` returns them; None without labels
    space: LabelSpace  # the labels, with their columns of `rows`; official files have none there
    shares: np.ndarray | None = None  # (S, L) those of soft labels; of train alone
    weights: np.ndarray | None = None  # (S,) the weights of rows in the loss of train, or in the scores of other splits
    group: str = ""  # the column whose equal values keep rows together; empty for the texts
    left_out: Sequence[int] = ()  # the lines of rows that are left out because they have no label
    rule: ThresholdRule | None = None  # how thresholds are chosen

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> list[tuple[str, ...]]:
        """Return the texts of some rows side by side."""
        start, stop, _ = part.indices(len(self))
        columns = (self.rows.find(name).slice(start, stop - start).to_pylist() for name in self.text)
        return list(zip(*columns, strict=True))

    def take(self, numbers: np.ndarray) -> "TextExamples":
        """Return some of the examples."""
        columns = {name: getattr(self, name) for name in ("labels", "shares", "weights")}
        taken = {name: None if column is None else column[numbers] for name, column in columns.items()}
        return replace(self, rows=self.rows.take(numbers), **taken)

    def to_scored(self, options: Mapping[str, Any]) -> "TextExamples":
        """Return training rows as they are scored: with right labels where they have them, and the scores' weights."""
        found = replace(self, shares=None, weights=self.weights if options["weighted_scores"] else None)
        if options["gold"] not in self.rows.table.column_names:
            return found
        space = replace(self.space, columns=(options["gold"],), is_soft=False)
        labels, is_blank, has_other, _ = space.read(self.rows)
        return replace(found, labels=labels, space=space).take(np.flatnonzero(~(is_blank | has_other)))

    def limit(self, most: int) -> "TextExamples":
        """Return the first examples; 0: all."""
        return self.take(np.arange(min(most, len(self)))) if most else self


@dataclass(eq=False)
class TextSequences(Items):
    """Encoded texts with their labels' space and, where these are written with predictions, their rows."""

    sequences: Sequences | Groups
    space: LabelSpace
    rows: Columns | None = None
    rule: ThresholdRule | None = None  # how thresholds are chosen
    shares: np.ndarray | None = None  # as in TextExamples
    weights: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one text, as `sequences` does, with its soft label instead of `labels`, and its weight."""
        item = self.sequences[index]
        if self.shares is not None:
            item["labels"] = self.shares[index]
        if self.weights is not None:
            item["sample_weight"] = np.float32(self.weights[index])
        return item

    @property
    def labels(self) -> np.ndarray | None:
        """Return the labels, as `LabelSpace.read` does; None without labels."""
        return self.sequences.labels

    def fingerprint(self) -> str:
        """Return a fingerprint of the sequences and labels; the names of official labels never change."""
        found = self.sequences.fingerprint()
        if self.shares is not None or self.weights is not None:
            found = take_fingerprint(found.encode(), self.shares, self.weights)
        return take_fingerprint(json.dumps(self.space.names).encode(), found.encode()) if self.space.columns else found


class TextTask(FineTuningTask):
    """Texts or pairs with one label, several labels or a number each, in any table."""

    name = command = "classify"
    title = "your texts"
    head = "BertForSequenceClassification"
    solves_head = True
    options = CLASSIFY_OPTIONS
    metric = "score"
    is_classifier = True  # regression is refused when the data are read
    baselines = ("tfidf", "frozen")
    next_commands: tuple[str, ...] = (
        REPORT_PAGE,
        "bertkit predict {run} --input FILE.csv --output predictions.csv",
        "bertkit serve {run}  # a page to try it, and answers over HTTP",
    )
    compared: tuple[str, ...] = ("macro_f1", "pearson", "r2", AGREEMENT)  # class weights may lower other scores
    space: LabelSpace | None = None  # the labels, if they and the columns are known before the data are read

    def __init__(self) -> None:
        self.table = list_rows()
        self.recipe = self.make_recipe(32, num_train_epochs=3.0, learning_rate=2e-5, **EVERY_EPOCH)  # as for GLUE, 4.1

    # --- The data -----------------------------------------------------------------------------------------------------

    def check(self, recipe: Any) -> None:
        """Check the recipe, including the columns, the shares and the folds."""
        super().check(recipe)
        data = recipe.data
        if recipe.starts_solved and data["long"] == "max":
            raise UsageError("long=max needs a head that is trained; give long=mean, or remove freeze and start")
        if self.space:
            return
        if len(data["text"]) > 2:
            raise UsageError(f"text names {len(data['text'])} columns in [data]; give one, or two for pairs")
        check_split_options(data)
        if data["threshold"]:
            ThresholdRule.parse(data["threshold"])
        elif data["positive"]:
            raise UsageError(f"positive is {data['positive']!r} in [data], but there is no threshold; add one")
        if data["threshold"] and data["target_accuracy"]:
            raise UsageError("threshold and target_accuracy are both set in [data]; a model decides by one of them")
        check_class_weights(data["class_weights"])
        if data["weighted_scores"] and not data["weight"]:
            raise UsageError("weighted_scores is set in [data], but there is no weight; name its column with --weight")
        for name, is_set in {"target_accuracy": data["target_accuracy"], "calibrate": recipe.calibrate}.items():
            if data["weighted_scores"] and is_set:
                raise UsageError(f"{name} counts rows alike; leave out weighted_scores in [data], or {name}")

    def load(
        self, options: Mapping[str, Any], report: Report, config: "BertConfig | None" = None
    ) -> dict[str, TextExamples]:
        """Read the table or tables, and split a single one by a hash of its texts."""
        if not options["dir"]:
            raise UsageError(
                "classify needs a table of texts and labels; name a file, a folder or a Hub data set with --data"
            )
        read = choose_reader(options, report)
        tables = read_splits(options["dir"], read, needs_train=config is None)
        learned = {*options["text"], *options["label"]}
        tables = {split: read_labelled_export(table, learned, report) for split, table in tables.items()}
        if config is not None:
            return read_scored(tables, options, config, report)
        train = tables["train"]
        text, label = choose_columns(train, options["text"], options["label"], report)
        for split, table in tables.items():
            # The doctor lists such rows, and a test split without labels keeps them.
            if not options.get("is_check") and (split != "test" or has_labels(table, label)):
                tables[split] = drop_blank(table, text, report)
        whole, given = dict(tables), {split: table.source for split, table in tables.items()}
        taken = divide_train(given, iterate_keys(tables["train"], text, options["group"]), options)
        tables |= {split: tables["train"].take(numbers) for split, numbers in taken.items()}
        # The models of all folds have the same labels, whatever each of them is trained on.
        known = train if options["folds"] else tables["train"]
        names = options["labels"] or (list(label.values()) if len(label) > 1 else [])
        space = make_label_space(known, list(label), options["problem_type"], names, options["label_sep"])
        if options["gold"] and not space.is_soft:
            raise UsageError(f"gold is {options['gold']!r}, but the labels are not soft; name right ones with --label")
        report(space.describe())
        for remark in space.remarks:
            report(f"{train.source}: {remark}")
        examples = {}
        scored = replace(space, columns=(options["gold"],), is_soft=False) if options["gold"] else space
        for split, table in whole.items():
            check_missing(split, table, space if split == "train" else scored, options, report)
        for split, table in tables.items():
            asked = space if split == "train" else scored
            rows, labels, left_out = read_labelled(split, table, asked, report)
            found = TextExamples(rows, tuple(text), labels, asked, group=options["group"], left_out=left_out)
            examples[split] = weigh(found, options, report, is_learned=split == "train")
        rule = make_rule(options, examples["train"])
        examples = {split: replace(found, rule=rule) for split, found in examples.items()}
        if "test" in examples and examples["test"].labels is None:
            examples[UNLABELLED] = examples.pop("test")
        examples["train"] = examples["train"].limit(options["max_train_samples"])
        report(f"{train.source}: " + ", ".join(f"{split} {len(found):,}" for split, found in examples.items()))
        for line in (*describe_labels(examples), *warn_of_rare(examples["train"])):
            report(line)
        return examples

    def tabulate_examples(self, examples: TextExamples) -> ExampleRows:
        """Return the rows of the table, of the official file or of its copy on the Hub."""
        rows, space = examples.rows, examples.space
        labels = None if examples.labels is None else space.format_labels(examples.labels)
        texts = {name: rows.find(name) for name in examples.text}
        classes = [] if labels is None else LABEL_KINDS[space.kind].list_classes(labels)
        if not space.columns:
            return ExampleRows(texts, texts[examples.text[0]].to_pylist(), labels, classes, rows.lines)
        groups = list(iterate_keys(rows, examples.text, examples.group))
        return ExampleRows(texts, groups, labels, classes, rows.lines, rows, {*examples.text, *space.columns})

    def encode(
        self, examples: TextExamples, tokenizer: Any, recipe: Any, split: str, report: Report = ignore
    ) -> TextSequences:
        """Return the sequences of a split; all except train keep their rows, for the files of predictions."""
        pa.default_memory_pool().release_unused()  # the whole table has been divided, and its memory is free
        options = {name: recipe.data[name] for name in TEXT_OPTIONS}
        found = encode_long(examples, examples.labels, tokenizer, **options)
        weights = examples.weights
        if split != "train":
            return TextSequences(found, examples.space, examples.rows, examples.rule, weights=weights)
        is_windowed = options["long"] in POOLED
        report_cut(found.sequences if is_windowed else found, is_windowed, tokenizer.model_max_length, report)
        return TextSequences(found, examples.space, shares=examples.shares, weights=weights)

    def configure(self, recipe: Any, tokenizer: Any, examples: Any) -> dict[str, Any]:
        """Return label names, kind of problem, columns and class weights; in a dry run what is known without data."""
        settings, long = super().configure(recipe, tokenizer, examples), recipe.data["long"]
        if long in POOLED:
            settings["window_pooling"] = long
        if not (space := self.space or (examples and examples["train"].space)):
            return settings
        # The problem type is for plain transformers, whose pipeline would otherwise apply a sigmoid to a score.
        settings |= {"id2label": dict(enumerate(space.names)), "problem_type": space.kind}
        if self.space:
            return settings
        train = examples["train"]
        if recipe.calibrate and space.is_soft and not recipe.data["gold"]:
            raise UsageError("calibrate needs right labels, but these are soft; name their column with data.gold")
        if not LABEL_KINDS[space.kind].has_names:
            if recipe.calibrate:
                raise UsageError("calibrate is for labels, not for numbers; remove it")
            settings["target_scale"] = space.measure(train.labels)
        weights = space.weigh(train.labels, recipe.data["class_weights"])
        return settings | {"text_columns": list(train.text)} | ({"class_weights": weights} if weights else {})

    # --- Scores and files ---------------------------------------------------------------------------------------------

    def decode(self, summaries: np.ndarray, data: TextSequences, decided: Decisions | None = None) -> Answers:
        """Return the class, the labels or the number of each text."""
        gold = None
        if data.labels is not None:
            gold = Gold(data.labels, data.weights, data.space.is_soft, data.rule)
        return LABEL_KINDS[data.space.kind].decode(summaries, data.space.names, gold, decided)

    def score(self, rows: pa.Table) -> dict[str, WeightedScore | float]:
        """Return the scores of the kind of problem as fractions."""
        kind, facts = get_kind(rows), read_facts(rows)
        found, main = kind.measure(rows), next(iter(kind.scores))
        if facts.get("soft"):
            numbers = {name: value for name, value in found.items() if not isinstance(value, WeightedScore)}
            found, main = {AGREEMENT: found["accuracy"]} | numbers, AGREEMENT
        if facts.get("weighted"):
            weights = read_numbers(rows, WEIGHT)
            found = {
                name: replace(value, row_weights=weights) if isinstance(value, WeightedScore) else value
                for name, value in found.items()
            }
        asked = {f"asked_{name}": value for name, value in facts.get("asked", {}).items()}
        return found | {"score": found[main]} | asked

    def score_nothing(self, train: TextSequences, dev: TextSequences) -> dict[str, float]:
        """Return the scores of the most frequent training label, of each label's majority, or of the mean."""
        _, labels, weights = list_targets(train)
        constant = LABEL_KINDS[dev.space.kind].answer_constantly(labels, dev.space.names, weights)
        thresholds = {"thresholds": [FIXED_THRESHOLD] * len(dev.space.names)}
        scores = score_summaries(self, np.tile(constant, (len(dev), 1)), dev, thresholds)
        return {row.key: scores[row.key] for row in self.table if row.baselines and row.key in scores}

    def format_predictions(self, answers: Answers, data: TextSequences, split: str) -> dict[str, str]:
        """Return a split's rows with the predicted label and probabilities as CSV."""
        return {f"{name_split(split)}.csv": write_beside(data.rows, list(map(answers.flatten, answers.list_results())))}

    def comment(self, metrics: Mapping[str, Any]) -> list[str]:
        """Return also a line on the threshold of two classes, and on a precision or recall that none reaches."""
        lines, prefix = super().comment(metrics), "threshold_"
        names = [key.removeprefix(prefix) for key, value in metrics.items() if key.startswith(prefix)]
        thresholds = {name: metrics[f"{prefix}{name}"] for name in names}
        for name in names:
            for score in ("precision", "recall"):
                asked, reached = metrics.get(f"asked_{score}"), metrics.get(f"{score}_{name}", 0.0)
                is_chosen = "thresholds" in metrics.get(CHOSEN_ON_DEV, "")  # else other rows have chosen
                if asked and thresholds[name] and reached < asked and is_chosen:
                    lines.append(
                        f"no threshold of {name!r} has a {score} of {asked:.1%}: the nearest has {reached:.1%}"
                    )
        if len(names) == 2 and 0.0 in thresholds.values():
            name = max(thresholds, key=thresholds.get)
            lines.append(
                f"a text is {name!r} if the probability of {name!r} is above {thresholds[name]:.3f}; plain "
                "transformers decides at 0.5, and so do the scores whose names begin with fixed_"
            )
        if target := metrics.get("target_accuracy"):
            line = (
                f"no confidence has an accuracy of {target:.1%} for sure: {metrics['reached_accuracy']:.1%} is reached"
            )
            if "answered" in metrics:
                line = (
                    f"answers {metrics['answered']:.0%} of the texts, those with a probability of at least "
                    f"{metrics['least_confidence']:g}; at least {target:.1%} of these answers are right (95 % "
                    f"certainty, {metrics['deciding_rows']:,} rows)"
                )
            lines.append(line)
        return lines

    # --- Answers ------------------------------------------------------------------------------------------------------

    def read_input(self, given: Mapping[str, Any], settings: PredictionSettings) -> tuple[str, ...]:
        """Return a text, or two."""
        return read_texts(given, settings.pairs)

    def schema(self, settings: PredictionSettings) -> tuple[Schema, Schema]:
        """Return the schemas of a sentence or two, and of the answers."""
        kind = get_trained_kind(settings.model.config)
        answers = kind.describe(settings.labels, settings.decided)
        return describe_texts(SAMPLE_PAIR, settings), answers

    def encode_inputs(self, examples: Sequence[tuple[str, ...]], settings: PredictionSettings) -> EncodedInputs:
        """Return the sequences of texts and pairs, or of all their windows."""
        lengths = {**list_defaults(TEXT_OPTIONS), **settings.lengths, "max_length": settings.max_length}
        data = encode_long(examples, None, settings.tokenizer, **{name: lengths[name] for name in TEXT_OPTIONS})
        join = stack_summaries
        if isinstance(data, Groups):
            join = partial(join_windows, counts=data.sequences.counts, pooling=lengths["long"])
            data = data.sequences
        space = LabelSpace(get_trained_kind(settings.model.config).problem_type, tuple(settings.labels), (), AS_TRAINED)
        sizes = np.diff(data.ends, prepend=0)
        return EncodedInputs(TextSequences(data, space), sizes, data.shortened, join=join)


class NextSentenceTask(TextTask):
    """Tell whether the second text follows the first, with that head alone; it is never trained by itself."""

    head = "BertForNextSentencePrediction"
    solves_head = False
    pairs = True

    def schema(self, settings: PredictionSettings) -> tuple[Schema, Schema]:
        """Return the schemas of two sentences and of a probability."""
        return describe_texts(SAMPLE_PAIR, settings), make_object({"next_sentence": PROBABILITY})

    def decode(self, summaries: np.ndarray, data: TextSequences, decided: Decisions | None = None) -> Answers:
        """Return whether the second text of each example follows the first."""
        return PairAnswers(judge_pairs(check_finite(summaries)))


def read_scored(
    tables: Mapping[str, Columns], options: Mapping[str, Any], config: "BertConfig", report: Report
) -> dict[str, TextExamples]:
    """Return the labelled rows of a table, or of dev and test, with the labels of a trained model."""
    scored = {split: table for split, table in tables.items() if split != "train"} or {"data": tables["train"]}
    given, kind = options["text"], get_trained_kind(config)
    asked = [options["gold"]] if options["gold"] else options["label"]
    names, examples = tuple(config.id2label[label] for label in range(config.num_labels)), {}
    for split, table in scored.items():
        columns = table.table.column_names
        usual = asked or LABEL_NAMES
        if not set(columns) & expand_columns(columns, usual).keys():
            report(f"{table.source} has no column {' or '.join(map(repr, usual))}, skipping")
            continue
        if missing := [name for name in given if name not in columns]:
            listed = ", ".join(map(repr, columns[:MOST_SHOWN]))
            raise UsageError(f"{table.source} has no column {missing[0]!r}, but {listed}; name the texts with --text")
        text, label = choose_columns(table, given, asked, report)
        if not has_labels(table, label):
            report(f"{table.source} has no labels in {' or '.join(map(repr, label))}, skipping")
            continue
        is_soft = kind.has_classes and (len(label) > 1 or bool(name_shares(table, list(label), ())))
        if len(label) > 1 and not kind.has_several and {*label.values()} != {*names}:
            raise UsageError(
                f"the model gives a text one label, but {len(label)} columns are named; name one with --label"
            )
        if len(label) > 1 and {*label.values()} != {*names}:
            listed = ", ".join(map(repr, names[:MOST_SHOWN]))
            raise UsageError(f"several label columns have the names of the model's labels, {listed}; rename them")
        by_name = {name: column for column, name in label.items()}
        ordered = tuple(label) if len(label) == 1 else tuple(by_name[name] for name in names)
        space = LabelSpace(kind.problem_type, names, ordered, AS_TRAINED, is_soft=is_soft)
        if kind.has_several and len(label) == 1:
            space = fit_space(space, table, options["label_sep"])
        group = options["group"] if options["group"] in columns else ""
        table = drop_blank(table, text, report)
        check_missing(split, table, space, options, report)
        rows, labels, _ = read_labelled(split, table, space, report)
        found = TextExamples(rows, tuple(text), labels, space, group=group)
        if options["weighted_scores"] and options["weight"] not in columns:
            report(f"{table.source} has no column {options['weight']!r}, so all its rows count alike")
        else:
            found = weigh(found, options, report, is_learned=False)
        examples[split] = found
    return examples


def weigh(examples: TextExamples, options: Mapping[str, Any], report: Report, is_learned: bool) -> TextExamples:
    """Return the examples of a split with the weights and the soft labels that its loss or its scores need."""
    rows, weight = examples.rows, options["weight"]
    if examples.labels is None:
        return examples
    shares = examples.space.read_shares(rows) if is_learned and examples.space.is_soft else None
    weights = read_weights(rows, weight) if weight and (is_learned or options["weighted_scores"]) else None
    if weights is not None:
        use = "the loss" if is_learned else "scores"
        none = f", {pluralize(int((weights == 0).sum()), 'row')} with 0" if not weights.all() else ""
        report(f"{rows.source}: {use} by the weights in {weight!r}, {weights.sum():,g} in all{none}")
    return replace(examples, shares=shares, weights=weights)


def list_targets(
    data: TextExamples | TextSequences, rows: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return what a head is fitted to: each row once, or once for each class with its share of a soft label.

    Rows of weight 0, and classes with a share below LEAST_CLASS_SHARE, are left out.

    Args:
        rows: (R,) the numbers of some of its rows; None: all.

    Returns:
        (K,) the places in `rows`, (K, ...) their targets, and (K,) their weights; None without any.
    """
    rows = np.arange(len(data.labels)) if rows is None else rows
    places, targets = np.arange(len(rows)), data.labels[rows]
    weights = None if data.weights is None else data.weights[rows]
    if data.shares is not None:
        shares = data.shares[rows].astype(np.float64)  # (R, L)
        places, targets = np.nonzero(shares >= LEAST_CLASS_SHARE)
        shares = shares[places, targets]
        weights = shares if weights is None else shares * weights[places]
    if weights is None:
        return places, targets, None
    is_counted = weights > 0
    return places[is_counted], targets[is_counted], weights[is_counted]


def make_rule(options: Mapping[str, Any], train: TextExamples) -> ThresholdRule | None:
    """Return how thresholds are chosen; of two classes the rarer one of train has it, or the one that is named."""
    space = train.space
    kind, names = LABEL_KINDS[space.kind], space.names
    if options["target_accuracy"] and (kind.has_several or not kind.has_names):
        raise UsageError("target_accuracy is for classes, but the labels are several or numbers; leave it out")
    if space.is_soft and not options["gold"] and (options["target_accuracy"] or options["threshold"]):
        raise UsageError(
            "threshold and target_accuracy need right labels, but these are soft; name their column with data.gold"
        )
    if not options["threshold"]:
        return None
    rule = ThresholdRule.parse(options["threshold"])
    if not kind.has_names or (len(names) > 2 and not kind.has_several):
        many = f"{len(names):,} classes" if kind.has_names else "numbers"
        raise UsageError(f"threshold is for two classes or for several labels, but the labels are {many}; leave it out")
    if kind.has_several:
        if options["positive"]:
            raise UsageError("positive is for two classes, but a text has several labels; leave it out")
        return rule
    if options["positive"] not in ("", *names):
        raise UsageError(f"positive is {options['positive']!r}, expected {' or '.join(map(repr, names))}; correct it")
    label = names.index(options["positive"]) if options["positive"] else int(space.count(train.labels).argmin())
    return replace(rule, label=label)


def describe_labels(examples: Mapping[str, TextExamples]) -> list[str]:
    """Return the share of each label in every split with labels, or the mean and the deviation of numbers."""
    labelled = {split: found for split, found in examples.items() if found.labels is not None}
    space = examples["train"].space
    if not LABEL_KINDS[space.kind].has_names:
        return [
            f"  {split}: mean {show_number(found.labels.mean(dtype=float))}, "
            f"sd {show_number(found.labels.std(dtype=float))}"
            for split, found in labelled.items()
        ]
    counts = {split: space.count(found.labels) for split, found in labelled.items()}
    return describe_shares(counts, {split: len(found) for split, found in labelled.items()}, space.names)


def warn_of_rare(train: TextExamples) -> list[str]:
    """Return a warning if labels have too few training rows to be learned; many of them may be another column."""
    space = train.space
    labels = train.labels if train.weights is None else train.labels[train.weights > 0]
    counts = space.count(labels).astype(int).tolist() if LABEL_KINDS[space.kind].has_names else []
    rare = [f"{name!r} ({number})" for name, number in zip(space.names, counts, strict=False) if number < RARE_ROWS]
    if not rare:
        return []
    line = f"warning: {len(rare):,} of {len(counts):,} labels have fewer than {RARE_ROWS} rows in train"
    question = f"; is {space.columns[0]!r} the column of the labels?" if 2 * len(rare) > len(counts) else ""
    return [f"{line}, such as {', '.join(rare[:3])}{question}"]


def list_rows() -> tuple[ScoreLine, ...]:
    """Return the lines of the table: every score of every kind, on dev and on test."""
    names = {"score": "score"}  # the lines of studies name it
    for kind in (SINGLE_LABEL, SEVERAL_LABELS, ONE_NUMBER):  # the lines of the table are in this order
        names |= kind.scores
    names[AGREEMENT] = "agreement with the soft labels"
    hidden = {"score": "score", "micro_f1": "accuracy"}  # a line that would repeat another one's value is hidden
    rows = {}
    for key, name in names.items():
        is_error = key in ("rmse", "mae", "ece", "brier")  # lower is better
        trained = name_baselines(TextTask.baselines, key)
        baselines = {} if is_error else {"a constant answer": f"majority_{key}"} | trained
        unit = "" if key in ("rmse", "mae", "r2", "brier") else "fraction"
        rows[key] = ScoreLine(name, key, baselines, unit, hidden_by=hidden.get(key, ""))
    return add_test_rows(list(rows.values()))


CLASSIFICATION = TextTask()
