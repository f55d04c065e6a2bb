"""Worker processes in a Ray cluster: a placement group with a bundle for each process, and an actor in each bundle.

An actor runs the agent of a host, which starts one worker. Ray places the bundles. It restarts an actor that ends, on
another node if its node is gone. The output of agents and workers is in the actors' logs, which Ray's dashboard shows.
Ray's client runs in a separate process, so that its failures do not reach `tinkerflow up`. When that process ends, Ray
ends the actors. Only this module imports Ray (the extra `ray`), and only in that process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from typing import Any

from tinkerflow.backend.core.clock import every_second
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.joining import parse_address
from tinkerflow.backend.pool import HostConfig, serve_group
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.supervise.processes import die_with_parent
from tinkerflow.deployments.keeper import FOR_PEOPLE, Part
from tinkerflow.deployments.launching import Launcher, Plan, Say, own_address
from tinkerflow.deployments.options import settings_with
from tinkerflow.deployments.pulse import READY, Pulse, keep_stdout, say

_PLACING_SECONDS = 15.0  # seconds between two progress lines about the placement
_LEAVE_SECONDS = 15.0  # the time that actors have to end their workers cleanly


class HostAgent:
    """The actor, which runs the agent of a host with capacity for one process."""

    def __init__(self, host: HostConfig) -> None:
        """The actor ends with its raylet, because Ray then starts it on another node."""
        die_with_parent(os.getppid())
        self._host = host
        self._serving: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Offer the capacity to the group until `leave`. Ray calls this again in an actor that it restarted."""
        self._serving = asyncio.create_task(serve_group(self._host, lambda line: print(line, flush=True)))
        await asyncio.wait((self._serving,))
        if not self._serving.cancelled():
            self._serving.result()

    async def leave(self) -> None:
        """Notify the driver, and end the worker."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait((self._serving,))


async def _keep(plan: Plan, report: Say) -> None:
    """Run the process that owns the placement group. UserError: there is no cluster at the start."""
    part = Part(
        "ray",
        (sys.executable, "-c", f"from {__name__} import main; main()", str(os.getpid())),
        environment={"RAY_USAGE_STATS_ENABLED": "0", **plan.environment},
        log_dir=plan.data_dir / "logs",
        silence=float(plan.environment["TINKERFLOW_HEARTBEAT_TIMEOUT"]),
        report=report,
    )
    await part.keep(part.ready.done)


def main() -> None:
    """Run the process that owns the placement group. Its argument is the pid of its parent."""
    die_with_parent(int(sys.argv[1]))
    keep_stdout()  # Ray's output goes to the log
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    pulse = Pulse()
    pulse.start()
    try:
        asyncio.run(_hold(Plan.of(settings_with(), os.environ), pulse))
    except UserError as error:
        cause = getattr(error, "cause", error)  # Ray wraps the error of an actor, and shows it with a traceback
        sys.exit(f"{FOR_PEOPLE}{cause.message}")


async def _hold(plan: Plan, pulse: Pulse) -> None:
    """Own the placement group until SIGTERM."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    turning = asyncio.create_task(every_second(pulse.turns))
    say(f"connecting to {plan.cluster or 'this machine'}")  # Ray tries a dead address for minutes
    await asyncio.to_thread(_connect, plan.cluster)
    loop.add_signal_handler(signal.SIGTERM, stop.set)  # replaces Ray's handler, which ends the process immediately
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = bundle_of(plan)
    strategy = "STRICT_SPREAD" if plan.spread else "PACK"
    group = placement_group([bundle] * plan.processes, strategy=strategy)
    make = ray.remote(max_restarts=-1, max_task_retries=-1)(HostAgent)
    driver, port = parse_address(plan.group)
    host = HostConfig(driver, port, plan.secret, 1, None, "", platform=plan.platform)
    actors: list[Any] = [
        make.options(
            name=f"tinkerflow-{port}-{number}",
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            resources={"TPU": bundle["TPU"]} if "TPU" in bundle else None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        ).remote(host)
        for number in range(plan.processes)
    ]
    serving = [asyncio.ensure_future(_result(actor.serve.remote())) for actor in actors]
    placed = asyncio.ensure_future(_result(group.ready()))
    stopping = asyncio.create_task(stop.wait())
    try:
        while not placed.done() and not stopping.done():
            await asyncio.wait((placed, stopping), timeout=_PLACING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not placed.done():
                say(f"waiting for Ray to place {plan.processes} bundle(s) of {bundle} ({strategy})")
        if placed.done():
            placed.result()
            say(READY)
        done, _ = await asyncio.wait((stopping, *serving), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        turning.cancel()
        with contextlib.suppress(Exception):  # the actors end with this process in any case
            leaving = [asyncio.ensure_future(_result(actor.leave.remote())) for actor in actors]
            await asyncio.wait(leaving, timeout=_LEAVE_SECONDS)
            remove_placement_group(group)
        ray.shutdown()


async def _result(reference: Any) -> None:
    await reference


def _connect(address: str) -> None:
    """Connect to the cluster. UserError: Ray is not installed, or there is no cluster."""
    try:
        import ray
    except ImportError as error:
        raise UserError(f"launcher 'ray': Ray cannot be imported ({error}): install the extra `ray`") from error
    try:
        ray.init(address or "auto", namespace="tinkerflow", log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"ray_address {address!r}: cannot connect" if address else "no Ray cluster runs on this machine"
        fix = "start one with `ray start --head`, or name another with --ray-address"
        raise UserError(f"launcher 'ray': {where} ({' '.join(str(error).split())}): {fix}") from error


def bundle_of(plan: Plan) -> dict[str, int]:
    """The resources of one process in Ray: a CPU, and the plan's devices."""
    kind = "TPU" if plan.platform == "tpu" else "GPU"
    return {"CPU": 1} | ({kind: plan.devices} if plan.devices else {})


def _address(settings: Settings) -> str:
    host = settings.ray_address.removeprefix("ray://").rpartition(":")[0]
    return own_address(host)


LAUNCHER = Launcher("ray", _keep, _address)
