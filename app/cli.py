"""The command `floe-chat`. Torch, transformers and Textual are imported only by the commands that need them."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ..models.errors import FloeError, UsageError
from .bench import bench
from .evaluate import evaluate
from .harness import harness
from .log import log_file, start_log
from .tune import tune
from .widgets.plain import printable

EXIT_INTERRUPTED = 130

Command = Callable[..., Any]

_MODEL = (
    click.option(
        "--model",
        "-m",
        default="demo",
        show_default=True,
        metavar="NAME|FOLDER",
        help="A packed model: a name that `doctor` lists, or a folder.",
    ),
    click.option("--preset", "-p", metavar="NAME", help="Exact, High, Balanced or Fast.  [default: Balanced]"),
    click.option(
        "--device",
        default="auto",
        show_default=True,
        metavar="NAME",
        help="auto, cpu, cuda or cuda:N; sim:NAME plays a card in virtual time.",
    ),
    click.option(
        "--vram", metavar="SIZE", help="Use at most so much GPU memory, such as 10gb.  [default: what is free]"
    ),
)
_SAMPLING = (
    click.option("--temperature", type=float, help="0 always takes the likeliest.  [default: the model's, or 0.7]"),
    click.option("--top-k", type=int, help="Draw among the K likeliest tokens; 0 is off.  [default: 0]"),
    click.option("--top-p", type=float, help="Draw among the likeliest up to this sum; 1 is off.  [default: 1]"),
    click.option("--min-p", type=float, help="Drop tokens below this share of the likeliest.  [default: 0.05]"),
    click.option("--repetition-penalty", type=float, help="Above 1 avoids repeats.  [default: 1]"),
    click.option("--seed", type=int, help="Makes answers repeatable.  [default: a fresh one]"),
    click.option("--max-tokens", type=click.IntRange(1), default=512, show_default=True, help="Longest answer."),
    click.option("--system", metavar="TEXT", help="Instructions that precede the conversation."),
)


def _with(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@_with(*_MODEL, *_SAMPLING)
@click.version_option(version("floe-chat"), prog_name="floe-chat")
@click.pass_context
def cli(ctx: click.Context, model: str, preset: str | None, device: str, vram: str | None, **sampling: Any) -> None:
    """Chat in the terminal with a Mixture-of-Experts model larger than your GPU. Everything stays on this machine.

    Without a command, opens the chat screen.
    """
    if ctx.invoked_subcommand is not None:
        given = [name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if given:
            option = "--" + given[0].replace("_", "-")
            raise click.UsageError(
                f"{option} belongs after the command: floe-chat {ctx.invoked_subcommand} {option} ..."
            )
        return
    from ..models.catalog import find
    from .arguments import memory_size, need_terminal, sampling_from

    need_terminal()
    from .chat_client import ChatClient
    from .tui import run_app

    pack = find(model)
    chosen, max_tokens, system = sampling_from(sampling, pack)
    ctx.exit(run_app(ChatClient(pack, preset, device, memory_size(vram)), chosen, max_tokens, system))


@cli.command()
@click.argument("prompt", nargs=-1)
@click.option("--file", "-f", "file", type=click.Path(path_type=Path), help="Read the question from a text file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@_with(*_MODEL, *_SAMPLING)
@click.pass_context
def ask(
    ctx: click.Context,
    prompt: tuple[str, ...],
    file: Path | None,
    as_json: bool,
    model: str,
    preset: str | None,
    device: str,
    vram: str | None,
    **sampling: Any,
) -> None:
    """Answer one question on stdout.

    The question is PROMPT, the --file, and what is piped in, whichever are given, in this order.
    """
    from ..models.catalog import find
    from .arguments import memory_size, question, sampling_from
    from .ask import answer
    from .chat_client import ChatClient

    text = question(prompt, file)
    pack = find(model)
    chosen, max_tokens, system = sampling_from(sampling, pack)
    ctx.exit(
        answer(ChatClient(pack, preset, device, memory_size(vram)), text, chosen, max_tokens, system, as_json=as_json)
    )


@cli.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
@click.option("--up", type=int, default=3, show_default=True, help="Bits of the up projection: 2, 3, 4, 8 or 16.")
@click.option("--rows", type=int, default=4, show_default=True, help="Bits of gate and down: 2, 3, 4, 8 or 16.")
@click.option("--gate", type=int, help="Bits of gate, if not those of --rows.")
@click.option("--down", type=int, help="Bits of down, if not those of --rows.")
@click.option("--dense", type=int, help="Bits of attention: 4, 8 or 16.  [default: 4, or 16 if all the rest is 16]")
@click.option("--name", help="What the model is called.  [default: the destination folder's name]")
def pack(
    source: Path,
    destination: Path,
    up: int,
    rows: int,
    gate: int | None,
    down: int | None,
    dense: int | None,
    name: str | None,
) -> None:
    """Pack the checkpoint in folder SOURCE into folder DESTINATION.

    SOURCE holds config.json, tokenizer.json and *.safetensors as published; it is only read. With --up 16 --rows 16
    nothing is rounded, and the preset Exact gives the original model's own answers. `floe-chat tune` measures what
    other widths would lose and save.
    """
    gate, down = rows if gate is None else gate, rows if down is None else down
    with click.progressbar(length=1000, label="Reading", file=sys.stderr, show_pos=False) as bar:
        shown = 0

        def progress(step: str, share: float) -> None:
            nonlocal shown
            bar.label = step
            bar.update(int(share * 1000) - shown)
            shown = int(share * 1000)

        from ..models.pack import PackSpec
        from .packing import pack_folder

        if dense is None:
            dense = 16 if up == gate == down == 16 else 4
        called = name or destination.resolve().name
        spec = PackSpec(up, gate, down, dense)
        manifest, size = pack_folder(source, destination, spec, called, progress)
    click.echo(f"{destination}: {manifest.widths.describe()}, {size / 1e9:.3g} GB", err=True)
    click.echo(f"Chat with it: floe-chat --model {destination}", err=True)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Tell what this machine has, which paths would run here, and why."""
    from .doctor import report

    click.echo(report(as_json=as_json))


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that completes floe-chat's commands and options in SHELL.

    \b
    bash:  floe-chat completion bash >> ~/.bashrc
    zsh:   floe-chat completion zsh >> ~/.zshrc
    fish:  floe-chat completion fish > ~/.config/fish/completions/floe-chat.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise UsageError(f"There is no completion for {shell}", "", "Choose bash, zsh or fish.")
    click.echo(kind(cli, {}, "floe-chat", "_FLOE_CHAT_COMPLETE").source())


cli.add_command(bench)
cli.add_command(evaluate)
cli.add_command(tune)
cli.add_command(harness)


def main() -> None:
    """Run the command: every failure ends in a sentence and an exit code (SystemExit), never in a traceback."""
    # Read by huggingface_hub and transformers when they are imported: nothing here needs a network (`harness` asks for
    # it by itself), and their advice to programmers would land between the person's lines.
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Torch's threads would otherwise wait for their next work busily and keep the cores from the kernels' own threads:
    # a decode step of full width took half as long again.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an output that cannot hold every character loses it, not the answer
    start_log()
    sys.exit(_run())


def command() -> None:
    """Entry point of the installed command: `main`, then out at once.

    Torch takes seconds to tear itself down, and a person who quit wants the terminal back.
    """
    code = 1
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            code = code or 1
    os._exit(code)


def _run() -> int:
    try:
        return cli.main(standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except FloeError as error:
        _explain(error)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("\nfloe-chat: interrupted", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has enough; closing stdout here keeps the interpreter from complaining at exit.
        sys.stdout = None  # type: ignore[assignment]
        return 1
    except OSError as error:
        _explain(
            FloeError("floe-chat had to stop", f"{error.strerror or error}.", "Check the disk or the device named.")
        )
        return 1
    # The program's border: the person gets a sentence, the log gets the traceback.
    except Exception as error:
        logging.getLogger("floe_chat").exception("floe-chat failed")
        hint = f"This is a fault of floe-chat. The details are in {log_file()}."
        _explain(FloeError("floe-chat failed", f"{type(error).__name__}: {error}", hint))
        return 1


def _explain(error: FloeError) -> None:
    # Names and templates of a pack are somebody else's text.
    title, *rest = printable(str(error)).splitlines()
    click.echo("\n".join([f"floe-chat: {title}", *(f"  {line}" for line in rest)]), err=True)
