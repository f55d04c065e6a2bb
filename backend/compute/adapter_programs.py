"""The compiled programs of each adapter shape: their warm-up, reports of waiting commands, and their removal."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from jax.sharding import Mesh

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.lora import Lora
from tinkerflow.backend.compute.models.transformer import Params
from tinkerflow.backend.compute.models.vision_tower import VisionTower
from tinkerflow.backend.compute.sampler import GroupSampler
from tinkerflow.backend.compute.training.adapters import Adapter
from tinkerflow.backend.compute.training.budget import Budget
from tinkerflow.backend.compute.training.packing import MicroBatch
from tinkerflow.backend.compute.training.train import Steps, make_steps
from tinkerflow.backend.compute.training.train_programs import StepsByShape, adapter_like, training_programs
from tinkerflow.backend.compute.warming import WarmUp
from tinkerflow.backend.spec.commands import GroupConfig, LoraSpec, Optimizer
from tinkerflow.backend.supervise.processes import memory_maps_used


class AdapterPrograms:
    """The programs of each adapter shape, for training adapters and publishing their weights."""

    def __init__(
        self,
        cfg: ModelConfig,
        mesh: Mesh,
        params: Params,
        budget: Budget,
        sampler: GroupSampler,
        tower: VisionTower | None,
        warm_up: WarmUp,
        progress: Callable[[str], None],
        *,
        max_context: int,
        trees: bool,
        config: GroupConfig,
    ) -> None:
        """Start without any programs.

        cfg, params: the base model, on the mesh. budget: the limits of a training step. sampler: publishes weights.
        tower: encodes images. warm_up: compiles programs before they are needed. progress: called with a line of text
        when a command may wait for a compilation. max_context: the longest sequence in tokens. trees: whether examples
        with shared prefixes need their own programs. config: whether experts and supports are recorded, which also need
        their own programs.
        """
        self._cfg, self._mesh, self._params = cfg, mesh, params
        self._sampler, self._tower, self._warm_up, self._progress = sampler, tower, warm_up, progress
        self._max_context, self._budget, self._trees, self._config = max_context, budget, trees, config
        self._steps = StepsByShape(partial(make_steps, cfg, mesh, budget), memory_maps_used, self._forget)
        self._wanted: set[tuple[LoraSpec, Optimizer]] = set()
        self._announced: set[tuple[str, LoraSpec, tuple[int, ...]]] = set()

    def steps_of(self, spec: LoraSpec) -> Steps:
        """The jitted training steps for adapters of this shape."""
        return self._steps.steps_of(spec)

    def trim(self, used: Collection[LoraSpec]) -> None:
        """Drop programs that are unlikely to be needed again. used: the shapes of all adapters."""
        self._steps.trim(used)

    def warm_up_for(self, spec: LoraSpec, optimizer: Optimizer) -> None:
        """Queue the programs for adapters of this shape for the warm-up, once."""
        if not self._warm_up.on or (spec, optimizer) in self._wanted:
            return
        self._wanted.add((spec, optimizer))
        adapter = adapter_like(self._cfg, self._mesh, spec)
        if isinstance(adapter, Lora):
            self._warm_up.want(self._sampler.adapters.publishing_programs(spec, adapter))
        self._warm_up.want(
            training_programs(
                self._mesh,
                self._params,
                self.steps_of(spec),
                adapter,
                optimizer=optimizer,
                budget=self._budget,
                max_context=self._max_context,
                tower=self._tower,
                trees=self._trees,
                routes=self._cfg.layers * self._cfg.experts_per_token if self._config.routing_replay else 0,
                supports=self._config.support_replay,
            ),
            owner=spec,
        )

    def announce(self, what: str, adapter: Adapter, batch: MicroBatch) -> None:
        """Report at the first batch of this shape that `what` is being compiled for it."""
        key = (what, adapter.spec, batch.targets_BTK.shape)
        if key not in self._announced:
            self._announced.add(key)
            rows, tokens, _ = batch.targets_BTK.shape
            shape = "all parameters" if adapter.spec.full else f"rank {adapter.spec.rank}"
            self._progress(f"compiling {what} for {rows}x{tokens} tokens, {shape}")

    def _forget(self, spec: LoraSpec) -> None:
        """Stop the warm-up for adapters of this shape. Later compilations of their programs are announced again."""
        self._warm_up.forget(spec)
        self._wanted = {wanted for wanted in self._wanted if wanted[0] != spec}
        self._announced = {key for key in self._announced if key[1] != spec}
