"""Training in segments: some steps, then a saved state and its record, from which any process can continue."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run

from tinkerflow.backend.core.errors import ServerError, UserError
from tinkerflow.backend.spec.run_metadata import FLOW_RUN
from tinkerflow.tasks.pipelines.artifacts import has_lasting_page, log_line, training_runs
from tinkerflow.tasks.pipelines.control import Control
from tinkerflow.tasks.pipelines.outliers import HISTORY, OutlierWatch
from tinkerflow.tasks.pipelines.preparation import PreparedRun
from tinkerflow.tasks.pipelines.progress import RunProgress, Sample, SegmentRecord, StepMetrics
from tinkerflow.tasks.pipelines.schedule import learning_rate
from tinkerflow.tasks.pipelines.user_code import InterruptedCodeError

if TYPE_CHECKING:
    import tinker

Values = Mapping[str, float]


class Recipe(Protocol):
    """How a pipeline makes its steps. Steps count from 0.

    A step depends only on its number, the first step of its segment, and the weights of steps in that segment.
    """

    @property
    def ahead(self) -> int:
        """How many submitted steps may be unanswered when the next is submitted; 0 if steps depend on results."""

    async def prepare(self, trainer: Trainer) -> None:
        """Prepare once in every process, before its first step. `trainer.at(0)` is the model before any step."""

    def begin(self, step: int) -> None:
        """Begin a segment with `step`. All earlier steps are answered."""

    def submit(self, client: tinker.TrainingClient, step: int, params: tinker.AdamParams) -> Awaitable[Values]:
        """Submit a step's gradients and optimizer step without waiting. The awaitable returns the step's metrics."""

    async def held_out(self, client: tinker.TrainingClient) -> Values:
        """Measure on the held-out rows. Returns {} if there are none."""


@dataclass(frozen=True)
class Lineage:
    """The origin of a checkpoint, stored with the checkpoint on the server.

    run: the name that retries share. data: name and digest of the training data. code: name and version of this
    program. parent: the checkpoint that training began with; empty for the base model.
    """

    pipeline: str
    run: str
    data: str
    code: str
    parent: str = ""

    def metadata(self, step: int) -> dict[str, str]:
        """The user metadata of the checkpoint after `step` steps."""
        return asdict(self) | {"step": str(step)}


def data_name(url: str, key: str) -> str:
    """A readable name of training data: the file and a digest. url: the data's URL. key: the data's name in plans."""
    scheme, _, rest = url.rpartition("://")
    file = rest.partition("?")[0].rstrip("/").rpartition("/")[2] or scheme
    return f"{file} {key.removeprefix('rendered/').removesuffix('.npz')}"


class Trainer:
    """A model being trained, and the record of its training. After a failure it is reopened at the last record.

    Steps of a lost process after the last record do not affect later weights, because their adapter is not used again.
    """

    def __init__(
        self,
        run: PreparedRun,
        recipe: Recipe,
        progress: RunProgress,
        lineage: Lineage,
        watch: OutlierWatch | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Store the parts. No request is sent to the server yet.

        run: the parameters and the connection. recipe: makes the steps. progress: the record of this run. lineage: the
        origin, stored with checkpoints. watch: leaves out rows that spoil a step; None: no step is made again.
        settings: the pipeline's settings, for the page of the training run.
        """
        self.run = run
        self.training = run.parameters.training
        self.recipe = recipe
        self.progress = progress
        self.lineage = lineage
        self.watch = watch
        self.settings = settings
        self.newest_run = ""  # the id of the newest training run, even if no model is live
        self._live: tuple[int, tinker.TrainingClient] | None = None

    async def at(self, step: int) -> tinker.TrainingClient:
        """The model after `step` steps."""
        if self._live is not None and self._live[0] == step:
            return self._live[1]
        await self.release()
        service, model, metadata = self.run.server.service, self.run.parameters.model, self._metadata(step)
        client: tinker.TrainingClient
        if step > 0:
            state = next(segment.state for segment in self.progress.segments() if segment.last_step == step)
            client = await service.create_training_client_from_state_with_optimizer(state, user_metadata=metadata)
        elif model.start_from:
            client = await service.create_training_client_from_state(model.start_from, user_metadata=metadata)
        else:
            client = await service.create_lora_training_client(
                self.run.model.name, rank=model.rank, seed=model.seed, user_metadata=metadata
            )
        self._set_live(step, client)
        if self.watch is not None:
            await self.watch.check_history(self.run_id)
        return client

    async def before(self, step: int) -> tinker.TrainingClient:
        """Restore the live model to its state before `step`, counted from 1, which spoiled it.

        The watch leaves out the rows that caused this.
        """
        assert self.watch is not None
        run_id = self.run_id
        await self.release()
        client = await self.watch.go_back(run_id, step, self._metadata(step - 1))
        self._set_live(step - 1, client)
        return client

    def _set_live(self, step: int, client: tinker.TrainingClient) -> None:
        self._live = (step, client)
        self.newest_run = self.run_id
        if (made := training_runs.get()) is not None:
            made.append(self.run_id)

    def _metadata(self, step: int) -> dict[str, str]:
        parameters = self.run.parameters
        kept = parameters.history or self.watch is not None
        segment = str(self.training.segment_steps)  # included even without a plan entry, so that runs can be compared
        plan = {"planned_steps": str(self.training.steps), "save_every": segment, "training.segment_steps": segment}
        page = {FLOW_RUN: str(flow_run.id)} if flow_run.id and has_lasting_page.get() else {}
        shown = {**self.settings, **page}
        return shown | self.lineage.metadata(step) | {"name": parameters.name} | plan | (HISTORY if kept else {})

    @property
    def run_id(self) -> str:
        """The training run of the live model, or "" if no model is live."""
        return "" if self._live is None else str(self._live[1].model_id)

    def moved(self, step: int) -> None:
        """Note that the live model has made all steps up to `step`."""
        assert self._live is not None
        self._live = (step, self._live[1])

    async def release(self) -> None:
        """Unload the live model, if any. It may have made uncounted steps."""
        if self._live is not None:
            _, client = self._live
            self._live = None
            await self.run.server.unload(client.model_id)

    def params(self, step: int) -> tinker.AdamParams:
        """The parameters of the optimizer step `step`, counted from 0."""
        import tinker

        return tinker.AdamParams(
            learning_rate=learning_rate(step, self.training),
            weight_decay=self.training.weight_decay,
            grad_clip_norm=self.training.grad_clip,
        )


async def grad_norm(update: Awaitable[tinker.OptimStepResponse]) -> float:
    """The norm of an optimizer step's gradients before clipping; NaN if it is not finite."""
    return float(((await update).metrics or {}).get("grad_norm", math.nan))


class _SpoiledStepError(Exception):
    """A step, counted from 1, is unusual. made: the steps before it."""

    def __init__(self, step: int, made: list[StepMetrics]) -> None:
        super().__init__(step)
        self.step, self.made = step, made


def _may_help(_task: object, _run: object, state: State[Any]) -> bool:
    """Whether a retry may succeed. It cannot if a parameter or the data is wrong, or if a limit is reached."""
    from tinker import RequestFailedError
    from tinker.types import RequestErrorCategory

    error = state.data
    is_refused = isinstance(error, RequestFailedError) and error.category == RequestErrorCategory.User
    return not is_refused and not isinstance(error, UserError)


@task(
    name="train segment",
    task_run_name="train steps {first_step} to {last_step}",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=_may_help,
)
async def train_segment(
    trainer: Trainer, first_step: int, last_step: int, control: Control, on_step: Callable[[StepMetrics], None]
) -> SegmentRecord | None:
    """Make the steps first_step..last_step (counted from 1), measure, save the state, and record the segment.

    trainer: the model and its record. control: reports requests to stop. on_step: gets the metrics of each
    step. After a request to stop, the segment ends with the current step, without measurements. Returns None if no step
    was made. A failure leaves no record and no live model. The same call then makes the steps again, on the state
    before them.
    """
    try:
        if trainer.watch is not None:
            trainer.watch.begin(trainer.progress.segments())
        client = await trainer.at(first_step - 1)
        made: list[StepMetrics] = []
        while True:
            try:
                made += await make_steps(trainer, client, first_step + len(made), last_step, control, on_step)
                break
            except _SpoiledStepError as spoiled:
                made += spoiled.made
                client = await trainer.before(spoiled.step)
        if not made:
            return None
        left_out = [] if trainer.watch is None else trainer.watch.left_out
        state = await _save(trainer, client, made[-1].step)

        measured = await _measured(trainer, client, made[-1].step, control)
        segment = SegmentRecord(
            first_step=first_step,
            last_step=made[-1].step,
            state=state,
            steps=made,
            held_out=dict(measured[0]),
            samples=measured[1],
            left_out=[one for one in left_out if first_step <= one.step <= made[-1].step],
        )
        trainer.progress.add(segment)
        trainer.moved(segment.last_step)
    except Exception:
        await trainer.release()  # so that the next attempt does not exceed max_live_models
        raise
    return segment


async def _measured(
    trainer: Trainer, client: tinker.TrainingClient, step: int, control: Control
) -> tuple[Values, list[Sample]]:
    """The measurements on held-out rows after `step`, and samples. None if the run stops before its last step."""

    async def measure() -> tuple[Values, list[Sample]]:
        return await trainer.recipe.held_out(client), await trainer.run.preview(client)

    if step == trainer.training.steps:
        return await measure()
    if not control.stopping:  # otherwise the person who stopped the run is waiting
        with suppress(InterruptedCodeError):
            return await control.before_stop(measure)
    return {}, []


async def make_steps(
    trainer: Trainer,
    client: tinker.TrainingClient,
    first: int,
    last: int,
    control: Control,
    on_step: Callable[[StepMetrics], None],
) -> list[StepMetrics]:
    """Make the steps `first` to `last`, or until a request to stop. Submitted steps are always awaited.

    trainer: learning rates and recipe. client: the model before the step `first`. control: reports requests to stop or
    pause. on_step: gets the metrics of each step.
    _SpoiledStepError: the trainer's watch rejects a step. ServerError: without a watch, a gradient is not finite.
    """
    watch = trainer.watch
    made: list[StepMetrics] = []
    pending: list[asyncio.Future[Values]] = []

    async def answered(ahead: int) -> None:
        """Wait until at most `ahead` of the submitted steps are unanswered."""
        while len(pending) > ahead:
            step = first + len(made)
            values = {**await pending.pop(0), "learning_rate": learning_rate(step - 1, trainer.training)}
            norm = values.get("grad_norm", 0.0)
            if watch is not None:
                if not watch.passes(step, norm, values.get("loss", 0.0)):
                    raise _SpoiledStepError(step, made)
                values["rows_left_out"] = float(len(watch.left_out))
            if not math.isfinite(norm):
                search = f"`tinkerflow blame {trainer.run_id} --step {step}` finds the rows if the run keeps a history"
                raise ServerError(f"step {step}: the norm of its gradients is not finite; {search}")
            made.append(StepMetrics(step=step, values=values))
            on_step(made[-1])

    trainer.recipe.begin(first - 1)
    try:
        for step in range(first, last + 1):
            if not await control.may_go_on():
                break
            params = trainer.params(step - 1)
            pending.append(asyncio.ensure_future(trainer.recipe.submit(client, step - 1, params)))
            await answered(trainer.recipe.ahead)
        await answered(0)
    except InterruptedCodeError as interrupted:  # interrupted before its step trained anything
        log_line(f"step {first + len(made)} was not executed: {interrupted}")
    finally:
        for future in pending:
            future.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    return made


async def _save(trainer: Trainer, client: tinker.TrainingClient, step: int) -> str:
    """Save a state to resume from, which expires unless its run is finished. Returns its path."""
    saved = await client.save_state(
        f"step-{step:08d}",
        ttl_seconds=trainer.training.state_seconds,
        user_metadata=trainer.lineage.metadata(step),
    )
    return str(saved.path)
