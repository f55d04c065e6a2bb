"""The journal's rows of checkpoints, made from the store's commits: when they are saved, and when the rows are lost."""

from __future__ import annotations

from dataclasses import dataclass

from tinkerflow.backend.errors import StoreError
from tinkerflow.backend.journal import CheckpointKind, CheckpointSaved, Journal
from tinkerflow.backend.store import RECOVERY, CheckpointPath, Saved, Store


@dataclass(frozen=True)
class Rebuilt:
    """What became of the checkpoints in a store. damaged: sentences that name those whose commit cannot be read."""

    restored: tuple[str, ...]
    known: int
    damaged: tuple[str, ...]


def row_of(saved: Saved) -> CheckpointSaved:
    """The row that goes with a commit."""
    return CheckpointSaved(
        path=saved.path,
        run_id=saved.run_id,
        kind=CheckpointKind(saved.kind),
        name=saved.name,
        owner=saved.meta.owner,
        base_model=saved.meta.base_model,
        rank=saved.spec.rank,
        train_attn=saved.spec.train_attn,
        train_mlp=saved.spec.train_mlp,
        train_unembed=saved.spec.train_unembed,
        expert_rank=saved.spec.expert_rank,
        step=saved.step,
        size_bytes=saved.size_bytes,
        user_metadata=saved.meta.user_metadata,
        expires_at=saved.meta.expires_at,
        optimizer=saved.optimizer,
        attempt=saved.attempt,
        created_at=saved.created_at,
    )


def rebuild(journal: Journal, store: Store) -> Rebuilt:
    """Make the journal know every checkpoint that is committed in the store; what it knows already stays as it is.

    Repeated after a crash it goes on. Recovery snapshots are left out: without the requests since, nothing can be
    continued from them.
    """
    restored, known, damaged = [], 0, []
    for path in store.paths():
        if CheckpointPath.parse(path).kind == RECOVERY:
            continue
        try:
            saved = store.find(path)
        except StoreError as error:
            damaged.append(error.message)
            continue
        if saved is None:
            continue
        if journal.imports.restore(row_of(saved), saved.meta.public, saved.meta.run_metadata):
            restored.append(path)
        else:
            known += 1
    return Rebuilt(tuple(restored), known, tuple(damaged))
