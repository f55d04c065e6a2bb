"""Saves, overwrites, deletions and sweeps on a faulty store, compared with a dict of the expected checkpoints.

Hypothesis chooses the actions and the faults. After every step another process reads the store. It must find all
acknowledged checkpoints complete. A failed action may have had its effect or not, and this must not change later.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal, get_args

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.manual_clock import ManualClock
from tests.store.faulty_fs import Crash, Fault, FaultyFileSystem, Wrong

from tinkerflow.backend.core.errors import ConflictError, NotFoundError, StoreError
from tinkerflow.backend.spec.commands import AdapterState, LoraSpec
from tinkerflow.backend.store import CheckpointMeta, CheckpointPath, Store
from tinkerflow.backend.store.objects import ObjectBlobs

RUNS, NAMES, KINDS = ("run-a", "run-b"), ("x",), ("weights", "recovery")
LATER = datetime(2027, 1, 1, tzinfo=UTC)
DAMAGED = "damaged"
FILES = ("adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "commit.json")


@dataclass(frozen=True)
class Kept:
    """The state under a path, identified by its fill."""

    fill: int
    public: bool = False


Candidate = Kept | Literal["damaged"] | None


def state(fill: int) -> AdapterState:
    weights = {f"base_model.model.lm_head.lora_{m}.weight": np.full((2, 2), fill, np.float32) for m in "AB"}
    return AdapterState(LoraSpec(2), fill, weights, {"mu": np.full(2, -fill, np.float32)})


LOST: list[Wrong] = ["crash before", "crash after", "503 before", "503 after", "timeout after"]  # nothing is cut
FAULTS = st.one_of(
    st.builds(Fault, st.sampled_from(["create", "replace"]), st.sampled_from(FILES), st.sampled_from(get_args(Wrong))),
    st.builds(Fault, st.sampled_from(["remove", "read"]), st.sampled_from(FILES), st.sampled_from(LOST)),
)
PATHS = st.builds(CheckpointPath, st.sampled_from(RUNS), st.sampled_from(KINDS), st.sampled_from(NAMES))
PLANS = st.lists(FAULTS, max_size=2)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.fs = FaultyFileSystem()
        self.store = Store("faulty://", ObjectBlobs(self.fs, "root", guard=nullcontext), ManualClock())
        self.model: dict[CheckpointPath, set[Candidate]] = {}
        self.fill = 0
        self.failed: tuple[CheckpointPath, int, bool] | None = None

    def of(self, path: CheckpointPath) -> set[Candidate]:
        return self.model.get(path, {None})

    # -------------------------------------------------------------- actions
    @rule(path=PATHS, overwrite=st.booleans(), planned=PLANS)
    def save(self, path: CheckpointPath, overwrite: bool, planned: list[Fault]) -> None:
        self.fs.faults += planned
        self.fill += 1
        self._save(path, self.fill, overwrite)

    @rule()
    def save_again(self) -> None:
        """Execute an interrupted request again under its own id."""
        if self.failed is not None:
            self._save(*self.failed)

    def _save(self, path: CheckpointPath, fill: int, overwrite: bool) -> None:
        before, self.failed = self.of(path), (path, fill, overwrite)
        meta = CheckpointMeta("tiny", "me", request_id=f"req-{fill}")
        try:
            saved = self.store.save(path.run_id, path.kind, path.name, state(fill), meta, overwrite=overwrite)
        except ConflictError:
            assert not overwrite
            self.model[path] = {one for one in before if not isinstance(one, Kept) or one.fill != fill} - {None}
            assert self.model[path]
            self.failed = None
        except (StoreError, Crash) as error:
            self._failed(path, before | {Kept(fill)}, error)
        else:
            assert saved.step == fill
            mine = {one for one in before if isinstance(one, Kept) and one.fill == fill}
            self.model[path] = mine or {Kept(fill)}
            self.failed = None

    @rule(path=PATHS, planned=PLANS)
    def delete(self, path: CheckpointPath, planned: list[Fault]) -> None:
        self.fs.faults += planned
        before = self.of(path)
        try:
            found = self.store.delete(str(path))
        except (StoreError, Crash) as error:
            self._failed(path, before | {None}, error)
        else:
            assert found or None in before
            self.model[path] = {None}

    @rule(path=PATHS, public=st.booleans(), planned=PLANS)
    def amend(self, path: CheckpointPath, public: bool, planned: list[Fault]) -> None:
        self.fs.faults += planned
        before = self.of(path)
        attempt = self._attempt(path)
        after = {replace(one, public=public) if isinstance(one, Kept) else one for one in before}
        try:
            amended = self.store.amend(str(path), attempt, public=public, expires_at=None)
        except (StoreError, Crash) as error:
            self._failed(path, before | after, error)
        else:
            self.model[path] = {one for one in after if one == DAMAGED or isinstance(one, Kept) == amended}

    @rule(source=PATHS, path=PATHS)
    def copy(self, source: CheckpointPath, path: CheckpointPath) -> None:
        path = replace(path, kind=source.kind, name=source.name)
        if path.run_id == source.run_id:
            return
        before, copied = self.of(path), {Kept(one.fill) for one in self.of(source) if isinstance(one, Kept)}
        try:
            saved = self.store.copy(str(source), path.run_id, owner="you", expires_at=None, request_id="")
        except NotFoundError:
            assert None in self.of(source)
        except ConflictError:
            self.model[path] = {one for one in before if one is not None}
        except (StoreError, Crash) as error:
            self._failed(path, before | copied, error, source)
        else:
            self.model[path] = {Kept(saved.step)}
            assert self.model[path] <= copied

    @rule(path=PATHS)
    def load(self, path: CheckpointPath) -> None:
        """A reader with faults gets the correct state or an error."""
        try:
            found, _ = self.store.load(str(path))
        except NotFoundError:
            assert None in self.of(path)
        except (StoreError, Crash) as error:
            self._failed(path, self.of(path), error)
        else:
            assert found.step in {one.fill for one in self.of(path) if isinstance(one, Kept)}

    @rule()
    def sweep(self) -> None:
        try:
            for orphan in self.store.upkeep.orphans(LATER):
                self.store.upkeep.remove_orphan(orphan)
        except (StoreError, Crash):
            self._restart()

    @rule(path=PATHS, file=st.sampled_from(FILES), cut=st.booleans())
    def rot(self, path: CheckpointPath, file: str, cut: bool) -> None:
        """Stored bytes change. The checkpoint is then refused with its name until it is deleted."""
        self._restart()
        attempt = self._attempt(path)
        key = f"root/{path.commit}" if file == "commit.json" else f"root/{path.attempt(attempt)}/{file}"
        if not attempt or DAMAGED in self.of(path):  # a second change could undo the first
            return
        data = self.fs.objects[key]
        self.fs.objects[key] = data[:-2] if cut else bytes([*data[:-9], data[-9] ^ 1, *data[-8:]])
        self.model[path] = {DAMAGED}

    def _failed(
        self,
        path: CheckpointPath,
        candidates: set[Candidate],
        error: BaseException,
        source: CheckpointPath | None = None,
    ) -> None:
        """Record that `candidates` are possible. A truncated commit of a killed process is damage, and stays."""
        if isinstance(error, StoreError):
            assert self.fs.met or DAMAGED in self.of(path) | self.of(source or path), f"no fault was met: {error}"
            assert str(source or path) in str(error) or str(path) in str(error) or "faulty://" in str(error)
        cut = [met.wrong for met in self.fs.met if "cut" in met.wrong and met.where == "commit.json"]
        if "crash, cut" in cut or (cut and len(self.fs.met) > 1):  # undoing the change met the second fault
            candidates = candidates | {DAMAGED}
        self.model[path] = candidates
        self._restart()

    def _restart(self) -> None:
        self.fs.restart()
        self.fs.met.clear()

    # -------------------------------------------------------------- invariants
    @invariant()
    def another_process_reads_the_expected_state(self) -> None:
        planned, self.fs.faults = self.fs.faults, []
        found = {}
        for path, candidates in self.model.items():
            now = self._look(path)
            assert now in candidates, f"{path}: {now} is there; possible was {candidates}"
            self.model[path] = {now}
            found[path] = now
        listed = {saved.path for saved in self.store.checkpoints()}
        whole = {str(path) for path, now in found.items() if isinstance(now, Kept) and path.kind == "weights"}
        assert whole <= listed <= {str(path) for path, now in found.items() if now is not None}
        self.fs.faults = planned

    def _look(self, path: CheckpointPath) -> Candidate:
        try:
            loaded, saved = self.store.load(str(path))
        except NotFoundError:
            assert self.store.upkeep.problems(str(path)) == []
            return None
        except StoreError as error:
            assert str(path) in str(error)
            assert self.store.upkeep.problems(str(path)) != []
            return DAMAGED
        wanted = state(saved.step)
        for ours, theirs in ((loaded.weights, wanted.weights), (loaded.moments, wanted.moments)):
            assert {name: array.tobytes() for name, array in ours.items()} == {
                name: array.tobytes() for name, array in theirs.items()
            }
        assert self.store.upkeep.problems(str(path)) == []
        return Kept(saved.step, saved.meta.public)

    def _attempt(self, path: CheckpointPath) -> str:
        planned, self.fs.faults = self.fs.faults, []
        try:
            saved = self.store.find(str(path))
        except StoreError:
            return ""
        finally:
            self.fs.faults = planned
        return saved.attempt if saved else ""

    def teardown(self) -> None:
        """After a last sweep the store contains only files that commits name."""
        self._restart()
        for orphan in self.store.upkeep.orphans(LATER):
            assert self.store.upkeep.remove_orphan(orphan)
        named = set()
        damaged = [path for path, candidates in self.model.items() if DAMAGED in candidates]
        for path in map(CheckpointPath.parse, self.store.upkeep.paths()):
            if path not in damaged and (saved := self.store.find(str(path))) is not None:
                named |= {path.commit, *(f"{path.attempt(saved.attempt)}/{file}" for file in saved.files)}
        beside = tuple(f"root/{path.folder}/" for path in damaged)
        assert {key for key in self.fs.objects if not key.startswith(beside)} == {f"root/{key}" for key in named}


StoreMachine.TestCase.settings = settings(
    max_examples=50,
    stateful_step_count=25,
    derandomize=True,
    phases=[Phase.generate],  # shrinking takes minutes; a failure prints its steps
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_acknowledged_changes_survive_faults = StoreMachine.TestCase
