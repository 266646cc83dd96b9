"""The command line: parses, calls, prints. The only file that knows typer, and the only one that prints or exits.

A user's mistake is one line on standard error and exit code 2; a run stopped by a signal ends with 128 + its number.
"""

import atexit
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from bertkit.errors import UsageError, explain_full_disk, explain_os_error
from bertkit.system.signals import act_outside_imports, await_end, note_signals

app = typer.Typer(
    name="bertkit",
    help="Pretrain BERT on your own text, fine-tune it on everything the paper did, and know how close you came.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

# Control characters, line and paragraph separators, and marks that turn the direction of writing.
CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
LAUNCHED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}  # the variables of one of several processes


def read_path(text: str) -> Path:
    """Return the path that an option names, `~` and `~user` expanded: a shell leaves them alone behind `--output=`."""
    return Path(os.path.expanduser(text))


# Of paths, and of what may be a path or a name.
PathOption, PathArgument = (partial(kind, parser=read_path) for kind in (typer.Option, typer.Argument))
PlaceOption, PlaceArgument = (partial(kind, parser=os.path.expanduser) for kind in (typer.Option, typer.Argument))

Sources = Annotated[list[str], PlaceArgument(help="Text files, directories of them, a Hub data set, or docs.")]
RecipeFile = Annotated[Path | None, PathOption("--recipe", help="A TOML file; see recipes/.", metavar="FILE")]
Output = Annotated[Path | None, PathOption("--output", help="The run directory.", metavar="DIR")]
Model = Annotated[str | None, PlaceOption("--model", help="Start from this checkpoint or run.", metavar="NAME|RUN")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any key of the recipe, such as train.learning_rate=1e-4.", metavar="KEY=VALUE"),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and stop.")]
Data = Annotated[
    Path | None,
    PathOption("--data", help="The folder of the official files; the Hub's copy if not given.", metavar="DIR"),
]
Push = Annotated[
    str | None, typer.Option("--push-to-hub", help="Upload the finished run to this repository.", metavar="REPO")
]
Workers = Annotated[
    str, typer.Option("--workers", help="Processes that share the runs; ray: a Ray cluster.", metavar="N|ray")
]
JsonFile = Annotated[Path | None, PathOption("--json", help="Write the figures here.", metavar="FILE")]
Builders = Annotated[
    str | None,
    typer.Option("--workers", help="Processes that build it, one a CPU if not given; ray: a cluster.", metavar="N|ray"),
]
Cased = Annotated[bool, typer.Option("--cased", help="Keep upper case and accents.")]
Device = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda or cuda:N; the first accelerator if not given.", metavar="D")
]
Size = Annotated[
    str | None,
    typer.Option("--size", help="Of random weights: tiny, mini, small, medium, base, large.", metavar="NAME"),
]
Repeats = Annotated[int, typer.Option("--repeats", help="Rounds; the median counts.", min=1)]
Compile = Annotated[bool, typer.Option("--compile/--no-compile", help="Try stock with torch.compile, too.")]


@app.callback(invoke_without_command=True)
def show_version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    """Nothing, or the version."""
    if version:
        import bertkit

        print_line(bertkit.__version__)
        raise typer.Exit


scores = typer.Typer(no_args_is_help=True, help="Score files of predictions, made by anything.")
app.add_typer(scores, name="score")
corpora = typer.Typer(no_args_is_help=True, help="Build a corpus of any size on disk, and look at it.")
app.add_typer(corpora, name="corpus")
benches = typer.Typer(no_args_is_help=True, help="Time this package beside other code that does the same.")
app.add_typer(benches, name="bench")


@app.command()
def vocab(
    sources: Sources,
    output: Annotated[Path, PathOption("--output", help="Where vocab.txt and tokenizer.json go.", metavar="DIR")],
    size: Annotated[int, typer.Option("--size", help="Tokens in the vocabulary.", min=1)] = 30522,
    cased: Cased = False,
) -> None:
    """Train a WordPiece vocabulary.

    Example: bertkit vocab corpus.txt --size 30522 --output my-vocab
    """
    from bertkit.data.pretraining.sources import read_documents
    from bertkit.data.tokenizer import TOKENIZER_FILES, make_tokenizer, save_tokenizer, train_vocabulary

    if output.is_file():
        raise UsageError(f"{output} is a file; name a directory with --output")
    for name in TOKENIZER_FILES:
        if (output / name).exists():
            raise UsageError(f"{output} holds a tokenizer already ({name}); name another directory with --output")
    with Screen() as screen, explain_full_disk(output):
        documents = read_documents(sources, split_sentences=False, report=screen.say)
        lines = (line for document in documents for line in document)
        tokens = train_vocabulary(lines, size=size, cased=cased, report=screen.say)
        save_tokenizer(make_tokenizer(tokens, cased=cased), output)
        screen.say(f"{len(tokens):,} tokens in {output / 'vocab.txt'}")


@app.command()
def pretrain(
    recipe: RecipeFile = None,
    corpus: Annotated[
        list[str] | None,
        PlaceOption("--corpus", help="A text file, a directory, a Hub data set, or docs.", metavar="PATH|docs|NAME"),
    ] = None,
    vocab: Annotated[
        str | None, PlaceOption("--vocab", help="A vocabulary; trained if not given.", metavar="DIR|FILE|NAME")
    ] = None,
    cased: Cased = False,
    model: Model = None,
    output: Output = None,
    settings: Settings = None,
    dry_run: DryRun = False,
    push_to: Push = None,
) -> None:
    """Pretrain BERT on raw text: masked LM and next sentence.

    Bare, it trains a small BERT for some minutes on the documentation installed on this machine. With --model it
    continues from a checkpoint (domain adaptation).

    Example: bertkit pretrain --corpus corpus.txt --output runs/mine

    Example: bertkit pretrain --model runs/mine --corpus more.txt --output runs/more
    """
    data = {"corpus": corpus or None, "vocab": vocab, "cased": cased or None}
    given = {"checkpoint": model, "data": {key: value for key, value in data.items() if value is not None}}
    execute("pretrain", recipe, given, output, settings, dry_run, push_to)


@app.command()
def glue(
    task: Annotated[str, typer.Option("--task", help="cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli, ax or all.")],
    recipe: RecipeFile = None,
    model: Model = None,
    data: Data = None,
    output: Output = None,
    settings: Settings = None,
    grid: Annotated[bool, typer.Option("--grid", help="4 rates x 2 batch sizes x 3 epochs; best on dev wins.")] = False,
    restarts: Annotated[int, typer.Option("--restarts", help="Runs with other seeds, of each setting.", min=1)] = 1,
    workers: Workers = "1",
    submit: Annotated[
        Path | None,
        PathOption("--submit", help="With --task all: the leaderboard's zip of test predictions.", metavar="FILE.zip"),
    ] = None,
    submit_partial: Annotated[
        bool, typer.Option("--submit-partial", help="Fill what is missing in the zip with the majority class.")
    ] = False,
    push_to: Push = None,
    dry_run: DryRun = False,
) -> None:
    """Fine-tune on a GLUE task, or on all of them.

    --task all, --grid and --restarts make a study: a table of runs, which continues where it was stopped. ax is
    predicted by a model of mnli (--model RUN). --submit with nothing but --output gathers the finished runs there.

    Example: bertkit glue --task mnli --data GLUE --output runs/mnli

    Example: bertkit glue --task rte --data GLUE --grid --restarts 5 --output runs/rte-grid

    Example: bertkit glue --task all --data GLUE --output runs/glue --submit glue.zip
    """
    from bertkit.data.pretraining.sources import ignore
    from bertkit.inference.glue_submission import check_target, find_runs, keep_complete, list_tasks
    from bertkit.tasks.glue import GRID
    from bertkit.training.recipe import parse_setting, read_recipe

    names, together = list_tasks(task), task.lower() == "all"
    output = output or Path("runs") / ("glue" if together else names[0])
    given = {"checkpoint": model, "data": {"dir": str(data)} if data else None}
    if submit is not None:
        check_target(submit)
    several = together or grid or restarts > 1
    refused = {
        f"--submit is for --task all, not --task {task}": submit is not None and not together,
        "--submit-partial is for --submit FILE.zip": submit_partial and submit is None,
        "--push-to-hub takes one model; name one task": push_to is not None and together,
        "--workers is for --task all, --grid and --restarts": workers != "1" and not several,
    }
    for message, is_so in refused.items():
        if is_so:
            raise UsageError(f"{message}; see bertkit glue --help")
    if (
        submit is not None
        and not (any(given.values()) or recipe or settings or grid or restarts > 1)
        and find_runs(output)
    ):
        write_submission(output, submit, submit_partial, dry_run)  # of what is there
    elif several:
        if together and data is not None:
            say = print_line if is_first_process() else ignore
            names = keep_complete(names, data, tested=submit is not None, partial=submit_partial, report=say)
        written = read_recipe(recipe) if recipe else {}
        if together:
            written.pop("task", None)
        definition = {"tasks": names, "restarts": restarts, "recipe": written, "grid": GRID if grid else {}}
        options = [given, *map(parse_setting, settings or [])]
        compare(definition, options, output, workers, dry_run, where=str(recipe or "glue"), push_to=push_to)
        if submit is not None and not dry_run:
            write_submission(output, submit, submit_partial)
    else:
        execute(names[0], recipe, given, output, settings, dry_run, push_to)


@app.command()
def squad(
    version: Annotated[int, typer.Option("--version", help="1 (for 1.1) or 2 (for 2.0).", metavar="1|2")],
    runs: Annotated[list[Path] | None, PathArgument(help="Finished runs, for --ensemble.", metavar="RUN")] = None,
    recipe: RecipeFile = None,
    model: Model = None,
    data: Data = None,
    output: Output = None,
    settings: Settings = None,
    extra_train: Annotated[
        Path | None,
        PathOption(
            "--extra-train",
            help="Fine-tune on this file in SQuAD's form first; triviaqa makes one as the paper did.",
            metavar="FILE",
        ),
    ] = None,
    ensemble: Annotated[
        bool, typer.Option("--ensemble", help="Combine the answers of finished runs instead of training.")
    ] = False,
    push_to: Push = None,
    dry_run: DryRun = False,
) -> None:
    """Fine-tune on SQuAD 1.1 or 2.0: find the answer to a question in a text, or that there is none.

    For 2.0 the threshold tau is tuned on the dev set for best F1, and kept with the model.

    Example: bertkit squad --version 2 --data SQUAD --output runs/squad2

    Example: bertkit squad --version 2 --ensemble runs/squad2 runs/other --output runs/both
    """
    from bertkit.tasks.squad import find_version

    found = find_version(version)
    if runs and not ensemble:
        raise UsageError(f"runs ({runs[0]}) are for --ensemble; see bertkit squad --help")
    if ensemble:
        unused = {
            "--recipe": recipe,
            "--model": model,
            "--set": settings,
            "--extra-train": extra_train,
            "--push-to-hub": push_to,
            "--dry-run": dry_run,
        }
        if given := [name for name, value in unused.items() if value]:
            raise UsageError(f"{given[0]} is for training, not for --ensemble; leave it out")
        combine(found, runs or [], data, output or Path("runs") / f"{found.name}-ensemble")
        return
    options = {"dir": data, "extra_train": extra_train}
    given = {"checkpoint": model, "data": {key: str(value) for key, value in options.items() if value}}
    execute(found.name, recipe, given, output, settings, dry_run, push_to)


@app.command()
def swag(
    recipe: RecipeFile = None,
    model: Model = None,
    data: Data = None,
    output: Output = None,
    settings: Settings = None,
    push_to: Push = None,
    dry_run: DryRun = False,
) -> None:
    """Fine-tune on SWAG: which of four endings follows.

    Example: bertkit swag --data SWAG --output runs/swag
    """
    given = {"checkpoint": model, "data": {"dir": str(data)} if data else None}
    execute("swag", recipe, given, output, settings, dry_run, push_to)


@app.command()
def ner(
    recipe: RecipeFile = None,
    model: Model = None,
    data: Data = None,
    output: Output = None,
    settings: Settings = None,
    layers: Annotated[
        str | None,
        typer.Option(
            "--features",
            help="The feature-based approach: the encoder stays as it is, and a BiLSTM learns from these layers.",
            metavar="LAYERS",
        ),
    ] = None,
    push_to: Push = None,
    dry_run: DryRun = False,
) -> None:
    """Find names in text: fine-tune on CoNLL-2003 or other files in its form, or learn from BERT's features.

    LAYERS: embeddings, second-to-last, last, sum-last-four, concat-last-four or sum-all, as in Table 7.

    Example: bertkit ner --data CONLL --output runs/ner

    Example: bertkit ner --data CONLL --features concat-last-four --output runs/ner-features
    """
    options = {"dir": data, "features": layers}
    given = {"checkpoint": model, "data": {key: str(value) for key, value in options.items() if value is not None}}
    execute("ner", recipe, given, output, settings, dry_run, push_to)


@app.command()
def features(
    model: Annotated[str, PlaceArgument(help="A checkpoint or run.", metavar="MODEL")],
    source: Annotated[Path, PathOption("--input", help="A text a line.", metavar="FILE")],
    output: Annotated[Path, PathOption("--output", help="A .jsonl or .npz file.", metavar="FILE")],
    layers: Annotated[
        str,
        typer.Option(
            "--layers",
            help="embeddings, second-to-last, last, sum-last-four, concat-last-four or sum-all.",
            metavar="LAYERS",
        ),
    ] = "last",
    pool: Annotated[
        str, typer.Option("--pool", help="A vector a word, or one a text: that of [CLS], or the mean.")
    ] = "words",
) -> None:
    """Write contextual vectors of any text: the same word in two contexts gets two.

    Example: bertkit features runs/mine --input texts.txt --layers last --output vectors.npz

    Example: bertkit features runs/mine --input texts.txt --pool mean --output vectors.jsonl
    """
    from bertkit.inference.features import extract

    with Screen() as screen:
        screen.start()
        extract(model, source, layers, output, pool, screen.say)


@app.command()
def sample(
    output: Annotated[Path, PathArgument(help="Where squad/ and glue/ go.", metavar="DIR")],
    questions: Annotated[int, typer.Option("--questions", help="Of each training set, at most.", min=100)] = 12_000,
) -> None:
    """Write small data sets in the forms of SQuAD 2.0 and GLUE, made of the documentation installed here.

    Example: bertkit sample data
    """
    from bertkit.data.formats.demo import write_samples

    with Screen() as screen:
        write_samples(output, questions, screen.say)


@app.command("import-tf")
def import_tf(
    source: Annotated[
        Path, PathArgument(help="A folder with bert_config.json, vocab.txt, bert_model.ckpt.*.", metavar="DIR")
    ],
    output: Annotated[Path, PathArgument(help="A new directory.", metavar="OUT")],
    cased: Annotated[
        bool | None,
        typer.Option("--cased/--uncased", help="Whether capital letters count; found out if not given."),
    ] = None,
) -> None:
    """Make a checkpoint of the files that BERT was released in; TensorFlow is not needed.

    Example: bertkit import-tf uncased_L-12_H-768_A-12 bert-base-uncased
    """
    from bertkit.model.tf_release import import_checkpoint

    with Screen() as screen:
        screen.start()
        import_checkpoint(source, output, cased=cased, report=screen.say)


@app.command()
def push(
    run: Annotated[Path, PathArgument(help="The directory of a finished run.", metavar="RUN")],
    repo: Annotated[str, typer.Argument(help="The repository: owner/name, or a name of yours.", metavar="REPO")],
    private: Annotated[bool, typer.Option("--private", help="Make it a private one.")] = False,
) -> None:
    """Upload a finished run to the Hugging Face Hub: weights, tokenizer, scores and model card.

    Log in first, with a token that may write: hf auth login. Broken off, the same command completes it.

    Example: bertkit push runs/mine ada/my-bert --private
    """
    with Screen() as screen:
        screen.start()
        upload(screen, run, repo, private)


@app.command()
def reproduce(
    run: Annotated[Path, PathArgument(help="The directory of a finished run.", metavar="RUN")],
    output: Output = None,
) -> None:
    """Do a finished run again from what its directory says, and compare scores, weights and predictions.

    Exit code 0: the same to the last bit. 1: not; then it is listed how, and in what the two machines differ. The
    repetition is in RUN-again if --output names no other place. Start it where the run was started: paths of data in
    its recipe may be relative.

    Example: bertkit reproduce runs/rte
    """
    with Screen() as screen:
        screen.start()
        from bertkit.training import reproduce as reproduction

        again = output or Path(f"{run}-again")
        with screen.watch_training():
            found = reproduction.reproduce(run, again, report=screen.say, progress=screen.advance)
        screen.show_reproduction(found, run, again)
        sys.exit(0 if found.is_exact else 1)


@app.command()
def predict(
    run: Annotated[str, PlaceArgument(help="A fine-tuned or pretrained run, or another checkpoint.", metavar="RUN")],
    texts: Annotated[list[str] | None, typer.Argument(help="Inputs, or the parts of them.", metavar="TEXT…")] = None,
    source: Annotated[
        str | None,
        PlaceOption("--input", help="Inputs, a line each: .jsonl, .tsv with names, or .txt.", metavar="FILE|-"),
    ] = None,
    output: Annotated[
        Path | None, PathOption("--output", help="Write a line of JSON an input here.", metavar="FILE")
    ] = None,
    pair: Annotated[bool, typer.Option("--pair", help="An input is two texts; a run's task says so itself.")] = False,
    top: Annotated[int, typer.Option("--top", help="Words for each [MASK].", min=1)] = 5,
    precision: Annotated[
        str, typer.Option("--precision", help="auto (bf16 where it is faster), fp32, bf16 or fp16.")
    ] = "auto",
) -> None:
    """Predict with a trained model: a class, an answer, names, an ending, masked words, whatever its head is for.

    TEXT: a text for a classifier (two for a pair), NER or [MASK]; question and context for SQuAD; context and endings
    for SWAG. Names in JSON and of columns: text, text_pair; question, context; words; context, start, endings.

    Example: bertkit predict runs/squad2 "Who wrote it?" "The book was written by Ada."

    Example: bertkit predict runs/mnli --input pairs.jsonl --output predictions.jsonl
    """
    from bertkit.data.formats.inputs import STDIN, check_output, check_source, read_inputs
    from bertkit.inference.predictor import Predictor, Tally, write_results

    if bool(texts) == bool(source):
        raise UsageError(
            "give the inputs as TEXT or with --input FILE, one of the two (--input - reads standard input)"
        )
    if source is not None:
        check_source(source)
        if output is not None:
            check_output(source, output)
    with Screen() as screen:
        screen.start()
        predictor = Predictor(run, pairs=pair or None, top=top, precision=precision)
        is_typed = source == STDIN and sys.stdin.isatty()  # by somebody who wants each answer
        inputs = predictor.group(texts) if texts else read_inputs(source)
        results = predictor.stream(inputs, at_once=1 if is_typed else None)
        if output is not None:
            tally = write_results(results, output, screen.say)
        else:
            tally = Tally()
            for result in tally.watch(results):
                if "error" in result and not texts and not screen.console.is_terminal:  # where it would stand twice
                    complain(result["error"])
                screen.say(predictor.describe(result) if texts else json.dumps(result, ensure_ascii=False))
        if cut := tally.describe_cut():
            complain(cut)
        if tally.errors:
            count = f"{tally.errors:,} input{'s' * (tally.errors > 1)}"
            raise UsageError(f"{count} cannot be predicted; the reason stands in place of each result")


@app.command()
def triviaqa(
    qa: Annotated[Path, PathArgument(help="TriviaQA's JSON, such as wikipedia-train.json.", metavar="QA.json")],
    evidence: Annotated[Path, PathOption("--evidence", help="The folder of its documents.", metavar="DIR")],
    output: Annotated[Path, PathOption("--output", help="The file to write, in SQuAD's form.", metavar="FILE")],
) -> None:
    """Make a training file of TriviaQA: paragraphs that hold an answer, for squad --extra-train.

    Example: bertkit triviaqa qa/wikipedia-train.json --evidence evidence --output triviaqa.json
    """
    from bertkit.data.formats.triviaqa import convert

    with Screen() as screen, explain_full_disk(output):
        convert(qa, evidence, output, screen.say)


@app.command()
def study(
    file: Annotated[Path, PathArgument(help="A TOML file; see recipes/studies/.", metavar="FILE")],
    data: Annotated[
        Path | None, PathOption("--data", help="A folder that holds glue/, squad/, swag/, ner/.", metavar="ROOT")
    ] = None,
    model: Model = None,
    output: Output = None,
    settings: Settings = None,
    workers: Workers = "1",
    dry_run: DryRun = False,
) -> None:
    """Run a table of runs: recipe variants x tasks x a grid, with seeds, beside the paper's values.

    Killed at any moment, the same command finishes it.

    Example: bertkit study recipes/studies/glue-grid.toml --data ROOT --workers 2
    """
    from bertkit.training.recipe import parse_setting, read_recipe

    given = [{"checkpoint": model, "data_root": str(data) if data else None}, *map(parse_setting, settings or [])]
    compare(read_recipe(file), given, output or Path("runs") / file.stem, workers, dry_run, where=str(file))


@app.command()
def report(
    sources: Annotated[list[Path], PathArgument(help="Runs and studies, finished or not.", metavar="RUN|STUDY")],
    output: Annotated[Path, PathOption("--output", help="The page to write.", metavar="FILE")] = Path("report.html"),
) -> None:
    """Show runs and studies on one page that needs no network: scores, curves, mistakes, recipes to copy.

    Example: bertkit report runs/mrpc runs/squad2 --output report.html
    """
    from bertkit.analysis.page import write_page

    with Screen() as screen, explain_full_disk(output):
        screen.start()
        write_page(sources, output, screen.say)


@scores.command("glue")
def score_glue(
    gold: Annotated[Path, PathArgument(help="The official file with labels, such as RTE/dev.tsv.")],
    predictions: Annotated[Path, PathArgument(help="The leaderboard's form (index, prediction), or an answer a line.")],
    task: Annotated[str, typer.Option("--task", help="cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Score predictions for a GLUE task.

    Example: bertkit score glue --task rte RTE/dev.tsv runs/rte/predictions/dev.tsv
    """
    from bertkit.tasks.glue import find_benchmark, score_files

    found = score_files(find_benchmark(task), gold, predictions)
    for line in [json.dumps(found)] if as_json else [f"{name} {value:.4f}" for name, value in found.items()]:
        print_line(line)


@scores.command("squad")
def score_squad(
    gold: Annotated[Path, PathArgument(help="The official file, such as dev-v2.0.json.", metavar="DATA.json")],
    predictions: Annotated[Path, PathArgument(help="Question id -> answer.", metavar="PREDICTIONS.json")],
    version: Annotated[int, typer.Option("--version", help="1 (for 1.1) or 2 (for 2.0).", metavar="1|2")],
    odds: Annotated[
        Path | None,
        PathOption("--null-odds", help="Question id -> how sure there is no answer (2.0).", metavar="FILE"),
    ] = None,
    threshold: Annotated[
        float,
        typer.Option(
            "--na-prob-thresh", help="Odds above it count as no answer; the official 1.0 is meant for probabilities."
        ),
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Score answers to SQuAD, as the official scripts do.

    Example: bertkit score squad --version 2 dev-v2.0.json runs/squad2/predictions/predictions.json

    Example: bertkit score squad --version 2 dev-v2.0.json answers.json --null-odds na_prob.json --na-prob-thresh 0.5
    """
    from bertkit.tasks.squad import find_version, score_files

    found = score_files(find_version(version), gold, predictions, odds, threshold, report=complain)
    for line in [json.dumps(found)] if as_json else [f"{name} {value:g}" for name, value in found.items()]:
        print_line(line)


@corpora.command("build")
def build_corpus(
    sources: Sources,
    vocab: Annotated[str, PlaceOption("--vocab", help="A vocabulary.", metavar="DIR|FILE|NAME")],
    output: Annotated[Path, PathOption("--output", help="Where the corpus goes.", metavar="DIR")],
    workers: Builders = None,
    cased: Cased = False,
    language: Annotated[str, typer.Option("--language", help="Whose rules end sentences.", metavar="CODE")] = "en",
    split_sentences: Annotated[
        bool, typer.Option("--split-sentences/--no-split-sentences", help="Or leave every line as it is.")
    ] = True,
    deduplicate: Annotated[
        str, typer.Option("--deduplicate", help="Drop what came before.", metavar="documents|lines")
    ] = "",
) -> None:
    """Turn text into token ids on disk, which pretrain --corpus DIR reads.

    Killed at any moment, the same command finishes it.

    Example: bertkit corpus build texts docs --vocab my-vocab --output corpora/mine

    Example: bertkit corpus build wikimedia/wikipedia:20231101.en --vocab my-vocab --output corpora/wikipedia
    """
    from bertkit.data.pretraining.build import build
    from bertkit.data.pretraining.docstrings import count_cores
    from bertkit.data.tokenizer import load_tokenizer
    from bertkit.studies.workers import read_workers

    count = read_workers(count_cores() if workers is None else workers)
    with Screen() as screen, explain_full_disk(output):
        screen.start()
        statistics = build(
            sources,
            load_tokenizer(vocab, cased=cased or None),
            output,
            split_sentences=split_sentences,
            language=language,
            deduplicate=deduplicate,
            workers=count,
            report=screen.say,
            progress=screen.show_build,
        )
        screen.finish_progress()
        screen.show_statistics(statistics, output)
        screen.say("Next:")
        run = Path("runs", output.name)
        if run.resolve() == output.resolve():
            run = run.with_name(f"{run.name}-bert")
        screen.say(f"  bertkit pretrain --corpus {quote(str(output))} --output {quote(str(run))}")


@corpora.command("stats")
def show_corpus(
    directory: Annotated[Path, PathArgument(help="A corpus that corpus build has made.", metavar="DIR")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Check the files of a corpus, and say what it is like: sizes, lengths, repeats, padding.

    Example: bertkit corpus stats corpora/mine
    """
    from bertkit.data.pretraining.store import open_corpus, read_manifest

    open_corpus(directory)  # which checks
    statistics = read_manifest(directory)["statistics"]
    if as_json:
        print_line(json.dumps(statistics))
        return
    with Screen() as screen:
        screen.start()
        screen.show_statistics(statistics, directory)


@benches.command("squad")
def bench_squad(
    data: Data = None,
    reference: Annotated[
        Path | None,
        PathOption("--reference", help="A copy of transformers' utils_qa.py to compare with.", metavar="FILE"),
    ] = None,
    as_json: JsonFile = None,
) -> None:
    """Time the decoding and scoring of SQuAD's answers beside the stock example's.

    Example: bertkit bench squad --data SQUAD --reference utils_qa.py --json squad.json
    """
    from bertkit.bench import squad

    run_bench(squad.bench_squad, as_json, reference, data)


@benches.command("corpus")
def bench_corpus(
    data: Annotated[
        str | None,
        PlaceOption("--data", help="The text: as a corpus of pretrain; docs if not given.", metavar="FILE|DIR"),
    ] = None,
    reference: Annotated[
        Path | None,
        PathOption("--reference", help="A checkout of google-research/bert to compare with.", metavar="DIR"),
    ] = None,
    vocab: Annotated[
        str | None,
        PlaceOption("--vocab", help="A lower-case vocabulary; trained on the text if not given.", metavar="DIR|FILE"),
    ] = None,
    characters: Annotated[int, typer.Option("--characters", help="Of text, about.", min=1)] = 4_000_000,
    copies: Annotated[int, typer.Option("--copies", help="Of the text, each with pairs of its own.", min=1)] = 10,
    as_json: JsonFile = None,
) -> None:
    """Time the way from text to masked next-sentence pairs beside the reference code's.

    Example: bertkit bench corpus --data text/ --reference bert/ --json corpus.json
    """
    from bertkit.bench import corpus

    run_bench(corpus.bench_corpus, as_json, reference, data, vocab, characters=characters, copies=copies)


@benches.command("predict")
def bench_predict(
    run: Annotated[
        str | None, PlaceArgument(help="A classifier; BERT-base of random weights if not given.", metavar="RUN")
    ] = None,
    source: Annotated[
        str | None, PlaceOption("--input", help="Texts, as predict reads them; made up if not given.", metavar="FILE")
    ] = None,
    count: Annotated[int, typer.Option("--texts", help="The first so many.", min=1)] = 512,
    repeats: Repeats = 3,
    as_json: JsonFile = None,
) -> None:
    """Time predictions beside the pipeline of transformers, at its best of batch sizes 1, 8 and 32.

    Example: bertkit bench predict runs/sst2 --input reviews.txt --json predict.json
    """
    from bertkit.bench import predict

    run_bench(predict.bench_predict, as_json, run, source, count, repeats)


@benches.command("finetune")
def bench_finetune(
    model: Annotated[
        str | None, PlaceOption("--model", help="A checkpoint; random weights if not given.", metavar="NAME|RUN")
    ] = None,
    data: Annotated[
        Path | None,
        PathOption("--data", help="The official GLUE files; pairs of documentation if not given.", metavar="DIR"),
    ] = None,
    task: Annotated[str, typer.Option("--task", help="Which GLUE task of --data.", metavar="NAME")] = "",
    size: Size = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Rows an update.", min=1)] = 32,
    updates: Annotated[int, typer.Option("--updates", help="Of each side in a round.", min=1)] = 50,
    repeats: Repeats = 3,
    compiled: Compile = True,
    device: Device = None,
    as_json: JsonFile = None,
) -> None:
    """Time fine-tuning beside plain transformers: on the same batches, at its best, and as its examples do.

    Example: bertkit bench finetune --model MINILM --data GLUE --task rte --json finetune.json
    """
    choose_device(device)
    from bertkit.bench import finetune

    options = {"task": task, "size": size, "batch_size": batch_size, "updates": updates, "repeats": repeats}
    run_bench(finetune.bench_finetune, as_json, model, data, compiled=compiled, **options)


@benches.command("pretrain")
def bench_pretrain(
    data: Annotated[
        str | None,
        PlaceOption("--data", help="The text: as a corpus of pretrain; docs if not given.", metavar="FILE|DIR"),
    ] = None,
    size: Size = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Pairs an update.", min=1)] = 64,
    length: Annotated[int, typer.Option("--length", help="Tokens of a pair, at most.", min=16)] = 128,
    updates: Annotated[int, typer.Option("--updates", help="Of each side in a round.", min=1)] = 20,
    repeats: Repeats = 3,
    compiled: Compile = True,
    device: Device = None,
    as_json: JsonFile = None,
) -> None:
    """Time pretraining from random weights beside plain transformers: speed and memory.

    Example: bertkit bench pretrain --size small --json pretrain.json
    """
    choose_device(device)
    from bertkit.bench import pretrain

    options = {"size": size, "batch_size": batch_size, "length": length, "updates": updates, "repeats": repeats}
    run_bench(pretrain.bench_pretrain, as_json, data, compiled=compiled, **options)


def choose_device(device: str | None) -> None:
    """Hides all accelerators but the one that is asked for; torch must not have looked for them yet."""
    if device is None:
        return
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (number and not (kind == "cuda" and number.isdecimal())):
        raise UsageError(f"unknown device {device!r}; expected cpu, cuda or cuda:N")
    os.environ["CUDA_VISIBLE_DEVICES"] = "" if kind == "cpu" else number or "0"
    if kind == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UsageError(f"there is no {device} here; leave --device out, or give cpu")


def run_bench(bench: Callable[..., Mapping[str, Any]], as_json: Path | None, *arguments: Any, **options: Any) -> None:
    """Runs a bench, and writes its figures where they are wanted."""
    from bertkit.system.files import write_json

    if as_json is not None and (as_json.is_dir() or not os.access(as_json.parent, os.W_OK)):
        raise UsageError(f"{as_json} cannot be written; name a file in a folder that is there with --json")
    with Screen() as screen, explain_full_disk(as_json or "."):
        screen.start()
        found = bench(*arguments, report=screen.say, **options)
        if as_json is not None:
            write_json(found, as_json)
            screen.say(f"Figures: {as_json}")


def execute(
    name: str,
    recipe: Path | None,
    given: dict[str, Any],
    output: Path | None,
    settings: list[str] | None,
    dry_run: bool,
    push_to: str | None = None,
) -> None:
    """Runs a task with what the command line gave, and prints what came of it."""
    from bertkit.training.recipe import check, merge, parse_setting, read_recipe

    given = {key: value for key, value in given.items() if value}
    options = [parse_setting(setting) for setting in settings or []]
    written = read_recipe(recipe) if recipe else None
    with Screen() as screen:
        screen.start()
        from bertkit.tasks import TASKS
        from bertkit.training import model_card
        from bertkit.training import run as runs

        task = TASKS[name]
        screen.names |= {row.key: row.name for row in task.table}
        if written is not None:
            check(written, data_defaults=task.recipe["data"], where=str(recipe))
        elif task.starter is not None:
            written = task.starter(merge(given, *options))
        recipes = (written or {}, given, *options)
        output = output or Path("runs") / name
        if push_to is not None:
            model_card.check_push(push_to)
        if dry_run:
            screen.show_plan(runs.dry_run(task, *recipes, output=output))
            return
        with screen.watch_training():
            metrics = runs.run(task, *recipes, output=output, report=screen.say, progress=screen.advance)
        if not screen.quiet:
            screen.show_results(task, metrics, output)
            if push_to is not None:
                upload(screen, output, push_to)


def compare(
    definition: Mapping[str, Any],
    given: list[Mapping[str, Any]],
    output: Path,
    workers: str,
    dry_run: bool,
    *,
    where: str,
    push_to: str | None = None,
) -> None:
    """Runs a study with what the command line gave, and prints what came of it."""
    with Screen() as screen:
        screen.start()
        from bertkit.studies import runner as studies
        from bertkit.studies.spec import describe_plan
        from bertkit.training import model_card

        made = studies.make_study(definition, *given, where=where)
        if push_to is not None:
            model_card.check_push(push_to)
        if dry_run:
            screen.show_study_plan(describe_plan(made))
            return
        with screen.watch_training(), explain_full_disk(output):
            results = studies.run_study(
                made, output=output, workers=workers, report=screen.say, progress=screen.show_study
            )
        if screen.quiet:
            return
        screen.show_study_results(results, output)
        if not results["chosen"]:
            raise UsageError(f"all {results['runs']} runs failed; {output / studies.STUDY_RESULT} says why")
        if push_to is not None:
            upload(screen, output / results["chosen"][0]["run"], push_to)
        if failed := results["failed"]:
            why = f"{output / studies.STUDY_RESULT} says why, and the same command tries them again"
            raise UsageError(f"{failed:,} of {results['runs']:,} runs failed; {why}")


def upload(screen: "Screen", run: Path, repo: str, private: bool = False) -> None:
    """Uploads a finished run, with a progress bar if this is a terminal, and prints where it is."""
    from huggingface_hub.utils import enable_progress_bars

    from bertkit.training import model_card

    if screen.console.is_terminal:
        enable_progress_bars()
    screen.say(f"Pushed: {model_card.push(run, repo, private=private, report=screen.say)}")


def combine(version: Any, runs: list[Path], data: Path | None, output: Path) -> None:
    """Combines the answers of finished runs, and prints what came of it."""
    with Screen() as screen:
        screen.start()
        from bertkit.inference import ensemble

        if is_first_process():
            with explain_full_disk(output):
                results = ensemble.combine(version, runs, output, data, screen.say)
            screen.show_ensemble(version, results, output)


def write_submission(folder: Path, path: Path, fill: bool, dry_run: bool = False) -> None:
    """Writes the leaderboard's zip from the finished runs in a folder."""
    from bertkit.inference.glue_submission import find_runs, gather_files, write_zip

    if not is_first_process():
        return
    runs = find_runs(folder, print_line)
    files = gather_files(runs, where=folder, fill=fill, report=print_line)
    if dry_run:
        print_line(f"{len(files)} files would be in {path}, from {', '.join(map(str, runs))} (--dry-run)")
        return
    write_zip(files, path)
    print_line(f"{len(files)} files in {path}")


class Screen:
    """What a person sees: lines, a progress bar if this is a terminal, tables at the end."""

    def __init__(self) -> None:
        self.quiet = not is_first_process()
        self.names: dict[str, str] = {"loss": "loss"}  # log entry -> words for it
        self.console: Any = None
        self.bar: Any = None
        self.shown = -1
        self.began: tuple[float, int] | None = None  # when a build did, and with how many bytes
        self.done = 0
        self.latest: dict[str, float] = {}
        self.trains = False  # goes on when nobody reads its progress any more

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.finish_progress()

    def start(self) -> None:
        """Makes the console; libraries then report through this program and not beside it."""
        from rich.console import Console

        self.console = Console(highlight=False, soft_wrap=True)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def say(self, line: str) -> None:
        """Prints one line."""
        if not self.quiet:
            print_line(line, goes_on=self.trains)

    def show(self, renderable: Any) -> None:
        """Prints what rich draws."""
        with self.console.capture() as drawn:
            self.console.print(renderable)
        write(drawn.get(), goes_on=self.trains)

    def show_table(self, title: str, headings: Iterable[str], lines: Iterable[Sequence[str]], **options: Any) -> None:
        """Prints a table of texts."""
        self.show(make_table(title, headings, lines, **options))

    def advance(self, done: int, total: int, log: Mapping[str, float]) -> None:
        """Shows how far the training is, and the latest losses."""
        if done < self.done:  # another training has begun
            self.finish_progress()
            self.shown, self.latest = -1, {}
        self.done = done
        self.latest |= {self.names[key]: value for key, value in log.items() if key in self.names}
        state = ", ".join(f"{name} {value:.3f}" for name, value in self.latest.items())
        if self.console is not None and self.console.is_terminal:
            from rich.progress import MofNCompleteColumn

            self._move_bar("training", done, total, MofNCompleteColumn(), state=state)
        elif done * 20 // max(total, 1) > self.shown:
            self.shown = done * 20 // max(total, 1)
            self.say(f"  update {done:,} of {total:,}  {state}")

    def _move_bar(self, name: str, done: int, total: int | None, count: Any, **state: str) -> None:
        """Moves the progress bar; `count` is rich's column for how much is done, `state` what stands behind it."""
        if self.bar is None:
            from rich import progress

            self.bar = progress.Progress(
                progress.TextColumn(name),
                progress.BarColumn(),
                count,
                progress.TimeRemainingColumn(),
                *(progress.TextColumn(f"{{task.fields[{key}]}}", markup=False) for key in state),
                console=self.console,
            )
            self.bar.start()
            self.bar.add_task(name, total=total, **state)
        self.bar.update(self.bar.task_ids[0], completed=done, **state)

    def show_build(self, done: int, total: int, tokens: int) -> None:
        """Shows how far the building of a corpus is, in bytes of text; where their total is unknown, the tokens."""
        now = time.monotonic()
        self.began = self.began or (now, done)
        seconds, read = now - self.began[0], done - self.began[1]
        rate = f"{tokens:,} tokens, {tokens / max(seconds, 1):,.0f} a second" if tokens else ""
        if self.console is not None and self.console.is_terminal:
            from rich.progress import DownloadColumn

            self._move_bar("building", done, total or None, DownloadColumn(), rate=rate)
        elif rate and (done * 20 // total > self.shown if total else seconds > self.shown + 30):
            self.shown = done * 20 // total if total else int(seconds)
            left = f", {seconds * (total - done) / read:,.0f} s left" if total and read else ""
            digits = int(total < 1e7)
            share = f"{done / 1e6:,.{digits}f} of {total / 1e6:,.{digits}f} MB, " if total else ""
            self.say(f"  {share}{rate}{left}")

    def show_statistics(self, statistics: Mapping[str, Any], directory: Path) -> None:
        """Prints what a corpus is like, and what is unusual about it."""
        from bertkit.data.pretraining.statistics import list_rows, list_warnings

        self.show_table(f"{directory}", ["", ""], list_rows(statistics), show_header=False)
        for line in list_warnings(statistics):
            self.say(line)

    @contextmanager
    def watch_training(self) -> Iterator[None]:
        """For what trains: its progress, and the other processes, end with it; stopped by a signal, so does this one.

        Exits with 128 + the signal's number then.
        """
        from bertkit.training.run import leave_processes
        from bertkit.training.trainer import Interrupted

        self.trains = True
        try:
            yield
        except Interrupted as stop:
            self.finish_progress()
            complain(str(stop))
            sys.exit(128 + stop.number)
        self.finish_progress()
        leave_processes()

    def finish_progress(self) -> None:
        """Ends the progress bar or the live table."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def show_ensemble(self, version: Any, results: Mapping[str, Any], output: Path) -> None:
        """Prints the scores of runs and of their ensemble, beside the paper's."""
        from bertkit.inference.ensemble import list_lines

        self.show_table(f"{output}", *list_lines(version, results))
        self.say(f"In {output}: metrics.json, predictions/")

    def show_study(self, results: Mapping[str, Any]) -> None:
        """Shows the table of a study as it fills; only on a terminal, for every finished run has its line as well."""
        if self.quiet or not self.console.is_terminal:
            return
        from rich.live import Live

        from bertkit.reports.tables import list_progress

        headings, lines = list_progress(results, limit=max(self.console.height - 8, 4))
        table = make_table(f"{results['over']} of {results['runs']} runs", headings, lines)
        if self.bar is None:
            self.bar = Live(console=self.console, transient=True, refresh_per_second=4)
            self.bar.start()
        self.bar.update(table)

    def show_study_plan(self, lines: list[str]) -> None:
        """Prints a dry run of a study."""
        for line in lines:
            self.say(line)
        self.say("nothing was trained or written (--dry-run)")

    def show_study_results(self, results: Mapping[str, Any], output: Path) -> None:
        """Prints the tables of a study, and where everything is."""
        from rich.markdown import Markdown

        from bertkit.studies.runner import CURVE, PICTURE, STUDY_RESULT, TABLE

        text = (output / TABLE).read_text(encoding="utf-8")
        self.show(Markdown("\n".join(map(escape_controls, text.split("\n"))), hyperlinks=False))
        for task in dict.fromkeys(column["task"] for column in results["columns"].values()):
            self.warn(task, [cell for cell in results["cells"] if cell["task"] == task])
        for chosen in results["chosen"]:
            names = [name for name in (chosen["row"], chosen["column"]) if name]
            self.say(f"Chosen for {', '.join(names)}: {output / chosen['run']}")
        there = [name for name in (STUDY_RESULT, TABLE, PICTURE, CURVE) if (output / name).exists()]
        self.say(f"In {output}: {', '.join(there)}")

    def show_plan(self, plan: Mapping[str, Any]) -> None:
        """Prints a dry run: the complete recipe, then the sizes."""
        import tomli_w

        plan = dict(plan)
        for line in tomli_w.dumps(plan.pop("recipe")).split("\n"):
            self.say(line)
        for name, value in plan.items():
            self.say(f"{name.replace('_', ' ')}: {value:,}" if isinstance(value, int) else f"{name}: {value}")
        self.say("nothing was trained or written (--dry-run)")

    def show_results(self, task: Any, metrics: Mapping[str, Any], output: Path) -> None:
        """Prints the task's table of scores, some predictions, and where everything is."""
        from bertkit.reports.tables import plot_log
        from bertkit.training.recipe import read_recipe
        from bertkit.training.run_dir import EXAMPLES, METRICS, PREDICTIONS, RECIPE, hold_run_dir, read_log

        rows = task.list_rows(metrics)
        columns = {  # heading -> the cell of a row
            "held out": lambda row: row.name + (" (%)" if row.unit else ""),
            "knowing nothing": lambda row: "\n".join(
                f"{row.show(metrics[key])} {name}" for name, key in row.baselines.items()
            ),
            "before": lambda row: row.show(metrics[f"start_{row.key}"]) if f"start_{row.key}" in metrics else "",
            "after": lambda row: row.show(metrics[row.key]),
            "the paper": lambda row: "\n".join(f"{row.show(value)} {name}" for name, value in row.paper.items()),
        }
        cells = {heading: [make(row) for row in rows] for heading, make in columns.items()}
        cells = {heading: column for heading, column in cells.items() if any(column)}
        if rows:
            self.show_table(f"{output}", cells, zip(*cells.values(), strict=True))
        for line in task.comment(metrics):
            self.say(line)
        self.show_examples(output / PREDICTIONS / EXAMPLES)
        curves = output / "curves.png"
        with suppress(UsageError), hold_run_dir(output):  # another start of this run draws the same curves
            plot_log(read_log(output), task.table, metrics, curves)
        self.say(f"Scores: {output / METRICS}" + (f"; curves: {curves}" if curves.exists() else ""))
        activate = "" if shutil.which("bertkit") else f" (after: source {Path(sys.prefix) / 'bin' / 'activate'})"
        if commands := task.suggest(output, read_recipe(output / RECIPE)):
            self.say(f"Next{activate}:")
            for command in commands:
                self.say(f"  {command}")

    def warn(self, task: str, cells: list[Mapping[str, Any]]) -> None:
        """Prints of a task's runs how many have learned nothing, with the likely causes."""
        from bertkit.tasks import TASKS

        # Columns may share runs.
        found = {run["directory"]: run for cell in cells for run in cell["runs"]}
        runs = [run for run in found.values() if run["status"] == "finished"]
        lines = [line for run in runs for line in TASKS[task].comment(run["metrics"]) if line.startswith("warning: ")]
        if lines:
            self.say(f"{task}, {len(lines)} of {len(runs)} runs: {lines[0]}")

    def show_reproduction(self, found: Any, run: Path, again: Path) -> None:
        """Prints how a run and its repetition differ, and what may be the reason."""
        from bertkit.training.run_dir import PREDICTIONS

        for name, (before, now) in found.scores.items():
            self.say(f"{name}: {before} -> {now}")
        if found.weights:
            name, apart = max(found.weights.items(), key=lambda item: item[1])
            self.say(f"{len(found.weights)} weights differ, most of all {name}: by {apart:.3g}")
        for name, (count, lines) in found.predictions.items():
            self.say(f"{PREDICTIONS}/{name}: {count:,} of {lines:,} lines differ")
        for difference in found.environment:
            self.say(f"another machine, software or data: {difference}")
        if found.is_exact:
            self.say(f"{again} is {run} again, bit for bit: scores, weights and predictions")
        elif not found.environment:
            self.say("machine, software and data are the same; on a GPU train.full_determinism gives sums an order")

    def show_examples(self, path: Path) -> None:
        """Prints the predictions that a run has left to look at."""
        if path.is_file() and (lines := path.read_text(encoding="utf-8").splitlines()):
            self.say("Predictions on held-out text (the right answer in parentheses):")
            for line in lines:
                self.say(f"  {line}")


def print_line(line: str, *, err: bool = False, goes_on: bool = False) -> None:
    """Print one line; see `write`."""
    write(f"{escape_controls(line)}\n", err=err, goes_on=goes_on)


def write(text: str, *, err: bool = False, goes_on: bool = False) -> None:
    """Write to standard output or error and flush it; everything but rich's progress comes this way.

    A stream without a reader ends the command quietly, as is usual on Unix. With `goes_on`, and on standard error, the
    command goes on in silence.

    Raises:
        UsageError: standard output is on a full disk, or broken in another way.
    """
    stream = sys.stderr if err else sys.stdout
    try:
        typer.echo(text, nl=False, err=err)
        if stream is not None:  # closed
            stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # for what is left in the buffer, and all that comes
        if err:
            return
        trouble = f"standard output cannot be written to ({error.strerror})"
        if not isinstance(error, BrokenPipeError):
            if not goes_on:
                raise UsageError(f"{trouble}; free some space or send it elsewhere, and try again") from None
            complain(f"{trouble}; the training goes on without it")
        elif not goes_on:
            sys.exit(128 + signal.SIGPIPE)


def escape_controls(line: str) -> str:
    r"""Return a line with \uXXXX for characters that move the cursor, colour or reorder text; JSON stays the same."""
    return CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", line)


def make_table(title: str, headings: Iterable[str], lines: Iterable[Sequence[str]], **options: Any) -> Any:
    """Return rich's table of texts, in which nothing is read as markup."""
    from rich.table import Table
    from rich.text import Text

    def show(text: str) -> Text:
        return Text("\n".join(map(escape_controls, text.split("\n"))))

    table = Table(title=show(title), title_justify="left", **options)
    for heading in headings:
        table.add_column(show(heading))
    for line in lines:
        table.add_row(*map(show, line))
    return table


def is_first_process() -> bool:
    """Whether this is the one of several processes that speaks; alone it is."""
    return os.environ.get("RANK", "0") == "0" or not os.environ.keys() >= LAUNCHED


def complain(message: str) -> None:
    """Prints one line on standard error."""
    if is_first_process():
        print_line(f"bertkit: {message}", err=True)


@contextmanager
def obey_signals() -> Iterator[None]:
    """Being stopped by a signal, where nothing below has a better end for that, is one line and exit code 128 + it."""
    code = 0

    def stop(number: int) -> None:
        nonlocal code
        code = 128 + number
        complain("stopped; what is finished is kept, and the same command goes on")
        act_outside_imports(lambda: sys.exit(code), otherwise=lambda: os._exit(code))

    try:
        with note_signals(stop, again=signal.SIG_DFL):
            yield
    except BaseException:
        if not code:
            raise
    if code:  # what was at work has caught the exit, and made something else of it
        sys.exit(code)


@contextmanager
def explain_mistakes() -> Iterator[None]:
    """A mistake of the user becomes one line and exit code 2."""
    try:
        with obey_signals():
            yield
    except UsageError as error:
        complain(str(error))
        sys.exit(2)
    except Exception as error:
        if line := explain_os_error(error):
            complain(line)
            sys.exit(2)
        # typer's own refusals; which module their class lives in has changed with its versions.
        if not hasattr(error, "format_message"):
            raise
        if message := " ".join(error.format_message().split()):
            complain(f"{message.rstrip('.')}; bertkit --help says what there is")
        sys.exit(error.exit_code)


def check_words(words: list[str]) -> None:
    """Nothing, or a UsageError: a word of the command cannot be written down in a recipe or a log."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{word!a} is not UTF-8; write it so, or give the file another name") from None


def check_launcher() -> None:
    """Check that the environment says all or nothing of other processes, as torchrun and accelerate launch do.

    Raises:
        UsageError: a variable says that this is one of several processes, and another one is missing.
    """
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "-1"}
    said = [name for name, value in alone.items() if os.environ.get(name, value) != value]
    missing = sorted(LAUNCHED - os.environ.keys())
    if said and missing:
        raise UsageError(
            f"{said[0]} = {os.environ[said[0]]} in the environment means several processes, but these are not set: "
            f"{', '.join(missing)}; unset {said[0]}, or start them with torchrun or accelerate launch"
        )


def main() -> None:
    """The console command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # what a terminal's encoding does not have is written as an escape
            stream.reconfigure(errors="backslashreplace")
    try:
        with explain_mistakes():
            check_words(sys.argv)
            check_launcher()
            code = app(standalone_mode=False)
        if os.environ.get("WORLD_SIZE", "1") != "1":  # as torchrun and accelerate launch say
            leave_at_once(code or 0)
        sys.exit(code)
    except SystemExit as end:
        if (end.code or 0) > 128:  # by a signal
            await_end()
        raise


def leave_at_once(code: int) -> None:
    """Ends this process without Python's teardown, in which a thread of gloo's may outlive its owner and abort it.

    What libraries have registered for the end is done: trackers close their runs.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
