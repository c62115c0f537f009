"""The command `floe-chat`. Torch, transformers and Textual are imported only by the commands that need them."""

from __future__ import annotations

import io
import logging
import os
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ...engine.parallel.world import World
from ...models.errors import FloeError, UsageError
from ...models.hub.privacy import stay_private
from ..arguments import need_folder, need_terminal
from ..log import log_file, start_log
from ..settings.settings import THINKING
from ..terminal.interrupts import EXIT_INTERRUPTED, heed_interrupts
from ..terminal.terminal import EXIT_SIGNAL
from ..text.plain_text import printable
from .bench.command import bench
from .command_names import CommandGroup
from .harness.command import harness
from .history import NUMBER, history
from .models import models, paths
from .options import MODEL, SAMPLING, SERVER, given_by
from .pack import pack
from .paper import paper
from .plan import plan
from .quality.evaluate import evaluate
from .quality.tune import tune
from .serve import serve
from .setup.command import setup
from .transform import transform
from .verify import verify
from .working import work

_SPREAD = (None, "ask", "serve")  # commands that several processes do together


@click.group(cls=CommandGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@given_by(*MODEL, *SERVER, *SAMPLING)
@click.option("--continue", "-c", "continued", is_flag=True, help="Open the last chat, with its own model.")
@click.option("--chat", type=NUMBER, metavar="N", help="Open this chat, with its own model; see `history list`.")
@click.option("--plain", is_flag=True, help="Chat line by line, without a screen: for screen readers and slow lines.")
@click.version_option(package_name="floe-chat", prog_name="floe-chat")
@click.pass_context
def cli(ctx: click.Context, plain: bool, continued: bool, chat: int | None, **options: Any) -> None:
    """Chat in the terminal with a Mixture-of-Experts model larger than your GPU. Everything stays on this machine,
    unless you connect to a server: --connect URL.

    Without a command, opens the chat screen with the model chosen last. Options that you leave out come from the
    settings file (`floe-chat paths` shows where it is).
    """
    need_folder()
    _use_own_models_folder()
    if (world := World.of()) is not None and world.rank:  # process 0 does what is asked, the others help it
        ctx.exit(work(world) if ctx.invoked_subcommand in _SPREAD else 0)
    if ctx.invoked_subcommand is not None:
        given = [name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if given:
            raise click.UsageError(_misplaced(ctx.invoked_subcommand, given[0]))
        return
    if plain:
        ctx.exit(_chat_plainly(ctx, options, last=continued, chat=chat))
    need_terminal()
    from ..terminal.terminal import Terminal

    with Terminal() as terminal:  # before the imports that take a second
        from ..chat.beginning import begin

        beginning = begin(ctx, options, last=continued, chat=chat)
        from ..tui import run_app

        code = run_app(terminal, beginning)
    ctx.exit(code)


def _misplaced(command: str, name: str) -> str:
    option = next(param.opts[0] for param in cli.params if param.name == name)
    if any(name == its.name for its in cli.commands[command].params):
        return f"{option} belongs after the command: floe-chat {command} {option} ..."
    return f"floe-chat {command} has no {option}. See floe-chat {command} --help"


def _chat_plainly(ctx: click.Context, options: dict[str, Any], *, last: bool, chat: int | None) -> int:
    from ..chat.beginning import begin, need_saving
    from ..history import History, history_file
    from ..plain.plain_chat import run_plain

    beginning = begin(ctx, options, last=last, chat=chat)
    need_saving(beginning)
    history = History(history_file() if beginning.settings.save_history else None)
    return run_plain(beginning, history)


@cli.command()
@click.argument("prompt", nargs=-1)
@click.option(
    "--file",
    "-f",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Add a text file to the question; may be repeated.",
)
@click.option("--continue", "-c", "continued", is_flag=True, help="Continue the last chat, with its own model.")
@click.option(
    *("--chat", "--conversation", "chat"),
    type=NUMBER,
    metavar="N",
    help="Continue this chat, with its own model; see `history list`.",
)
@click.option(
    "--thinking",
    type=click.Choice(THINKING),
    default="fold",
    help="What the model thinks first: left out (fold), on stderr (show), or not wanted (off).  [default: fold]",
)
@click.option("--no-save", is_flag=True, help="Do not save the question and its answer.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@click.option(
    "--json-lines",
    "as_lines",
    is_flag=True,
    help="Print a JSON object for each piece of the answer, and one at the end.",
)
@given_by(*MODEL, *SERVER, *SAMPLING)
@click.pass_context
def ask(
    ctx: click.Context,
    prompt: tuple[str, ...],
    files: tuple[Path, ...],
    continued: bool,
    chat: int | None,
    no_save: bool,
    as_json: bool,
    as_lines: bool,
    **options: Any,
) -> None:
    """Answer one question on stdout.

    The question is PROMPT, then every --file, then the text that is piped in. Question and answer are saved (see
    `floe-chat history`), unless you give --no-save or the settings turn saving off.

    \b
    floe-chat ask "What is an expert?"
    git diff | floe-chat ask "Summarize this"
    floe-chat ask --continue "And in one sentence?"
    floe-chat ask -f notes.txt -f plan.txt "What contradicts what?"
    """
    from ..arguments import question
    from ..chat.beginning import begin
    from .ask import Asked
    from .ask import ask as answer

    if as_json and as_lines:
        raise click.UsageError("--json and --json-lines cannot be combined. Give one of them.")
    text = question(prompt, files)
    beginning = begin(ctx, options, last=continued, chat=chat)
    if beginning.remark:
        click.echo(printable(f"floe-chat: {beginning.remark}"), err=True)
    number = None if beginning.chat is None else beginning.chat.number
    saved = beginning.settings.save_history and not no_save
    asked = Asked(text, beginning.setup, beginning.max_tokens, number, saved, beginning.thinking)
    ctx.exit(answer(beginning.client, asked, "json" if as_json else "lines" if as_lines else "text"))


def _use_own_models_folder() -> None:
    """Use the models folder of the settings, for every command."""
    from ...models.catalog import use_models_folder
    from ..settings.file import read, settings_file

    folder = read(settings_file()).settings.models_folder
    use_models_folder(Path(folder) if folder else None)


@cli.command(short_help="Show this machine's hardware and which code runs on it.")
@click.option("--measure", is_flag=True, help="Measure this machine's speeds again, which takes a few seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(measure: bool, as_json: bool) -> None:
    """Show this machine's hardware, which code paths run here, and why."""
    from .doctor import report

    click.echo(report(as_json=as_json, measure=measure))


@cli.command(short_help="Print a completion script for your shell.")
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
cli.add_command(history)
cli.add_command(models)
cli.add_command(pack)
cli.add_command(paper)
cli.add_command(paths)
cli.add_command(plan)
cli.add_command(serve)
cli.add_command(setup)
cli.add_command(transform)
cli.add_command(verify)


def main() -> None:
    """Run the command: every failure ends in a message and an exit code (SystemExit), never in a traceback."""
    # Read by huggingface_hub and transformers when they are imported: nothing here needs a network (`harness` asks for
    # it itself), and their advice to programmers would appear between the user's lines.
    stay_private()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Where several processes compute, each would print pages of C++ when one of them ends.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Torch's threads would otherwise spin while they wait and take the cores from the kernels' own threads: a decode
    # step of full width took 1.5 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    _take_streams()
    # Whatever the umask allows, no other user may change what this program writes: packs, downloads, caches.
    os.umask(os.umask(0o077) | 0o022)
    start_log()
    sys.exit(_run())


def _take_streams() -> None:
    """Treat a closed standard input as empty, and drop what is written to a closed standard error."""
    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stdin = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the encoding lacks is lost, not the answer


def command() -> None:
    """`main`, then out at once.

    Torch takes seconds to tear itself down, and a person who quit wants the terminal back.
    """
    code = 1
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    logging.shutdown()
    # After a signal stdout is not flushed: a reader that has stopped reading would block the exit.
    for stream in (sys.stdout, sys.stderr) if code < EXIT_SIGNAL else (sys.stderr,):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            code = code or 1
    os._exit(code)


def _run() -> int:
    try:
        heed_interrupts()
        if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
            raise FloeError(
                "There is nowhere to write to",
                "Standard output is closed.",
                f"Leave it open, or redirect it: >{os.devnull}",
            )
        return cli.main(standalone_mode=False) or 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        path = context.command_path if context else "floe-chat"
        title, _, more = error.format_message().removesuffix(".").partition(". ")
        _explain(FloeError(title, more.strip("()"), f"`{path} --help` lists what it accepts."))
        return error.exit_code
    except FloeError as error:
        _explain(error)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("\nfloe-chat: interrupted", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe; closing stdout here keeps the interpreter from complaining at exit.
        sys.stdout = None  # type: ignore[assignment]
        return 1
    except OSError as error:
        logging.getLogger("floe_chat").exception("floe-chat had to stop")
        named = f"{error.filename}: " if error.filename else ""
        hint = "Check its permissions." if named else f"The details are in {log_file()}."
        _explain(FloeError("floe-chat had to stop", f"{named}{error.strerror or error}.", hint))
        return 1
    # The program's border: the person gets a sentence, the log gets the traceback.
    except Exception as error:
        logging.getLogger("floe_chat").exception("floe-chat failed")
        hint = f"This is a bug in floe-chat. The details are in {log_file()}."
        _explain(FloeError("floe-chat failed", f"{type(error).__name__}: {error}", hint))
        return 1


def _explain(error: FloeError) -> None:
    # Names and templates of a pack are untrusted text.
    title, *rest = printable(str(error)).splitlines()
    click.echo("\n".join([f"floe-chat: {title}", *(f"  {line}" for line in rest)]), err=True)
