"""`tinkerflow cassette`: record the requests of a program, and answer it from the recording without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from tinkerflow.backend.core.ids import session_of
from tinkerflow.deployments.options import DataDir, export_data_dir

app = typer.Typer(help="Record a program's requests, and replay them without a model.", no_args_is_help=True)
app.callback()(lambda: None)


def _is_run(text: str) -> bool:
    return session_of(text) != text


class _RunOrProgram(typer.core.TyperCommand):
    """Accepts options after the id of a run. Options after the name of a program belong to the program."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and _is_run(args[0]):
            args = [*args[1:], args[0]]
        return super().parse_args(ctx, args)


@app.command(cls=_RunOrProgram, context_settings={"allow_interspersed_args": False})
def record(
    command: Annotated[
        list[str],
        typer.Argument(help="program to run, with its arguments, after --; or the id of a run with a history"),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="file to write")],
    server: Annotated[
        str | None, typer.Option(help="service to record (default: TINKER_BASE_URL, or the service of the data dir)")
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Run a program that uses the tinker SDK, and record its requests with their answers.

    `tinkerflow cassette record -o loop.cassette -- python my_loop.py` gives the program a TINKER_BASE_URL that leads
    through the recorder to the service. API keys are not written. The exit status is that of the program.

    `tinkerflow cassette record RUN -o loop.cassette` makes the cassette of a run from its history instead. The results
    are computed again. The exit status is 1, and there is no file, if one of them differs from the recorded one.
    """
    from tinkerflow.deployments.cassettes.programs import record_program, record_run

    export_data_dir(data_dir)
    if len(command) == 1 and _is_run(command[0]):
        record_run(command[0], output, server or "", report=typer.echo)
        return
    raise typer.Exit(record_program(command, output, server or "", report=typer.echo))


@app.command()
def serve(
    file: Annotated[Path, typer.Argument(help="cassette to replay")],
    command: Annotated[
        list[str] | None,
        typer.Argument(help="program to run and its arguments, after -- (default: serve until Ctrl-C)"),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="port on 127.0.0.1; 0 = a free one")] = 0,
    ignore: Annotated[
        list[str] | None, typer.Option(help="field that may differ, as in user_metadata.started; may be repeated")
    ] = None,
    partial: Annotated[bool, typer.Option("--partial", help="accept a recording that was interrupted")] = False,
) -> None:
    """Answer a program from a cassette: no model, no JAX, and no other service.

    The exit status is 1 if a request differed from the recording, or was missing; else that of the program.
    """
    from tinkerflow.deployments.cassettes.programs import serve_cassette

    raise typer.Exit(
        serve_cassette(file, command or [], port=port, ignore=ignore or [], partial=partial, report=typer.echo)
    )
