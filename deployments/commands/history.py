"""Commands for training runs with a history: `tinkerflow fork`, `rerun`, `blame`, `explain`, and receipts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tinkerflow.deployments.options import DataDir, print_wide, settings_with, write_output

if TYPE_CHECKING:
    from tinkerflow.deployments.recorded_run import RecordedRun
    from tinkerflow.deployments.rerun import Report

app = typer.Typer(no_args_is_help=True)

Run = Annotated[str, typer.Argument(help="id of the training run, such as sess-…:train:0")]


@app.command()
def rerun(
    run: Run,
    first: Annotated[int | None, typer.Option("--from", min=1, help="first step (default: from the beginning)")] = None,
    last: Annotated[int | None, typer.Option("--to", min=1, help="last step (default: to the end)")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="optimizer parameter, as learning_rate=1e-5 or learning_rate=*0.5")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="STEP to leave out, or STEP:ROW for one row of its data; may be repeated")
    ] = None,
    save: Annotated[str, typer.Option(help="name under which the new run saves its state at the end")] = "",
    data_dir: DataDir = None,
) -> None:
    """Train a run again, as it was or with changes, as a new run that the console compares with the first.

    Without changes, every result must equal the recorded one, byte for byte. The exit status is 1 if one differs.
    """
    from tinkerflow.deployments.rerun import Change, Changes, Rerun

    with _recorded(run, data_dir) as recorded:
        changes = Changes(
            first,
            last,
            [Change.parse(text, recorded.about["optimizer"]) for text in sets or []],
            Changes.parse_without(without or []),
        )
        again = Rerun(recorded, changes, _show)
        report = again.execute()
        print(f"{report.steps} steps in the new run {report.run_id}, which is at step {report.ended}")
        if report.parted is not None:
            parted = report.parted
            print(f"the first difference: {parted.kind} of step {parted.step} (request {parted.seq_id})")
        elif report.compared:
            print(f"{report.compared} results are equal to the recorded ones")
        if save:
            print(f"saved: {again.save(save)}")
        print(f"compare: {recorded.api.url}/compare?run={run}&run={report.run_id}")
    if report.parted is not None:
        raise typer.Exit(1)


@app.command()
def blame(
    run: Run,
    step: Annotated[int, typer.Option(min=1, help="optimizer step whose rows are examined")],
    back: Annotated[
        int, typer.Option(min=0, help="steps before it that are searched by bisection if none of its rows is to blame")
    ] = 16,
    show: Annotated[int, typer.Option(min=1, help="rows to show")] = 10,
    data_dir: DataDir = None,
) -> None:
    """Compute each row of a step alone, from the state before the step, and show rows unlike the others.

    The reason is a huge weight, repetitions, unlikely tokens, logprobs far from the trainer's, or a large gradient. If
    no row has a reason, the data of the step may be unlikely because an earlier step spoiled the weights. Then the
    earlier step is examined.
    """
    from rich.table import Table

    from tinkerflow.backend.spec.outliers import COLUMNS, cells, remedy
    from tinkerflow.deployments.blame import blame as compute
    from tinkerflow.deployments.blame import origin

    with _recorded(run, data_dir) as recorded:
        rows = compute(recorded, step)
        if not rows[0].reason and (earlier := origin(recorded, step, back)) is not None:
            print(f"step {earlier} made the data of step {step} unlikely; these are the rows of step {earlier}")
            step, rows = earlier, compute(recorded, earlier)
        if not rows[0].reason:
            print(f"no row of step {step} is unlike the others; the first one contributes most to the step")
        table = Table(*COLUMNS)
        for row in rows[:show]:
            table.add_row(*cells(row))
        print_wide(table)
        print(f"on the page of the run: {recorded.api.url}/training_runs/{run}")
    print(f"without the first: {remedy(run, step, rows[0])}")


@app.command()
def fork(
    run: Run,
    step: Annotated[int, typer.Option(min=0, help="optimizer step after which the run is forked")],
    name: Annotated[str, typer.Option(help="name of the checkpoint (default: step-STEP)")] = "",
    data_dir: DataDir = None,
) -> None:
    """Save the state of a run after one of its steps as a checkpoint of a new run, with the optimizer's state.

    Any client can also use it as tinker://RUN/weights/@STEP, without this command.
    """
    from tinkerflow.deployments.rerun import saved_fork

    with _recorded(run, data_dir) as recorded:
        print(saved_fork(recorded, step, name or f"step-{step}"))


@app.command()
def explain(
    path: Annotated[str, typer.Argument(help="checkpoint, as tinker://RUN/weights/NAME or tinker://RUN/weights/@STEP")],
    data_dir: DataDir = None,
) -> None:
    """Show where a checkpoint comes from, its data, the checkpoint before it, and the answers that it has given."""
    from tinkerflow.deployments.explain import answers_of
    from tinkerflow.deployments.explain import explain as ancestries
    from tinkerflow.deployments.recorded_run import Api
    from tinkerflow.tasks.pipelines.server_address import server_from_environment

    with Api(*server_from_environment(settings_with(data_dir=data_dir))) as api:
        for ancestry in ancestries(api, path):
            about = ancestry.run.about
            print(ancestry.path)
            print(f"  request {ancestry.seq_id} of {ancestry.run.run_id} made it, after {ancestry.data.steps} steps")
            seed = "" if about["seed"] is None else f", seed {about['seed']}"
            print(f"  base model {about['base_model']}, rank {about['lora_rank']}, {about['optimizer']}{seed}")
            answers = answers_of(api, path) if ancestry.path == path else []
            for line in (*ancestry.data.lines(), *answers):
                print(f"  {line}")


@app.command()
def receipt(
    run: Run,
    output: Annotated[Path, typer.Option("--output", "-o", help="file to write")] = Path("receipt.json"),
    data_dir: DataDir = None,
) -> None:
    """Write a signed statement of all inputs and results of a run. It contains digests, but no data."""
    import json

    from tinkerflow.deployments.recorded_run import quoted

    with _recorded(run, data_dir) as recorded:
        issued = recorded.api.ask(f"training_runs/{quoted(run)}/receipt")
    write_output(output, json.dumps(issued, indent=1) + "\n")
    last = issued["marks"][-1]
    print(f"{output}: {last['seq_id'] + 1} requests up to step {last['step']}, signed by {issued['public_key']}")


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="receipt, as `tinkerflow receipt` writes it")],
    sample: Annotated[int, typer.Option(min=0, help="random steps to execute again; 0 = the whole run")] = 0,
    data_dir: DataDir = None,
) -> None:
    """Compare a run with its receipt: the signature, the history, and the results when it is executed again.

    The exit status is 1 with the first step that differs.
    """
    from tinkerflow.deployments.receipts import read_receipt, verify_history, verify_results

    issued, marks = read_receipt(file)
    with _recorded(issued["run"]["id"], data_dir) as recorded:
        wrong = verify_history(recorded, marks)
        if wrong is None:
            print(f"the history is that of the receipt, up to step {marks[-1].step}", flush=True)
            wrong = verify_results(recorded, marks[-1], sample, lambda text: print(text, flush=True))
    if wrong is not None:
        print(wrong)
        raise typer.Exit(1)
    print(f"signed by {issued['public_key']}")


@contextmanager
def _recorded(run_id: str, data_dir: DataDir) -> Iterator[RecordedRun]:
    from tinkerflow.deployments.recorded_run import Api, RecordedRun
    from tinkerflow.tasks.pipelines.server_address import server_from_environment

    with Api(*server_from_environment(settings_with(data_dir=data_dir))) as api:
        yield RecordedRun.find(api, run_id)


def _show(report: Report) -> None:
    if report.steps & (report.steps - 1) == 0 or report.steps % 100 == 0:  # 1, 2, 4, 8, ... and every hundredth
        equal = f": {report.compared} results equal" if report.compared else ""
        print(f"step {report.ended}{equal}", flush=True)
