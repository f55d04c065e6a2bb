"""Kill engines and API replicas under load: answers must equal those of an undisturbed run. Measures the delays.

    python -m tests.benchmarks.failover [--clients 50] [--rounds 40] [--kills 2] [--apart]

The service has Postgres (pgserver), two API replicas behind a balancer, and a standby engine. Every client trains the
same model on the same data, so each must get the losses and tokens of a client that ran alone before. With --apart,
engines have different host names, as on two machines: the standby waits for the end of the dead engine's lease.
RESULTS.md keeps the output.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

os.environ["TINKER_TELEMETRY"] = "0"

import tinker
from tests.benchmarks.replicas import READY, START_SECONDS, Replicas, replicas, wait_for
from tests.benchmarks.service import datum
from tinker import types

TOKENS = [1 + i % 200 for i in range(24)]


@dataclass
class Tenant:
    """A client that trains, then samples. losses, times: the loss and the end of each round. tokens: the sample's."""

    url: str
    rounds: int
    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    error: BaseException | None = None
    ended: bool = False

    def run(self) -> None:
        """Train for all rounds, then sample from the weights."""
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001  the starter of the thread raises it
            self.error = error
        finally:
            self.ended = True

    def _run(self) -> None:
        rest = tinker.RestClient(base_url=self.url, api_key="tml-tenant")
        model = rest.get_server_capabilities().result().supported_models[0].model_name
        # Not closed: with SDK 0.38, closing may hang if a poll for answers is cancelled while it fails.
        service = tinker.ServiceClient(base_url=self.url, api_key="tml-tenant")
        client = service.create_lora_training_client(base_model=str(model), rank=8, seed=3).result()
        for _ in range(self.rounds):
            forward = client.forward_backward([datum(TOKENS)], "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
            self.losses.append(forward.result().metrics["loss:sum"])
            self.times.append(time.monotonic())
        sampler = client.save_weights_and_get_sampling_client().result()
        asked = types.SamplingParams(max_tokens=8, temperature=1.0, seed=5, stop=[])
        prompt = types.ModelInput.from_ints(TOKENS[:5])
        self.tokens = list(sampler.sample(prompt, 1, asked).result().sequences[0].tokens)


@dataclass(frozen=True)
class Failover:
    """A kill. served: seconds until a replacement could serve. answered: seconds until each client made two more steps.

    The first of these steps may have been computed before the kill.
    """

    what: str
    served: float
    answered: float


def disturb(found: Replicas, clients: int, rounds: int, kills: int) -> tuple[list[Tenant], list[Failover]]:
    """Run the clients, and kill each part in turn. RuntimeError: a client's answers differ from those of one alone."""
    alone = Tenant(found.url, rounds)
    alone.run()
    if alone.error is not None:
        raise alone.error
    tenants = [Tenant(found.url, rounds) for _ in range(clients)]
    threads = [threading.Thread(target=tenant.run, daemon=True) for tenant in tenants]
    for thread in threads:
        thread.start()
    failovers = []
    for number in range(2 * kills):
        _until(tenants, [(number + 1) * rounds // (2 * kills + 1)] * clients)
        before = [len(tenant.losses) + 2 for tenant in tenants]
        began = time.monotonic()
        what = _kill_api(found, number // 2 % len(found.apis)) if number % 2 else _kill_engine(found)
        served = time.monotonic() - began
        _until(tenants, before)
        failovers.append(Failover(what, served, time.monotonic() - began))
        if number < 2 * kills - 2:
            _mend(found)
    for thread in threads:
        thread.join()
    for tenant in tenants:
        if tenant.error is not None:
            raise tenant.error
        if (tenant.losses, tenant.tokens) != (alone.losses, alone.tokens):
            raise RuntimeError(f"a client's answers differ: {tenant.losses, tenant.tokens} after {alone}")
    return tenants, failovers


def _kill_engine(found: Replicas) -> str:
    """Kill the working engine, and return once the standby works."""
    working, standby = found.engines
    working.kill()
    found.engines.remove(working)
    wait_for(standby, READY)
    return "engine"


def _kill_api(found: Replicas, place: int) -> str:
    found.apis[place].kill()
    return "API replica"


def _mend(found: Replicas) -> None:
    """Replace a killed engine with a new standby, and restart killed replicas."""
    if len(found.engines) < 2:
        wait_for(found.start_engine(), "uses this journal")
    for place, api in enumerate(found.apis):
        if api.process.poll() is not None:
            wait_for(found.start_api(place), READY)


def _until(tenants: list[Tenant], steps: list[int]) -> None:
    """Wait until each tenant has made its steps or has ended. RuntimeError: START_SECONDS have passed."""
    until = time.monotonic() + START_SECONDS
    while not all(tenant.ended or len(tenant.losses) >= least for tenant, least in zip(tenants, steps, strict=True)):
        if time.monotonic() > until:
            made = [len(tenant.losses) for tenant in tenants]
            raise RuntimeError(f"in {START_SECONDS:g} s, the clients did not make {steps} steps, but {made}")
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--kills", type=int, default=2, help="of an engine, and of a replica")
    parser.add_argument("--apart", action="store_true", help="engines as on machines of their own")
    args = parser.parse_args()
    import pgserver

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as database:
        postgres = pgserver.get_server(database)
        try:
            with replicas(Path(folder), postgres.get_uri(), {}, apart=args.apart) as found:
                began = time.monotonic()
                tenants, failovers = disturb(found, args.clients, args.rounds, args.kills)
                took = time.monotonic() - began
        finally:
            postgres.cleanup()
    gaps = [later - earlier for one in tenants for earlier, later in zip(one.times, one.times[1:], strict=False)]
    count = args.clients * args.rounds
    print(f"{args.clients} clients, {count} steps in {took:.0f} s, load {os.getloadavg()[0]:.1f}: all answers as alone")
    print(f"longest time between two steps of a client: {max(gaps):.1f} s")
    for failover in failovers:
        served = f"the standby serves after {failover.served:.1f} s, " if failover.what == "engine" else ""
        print(f"{failover.what} killed: {served}every client has made two steps after {failover.answered:.1f} s")
    sys.stdout.flush()
    os._exit(0)  # the SDK's heartbeat threads would keep this process alive


if __name__ == "__main__":
    main()
