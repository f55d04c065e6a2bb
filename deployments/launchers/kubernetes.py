"""Worker processes in Kubernetes: the pods of the StatefulSet `worker`, with one process each.

What a pod is stands in the manifests (deployments/kubernetes): image, command, volumes, node selectors. This launcher
runs in the engine's pod and decides what the plan says: how many pods there are, how many accelerators each asks for,
and whether each has a node of its own. It tells the API by server-side apply, again and again, so that what somebody
else changes of it comes back. Kubernetes places the pods, and replaces those that end.

A StatefulSet, because one number says how many pods there are, a pod is replaced however it ended, and its volume waits
for it, with base models and compiled programs, while there are no pods. The hosts of a TPU slice are pods of a Job,
whose number is fixed: the overlay tpu-jobset has no launcher.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tinkerflow.backend.core.errors import ServerError, TinkerflowError, UserError
from tinkerflow.deployments.launching import Launcher, Plan, Say, own_address

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
NAME = "worker"  # of the StatefulSet, and of the container that computes
_LOOK_SECONDS = 15.0  # between two looks at the pods, each of which says what is waited for
LEAVE_SECONDS = 45.0  # that pods may take to save their models and to end

Json = dict[str, Any]


@dataclass(frozen=True)
class Cluster:
    """The objects of one namespace, as the service account of this pod may use them.

    http: a client with the URL of the cluster's API. token: the file with the account's token, which changes.
    """

    http: httpx.AsyncClient
    namespace: str
    token: Path

    async def scale(self, plan: Plan, replicas: int) -> str:
        """Have the StatefulSet be as the plan says, with `replicas` pods: the selector of its pods' labels."""
        url = f"apis/apps/v1/namespaces/{self.namespace}/statefulsets/{NAME}"
        selector = (await self._ask("GET", url))["spec"]["selector"]
        await self._ask(
            "PATCH",
            url,
            params={"fieldManager": "tinkerflow", "force": "true"},
            headers={"Content-Type": "application/apply-patch+yaml"},
            json=stateful_set(plan, replicas, selector),
        )
        return ",".join(f"{label}={value}" for label, value in selector["matchLabels"].items())

    async def pods(self, selector: str) -> list[Json]:
        """The pods with these labels."""
        url = f"api/v1/namespaces/{self.namespace}/pods"
        return list((await self._ask("GET", url, params={"labelSelector": selector}))["items"])

    async def warnings(self) -> list[Json]:
        """What Kubernetes warned of about the StatefulSet in the last hour, such as a quota."""
        about = f"involvedObject.kind=StatefulSet,involvedObject.name={NAME},type=Warning"
        url = f"api/v1/namespaces/{self.namespace}/events"
        return list((await self._ask("GET", url, params={"fieldSelector": about}))["items"])

    async def _ask(self, method: str, url: str, headers: dict[str, str] | None = None, **request: Any) -> Json:
        """The answer. ServerError when the API is away or fails; UserError, with its reason, when it refuses."""
        authority = {"Authorization": f"Bearer {self.token.read_text()}"}
        try:
            answer = await self.http.request(method, url, headers=authority | (headers or {}), **request)
        except httpx.TransportError as error:
            raise ServerError(f"Kubernetes at {self.http.base_url} cannot be reached: {error!r}") from error
        if answer.is_success:
            return dict(answer.json())
        try:
            why = answer.json()["message"]
        except (ValueError, LookupError, TypeError):  # not by Kubernetes itself
            why = answer.text[:300]
        failed = answer.is_server_error or answer.status_code == httpx.codes.TOO_MANY_REQUESTS
        raise (ServerError if failed else UserError)(f"Kubernetes refuses {method} {url} ({answer.status_code}): {why}")


def stateful_set(plan: Plan, replicas: int, selector: Json) -> Json:
    """What the plan decides of the StatefulSet. selector: of its pods."""
    pod: Json = {}
    if plan.devices:
        limits = {"google.com/tpu" if plan.platform == "tpu" else "nvidia.com/gpu": plan.devices}
        pod["containers"] = [{"name": NAME, "resources": {"limits": limits}}]
    if plan.spread:
        apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": selector}
        pod["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    spec: Json = {"replicas": replicas, **({"template": {"spec": pod}} if pod else {})}
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": NAME}, "spec": spec}


def waited_for(pods: Sequence[Json], count: int, warnings: Sequence[Json]) -> list[str]:
    """A line for each thing that pods wait for; none when all are in the group.

    pods, warnings: as the API gives them. count: how many pods there are to be.
    """
    found: dict[str, list[str]] = {}
    for pod in pods:
        if why := _lacks(pod):
            found.setdefault(why, []).append(pod["metadata"]["name"])
    lines = [f"waiting for {', '.join(names)}: {why}" for why, names in found.items()]
    if len(pods) < count:
        last = max(warnings, key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "", default={})
        why = f": {last.get('reason')}: {last.get('message')}" if last else ""
        lines.append(f"Kubernetes has made {len(pods)} of {count} pods{why}")
    return lines


def _lacks(pod: Json) -> str:
    """Why a pod is not in the group; "" when it is."""
    if "deletionTimestamp" in pod["metadata"]:
        return "it ends"
    status = pod["status"]
    conditions = {condition["type"]: condition for condition in status.get("conditions", ())}
    if conditions.get("Ready", {}).get("status") == "True":
        return ""
    placed = conditions.get("PodScheduled", {})
    if placed.get("status") == "False":
        return f"{placed.get('reason')}: {placed.get('message')}"
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = container["state"].get("waiting", {})
        if waiting.get("reason", "PodInitializing") != "PodInitializing":
            return f"container {container['name']}: {waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    return "it has not joined the group yet" if status.get("phase") == "Running" else "its init containers run"


async def keep(plan: Plan, say: Say, cluster: Cluster, look_seconds: float = _LOOK_SECONDS) -> None:
    """Keep the plan's pods until cancelled; then there are none any more.

    UserError when the API refuses the first request. What fails later is told, and tried again.
    """
    accepted = False
    try:
        while True:
            try:
                selector = await cluster.scale(plan, plan.processes)
                accepted = True
                await asyncio.sleep(look_seconds)
                pods = await cluster.pods(selector)
                warnings = await cluster.warnings() if len(pods) < plan.processes else []
                for line in waited_for(pods, plan.processes, warnings):
                    say(line)
            except TinkerflowError as error:
                if isinstance(error, UserError) and not accepted:
                    raise
                say(str(error))
                await asyncio.sleep(look_seconds)
    except asyncio.CancelledError:
        await _release(plan, say, cluster)
        raise


async def stay_released(plan: Plan, say: Say, cluster: Cluster, look_seconds: float = _LOOK_SECONDS) -> None:
    """Have no pods until cancelled, whatever failed when they were released."""
    while True:
        try:
            await cluster.scale(plan, 0)
        except TinkerflowError as error:
            say(f"worker pods may be there still: {error}")
        await asyncio.sleep(look_seconds)


async def _release(plan: Plan, say: Say, cluster: Cluster) -> None:
    """End the pods. Whatever fails is tried again until it is too late, and then told."""
    why = "they still end"
    try:
        async with asyncio.timeout(LEAVE_SECONDS):
            while True:
                try:
                    if not await cluster.pods(await cluster.scale(plan, 0)):
                        return
                except TinkerflowError as error:
                    why = str(error)
                await asyncio.sleep(1.0)
    except TimeoutError:
        say(f"worker pods are not gone after {LEAVE_SECONDS:g} s: {why}")


@asynccontextmanager
async def this_cluster() -> AsyncIterator[Cluster]:
    """The cluster in which this pod runs. UserError when this is no pod, or has no token."""
    host, token = os.environ.get("KUBERNETES_SERVICE_HOST"), ACCOUNT / "token"
    if not host or not token.exists():
        raise UserError("launcher is 'kubernetes': must run in a pod that has the token of its service account")
    trusted = ssl.create_default_context(cafile=ACCOUNT / "ca.crt")
    namespace, port = (ACCOUNT / "namespace").read_text().strip(), int(os.environ["KUBERNETES_SERVICE_PORT"])
    url = httpx.URL(scheme="https", host=host, port=port)
    async with httpx.AsyncClient(base_url=url, verify=trusted, trust_env=False, timeout=10.0) as http:
        yield Cluster(http, namespace, token)


async def _here(work: Callable[[Plan, Say, Cluster], Awaitable[None]], plan: Plan, report: Say) -> None:
    async with this_cluster() as cluster:
        await work(plan, lambda line: report(f"kubernetes: {line}"), cluster)


LAUNCHER = Launcher("kubernetes", partial(_here, keep), lambda settings: own_address(), partial(_here, stay_released))
