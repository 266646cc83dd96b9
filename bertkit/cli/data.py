"""The commands that check and make data: doctor, vocab, corpus, sample."""

import json
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from bertkit.cli.console import Screen, print_line, write_figures
from bertkit.cli.options import (
    Cased,
    Folds,
    JsonFile,
    LabelNames,
    Output,
    PathArgument,
    PathOption,
    RecipeFile,
    Settings,
    SourceArgument,
    SourceOption,
    Sources,
    TextNames,
    Workers,
    app,
    corpora,
    split_names,
)
from bertkit.errors import UsageError, explain_disk_error, raise_first
from bertkit.system.hub import check_checkpoint, check_path


@app.command()
def doctor(
    data: Annotated[
        str, SourceArgument(help="Data as for training (default: the Hub's data set).", metavar="DATA")
    ] = "",
    task: Annotated[
        str, typer.Option(help="classify, ner, squad1, squad2, swag, or a GLUE task such as cola.")
    ] = "classify",
    text: TextNames = None,
    label: LabelNames = None,
    model: Annotated[
        list[str] | None,
        SourceOption(
            help="Checkpoint that counts tokens, finds label errors by its vectors and gives expected "
            "scores (default: the task's); repeat it to compare expected scores.",
            metavar="NAME",
        ),
    ] = None,
    recipe: RecipeFile = None,
    settings: Settings = None,
    folds: Folds = 0,
    workers: Workers = "1",
    output: Output = None,
    json_file: JsonFile = None,
    write: Annotated[
        Path | None, PathOption(help="Write your table without the rows of --drop.", metavar="FILE|DIR")
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(
            help="Rows that --write leaves out: leaks, repeats, contradictory, near, label-errors (default: the first "
            "three)."
        ),
    ] = None,
) -> None:
    """Check data before training: leaks, repeats, contradictory labels, lengths, unknown words; and expected scores.

    The splits are those that training would use. Rows are compared in lower case, with white space folded. Single texts
    with one label are also searched for label errors, if the weights of --model are on this disk, by frozen vectors in
    seconds; --folds finds them more surely, by fine-tuning, and continues in --output where it was stopped. Without
    --write, the scores of simple baselines on the training rows follow, and a forecast for twice as many rows.

    $ bertkit doctor reviews.csv --text title,body --label stars

    $ bertkit doctor GLUE --task cola --json cola.json

    $ bertkit doctor reviews.csv --model bert-base-uncased --model runs/pretrained

    $ bertkit doctor reviews.csv --write clean.csv --drop leaks,repeats

    $ bertkit doctor reviews.csv --folds 5 --output runs/doctor
    """
    check_path(data, "owner/name")
    for name in (models := model or []):
        check_checkpoint(name)
    from bertkit.analysis.doctor import (
        DROPS,
        LABEL_ERROR_DROP,
        USUAL_DROPS,
        add_expected,
        examine,
        list_tables,
        plan_files,
        suspect_labels,
        tabulate_label_errors,
        write_clean,
    )
    from bertkit.analysis.expected import EXPECTED, describe_expected, tabulate_expected
    from bertkit.analysis.label_errors import LABEL_ERRORS
    from bertkit.data.formats.rows import check_output
    from bertkit.studies.spec import define_folds, propose
    from bertkit.system.cluster import read_workers
    from bertkit.system.files import write_json
    from bertkit.tasks import TASKS
    from bertkit.training.recipe import merge, parse_setting, read_recipe
    from bertkit.training.run_dir import DOCTOR_FILE

    task = task.lower()
    if task not in (known := [name for name in TASKS if name != "pretrain"]):
        raise UsageError(f"unknown task {task!r}; {propose(task, known)}")
    drops = ",".join(drop).split(",") if drop else USUAL_DROPS
    if unknown := [name for name in drops if name not in (*DROPS, LABEL_ERROR_DROP)]:
        raise UsageError(f"unknown {unknown[0]!r} in --drop; expected some of {', '.join(DROPS)}, {LABEL_ERROR_DROP}")
    if drop and write is None:
        raise UsageError("--drop names the rows that --write leaves out; add --write, or leave --drop out")
    if folds:
        if task != "classify":
            raise UsageError(f"--folds finds label errors in a table of texts and labels, not in {task}; leave it out")
        define_folds(task, {}, folds)
        read_workers(workers)
    elif output or workers != "1":
        raise UsageError("--output and --workers are for the models of --folds; add --folds 5 or leave them out")
    written = read_recipe(recipe) if recipe else {}
    columns = {"text": split_names(text), "label": split_names(label)}
    first = models[0] if models else None
    given = {"checkpoint": first, "data": {"dir": data or None, **columns}}
    given = merge(given, *map(parse_setting, settings or []))
    with Screen() as screen:
        diagnosis = examine(TASKS[task], merge(written, given), first, screen.say)
        if write is not None:
            plan_files(diagnosis, write)
        if json_file is not None:
            check_output(data, json_file, "--json")
        for table in list_tables(diagnosis.findings):
            screen.show_table(table)
        if folds:
            folder = output or Path("runs/doctor")
            found = fine_tune_folds(screen, diagnosis.rows["train"], written, given, folds, workers, folder)
            diagnosis = diagnosis.add(**{LABEL_ERRORS: found})
        else:
            diagnosis = suspect_labels(diagnosis, screen.say)
        if found := diagnosis.findings.get(LABEL_ERRORS):
            screen.show_table(tabulate_label_errors(found))
        if write is None:
            diagnosis = add_expected(diagnosis, models, screen.say)
        if folds:
            write_json(diagnosis.findings, folder / DOCTOR_FILE)
        if found := diagnosis.findings.get(EXPECTED):
            screen.show_table(tabulate_expected(found))
            screen.say(describe_expected(found))
        screen.say(*(f"left out: {reason}" for reason in diagnosis.findings["left_out"]))
        if json_file is not None:
            write_figures(diagnosis.findings, json_file)
            screen.say(f"All rows: {json_file}")
        elif diagnosis.findings["samples"] or LABEL_ERRORS in diagnosis.findings:
            screen.say("--json FILE lists all rows of the findings")
        if write is not None:
            write_clean(diagnosis, drops, write, screen.say)


def fine_tune_folds(
    screen: Screen,
    train: Any,
    recipe: Mapping[str, Any],
    given: Mapping[str, Any],
    folds: int,
    workers: str,
    output: Path,
) -> dict[str, Any]:
    """Train the folds with the options of the command line, and return and write the suspected label errors."""
    from bertkit.analysis.doctor import write_label_errors
    from bertkit.analysis.label_errors import LABEL_ERRORS, describe_label_errors, predict_by_folds

    shown = {"report": screen.say, "progress": screen.show_study}
    with screen.watch_training(), explain_disk_error(output):
        rows = predict_by_folds(train, recipe, given, folds=folds, output=output, workers=workers, **shown)
        found, path = describe_label_errors(rows), output / f"{LABEL_ERRORS}.csv"
        write_label_errors(found, rows, path)
        if found["suspected"]:
            screen.say(f"the suspected rows, the worst first: {path}")
    return found


@app.command()
def vocab(
    sources: Sources,
    output: Annotated[Path, PathOption(help="Directory for vocab.txt and tokenizer.json.", metavar="DIR")],
    size: Annotated[
        int | None, typer.Option(help="Number of tokens in a trained vocabulary (default: 30522).", min=1)
    ] = None,
    cased: Cased = False,
    trim: Annotated[
        str | None,
        SourceOption(help="Write this checkpoint with only the tokens that the text needs.", metavar="NAME|RUN"),
    ] = None,
    extend: Annotated[
        str | None, SourceOption(help="Write this checkpoint with more words of the text.", metavar="NAME|RUN")
    ] = None,
    words: Annotated[int | None, typer.Option(help="Words that --extend adds (default: 500).", min=1)] = None,
) -> None:
    """Train a WordPiece vocabulary, or fit that of a checkpoint to a text.

    --trim keeps the tokens that the text needs, special and added ones and single characters, with their rows of the
    embeddings and of the masked-LM head. --extend adds the words of the text that are divided into most pieces in
    total, with the mean of the rows of their pieces. The change is measured on one line in ten, held out.

    $ bertkit vocab corpus.txt --size 30522 --output my-vocab

    $ bertkit vocab texts.txt --trim bert-base-multilingual-cased --output small

    $ bertkit vocab texts.txt --extend bert-base-uncased --words 500 --output more
    """
    base = trim or extend
    if base:
        check_checkpoint(base)
    raise_first(
        {
            "--trim and --extend are two steps; give one of them, then the other with its output": trim and extend,
            "--words is for --extend; leave it out": words and not extend,
            "--size and --cased are for a new vocabulary, not for that of a checkpoint; leave them out": base
            and (size or cased),
        }
    )
    from bertkit.data.pretraining.sources import read_documents
    from bertkit.data.tokenizer import TOKENIZER_FILES, save_tokenizer, train_tokenizer

    for name in [*TOKENIZER_FILES, "config.json"] if base else TOKENIZER_FILES:
        if (output / name).exists():
            kind = "model" if name == "config.json" else "tokenizer"
            raise UsageError(f"{output} holds a {kind} already ({name}); name another directory with --output")
    with Screen() as screen, explain_disk_error(output):
        documents = read_documents(sources, split_sentences=False, report=screen.say)
        lines = (line for document in documents for line in document)
        if base:
            from bertkit.training.vocabulary import change_vocabulary

            change_vocabulary(base, lines, output, (words or 500) if extend else 0, screen.say)
            screen.say(f"the checkpoint is in {output}")
            return
        tokenizer = train_tokenizer(lines, size=size or 30522, cased=cased, report=screen.say)
        save_tokenizer(tokenizer, output)
        screen.say(f"{len(tokenizer):,} tokens in {output / 'vocab.txt'}")


@app.command()
def sample(
    output: Annotated[Path, PathArgument(help="Directory for squad/ and glue/.", metavar="DIR")],
    questions: Annotated[int, typer.Option(help="Maximum number of examples per training set.", min=100)] = 12_000,
) -> None:
    """Write small data sets in the formats of SQuAD 2.0 and GLUE, made from the documentation installed here.

    $ bertkit sample data
    """
    from bertkit.data.formats.demo import write_samples

    with Screen() as screen, explain_disk_error(output):
        write_samples(output, questions, screen.say)


@corpora.command("build")
def build_corpus(
    sources: Sources,
    vocab: Annotated[str, SourceOption(help="Vocabulary, or a checkpoint that has one.", metavar="DIR|FILE|NAME")],
    output: Annotated[Path, PathOption(help="Directory for the corpus.", metavar="DIR")],
    workers: Workers = "",
    cased: Cased = False,
    language: Annotated[str, typer.Option(help="Language used for sentence splitting.", metavar="CODE")] = "en",
    split_sentences: Annotated[
        bool,
        typer.Option("--split-sentences/--no-split-sentences", help="Split lines into sentences, or keep each line."),
    ] = True,
    passages: Annotated[bool, typer.Option("--passages", help="Leave out headings, lists, tables, links.")] = False,
    words: Annotated[
        str, typer.Option(help="Spaces are borders of words and nothing else (segmented text).", metavar="spaces")
    ] = "",
    deduplicate: Annotated[str, typer.Option(help="Drop repeated documents or lines.", metavar="documents|lines")] = "",
) -> None:
    """Turn text into token ids on disk, which pretrain --corpus DIR reads.

    If it is killed, the same command continues it. Without --workers there is one process per CPU.

    $ bertkit corpus build texts docs --vocab my-vocab --output corpora/mine

    $ bertkit corpus build roneneldan/TinyStories --vocab vocab --output stories
    """
    for source in sources:
        check_path(source, "name")

    from bertkit.data.pretraining.build import build
    from bertkit.data.tokenizer import load_tokenizer
    from bertkit.system.cluster import count_cores, read_workers

    with Screen() as screen, explain_disk_error(output):
        statistics = build(
            sources,
            load_tokenizer(vocab, cased=cased or None, report=screen.say),
            output,
            split_sentences=split_sentences,
            language=language,
            passages=passages,
            words=words,
            deduplicate=deduplicate,
            workers=read_workers(workers or count_cores()),
            report=screen.say,
            progress=screen.show_build,
        )
        screen.finish_progress()
        screen.show_statistics(statistics, output)
        run = Path("runs", output.name)
        if run.resolve() == output.resolve():
            run = run.with_name(f"{run.name}-bert")
        screen.say("Next:", f"  bertkit pretrain --corpus {quote(str(output))} --output {quote(str(run))}")


@corpora.command("stats")
def show_corpus(
    directory: Annotated[Path, PathArgument(help="Corpus made by corpus build.", metavar="DIR")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Check the files of a corpus, and print its sizes, lengths, repeats and padding.

    $ bertkit corpus stats corpora/mine
    """
    from bertkit.data.pretraining.store import open_corpus, read_manifest

    open_corpus(directory)  # checks the files
    statistics = read_manifest(directory)["statistics"]
    if as_json:
        print_line(json.dumps(statistics))
        return
    with Screen() as screen:
        screen.show_statistics(statistics, directory)
