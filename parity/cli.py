"""The command line: `parity run`, `parity check`, `parity list`, `parity show` and others.

Exit code 0 if everything held, 1 for a mismatch, 2 for wrong usage or bad input. torch and transformers are imported
when a command needs them, so that `--help` answers at once.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from parity.run import Selection

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Is this layer the same function as the class in transformers?",
)

SOAK_LOG, DIAGNOSIS_LOG, MISTAKES_LOG = Path("soak.jsonl"), Path("diagnosed.jsonl"), Path("mistakes.jsonl")
CORES = (os.cpu_count() or 1) if "fork" in multiprocessing.get_all_start_methods() else 1
Workers = Annotated[int, typer.Option(min=1, help="processes; by default one per core, where there are forks")]
Model = Annotated[str | None, typer.Argument(help="model type, as in config.json; all families if left out")]


@app.command()
def run(
    model: Model = None,
    layer: Annotated[list[str] | None, typer.Option(help="only this layer (repeat for several)")] = None,
    prop: Annotated[list[str] | None, typer.Option("--property", help="only this property (repeat)")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float64, float32, bfloat16 or float16 (repeat)")] = None,
    examples: Annotated[int | None, typer.Option(min=1, help="scenarios per row; else the profile's number")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="the same seed draws the same scenarios; else 0")] = None,
    scenario: Annotated[str | None, typer.Option(help="one scenario's line, as a mismatch prints it")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="a local checkpoint in Hugging Face's layout")] = None,
    json: Annotated[Path | None, typer.Option(help="write the results here as JSON")] = None,
    html: Annotated[Path | None, typer.Option(help="write a page about the results here, with pictures")] = None,
    workers: Workers = CORES,
) -> None:
    """Hold our layers against transformers and print a table of verdicts."""
    from parity import run as runs

    reports = runs.Reports(json, html)
    reports.check()
    if checkpoint is not None:
        given = {"MODEL": model, "--layer": layer, "--property": prop, "--examples": examples, "--html": html}
        raise typer.Exit(_run_checkpoint(checkpoint, given, dtype, seed or 0, scenario, json))
    selection = _select(model, layer, prop, dtype)
    if scenario is not None:
        if examples is not None or seed is not None:
            raise typer.BadParameter(
                "--examples and --seed cannot be given with --scenario, which is one, with its seed"
            )
        raise typer.Exit(runs.run_scenario(selection, scenario, reports, console()))
    raise typer.Exit(runs.run(selection, examples, seed or 0, reports, console(), workers))


@app.command()
def check(
    candidate: Annotated[str, typer.Argument(help="your layer: path/file.py:Name or package.module:Name")],
    against: Annotated[str, typer.Option(help="the reference: model_type:Class, a model type, or a checkpoint")],
    adapter: Annotated[str | None, typer.Option(help="file.py:name of a call(module, recorded) or a class")] = None,
    weights: Annotated[
        str | None, typer.Option(help="rules from the reference's tensors to yours: TOML, Python")
    ] = None,
    prop: Annotated[list[str] | None, typer.Option("--property", help="forward or gradients (repeat)")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float64, float32, bfloat16 or float16 (repeat)")] = None,
    examples: Annotated[int, typer.Option(min=1, help="configurations that are drawn")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="the same seed draws the same")] = 0,
    point: Annotated[int | None, typer.Option(min=0, help="only the configuration of this number")] = None,
    draws: Annotated[int, typer.Option(min=0, help="scenarios drawn for each of them, beside the named ones")] = 3,
    scenario: Annotated[
        str | None, typer.Option(help="only this one: decode, or a line as a mismatch prints it")
    ] = None,
    layer_idx: Annotated[int | None, typer.Option(min=0, help="which layer of the model; else the first")] = None,
    shared: Annotated[list[str] | None, typer.Option(help="a function of the reference that yours may call")] = None,
    time_limit: Annotated[float, typer.Option(min=0.1, help="seconds that one call of yours may take")] = 60.0,
    memory_limit: Annotated[float, typer.Option(min=0.1, help="GiB that it may take")] = 4.0,
    mistakes: Annotated[bool, typer.Option("--mistakes", help="also make mistakes in it: which are caught?")] = False,
    swap: Annotated[bool, typer.Option("--swap", help="also put it into a live tiny model of the reference")] = False,
    json: Annotated[Path | None, typer.Option(help="write the results here as JSON")] = None,
    html: Annotated[Path | None, typer.Option(help="write a page about the results here, with pictures")] = None,
    card: Annotated[Path | None, typer.Option(help="write a card for a pull request here, as Markdown")] = None,
    write_weights: Annotated[Path | None, typer.Option(help="write the rules of the weights here as TOML")] = None,
) -> None:
    """Hold your own layer against any class in transformers."""
    from parity.check import command
    from parity.check.sandbox import Limits
    from parity.check.session import PROPERTIES, Options
    from parity.scenario import DTYPES

    for name in prop or ():
        if name not in PROPERTIES:
            raise typer.BadParameter(f"unknown property {name!r}; known are {', '.join(PROPERTIES)}")
    options = Options(
        candidate,
        against,
        adapter,
        weights,
        tuple(prop or PROPERTIES),
        _dtypes(dtype) or tuple(DTYPES),
        examples,
        draws,
        seed,
        point,
        scenario,
        layer_idx,
        tuple(shared or ()),
        Limits(time_limit, int(memory_limit * 2**30)),
        swap,
        mistakes,
    )
    raise typer.Exit(command.command(options, command.Files(json, write_weights, card, html), console()))


@app.command()
def new(
    candidate: Annotated[str, typer.Argument(help="your layer: path/file.py:Name or package.module:Name")],
    against: Annotated[str | None, typer.Option(help="the reference; else what its name says")] = None,
    out: Annotated[Path | None, typer.Option(help="the file to write; else test_<name>.py")] = None,
) -> None:
    """Write a test file for your layer, to be run by pytest in your repository."""
    from parity.check.new import new as write

    console().print(f"wrote {write(candidate, against, out)}", highlight=False)


@app.command()
def card(
    report: Annotated[Path, typer.Argument(help="what `parity check --json` wrote")],
    out: Annotated[Path | None, typer.Option(help="write it here; else it is printed")] = None,
) -> None:
    """A verification card in Markdown, to paste into a pull request."""
    from parity.check.card import card as written
    from parity.check.card import read
    from parity.table import write_atomically

    text = written(read(report))
    if out is None:
        print(text, end="")
    else:
        write_atomically(out, text)


@app.command()
def soak(
    model: Model = None,
    layer: Annotated[list[str] | None, typer.Option(help="only this layer (repeat for several)")] = None,
    prop: Annotated[list[str] | None, typer.Option("--property", help="only this property (repeat)")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="by default float32 and bfloat16 (repeat)")] = None,
    scenarios: Annotated[int, typer.Option(min=1, help="how many, over all rows")] = 100_000,
    seed: Annotated[int, typer.Option(min=0, help="the same seed draws the same scenarios")] = 0,
    workers: Workers = CORES,
    log: Annotated[Path, typer.Option(help="a line per batch; a run that was stopped goes on from here")] = SOAK_LOG,
    json: Annotated[Path | None, typer.Option(help="write the results here as JSON")] = None,
) -> None:
    """Show that correct layers raise no alarm: very many scenarios, resumable; Ctrl-C stops it."""
    from parity import soak as soaking
    from parity.table import as_json, check_place, write_atomically

    if json is not None:
        check_place(json)
    selection = _select(model, layer, prop, dtype or ["float32", "bfloat16"])
    done = soaking.soak(selection, scenarios, seed, workers, log, console())
    bars = soaking.report(done, scenarios, console())
    if json is not None:
        write_atomically(json, as_json({"bars": bars, "batches": [asdict(each) for each in done]}))
    raise typer.Exit(0 if all(bar["holds"] for bar in bars) else 1)


@app.command()
def mistakes(
    model: Model = None,
    kind: Annotated[list[str] | None, typer.Option(help="only mistakes of this kind (repeat)")] = None,
    name: Annotated[list[str] | None, typer.Option(help="only the mistake of this name (repeat)")] = None,
    examples: Annotated[int, typer.Option(min=1, help="scenarios at most until a mistake must be caught")] = 160,
    seed: Annotated[int, typer.Option(min=0, help="the same seed draws the same scenarios")] = 0,
    workers: Workers = CORES,
    record: Annotated[bool, typer.Option("--record", help="keep the summary, which the README shows")] = False,
    diagnose: Annotated[
        bool, typer.Option("--diagnose", help="have second implementations make them, and name them instead")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="write the results here as JSON")] = None,
) -> None:
    """Make every mistake of the catalogue in our layers and show that ordinary runs catch it."""
    from parity import proof
    from parity.table import check_place

    if json is not None:
        check_place(json)
    if diagnose:
        given = {"--kind": kind, "--name": name, "MODEL": record and model}
        raise typer.Exit(_diagnose(model, given, seed, workers, DIAGNOSIS_LOG if record else None, json))
    chosen = proof.select(model, kind or [], name or [])
    if record and (model or name):
        raise typer.BadParameter("--record keeps the summary of whole kinds: leave out MODEL and --name")
    log = MISTAKES_LOG if record else None
    raise typer.Exit(proof.prove(chosen, examples, seed, workers, log, json, console()))


def _diagnose(
    model: str | None, given: Mapping[str, object], seed: int, workers: int, log: Path | None, json: Path | None
) -> int:
    """Name the mistakes of second implementations; what makes no sense of it is refused rather than ignored."""
    if useless := [name for name, value in given.items() if value]:
        whole = "--diagnose --record, which keeps" if "MODEL" in useless else "--diagnose, which tries"
        raise typer.BadParameter(f"{', '.join(useless)} cannot be given with {whole} all mistakes")
    from parity import diagnosed
    from parity.family import load

    if model is not None:
        load(model)
    return diagnosed.measure(model, seed, workers, json, console(), log)


@app.command()
def functions(
    names: Annotated[list[str] | None, typer.Argument(help="which; all if left out")] = None,
    examples: Annotated[int | None, typer.Option(min=1, help="of each; else the profile's number")] = None,
    seed: Annotated[int, typer.Option(min=0, help="the same seed draws the same examples")] = 0,
    json: Annotated[Path | None, typer.Option(help="write the results here as JSON")] = None,
) -> None:
    """Hold what is no layer (tokens, softmax, loss, learning rate, balance of experts) against its reference."""
    if json is not None:
        from parity.table import check_place

        check_place(json)
    from parity import function_run

    raise typer.Exit(function_run.run(names or [], examples, seed, json, console()))


@app.command("size")
def sizes(
    model: Annotated[str | None, typer.Argument(help="a published model; all if left out")] = None,
    config: Annotated[Path | None, typer.Option(help="a config.json, or its directory")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="hold parameters and FLOPs against the reference on the meta device, too")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="write the results here as JSON")] = None,
) -> None:
    """Parameters, FLOPs and cache of a model, from its configuration alone; cache in half precision.

    Counted are bert, deepseek_v3, gpt2, llama, mistral, mixtral, qwen2, qwen3 and qwen3_moe.
    """
    if model is not None and config is not None:
        raise typer.BadParameter("MODEL and --config cannot be given together")
    from parity import sizes as counting

    raise typer.Exit(counting.run(model, config, verify, json, console()))


@app.command("list")
def list_families(
    gaps: Annotated[bool, typer.Option("--gaps", help="known divergences inside the reference instead")] = False,
    references: Annotated[
        bool,
        typer.Option("--references", help="the installed model types that `parity check` can hold a layer against"),
    ] = False,
    task: Annotated[list[str] | None, typer.Option(help="causal, masked or seq2seq (repeat)")] = None,
    only: Annotated[
        list[str] | None, typer.Option("--filter", help="model types with this in their names (repeat)")
    ] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="record and replay every call of their modules, too")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="write the references here as JSON")] = None,
) -> None:
    """Families, their layers, the reference classes, and the properties that cover them."""
    if references:
        raise typer.Exit(_list_references(task or [], only or [], replay, json))
    given = {"--task": task, "--filter": only, "--replay": replay, "--json": json}
    if useless := [name for name, value in given.items() if value]:
        raise typer.BadParameter(f"{', '.join(useless)} can be given with --references only")
    from parity import listing

    (listing.print_gaps if gaps else listing.print_families)(console())


def _list_references(tasks: list[str], words: list[str], replays: bool, json: Path | None) -> int:
    """List them; 1 if too few can serve, or a replay is not exact."""
    from parity.check import references
    from parity.table import as_json, check_place, write_atomically

    if json is not None:
        check_place(json)
    report = references.run(tasks, words, replays, console())
    if json is not None:
        write_atomically(json, as_json(report))
    return 0 if all(bar["holds"] for bar in report["bars"]) else 1


@app.command()
def show(model: Annotated[str, typer.Argument(help="model type, as in config.json")]) -> None:
    """The configuration space of a family and the rules of its weights."""
    from parity import listing

    listing.print_family(model, console())


def console() -> Console:
    """Where results go: plain and unwrapped when nobody's terminal is at the other end."""
    return (
        Console(soft_wrap=True)
        if sys.stdout is not None and sys.stdout.isatty()
        else Console(width=200, soft_wrap=True)
    )


def _dtypes(names: list[str] | None) -> tuple[str, ...]:
    from parity.scenario import DTYPE_NAMES, ScenarioError

    for name in names or ():
        if name not in DTYPE_NAMES:
            raise ScenarioError(f"unknown dtype {name!r}; known are {', '.join(n for n in DTYPE_NAMES if len(n) > 4)}")
    return tuple(dict.fromkeys(DTYPE_NAMES[name] for name in names or ()))


def _select(
    model: str | None, layers: list[str] | None, properties: list[str] | None, dtypes: list[str] | None
) -> Selection:
    from parity.run import select

    return select(model, layers or [], properties or [], dtypes or [])


def _run_checkpoint(
    directory: Path,
    given: Mapping[str, object],
    dtypes: list[str] | None,
    seed: int,
    line: str | None,
    json: Path | None,
) -> int:
    """Run one; what makes no sense of it is refused rather than ignored."""
    if useless := [name for name, value in given.items() if value]:
        raise typer.BadParameter(f"{', '.join(useless)} cannot be given with --checkpoint, which runs a whole model")
    from parity import checkpoint
    from parity.scenario import parse_scenario

    scenario = replace(checkpoint.SCENARIO, seed=seed) if line is None else parse_scenario(line)
    if dtypes:
        scenario = replace(scenario, dtypes=_select(None, None, None, dtypes).dtypes)
    return checkpoint.run_checkpoint(directory, scenario, json, console())


UNWRITABLE = (errno.ENOSPC, errno.EPIPE, errno.EBADF, errno.EIO)


def main() -> None:
    """Run the command line."""
    guard(app)


def guard(command: Callable[[], object]) -> None:
    """Run a command; bad input is one paragraph on standard error and exit code 2."""
    try:
        command()
    except Exception as error:
        from parity.errors import BAD_INPUT

        if isinstance(error, OSError) and error.errno in UNWRITABLE and error.filename is None:
            error = OSError(f"standard output cannot be written: {error.strerror}")
        elif not isinstance(error, BAD_INPUT):
            raise
        print(f"parity: {error}", file=sys.stderr)
        sys.exit(2)
