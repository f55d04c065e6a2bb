"""The execution of operations: their order, their answers, recovery snapshots, and the restoration of a model.

A model survives the end of its worker group. After a recovery, its weights, gradients and moments are bit-identical to
those of an undisturbed run.

- The record. Every request becomes separate commands, and micro-batches are a pure function of the request, the
  settings and the size of the devices. The order of seq_id in the journal therefore determines the state of a model.
- Recovery snapshots (state_transfers.py). The runner gives a slot to a snapshot after some steps or seconds, and before
  a planned stop. The export is a command in the model's order, and the file is written while the model trains. The
  snapshot is recorded in the journal after its commit, when every request before it is answered. A request is either
  in the snapshot or executed again, never both. The journal keeps the requests after the second newest snapshot. If
  the newest snapshot cannot be read, the replay is longer (restore.py).
- Saves (sequencer.py). No snapshot is recorded past a save that has not ended. A replay therefore passes the save's
  place in the order, copies the state there again, and the save starts over with that copy. When a runner begins, it
  looks for unnamed saves that were answered but not stored. (A model that is cancelled at that moment is not replayed.
  Its weights are lost if the engine also dies before they are written.)
- Loading. A load, or the creation of a model from a checkpoint, commits the loaded state as a snapshot before it is
  answered. No replay then depends on a checkpoint that was deleted or overwritten later. A replay that must begin
  before the load uses the checkpoint only if it was not replaced.
- Interruption. An operation whose worker group ends is not answered (operation.py), because its effects ended with the
  group. The runner waits until the next group serves, restores the model there, and reads the journal again. All
  commands of a model are bound to the group in which it was restored. A restarted engine does the same.
- Failure. A model that cannot be restored fails with an error that names it, and other models are not affected. A
  request that repeatedly ends worker groups also fails with such an error.
"""
