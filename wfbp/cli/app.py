"""Finds the command and reports errors in one line.

Heavy modules (tables, plots, MPI, the extension) are imported on use: JSON output needs only NumPy.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from wfbp.errors import WfbpError
from wfbp.launcher.rank import RANK, number

COMMANDS = ("run", "doctor", "plan", "simulate", "probe", "report", "timeline", "bench")
_ON_RANKS = ("wfbp probe", "wfbp bench")
"""Commands that mpirun starts on every rank."""
BAD_INPUT = 2
FAILURE = 1
INTERRUPTED = 130


_SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
    "show_default": True,
}


class _InOrder(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the documentation."""
        return [name for name in COMMANDS if name in self.commands]


@click.group(
    cls=_InOrder,
    no_args_is_help=True,
    context_settings=_SETTINGS,
)
@click.version_option(package_name="wfbp", message="wfbp %(version)s")
def wfbp() -> None:
    """Start, plan, simulate and measure data-parallel training.

    On a new machine begin with wfbp doctor.
    """


def main(arguments: Sequence[str] | None = None, name: str = "") -> None:
    """Run a command and exit: 0 success, 1 failed machine or installation, 2 bad input or usage.
    ``name`` is that of a program that is one command."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    place = name or (f"wfbp {words[0]}" if words and words[0] in COMMANDS else "wfbp")
    try:
        for known in words[:1] if words and words[0] in COMMANDS else COMMANDS:
            wfbp.add_command(import_module(f"wfbp.cli.{known}").command)
        if name:
            code = wfbp.commands[words[0]].main(
                words[1:], prog_name=name, standalone_mode=False, **_SETTINGS
            )
        else:
            code = wfbp.main(words, prog_name="wfbp", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(BAD_INPUT)
    except click.ClickException as error:
        _leave(place, error.format_message(), error.exit_code)
    except click.Abort:
        _leave(place, "interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader (as `head`) has seen enough; nothing may be written on the way out either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILURE)
    except OSError as error:
        file = f"{error.filename}: " if error.filename else ""
        _leave(place, f"{file}{error.strerror or error}", BAD_INPUT)
    except ValueError as error:
        _leave(place, str(error), BAD_INPUT)
    except RecursionError:
        _leave(place, "the input is nested too deeply", BAD_INPUT)
    except WfbpError as error:
        _leave(place, str(error), FAILURE)
    sys.exit(code if isinstance(code, int) else 0)


def _leave(where: str, message: str, code: int) -> None:
    """Exit after one line on stderr that begins with the command, as ``wfbp plan``."""
    if where in _ON_RANKS and number(RANK, os.environ):
        sys.exit(code)  # all ranks have the same command line, and rank 0 reports the error
    click.echo(f"{where}: error: {' '.join(message.split())}", err=True)
    sys.exit(code)
