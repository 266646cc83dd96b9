"""A trained model at work on new text: classes, answers, tags, endings, masked words (paper sections 3.1, 4 and 5.3).

What an input is, and what is said of it, the model's head decides; any BERT with such a head will do, and a run brings
the lengths with which it was scored. Sequences are sorted by length and batched by tokens, some thousand inputs at a
time, so that any number of inputs goes through bounded memory; results come in the order of the inputs.

Left out: vectors (`bertkit.inference.features`), and the files that leaderboards want (`Task.format_predictions`).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

import bertkit
from bertkit.data.formats.inputs import Input, Line, cut_into_chunks
from bertkit.data.tokenizer import load_tokenizer
from bertkit.errors import UsageError
from bertkit.model.checkpoint import find_file, load_config, load_model
from bertkit.model.precision import choose_precision, find_device
from bertkit.system.files import atomic_open
from bertkit.system.progress import ignore
from bertkit.tasks import ANSWERING, TASKS
from bertkit.tasks.option import WINDOW_OPTIONS
from bertkit.tasks.prediction import predict
from bertkit.tasks.task import PredictionSettings, Result
from bertkit.tasks.texts import PAIR_NAMES
from bertkit.training.recipe import TOP_KEYS, check_value, list_lengths, read_recipe
from bertkit.training.run_dir import RECIPE_FILE

INPUTS_A_CHUNK = 2048  # read, encoded and answered at a time
CHARACTERS_A_CHUNK = 4_000_000  # at which a chunk ends, however few its inputs; some 500 MB of tokens and scores
TOP_WORDS = 5  # words for each mask
MOST_NAMED = 10  # inputs that were cut
Length = Annotated[int, msgspec.Meta(ge=1)]


class Predictor:
    """A trained model as a function: a list of inputs in, a list of results in the same order out.

    An input is a text, a list of texts, or a mapping, whose names other than the following are ignored; `cut` in a
    result says that the input was longer than the run's lengths allow and lost its end:

    - classification: `text`, or `text` and `text_pair` (also by GLUE's names). Result, by the configuration's
      `problem_type`: `label`, its `probability` and all `probabilities` by label; with several labels a text `labels`,
      those whose probability is above 0.5, and all `probabilities`; of a regression (STS-B) `score`, or `scores` by
      label if there are several.
    - SQuAD: `question` and `context`, of any length. Result: `answer`, empty if there is none; `best` with the `text`,
      `start` and `end` (characters of the context) of the best span and its `score` S.T_i + E.T_j; for 2.0 also
      `null_score` s_null and `tau`: there is an answer where score > null_score + tau (section 4.3).
    - named entities: `text`, or `words` as they are. Result: `entities` with `text`, `type`, `start` and `end`
      (characters; with `words` the first word and the end), every word's tag, `tags`, and of a text `places`, where
      each of these words starts and ends (characters).
    - SWAG: `context`, `endings`, and perhaps `start`, the endings' first words. Result: `ending`, the place of the
      likeliest, and all `probabilities`.
    - masked LM: `text`, and perhaps `text_pair`, with [MASK] in it. Result: `masks`, for each one the likeliest
      `words` with their probabilities. With two texts and a next-sentence head also `next_sentence`, the probability
      that the second follows the first.
    - next sentence: `text` and `text_pair`. Result: `next_sentence`.

    Args:
        run: a run directory, or another BERT checkpoint with a head.
        pairs: whether an input is a pair of texts; None: as the run's task has it, else either.
        top: words for each mask.
        precision: "auto": bf16 where it is faster, as in training, several times as fast as fp32 and with
            probabilities that differ in the third digit; or "fp32", "bf16" or "fp16".

    Raises:
        UsageError: it cannot be loaded, has no head, or lacks some of its weights.
    """

    def __init__(
        self, run: str | Path, *, pairs: bool | None = None, top: int = TOP_WORDS, precision: str = "auto"
    ) -> None:
        self.precision = choose_precision(check_value("precision", precision, TOP_KEYS["precision"]))
        name = str(run)
        config = load_config(name)
        head = str((config.architectures or ["none"])[0])
        if (task := ANSWERING.get(head.replace("BiLSTM", ""))) is None or not hasattr(bertkit, head):
            raise UsageError(
                f"{name} has the head {head}, which predicts none of classes, answers, tags, endings or masked words; "
                "give a fine-tuned run (for vectors: bertkit features)"
            )
        tokenizer = load_tokenizer(name)
        settings = {"tau": config.tau, "vocab_size": len(tokenizer)}
        model, missing = load_model(getattr(bertkit, head), name, settings)
        if missing:
            raise UsageError(f"{name} lacks weights of its {head}: {', '.join(missing[:3])}; give a trained one")
        labels = config.id2label
        names = {label for label in labels.values() if isinstance(label, str)}
        if sorted(labels) != list(range(len(labels))) or len(names) < len(labels):
            raise UsageError(f"id2label in the config.json of {name} must name each class, differently; correct it")
        path = find_file(name, RECIPE_FILE)
        recipe = {} if path is None else read_recipe(path)
        if pairs is None:
            pairs = TASKS.get(str(recipe.get("task")), task).pairs
        self.task = task
        self.settings = PredictionSettings(
            model.eval().requires_grad_(False).to(find_device()), tokenizer, find_lengths(recipe), pairs, top
        )

    def __call__(self, inputs: Sequence[Input | Sequence[str]]) -> list[Result]:
        """The result of each input.

        Raises:
            UsageError: an input that is none for this model, by its place in the list, from 0; or no list.
        """
        if isinstance(inputs, str | Mapping):
            raise UsageError(f"inputs must be a list, and this is one {type(inputs).__name__}; write [input]")
        results = list(self.stream(inputs))
        for place, result in enumerate(results):
            if "error" in result:
                raise UsageError(f"input {place}: {result['error']}")
        return results

    def stream(self, inputs: Iterable[Input | Sequence[str] | Line], at_once: int | None = None) -> Iterator[Result]:
        """The result of each input, in order; `error` says what is wrong with one that is none for this model.

        An input's `id` is repeated in its result. `at_once` inputs at most, INPUTS_A_CHUNK if not given,
        are read before the first of them is answered.
        """
        for chunk in cut_into_chunks(inputs, at_once or INPUTS_A_CHUNK, CHARACTERS_A_CHUNK):
            results: list[Result] = [{} for _ in chunk]
            examples = {}
            for place, line in enumerate(chunk):
                given = line.value if isinstance(line, Line) else line
                try:
                    if isinstance(given, Mapping) and "id" in given:
                        results[place]["id"] = given["id"]
                    examples[place] = self.read(given)
                except UsageError as error:
                    results[place]["error"] = f"{line.place}: {error}" if isinstance(line, Line) else str(error)
            for place, found in zip(
                examples, predict(self.task, list(examples.values()), self.settings, self.precision), strict=True
            ):
                results[place] |= found
            yield from results

    def read(self, given: Input | Sequence[str] | UsageError) -> Any:
        """The example of an input.

        Raises:
            UsageError: it is none.
        """
        if isinstance(given, UsageError):
            raise given
        if isinstance(given, str):
            given = [given]
        if not isinstance(given, Mapping | list | tuple):
            raise UsageError(f"it is one {type(given).__name__}; give a text, a list of texts or a mapping")
        if not isinstance(given, Mapping):
            given = name_texts(list(given), self.task.list_fields(self.settings))
        return self.task.read_input(given, self.settings)

    def describe(self, result: Result) -> str:
        """A result in words, in one line."""
        if "error" in result:
            return f"error: {result['error']}"
        said = self.task.describe_result(result) + ("  (the input was cut)" if "cut" in result else "")
        return " ".join(said.splitlines())

    def group(self, texts: Sequence[str]) -> list[Sequence[str]]:
        """Texts one after the other, as the command line has them, as inputs.

        Raises:
            UsageError: one is missing.
        """
        fields = self.task.list_fields(self.settings)
        if fields[-1].endswith("…"):
            return [texts]
        if len(texts) % len(fields):
            raise UsageError(f"{len(texts)} texts are no inputs of {' and '.join(fields)}; give them in this order")
        return [texts[start : start + len(fields)] for start in range(0, len(texts), len(fields))]


def name_texts(texts: Sequence[str], fields: Sequence[str]) -> dict[str, Any]:
    """The mapping of texts that come without names; the last field takes all that is left if it ends in …."""
    if fields[-1].endswith("…"):
        head = len(fields) - 1
        return dict(zip(fields, texts[:head], strict=False)) | {fields[-1].rstrip("…"): list(texts[head:])}
    if len(texts) == 2 and fields == ("text",):
        fields = PAIR_NAMES[0]
    if len(texts) != len(fields):
        raise UsageError(f"{len(texts)} texts where {' and '.join(fields)} are expected; give as many")
    return dict(zip(fields, texts, strict=True))


def find_lengths(recipe: Mapping[str, Any]) -> dict[str, int]:
    """Return the lengths of a run that its recipe says, of several phases the longest.

    Raises:
        UsageError: one is no whole number from 1 on.
    """
    try:
        data = recipe.get("data", {})
        lengths = {name: data[name] for name in WINDOW_OPTIONS if name in data}
        if recipe.get("phase"):
            lengths["max_length"] = max(list_lengths(recipe))
        return msgspec.convert(lengths, dict[str, Length])
    except (LookupError, TypeError, msgspec.ValidationError) as error:
        raise UsageError(
            f"the run's {RECIPE_FILE} is damaged ({error}); put the file back that the run was made with"
        ) from None


class Counts:
    """Results as they pass by: how many there are, how many are errors, and which inputs were cut."""

    def __init__(self) -> None:
        self.count = self.errors = self.cut = 0
        self.places: list[int] = []  # of the first inputs that were cut, from 1

    def watch(self, results: Iterable[Result]) -> Iterator[Result]:
        """The results."""
        for self.count, result in enumerate(results, 1):
            self.errors += "error" in result
            if "cut" in result:
                self.cut += 1
                if len(self.places) < MOST_NAMED:
                    self.places.append(self.count)
            yield result

    def describe_cut(self) -> str:
        """How many inputs were cut, and the first of them; empty if none was."""
        if not self.cut:
            return ""
        places = ", ".join(f"{place:,}" for place in self.places) + (", …" if self.cut > MOST_NAMED else "")
        return f"{self.cut:,} of {self.count:,} inputs are too long for this model and were cut: number {places}"


def write_results(results: Iterable[Result], output: Path, report: Callable[[str], None] = ignore) -> Counts:
    """Writes a line of JSON a result, all or none, and gives their counts; errors are reported.

    Raises:
        UsageError: the file cannot be written.
    """
    counts = Counts()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with atomic_open(output) as file:
            for result in counts.watch(results):
                file.write(json.dumps(result, ensure_ascii=False) + "\n")
                if "error" in result:
                    report(result["error"])
    except OSError as error:
        raise UsageError(f"{output} cannot be written ({error.strerror}); name another file with --output") from None
    none = f", and {counts.errors:,} inputs that are none" if counts.errors else ""
    report(f"{counts.count - counts.errors:,} results in {output}{none}")
    return counts
