"""What executes operations: their order, their answers, recovery snapshots, and the restoring of a model.

How a model survives the worker group that holds it. What must hold: the weights, gradients and moments after a recovery
are those of an undisturbed run, bit for bit.

- The record. Every request becomes commands of its own, and micro-batches are a pure function of the request, the
  settings and the size of the devices. So the journal's order of seq_id is all that must be recorded.
- Recovery snapshots (state_transfers.py). After so many steps or seconds, and before a planned stop, the runner
  gives a slot to a snapshot: the export is a command in the model's order, and the file is written while the model
  trains. The journal learns of it after the commit, and only when every request before it is answered: a request is
  either in the snapshot or executed again, never both. Requests after the second newest snapshot stay in the journal,
  so a newest one that cannot be read costs a longer replay (restore.py).
- Saves (sequencer.py). No snapshot is recorded past a save that has not ended. So a replay passes the save's place in
  the order: there the state is copied again, and the save begins anew with that copy. Unnamed saves that were answered
  and not stored are found by the runner when it begins. (A model that somebody cancels in that moment is not replayed:
  if the engine dies too before the weights are written, they are lost.)
- Loading. A load (also one that creates a model) commits the state it loaded as a snapshot before it is answered, so no
  replay depends on a checkpoint that was deleted or overwritten since. A replay that must begin before the load takes
  the checkpoint only if it is still the one of then.
- Interruption. An operation whose worker group ends is not answered (operation.py): its effects ended with the group.
  The runner waits until the next group serves, restores the model there, and takes from the journal again. All commands
  of a model are bound to the group that it was restored in. A restarted engine does the same, from nothing.
- Failure. A model that cannot be restored is failed by name; other models never notice. A request that ends worker
  groups is failed by name, too.
"""
