"""Admission: checks a request, and turns it into the sequences that the scheduler queues."""

from __future__ import annotations

from functools import cached_property, lru_cache

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.vision_tower import image_shift
from tinkerflow.backend.compute.sampler.constraints import Matcher, new_matcher
from tinkerflow.backend.compute.sampler.prompt_scores import prompt_scores
from tinkerflow.backend.compute.sampler.requests import ActiveRequest, ActiveSequence, BaseWeights
from tinkerflow.backend.compute.sampler.sampling import UniformStream
from tinkerflow.backend.compute.sampler.snapshot_cache import SnapshotCache
from tinkerflow.backend.compute.sampler.stops import Decode, StopDetector, load_decode
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import Constraint, SampleRequest
from tinkerflow.backend.spec.constraints import KEPT_CONSTRAINTS


class Admission:
    """Finds a request's snapshot, stops and constraint, and limits its tokens to the context."""

    def __init__(self, cfg: ModelConfig, model_path: str, snapshots: SnapshotCache, *, max_context: int) -> None:
        """cfg: the base model. model_path: its folder, with the tokenizer. max_context: tokens of prompt and answer."""
        self._cfg, self._model_path, self._snapshots, self.max_context = cfg, model_path, snapshots, max_context
        self.base = BaseWeights()
        self._matcher = lru_cache(KEPT_CONSTRAINTS)(self._new_matcher)

    def begin(self, request: SampleRequest) -> tuple[ActiveRequest, list[ActiveSequence]]:
        """The request in the scheduler's form, and its sequences.

        UserError: the snapshot or the constraint cannot be used, or the prompt exceeds the context.
        """
        snapshot = None if request.snapshot_id is None else self._snapshots.find(request.snapshot_id)
        decoder = self._decode_text if request.stop_strings else None
        matcher = self._matcher(request.owner, request.constraint) if request.constraint else None
        left = self.max_context - len(request.prompt_T)
        if left < 0:
            rule = f"must be at most {self.max_context}, the capacity of the KV cache"
            raise UserError(f"prompt: {len(request.prompt_T)} tokens; {rule}")
        max_tokens = min(request.max_tokens, max(left, 1))  # a token beyond the context never enters the model
        scores = prompt_scores(request, self._cfg.vocab)
        parent = ActiveRequest(request, snapshot, max_tokens, self.base, scores=scores)
        if request.images and self._cfg.vision is not None:
            parent.rotary_shift = image_shift(self._cfg.vision, request.images)
        stops = frozenset(request.stop_tokens).union(request.constraint.ends if request.constraint else ())
        sequences = [
            ActiveSequence(
                parent,
                index,
                StopDetector(stops, request.stop_strings, decoder, request.prompt_T),
                UniformStream(request.seed, index),
                matcher=None if matcher is None else matcher.copy(),
            )
            for index in range(request.num_samples)
        ]
        return parent, sequences

    @cached_property
    def _decode_text(self) -> Decode:
        return load_decode(self._model_path)

    def _new_matcher(self, owner: str, constraint: Constraint) -> Matcher:
        """Create a matcher. Cached by owner, because the time of an answer must not reveal others' constraints."""
        return new_matcher(self._model_path, self._cfg.vocab, constraint)
