"""Predict with a trained model: classes, answers, tags, endings, masked words (paper sections 3.1, 4 and 5.3).

The model's head determines the form of inputs and results. Any BERT with such a head can be used; a run also provides
the sequence lengths with which it was scored. Sequences are sorted by length and batched by tokens, a few thousand
inputs at a time, so memory is bounded for any number of inputs; results keep the order of the inputs.

Left out: vectors (`bertkit.inference.features`), and the files that leaderboards want (`Task.format_predictions`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import tee
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import pyarrow as pa

import bertkit
from bertkit.data.formats.dataframes import list_rows
from bertkit.data.formats.entities import select_columns
from bertkit.data.formats.line import make_text
from bertkit.data.formats.rows import Input, LocatedInput
from bertkit.data.formats.writer import write_rows
from bertkit.data.labels import PAIR_NAMES
from bertkit.data.long_texts import LONG
from bertkit.data.saved_tokenizer import EXPORT_AGAIN, SavedTokenizer
from bertkit.data.tokenizer import load_tokenizer
from bertkit.errors import UsageError, as_usage_error, explain_disk_error, list_some, pluralize, raise_first
from bertkit.inference.batching import cut_into_chunks
from bertkit.inference.tables import WRITERS, Row, write_joined
from bertkit.metrics.calibration import choose_limit
from bertkit.model.onnx_model import ONNX_FILE, ExportConfig, OnnxModel
from bertkit.system.files import atomic_open
from bertkit.system.hub import find_file
from bertkit.system.progress import Report, ignore
from bertkit.tasks import ANSWERING, FORMS, TASKS
from bertkit.tasks.answers import Answers, Result
from bertkit.tasks.inputs import MissingText, list_names, take_text
from bertkit.tasks.option import REDACTIONS, TEXT_OPTIONS, WINDOW_OPTIONS
from bertkit.tasks.prediction import predict
from bertkit.tasks.task import PredictionSettings, Task
from bertkit.training.calibration import load_conformity
from bertkit.training.recipe import TOP_KEYS, check_value, read_recipe
from bertkit.training.run_dir import RECIPE_FILE, read_record

INPUTS_A_CHUNK = 2048  # inputs read, encoded and answered at a time
CHARACTERS_A_CHUNK = 4_000_000  # limit of a chunk with long inputs; about 500 MB of tokens and scores
REDACTED_TEXT = ".txt"  # ends the name of a file with redacted texts only
TOP_WORDS = 5  # words for each mask
MOST_NAMED = 10  # truncated inputs listed in a message
CONFIG_FILE = "config.json"
EXPORT_FILE = "export.json"  # in an export, written last: its presence means that the export is complete
Length = Annotated[int, msgspec.Meta(ge=1)]


class ExportRecord(msgspec.Struct):
    """The part of an export's record that predictions depend on."""

    precision: str


def read_export_record(run: str) -> ExportRecord | None:
    """Return the record of the export in a directory, or None if it holds none."""
    path = Path(run, EXPORT_FILE)
    if not path.is_file():
        if path.with_name(ONNX_FILE).is_file() and not path.with_name("model.safetensors").is_file():
            raise UsageError(f"{run} holds an incomplete export; export the run again")
        return None
    return read_record(path, ExportRecord, EXPORT_AGAIN)


class Predictor:
    """A trained model as a function from a list of inputs to a list of results in the same order.

    An input is a text, a list of texts, or a mapping with the following keys; other keys are ignored. A result has the
    key `truncated` if the input was longer than the run's lengths allow.

    - Classification: `text`, or `text` and `text_pair` (also by GLUE's names). The result depends on the
      configuration's `problem_type`: `label`, its `probability` and all `probabilities` by label; for multi-label
      models `labels`, those with a probability above their threshold, and all `probabilities`; for regression (STS-B)
      `score`, or `scores` by label if there are several. With `coverage` also `label_set`.
    - SQuAD: `question` and `context`, of any length. Result: `answer`, empty if there is none; `best` with the `text`,
      `start` and `end` (characters of the context) of the best span and its `score` S.T_i + E.T_j; for 2.0 also
      `null_score` s_null and `tau`: there is an answer if score > null_score + tau (section 4.3).
    - Named entities: `text`, or `words` (also `tokens`), which are not split further. Result: `entities` with `text`,
      `type`, `start` and `end` (characters; with `words` the first word and the end) and `score`, or `words` with the
      same keys if each word has a class; `tags`, one for each word; for a text `places`, the start and end of each of
      these words (characters). With `redact` also `redacted`, the text or the words without its names, the
      `placeholder` of each entity, and `unread`, the number of words without a token, which stay, if there are any.
    - SWAG: `context`, `endings`, and optionally `start`, the first words of the endings. Result: `ending`, the index of
      the most probable ending, and all `probabilities`; with `coverage` also `label_set`, of indices.
    - Masked LM: `text` and optionally `text_pair`, with [MASK] in them. Result: `masks`, for each mask the most
      probable `words` with their probabilities. With two texts and a next-sentence head also `next_sentence`, the
      probability that the second follows the first.
    - Next sentence: `text` and `text_pair`. Result: `next_sentence`.

    On an x86 CPU the weights of linear layers are in memory twice, the second time in oneDNN's order.

    Args:
        run: A run directory, another BERT checkpoint with a head, or an export (`bertkit.inference.export`).
        pairs: Whether an input is a pair of texts; None: as in the run's task, or either without a run.
        top: Number of words for each mask.
        text: Names of an input's texts, in order; None: the columns that the model was trained on or the names `text`
            and `text_pair`, for models not trained on a table any of the names above.
        precision: "auto" (bf16 where it is faster, as in training: several times as fast as fp32, with probabilities
            that differ in the third digit), "fp32", "bf16" or "fp16". An export has the one it was made with.
        coverage: The probability with which a label set contains the correct label (all of several labels), for texts
            from the same source as the rows of the run that decided; None: no label sets.
        redact: How names are redacted: "types" ([PER]) or "numbered" ([PER-1], the same for the same name in an input);
            None: they are not.
        least: The probability of being in a name from which a word is redacted; None: the one that the run has chosen
            with `data.threshold`, or else the names of the tags are redacted.
        report: Receives a line if the files of the tokenizer do not say whether it is cased.

    Attributes:
        input_schema, output_schema: As `Task.schema` returns them.
        reading: The run's settings of reading files: `sep` and `encoding`.
        sample: An input that a person can try.
        trained_as: The task of the run; without one, that of the head.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        pairs: bool | None = None,
        top: int = TOP_WORDS,
        text: Sequence[str] | None = None,
        precision: str = "auto",
        coverage: float | None = None,
        redact: str | None = None,
        least: float | None = None,
        report: Report = ignore,
    ) -> None:
        check_value("precision", precision, TOP_KEYS["precision"])
        name = str(run)
        record = read_export_record(name)
        if record is not None and precision not in ("auto", record.precision):
            raise UsageError(f"{name} is an export in {record.precision}, got precision {precision!r}; leave it out")
        if record is None:
            model, tokenizer, self.precision = load_head(name, precision, report)
        else:
            model, tokenizer = load_export(Path(name), record.precision, report)
            self.precision = record.precision
        config = model.config
        task = get_task(name, config)
        labels = config.id2label
        names = {label for label in labels.values() if isinstance(label, str)}
        if sorted(labels) != list(range(len(labels))) or len(names) < len(labels):
            raise UsageError(f"id2label in the config.json of {name} must give each class a different name; correct it")
        path = find_file(name, RECIPE_FILE)
        recipe = {} if path is None else read_recipe(path)
        self.trained_as = TASKS.get(str(recipe.get("task")), task)
        if pairs is None:
            pairs = self.trained_as.pairs
        if pairs is None and config.text_columns:
            pairs = len(config.text_columns) == 2
        self.task = task
        self.text, self.trained = list(map(str, text or [])), config.text_columns or []
        lengths = ({"long": config.window_pooling} if config.window_pooling else {}) | read_lengths(recipe)
        data = recipe.get("data", {})
        self.reading = {name: str(data[name]) for name in ("sep", "encoding") if name in data}
        set_limit = None if coverage is None else choose_limit(load_conformity(name).scores, coverage)
        self.settings = PredictionSettings(model, tokenizer, lengths, pairs, top, set_limit)
        self.input_schema, self.output_schema = task.schema(self.settings)
        (self.sample,) = self.input_schema["examples"]
        self.settings = self.with_redaction(redact, least).settings

    def with_redaction(self, form: str | None, least: float | None = None) -> "Predictor":
        """Return a predictor with this model that redacts names; arguments are `redact` and `least` of the class."""
        head = self.settings.head
        troubles = {
            f"--redact is {form!r}, expected {' or '.join(REDACTIONS)}": form not in (None, *REDACTIONS),
            f"--redact is for a model of names, but {head} finds none; leave it out, or give a run of bertkit ner": (
                form is not None and "redacted" not in self.output_schema["properties"]
            ),
            f"--least is {least}; it must be from 0 to 1": least is not None and not 0 <= least <= 1,
            "--least is for redacted names; add --redact, or leave it out": form is None and least is not None,
        }
        raise_first(troubles)
        found = copy(self)
        vars(found).pop("sample_result", None)
        found.settings = replace(self.settings, redact=form, least=least)
        return found

    @cached_property
    def sample_result(self) -> Result:
        """Return the result of the sample."""
        example = self.task.read_input(self.sample, self.settings)
        return predict(self.task, [example], self.settings, self.precision)[0]

    @property
    def columns(self) -> dict[str, type]:
        """Return the columns of a table of results: name -> type; empty if they form none."""
        return {name: type(value) for name, value in flatten_result(self.sample_result).items()}

    @property
    def entity_columns(self) -> dict[str, type]:
        """Return the columns of a table with a row for each entity; empty if results are rows or have no entities."""
        found = get_form(self.sample_result).entity_columns
        return {"line": int, **found} if found and not self.columns else {}

    def __call__(self, inputs: Sequence[Input | Sequence[str]]) -> list[Result]:
        """Return the result of each input; those in a DataFrame of pandas or an Arrow table are its rows."""
        if isinstance(inputs, str | Mapping):
            raise UsageError(
                f"inputs must be a list, got {type(inputs).__name__}; give [input], a list of inputs or a DataFrame"
            )
        results = list(self.stream(inputs))
        for number, result in enumerate(results):
            if "error" in result:
                raise UsageError(f"input {number}: {result['error']}")
        return results

    def stream(
        self,
        inputs: Iterable[Input | Sequence[str] | LocatedInput],
        at_once: int | None = None,
        note: Callable[[np.ndarray], None] = ignore,
    ) -> Iterator[Result]:
        """Yield the result of each input, in order.

        A result has the key `error` if the input does not fit this model. An input's `id` is repeated in its result.

        Args:
            at_once: Maximum number of inputs read before the first of them is answered; None: INPUTS_A_CHUNK.
            note: Receives the tokens of each sequence of a chunk.
        """
        for chunk in cut_into_chunks(take_rows(inputs), at_once or INPUTS_A_CHUNK, CHARACTERS_A_CHUNK):
            results: list[Result] = [{} for _ in chunk]
            examples = {}
            for number, line in enumerate(chunk):
                given = line.value if isinstance(line, LocatedInput) else line
                try:
                    if isinstance(given, Mapping) and "id" in given:
                        results[number]["id"] = given["id"]
                    examples[number] = self.read(given)
                except UsageError as error:
                    results[number]["error"] = locate(error, line)
            answers = predict(self.task, list(examples.values()), self.settings, self.precision, note)
            for number, found in zip(examples, answers, strict=True):
                results[number] |= found
            yield from results

    def read(self, given: Input | Sequence[str] | UsageError) -> Any:
        """Return the task's example of an input."""
        if isinstance(given, UsageError):
            raise given
        if isinstance(given, str):
            given = [given]
        if not isinstance(given, Mapping | list | tuple):
            raise UsageError(f"got {type(given).__name__}; give a text, a list of texts or a mapping")
        if isinstance(given, Mapping):
            given = {str(name): value for name, value in given.items()}
        if isinstance(given, Mapping) and (names := self.text or self.trained):
            usual = PAIR_NAMES[0][: len(names)]
            if not self.text and given.keys() >= set(usual) and not given.keys() >= set(names):
                names = usual
            given = [take_cell(given, name) for name in names]
        if not isinstance(given, Mapping):
            given = name_texts(list(given), self.sample)
        return self.task.read_input(given, self.settings)

    def describe(self, result: Result) -> str:
        """Return a result in words, in one line."""
        if "error" in result:
            return f"error: {result['error']}"
        said = get_form(result).describe(result) + ("  (the input was truncated)" if "truncated" in result else "")
        return " ".join(said.splitlines())

    def format_for_pipeline(self, result: Result) -> Any:
        """Return a result, unless it is an error, in the form of transformers' `pipeline`."""
        return result if "error" in result else get_form(result).convert(result, self.settings.labels)

    def check_format(self, output: Path | None, is_pipeline: bool) -> None:
        """Check that this model's results can be written in the format of the output."""
        head, suffix = self.settings.head, "" if output is None else output.suffix
        is_table, known = suffix in WRITERS, [".jsonl", *WRITERS]
        if self.settings.redact is not None:
            known.append(REDACTED_TEXT)
        troubles = {
            f"{output} must end in {', '.join(known)}": suffix not in ("", *known),
            f"transformers has no pipeline for {head}; leave out --format pipeline": (
                is_pipeline and not get_form(self.sample_result).has_pipeline
            ),
            "transformers' pipelines have no label sets; leave out --coverage or --format pipeline": (
                is_pipeline and self.settings.set_limit is not None
            ),
            "transformers' pipelines do not redact; leave out --redact or --format pipeline": (
                is_pipeline and self.settings.redact is not None
            ),
            f"--format pipeline writes JSON lines, not {output}; name a file that ends in .jsonl": (
                is_pipeline and is_table
            ),
            f"the results of {head} do not form a table; name an --output that ends in .jsonl": (
                is_table and not (self.columns or self.entity_columns)
            ),
        }
        raise_first(troubles)

    def write(
        self,
        inputs: Iterable[Input | Sequence[str] | LocatedInput],
        output: Path,
        report: Report = ignore,
        *,
        is_pipeline: bool = False,
        answer: Callable[..., Iterator[Result]] | None = None,
        is_marked: bool = False,
    ) -> "Counts":
        """Predict inputs and write the results: a table if the suffix is .csv, .tsv or .parquet, else JSON lines.

        A table has a row for each input, or for each entity of the inputs (`entity_columns`).

        Args:
            is_pipeline: Whether to write JSON lines in the form of transformers' `pipeline`.
            answer: Takes the place of `stream`.
            is_marked: Whether a table of text begins with a byte order mark, as that of the inputs does.
        """
        self.check_format(output, is_pipeline)
        is_table, counts = output.suffix in WRITERS, Counts()
        # Where both are read, one iterator is at most a chunk ahead of the other.
        inputs, again = tee(take_rows(inputs)) if is_table else (inputs, ())
        results = counts.watch((answer or self.stream)(inputs), report)
        with explain_disk_error(output):
            output.parent.mkdir(parents=True, exist_ok=True)
            with atomic_open(output, "wb" if output.suffix == ".parquet" else "w") as file:
                if is_marked and is_table and output.suffix != ".parquet":
                    file.write("\ufeff")
                if is_table and self.entity_columns:
                    write_joined(list_entity_rows(again, results), self.entity_columns, output, file)
                elif is_table:
                    write_joined(map(self.make_row, again, results), self.columns, output, file)
                elif output.suffix == REDACTED_TEXT:
                    file.writelines(f"{self.describe(result)}\n" for result in results)
                else:
                    write_rows(map(self.format_for_pipeline, results) if is_pipeline else results, (), file, ".jsonl")
        none = f", {pluralize(counts.errors, 'invalid input')}" if counts.errors else ""
        report(f"{pluralize(counts.count - counts.errors, 'result')} in {output}{none}")
        return counts

    def make_row(self, given: Input | Sequence[str] | LocatedInput, result: Result) -> Row:
        """Return the columns of an input, and those of its result or its error; a redacted text leaves its column."""
        given = given.value if isinstance(given, LocatedInput) else given
        if isinstance(given, str | list | tuple):
            given = dict(zip(PAIR_NAMES[0], [given] if isinstance(given, str) else given, strict=False))
        found = {"error": result["error"]} if "error" in result else flatten_result(result)
        given = dict(given) if isinstance(given, Mapping) else {}
        if self.settings.redact is not None:
            given.pop(self.text[0] if self.text else select_columns(given)[0], None)
        return given, found

    def group(self, texts: Sequence[str]) -> list[Sequence[str]]:
        """Group the texts of a command line into inputs; the last one may lack texts."""
        if isinstance([*self.sample.values()][-1], list):
            return [texts]
        size = len(self.sample)
        return [texts[start : start + size] for start in range(0, len(texts), size)]


def load_head(name: str, precision: str, report: Report) -> tuple[Any, Any, str]:
    """Return a run's model or another checkpoint with a head, its tokenizer, and the precision."""
    from bertkit.model.checkpoint import TRAINED, load_config, load_model
    from bertkit.model.cpu import order_weights
    from bertkit.model.precision import cast_weights, choose_device, choose_precision

    precision, config = choose_precision(precision), load_config(name)
    get_task(name, config)
    head = config.architectures[0]
    tokenizer = load_tokenizer(name, report=report)
    settings = {key: getattr(config, key) for key in TRAINED}
    model, missing = load_model(getattr(bertkit, head), name, settings | {"vocab_size": len(tokenizer)})
    if missing:
        missing = ", ".join(missing[:3])
        raise UsageError(f"{name} lacks weights of its {head}: {missing}; give a fine-tuned model")
    model = model.eval().requires_grad_(False).to(choose_device())
    cast_weights(model, precision)
    order_weights(model)
    return model, tokenizer, precision


def get_task(name: str, config: Any) -> Task:
    """Return the task that encodes the inputs of a head and decodes its outputs."""
    head = str((config.architectures or ["none"])[0])
    if (task := ANSWERING.get(head.replace("BiLSTM", ""))) is None or head not in bertkit.__all__:
        raise UsageError(
            f"{name} has the head {head!r}, which does not predict classes, answers, tags, endings or masked "
            "words; give a fine-tuned run (for vectors, use bertkit features)"
        )
    return task


def load_export(directory: Path, precision: str, report: Report) -> tuple[OnnxModel, Any]:
    """Return the model of an export and its tokenizer, without torch and transformers if it is BERT's tokenizer."""
    with as_usage_error(str(directory / CONFIG_FILE), EXPORT_AGAIN):
        config = msgspec.json.decode((directory / CONFIG_FILE).read_bytes(), type=ExportConfig)
    get_task(str(directory), config)
    model = OnnxModel(directory / ONNX_FILE, config, is_int8=precision == "int8")
    is_usual = SavedTokenizer.fits(directory)
    return model, SavedTokenizer(directory) if is_usual else load_tokenizer(directory, report=report)


def get_form(result: Result) -> type[Answers]:
    """Return the form of a result, whose views are those of this class."""
    return next(form for key, form in FORMS.items() if key in result)


def flatten_result(result: Result) -> dict[str, Any]:
    """Return a result as a row of a table; empty if such results form none."""
    return get_form(result).flatten(result)


def list_entity_rows(inputs: Iterable[Any], results: Iterable[Result]) -> Iterator[Row]:
    """Yield a row for each entity of the results, or for an error, with the number of the input's line."""
    for number, (given, result) in enumerate(zip(inputs, results, strict=False), 1):
        line = given.number if isinstance(given, LocatedInput) else number
        rows = [{"error": result["error"]}] if "error" in result else get_form(result).list_marked(result)
        for row in rows:
            yield {}, {"line": line, **row}


def take_rows(inputs: Iterable[Any]) -> Iterable[Any]:
    """Return inputs unchanged, but the rows of a DataFrame or an Arrow table, and the values of a Series as texts.

    A missing value of a Series is an empty text.
    """
    if hasattr(inputs, "iterrows") or isinstance(inputs, pa.Table):
        return list_rows(inputs)
    if not hasattr(inputs, "fillna"):
        return inputs
    values = [row["text"] for row in list_rows(inputs.to_frame(name="text"))]
    return [value if isinstance(value, list | dict) else make_text(value) for value in values]


def locate(error: UsageError, given: Any) -> str:
    """Return the message of an input's error, with the file and the number of a line."""
    if not isinstance(given, LocatedInput):
        return str(error)
    if given.value is error:
        return f"{given.origin} {error}"
    if given.is_row and isinstance(error, MissingText):
        raise UsageError(f"{given.origin}: {error}, or name the columns of the texts with --text")
    return f"{given.origin}: {error}"


def name_texts(texts: Sequence[str], sample: Mapping[str, Any]) -> dict[str, Any]:
    """Assign unnamed texts to the fields of a sample; a last field that is a list takes all remaining texts."""
    fields = tuple(sample)
    if isinstance(sample[fields[-1]], list):
        head = len(fields) - 1
        return dict(zip(fields, texts[:head], strict=False)) | {fields[-1]: list(texts[head:])}
    if len(texts) == 2 and fields == ("text",):
        fields = PAIR_NAMES[0]
    if len(texts) != len(fields):
        expected = f"{pluralize(len(fields), 'text')} ({' and '.join(fields)})"
        raise MissingText(f"expected {expected}, got {len(texts)}; give them in order")
    return dict(zip(fields, texts, strict=True))


def take_cell(given: Mapping[str, Any], name: str) -> Any:
    """Return a text of an input by its name; numbers become texts, and missing values empty ones."""
    if isinstance(given.get(name), bool | int | float | None):
        if name not in given:
            raise MissingText(f"the input has {list_names(given)}, but not {name}; give it")
        return make_text(given[name])
    return take_text(given, name)


def read_lengths(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sequence lengths in a run's recipe, the longest if there are several phases, and `long`."""
    try:
        data = recipe.get("data", {})
        lengths = {name: data[name] for name in {**WINDOW_OPTIONS, **TEXT_OPTIONS} if name in data}
        long = {"long": lengths.pop("long")} if "long" in lengths else {}
        if recipe.get("phase"):
            lengths["max_length"] = max(phase["max_length"] for phase in recipe["phase"])
        return msgspec.convert(lengths, dict[str, Length]) | msgspec.convert(long, dict[str, Literal[LONG]])
    except (LookupError, TypeError, msgspec.ValidationError) as error:
        raise UsageError(f"the run's {RECIPE_FILE} is damaged ({error}); restore the original file") from None


class Counts:
    """Counts of results, errors and words that cannot be redacted, and the numbers of truncated inputs, from 1."""

    def __init__(self) -> None:
        self.count = self.errors = self.unread = 0
        self.cut: list[int] = []

    def watch(self, results: Iterable[Result], report: Report = ignore) -> Iterator[Result]:
        """Yield the results unchanged, count them, and report their errors."""
        for self.count, result in enumerate(results, 1):
            if "error" in result:
                self.errors += 1
                report(result["error"])
            if "truncated" in result:
                self.cut.append(self.count)
            self.unread += result.get("unread", 0)
            yield result

    def describe_cut(self) -> str:
        """Return a message with the number of truncated inputs and the first of them; empty if there are none."""
        if not self.cut:
            return ""
        named = list_some([f"{number:,}" for number in self.cut], MOST_NAMED)
        return (
            f"{len(self.cut):,} of {self.count:,} inputs are too long for this model and were truncated: number {named}"
        )
