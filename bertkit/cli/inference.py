"""The commands that use or show a finished run: predict, export, serve, features, report, compare, score."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from bertkit.cli.console import Screen, complain, print_line, write_figures
from bertkit.cli.options import (
    JsonFile,
    PathArgument,
    PathOption,
    RedactingCommand,
    SourceArgument,
    SourceOption,
    app,
    scores,
    split_names,
)
from bertkit.errors import UsageError, explain_disk_error, explain_missing, pluralize
from bertkit.system.hub import check_checkpoint, check_path

Precision = Annotated[str, typer.Option("--precision", help="auto (bf16 where it is faster), fp32, bf16 or fp16.")]


@app.command()
def features(
    model: Annotated[str, SourceArgument(help="Checkpoint or run.", metavar="MODEL")],
    source: Annotated[Path, PathOption("--input", help="Text file, one text per line.", metavar="FILE")],
    output: Annotated[Path, PathOption(help="File to write: .jsonl or .npz.", metavar="FILE")],
    layers: Annotated[
        str,
        typer.Option(
            help="embeddings, second-to-last, last, sum-last-four, concat-last-four, sum-all, all, or numbers such as "
            "3, -3 or 1,5,9.",
            metavar="LAYERS",
        ),
    ] = "last",
    pool: Annotated[str, typer.Option(help="words: one vector per word; cls or mean: one per text.")] = "words",
) -> None:
    """Write contextual vectors of words or texts; the same word has different vectors in different contexts.

    $ bertkit features runs/mine --input texts.txt --output vectors.npz

    $ bertkit features runs/mine --input texts.txt --pool mean --output mean.npz
    """
    check_checkpoint(model)
    check_path(str(source))
    from bertkit.inference.features import extract

    with Screen() as screen:
        extract(model, source, layers, output, pool, screen.say)


@app.command(cls=RedactingCommand)
def predict(
    run: Annotated[str, SourceArgument(help="Fine-tuned or pretrained run, export or checkpoint.", metavar="RUN")],
    texts: Annotated[
        list[str] | None, typer.Argument(help="Inputs, or the parts of each input.", metavar="TEXT…")
    ] = None,
    source: Annotated[
        str | None,
        SourceOption(
            "--input", help="Inputs: .jsonl, .json, .csv, .tsv, .txt (or .gz), .parquet, .xlsx.", metavar="FILE|-"
        ),
    ] = None,
    output: Annotated[
        Path | None, PathOption(help="Table to write: .csv, .tsv or .parquet; else JSON lines.", metavar="FILE")
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Columns of the texts (default: as in training).", metavar="COLUMN[,COLUMN]"),
    ] = None,
    form: Annotated[
        Literal["bertkit", "pipeline"],
        typer.Option("--format", help="bertkit; pipeline: JSON lines as of transformers' pipelines."),
    ] = "bertkit",
    pair: Annotated[
        bool, typer.Option("--pair", help="Each input is a pair of texts (default: as the run was trained).")
    ] = False,
    top: Annotated[int, typer.Option(help="Number of words per [MASK].", min=1)] = 5,
    precision: Precision = "auto",
    coverage: Annotated[
        float | None, typer.Option(help="Add sets of labels, right for this share of texts.", metavar="SHARE")
    ] = None,
    redact: Annotated[
        Literal["types", "numbered"] | None,
        typer.Option(help="Replace names by their type, or numbered: by [PER-1].", metavar="[types|numbered]"),
    ] = None,
    least: Annotated[
        float | None, typer.Option(help="Redact words that are in a name with this probability.", metavar="SHARE")
    ] = None,
    engine: Annotated[
        Literal["torch", "onnx"], typer.Option(help="torch; onnx: an export that is kept in the cache, in fp32.")
    ] = "torch",
    explains: Annotated[
        bool,
        typer.Option("--explain", help="Attribute the results of texts and pairs to their words (slow)."),
    ] = False,
) -> None:
    """Predict with a trained model: a class, an answer, names, an ending or masked words, depending on its head.

    TEXT: a text for a classifier (two for a pair), NER or [MASK]; question and context for SQuAD; context and endings
    for SWAG. Names in JSON and of columns: text, text_pair; question, context; words; context, start, endings.

    $ bertkit predict runs/squad2 "Who wrote it?" "The book was written by Ada."

    $ bertkit predict runs/mnli --input pairs.jsonl --output predictions.jsonl

    $ bertkit predict runs/sst2 --input a.csv --text review --output b.csv

    $ bertkit predict runs/sst2 --input a.csv --coverage 0.95 --output b.csv

    $ bertkit predict runs/sst2 "A warm, funny film." --explain

    $ bertkit predict runs/ner --input letters.txt --redact numbered
    """
    from bertkit.data.formats import rows
    from bertkit.data.formats.line import is_marked
    from bertkit.inference.tables import WRITERS

    if bool(texts) == bool(source):
        raise UsageError("give the inputs either as TEXT or with --input FILE (--input - reads standard input)")
    columns = split_names(text)
    if texts and columns:
        raise UsageError("--text names columns of --input, but the inputs are given as TEXT; leave it out")
    if source is not None:
        rows.check_source(source)
        if output is not None:
            rows.check_output(source, output)
    is_pipeline = form == "pipeline"
    if explains and (is_pipeline or (output is not None and output.suffix in WRITERS)):
        raise UsageError("--explain writes JSON lines; leave out --format, and name an --output that ends in .jsonl")
    if precision == "auto" and (explains or engine == "onnx"):
        precision = "fp32"
    check_checkpoint(run)
    from bertkit.inference.predictor import Counts, Predictor

    with Screen() as screen:
        settings = {"pairs": pair or None, "top": top, "text": columns, "precision": precision, "coverage": coverage}
        settings |= {"redact": redact, "least": least}
        predictor = Predictor(run, **settings, report=complain)
        predictor.check_format(output, is_pipeline)
        if engine == "onnx":
            from bertkit.inference.export import add_export
            from bertkit.model.onnx import check_exporter

            check_exporter()
            add_export(predictor, sys.maxsize, complain)
        answer = predictor.stream
        if explains:
            from bertkit.analysis.explanation import explain

            answer = partial(explain, predictor)
        at_once = 1 if source == rows.STDIN and sys.stdin.isatty() else None  # a person expects an answer to each line
        reading = {"columns": columns or (), "report": complain, **predictor.reading}
        inputs = predictor.group(texts) if texts else rows.read_inputs(source, **reading)
        if output is not None:
            marked = source not in (None, rows.STDIN) and is_marked(Path(source))
            how = {"is_pipeline": is_pipeline, "answer": answer, "is_marked": marked}
            tally = predictor.write(inputs, output, screen.say, **how)
        else:
            tally = Counts()
            for result in tally.watch(answer(inputs, at_once)):
                if "error" in result and not texts and not screen.console.is_terminal:  # a terminal would show it twice
                    complain(result["error"])
                if (texts or redact) and not is_pipeline:  # results with names in them are written to files only
                    screen.say(predictor.describe(result))
                    if explains:
                        screen.show_explanation(result.get("explanation", ()))
                else:
                    found = predictor.format_for_pipeline(result) if is_pipeline else result
                    screen.say(json.dumps(found, ensure_ascii=False))
        if not tally.count:
            complain("there are no inputs")
        if cut := tally.describe_cut():
            complain(cut)
        if tally.unread:
            complain(f"{pluralize(tally.unread, 'word')} without a token cannot be redacted")
        if tally.errors:
            failed = pluralize(tally.errors, "input")
            raise UsageError(f"{failed} cannot be predicted; the output gives the reason for each")


@app.command()
def evaluate(
    run: Annotated[
        str, SourceArgument(help="Finished run, export, Hub model, or table of predictions.", metavar="RUN|FILE")
    ],
    data: Annotated[
        str | None, SourceOption(help="Labelled data (default: the run's own dev and test).", metavar="FILE|DIR|NAME")
    ] = None,
    output: Annotated[
        Path | None, PathOption(help="Directory to write (default: in RUN/evaluations/).", metavar="DIR")
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Columns of the texts in --data (default: as in training).", metavar="COLUMN[,COLUMN]"),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(help="Columns of the labels in --data (default: as in training).", metavar="COLUMN[,COLUMN]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Score a trained model on labelled data that it has not seen, with intervals, and list its mistakes.

    Without --data the tables of the run's own predictions are written again. A table with the columns label and
    prediction, of any program, is scored as it is, and written only to --output.

    $ bertkit evaluate runs/stars --data new.csv

    $ bertkit evaluate runs/stars --data theirs.csv --text comment --label rating

    $ bertkit evaluate runs/squad2 --data questions.json --output scores --json

    $ bertkit evaluate answers.csv
    """
    check_checkpoint(run)
    check_path(data, "owner/name")
    from bertkit.inference.evaluate import evaluate as evaluate_model
    from bertkit.inference.evaluate import list_tables

    with Screen() as screen:
        columns = {"text": split_names(text), "label": split_names(label)}
        found = evaluate_model(run, data, output, complain if as_json else screen.say, **columns)
        if as_json:
            print_line(json.dumps({one.name: one.metrics for one in found}))
            return
        for one in found:
            for table in list_tables(one):
                screen.show_table(table)
            screen.say(*one.describe())


@app.command()
def export(
    run: Annotated[str, SourceArgument(help="Fine-tuned or pretrained run, or another checkpoint.", metavar="RUN")],
    output: Annotated[Path, PathOption(help="Directory to write.", metavar="DIR")],
    int8: Annotated[bool, typer.Option("--int8", help="Write int8, and measure on dev what it loses.")] = False,
    data: Annotated[
        str | None, SourceOption(help="Data for --int8 (default: the run's).", metavar="DIR|FILE|NAME")
    ] = None,
) -> None:
    """Export a run as ONNX for onnxruntime, with tokenizer, labels and thresholds; predict takes the directory.

    The exported model is compared with the run, and timed on this machine.

    $ bertkit export runs/sst2 --output exports/sst2

    $ bertkit export runs/sst2 --output exports/sst2-int8 --int8
    """
    if data and not int8:
        raise UsageError("--data is for --int8; add it or leave --data out")
    check_checkpoint(run)
    check_path(data, "owner/name")
    from bertkit.inference.export import export as export_run

    with Screen() as screen:
        _, tables = export_run(run, output, screen.say, int8=int8, data=data)
        for table in tables:
            screen.show_table(table)
        screen.say(f"Export: {output}")


@app.command()
def serve(
    run: Annotated[str, SourceArgument(help="Fine-tuned or pretrained run, or another checkpoint.", metavar="RUN")],
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8080,
    host: Annotated[
        str, typer.Option(help="Name or address; 0.0.0.0 or :: for other machines, with --token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(help="Required of every client: Authorization: Bearer TOKEN.", envvar="BERTKIT_TOKEN")
    ] = None,
    precision: Precision = "auto",
) -> None:
    """Serve a trained model over HTTP, with a page to try it, until Ctrl-C or SIGTERM.

    POST /predict takes an input or a list of inputs in JSON, as predict --input does. GET /health, /metrics and
    /openapi.json.

    $ bertkit serve runs/squad2

    $ bertkit serve runs/sst2 --host 0.0.0.0 --port 80 --token SECRET
    """
    from bertkit.inference.address import bind

    bind(host, port, token).close()  # the server binds it again
    check_checkpoint(run)
    with explain_missing("bertkit serve needs packages that are not installed", "serve"):
        from bertkit.inference.server import serve as serve_model
    with Screen() as screen:
        serve_model(run, host, port, token, precision, screen.say)


@app.command()
def report(
    sources: Annotated[
        list[Path],
        PathArgument(help="Runs and studies, finished or unfinished, or a folder of them.", metavar="RUN|STUDY|DIR"),
    ],
    output: Annotated[Path, PathOption(help="Page to write.", metavar="FILE")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page about runs and studies: scores, curves, mistakes, recipes.

    $ bertkit report runs/mrpc runs/squad2 --output report.html
    """
    for path in sources:
        check_path(str(path))
    from bertkit.analysis.report import write_page

    with Screen() as screen, explain_disk_error(output):
        write_page(sources, output, screen.say)


@app.command()
def compare(
    sources: Annotated[
        list[Path],
        PathArgument(
            help="Runs, studies, or tables with columns of texts, label and prediction.", metavar="RUN|STUDY|TABLE"
        ),
    ],
    split: Annotated[str | None, typer.Option(help="Split of runs, such as test (default: dev).")] = None,
    as_json: JsonFile = None,
) -> None:
    """Compare models on the same rows: better, worse or no clear difference, and the rows on which they differ.

    Each is compared with the first. Runs that differ only in their seed are one method.

    $ bertkit compare runs/rte runs/rte-43 --json differences.json

    $ bertkit compare runs/stars answers.csv
    """
    for path in sources:
        check_path(str(path))
    from bertkit.analysis.compare import comment, list_values, tabulate
    from bertkit.analysis.compare import compare as compare_all

    with Screen() as screen:
        found = compare_all(sources, split, screen.say)
        for table in tabulate(found):
            screen.show_table(table)
        screen.say(*comment(found))
        if as_json is not None:
            write_figures(list_values(found), as_json, *map(str, sources))


@scores.command("squad")
def score_squad(
    gold: Annotated[Path, PathArgument(help="Official file, such as dev-v2.0.json.", metavar="DATA.json")],
    predictions: Annotated[Path, PathArgument(help="JSON object: question id -> answer.", metavar="PREDICTIONS.json")],
    version: Annotated[int, typer.Option(help="1 (for 1.1) or 2 (for 2.0).", metavar="1|2", min=1, max=2)],
    odds: Annotated[
        Path | None,
        PathOption("--null-odds", help="JSON object: question id -> probability of no answer (2.0).", metavar="FILE"),
    ] = None,
    threshold: Annotated[
        float,
        typer.Option(
            "--na-prob-thresh",
            help="Values above it count as no answer; the official default 1.0 is for probabilities.",
        ),
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Score answers to SQuAD as the official scripts do.

    $ bertkit score squad --version 2 dev-v2.0.json answers.json

    $ bertkit score squad --version 2 dev.json answers.json --null-odds odds.json
    """
    from bertkit.tasks.squad import SQUAD

    found = SQUAD[f"squad{version}"].score_files(gold, predictions, odds, threshold, report=complain)
    for line in [json.dumps(found)] if as_json else [f"{name} {value:g}" for name, value in found.items()]:
        print_line(line)
