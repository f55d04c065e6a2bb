"""Worker processes in Kubernetes: the pods of the StatefulSet `worker`, with one process each.

The manifests (deployments/kubernetes) define the pods: image, command, volumes, node selectors. This launcher runs in
the engine's pod and sets the fields that the plan decides: the number of pods, the accelerators of each, and whether
each has a node of its own. It uses server-side apply every few seconds, so it undoes other changes of these fields.
Kubernetes places the pods and replaces those that end.

A StatefulSet has a single number of pods and replaces every pod that ends. While there are no pods, their volumes keep
base models and compiled programs. The hosts of a TPU slice are pods of a Job, whose number is fixed, so the overlay
tpu-jobset has no launcher. Only this module uses the client lightkube (the extra `kubernetes`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from tinkerflow.backend.core.errors import ServerError, TinkerflowError, UserError
from tinkerflow.deployments.launching import Launcher, Plan, Say, own_address

if TYPE_CHECKING:
    from lightkube import AsyncClient
    from lightkube.resources.core_v1 import Event, Pod

Selector = dict[str, Any]  # values by label or field

NAME = "worker"  # name of the StatefulSet, and of the container that computes
WARNINGS: Selector = {"involvedObject.kind": "StatefulSet", "involvedObject.name": NAME, "type": "Warning"}
CHECK_SECONDS = 15.0  # seconds between two checks of the pods, which report why pods wait
LEAVE_SECONDS = 45.0  # the time that pods have to save their models and to end


async def scale(client: AsyncClient, plan: Plan, replicas: int) -> Selector:
    """Apply the plan to the StatefulSet, with `replicas` pods. Returns the labels that select its pods."""
    from lightkube.resources.apps_v1 import StatefulSet
    from lightkube.types import PatchType

    with _refusals():
        spec = (await client.get(StatefulSet, NAME)).spec
        labels: Selector = dict((spec and spec.selector.matchLabels) or {})
        changes = stateful_set(plan, replicas, {"matchLabels": labels})
        how: dict[str, Any] = {"patch_type": PatchType.APPLY, "field_manager": "tinkerflow", "force": True}
        await client.patch(StatefulSet, NAME, changes, **how)
    return labels


def stateful_set(plan: Plan, replicas: int, selector: dict[str, Any]) -> dict[str, Any]:
    """The fields of the StatefulSet that the plan decides. selector: the labels of its pods."""
    pod: dict[str, Any] = {}
    if plan.devices:
        limits = {"google.com/tpu" if plan.platform == "tpu" else "nvidia.com/gpu": plan.devices}
        pod["containers"] = [{"name": NAME, "resources": {"limits": limits}}]
    if plan.spread:
        apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": selector}
        pod["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    spec = {"replicas": replicas, **({"template": {"spec": pod}} if pod else {})}
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": NAME}, "spec": spec}


async def report_waiting(client: AsyncClient, labels: Selector, count: int, say: Say) -> None:
    """Report why pods wait. Reports nothing when all `count` pods are in the group."""
    from lightkube.resources.core_v1 import Event, Pod

    with _refusals():
        pods = [pod async for pod in client.list(Pod, labels=labels)]
        few = len(pods) < count
        warnings = [event async for event in client.list(Event, fields=WARNINGS)] if few else []
    for line in waiting_lines(pods, count, warnings):
        say(line)


def waiting_lines(pods: Sequence[Pod], count: int, warnings: Sequence[Event]) -> list[str]:
    """A line for each reason why pods wait. warnings: about the StatefulSet, such as an exceeded quota."""
    names: dict[str, list[str]] = {}
    for pod in pods:
        if why := _waits_for(pod):
            names.setdefault(why, []).append(str(pod.metadata and pod.metadata.name))
    lines = [f"waiting for {', '.join(waiting)}: {why}" for why, waiting in names.items()]
    if len(pods) < count:
        last = max(warnings, key=lambda event: str(event.lastTimestamp or event.eventTime or ""), default=None)
        why = f": {last.reason}: {last.message}" if last else ""
        lines.append(f"Kubernetes has created {len(pods)} of {count} pods{why}")
    return lines


def _waits_for(pod: Pod) -> str:
    """Why a pod is not in the group; "" if it is in the group."""
    if pod.metadata and pod.metadata.deletionTimestamp:
        return "it is being deleted"
    assert pod.status is not None
    conditions = {condition.type: condition for condition in pod.status.conditions or ()}
    if "Ready" in conditions and conditions["Ready"].status == "True":
        return ""
    if (placed := conditions.get("PodScheduled")) and placed.status == "False":
        return f"{placed.reason}: {placed.message}"
    for container in (*(pod.status.initContainerStatuses or ()), *(pod.status.containerStatuses or ())):
        waiting = container.state and container.state.waiting
        if waiting and waiting.reason != "PodInitializing":
            return f"container {container.name}: {waiting.reason}: {waiting.message or ''}".rstrip(": ")
    return "it has not joined the group yet" if pod.status.phase == "Running" else "its init containers are running"


async def keep(plan: Plan, say: Say, client: AsyncClient, check_seconds: float = CHECK_SECONDS) -> None:
    """Run the plan's pods until cancelled, and then end them.

    UserError: the API refuses the first request. Later failures are reported and retried.
    """
    accepted = False
    try:
        while True:
            try:
                labels = await scale(client, plan, plan.processes)
                accepted = True
                await asyncio.sleep(check_seconds)
                await report_waiting(client, labels, plan.processes, say)
            except TinkerflowError as error:
                if isinstance(error, UserError) and not accepted:
                    raise
                say(str(error))
                await asyncio.sleep(check_seconds)
    except asyncio.CancelledError:
        await _release(plan, say, client)
        raise


async def stay_released(plan: Plan, say: Say, client: AsyncClient, check_seconds: float = CHECK_SECONDS) -> None:
    """Keep the number of pods at 0 until cancelled. Failures are reported and retried."""
    while True:
        try:
            await scale(client, plan, 0)
        except TinkerflowError as error:
            say(f"worker pods may still exist: {error}")
        await asyncio.sleep(check_seconds)


async def _release(plan: Plan, say: Say, client: AsyncClient) -> None:
    """End the pods. Failures are retried for LEAVE_SECONDS, and then reported."""
    from lightkube.resources.core_v1 import Pod

    why = "they are still being deleted"
    try:
        async with asyncio.timeout(LEAVE_SECONDS):
            while True:
                try:
                    labels = await scale(client, plan, 0)
                    with _refusals():
                        if not [pod async for pod in client.list(Pod, labels=labels)]:
                            return
                except TinkerflowError as error:
                    why = str(error)
                await asyncio.sleep(1.0)
    except TimeoutError:
        say(f"worker pods still exist after {LEAVE_SECONDS:g} s: {why}")


@contextmanager
def _refusals() -> Iterator[None]:
    """Convert errors. ServerError: the API cannot be reached or fails. UserError: the API refuses, with its reason."""
    import httpx2

    try:
        yield
    except httpx2.HTTPStatusError as error:  # an ApiError of lightkube contains the API's message
        answer = error.response
        why = str(error) if hasattr(error, "status") else answer.text[:300]
        kind = ServerError if answer.is_server_error or answer.status_code == 429 else UserError
        asked = f"{error.request.method} {error.request.url.path}"
        raise kind(f"Kubernetes refuses {asked} ({answer.status_code}): {why}") from error
    except httpx2.TransportError as error:
        raise ServerError(f"Kubernetes cannot be reached: {error!r}") from error


@asynccontextmanager
async def this_cluster() -> AsyncIterator[AsyncClient]:
    """A client for this pod's namespace, with its service account. UserError: no lightkube, or not in a pod."""
    try:
        from lightkube import AsyncClient, KubeConfig
        from lightkube.core.exceptions import ConfigError
    except ImportError as error:
        raise UserError(f"launcher 'kubernetes': install the extra `kubernetes` ({error})") from error
    try:
        config = KubeConfig.from_service_account()
    except (ConfigError, KeyError) as error:
        raise UserError(
            f"launcher 'kubernetes': must run in a pod that has the token of its service account: {error}"
        ) from error
    async with AsyncClient(config, trust_env=False) as client:
        yield client


async def _here(work: Callable[[Plan, Say, AsyncClient], Awaitable[None]], plan: Plan, report: Say) -> None:
    async with this_cluster() as client:
        await work(plan, lambda line: report(f"kubernetes: {line}"), client)


LAUNCHER = Launcher("kubernetes", partial(_here, keep), lambda settings: own_address(), partial(_here, stay_released))
