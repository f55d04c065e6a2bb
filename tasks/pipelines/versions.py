"""The weights that a step samples from if sampling runs ahead of training with bounded staleness.

Step s samples from the weights after s - lag steps, and never from weights before its segment. This depends only on the
step's number, not on the duration of sampling and environments. A restarted run therefore samples from weights of the
same age again.

A segment begins when all earlier steps are trained, because a resumed run has only the weights that a segment saved.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tinker


class WeightVersions:
    """The samplers of the weights that steps of a segment need. Version v is the weights after v steps."""

    def __init__(self, lag: int) -> None:
        """Begin without versions. lag: how many steps training may be ahead of the weights that a step samples from."""
        self.lag = lag
        self._first = 0
        self._samplers: dict[int, asyncio.Future[tinker.SamplingClient]] = {}

    def begin(self, step: int) -> None:
        """Begin a segment with `step`. All earlier steps are trained."""
        self._first, self._samplers = step, {}

    def version_for(self, step: int) -> int:
        """The version that `step` samples from."""
        return max(self._first, step - self.lag)

    async def sampler_for(self, client: tinker.TrainingClient, step: int) -> tinker.SamplingClient:
        """A sampler of the weights that `step` samples from."""
        return await self._taken(client, self.version_for(step))

    async def ready_to_train(self, client: tinker.TrainingClient, step: int) -> None:
        """Wait until all steps before `step` are trained, and their weights are saved if a lag needs them."""
        if self.lag:
            await self._taken(client, step)

    def trained(self, client: tinker.TrainingClient, step: int) -> None:
        """Save the weights after `step`, whose optimizer step has been submitted."""
        self._samplers.pop(step - self.lag, None)  # no later step samples from it
        if self.lag:
            self._request(client, step + 1)

    async def _taken(self, client: tinker.TrainingClient, version: int) -> tinker.SamplingClient:
        if version not in self._samplers and (version == self._first or not self.lag):
            self._request(client, version)
        return await asyncio.shield(self._sampler(version))

    def _sampler(self, version: int) -> asyncio.Future[tinker.SamplingClient]:
        if version not in self._samplers:
            self._samplers[version] = asyncio.get_running_loop().create_future()
        return self._samplers[version]

    def _request(self, client: tinker.TrainingClient, version: int) -> None:
        sampler = self._sampler(version)

        def pass_on(request: asyncio.Future[tinker.SamplingClient]) -> None:
            if request.cancelled():
                sampler.cancel()
            elif error := request.exception():
                sampler.set_exception(error)
                sampler.exception()  # marks the result as retrieved
            else:
                sampler.set_result(request.result())

        saved = client.save_weights_and_get_sampling_client(record_stability_info=True)  # trained data refer to samples
        asyncio.ensure_future(saved).add_done_callback(pass_on)
