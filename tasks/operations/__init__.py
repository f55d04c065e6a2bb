"""One module for each Tinker operation, under its wire name: from a pending request to its outcome."""

from tinkerflow.backend.journal import Kind
from tinkerflow.tasks.execution.operation import OperationTable
from tinkerflow.tasks.operations import create_model, forward_backward, load_weights, optim_step, save_weights, unload

CHANGES = load_weights.CHANGES  # the operations that change a model
OPERATIONS = OperationTable(
    {
        Kind.CREATE_MODEL: create_model.execute,
        Kind.LOAD_MODEL: load_weights.execute,
        Kind.FORWARD: forward_backward.execute,
        Kind.FORWARD_BACKWARD: forward_backward.execute,
        Kind.OPTIM_STEP: optim_step.execute,
        Kind.SAVE_WEIGHTS: save_weights.save_weights,
        Kind.LOAD_WEIGHTS: load_weights.execute,
        Kind.SAVE_FOR_SAMPLER: save_weights.save_weights_for_sampler,
        Kind.SAVE_EXTERNAL: save_weights.save_weights_external,
        Kind.UNLOAD: unload.execute,
    },
    save_weights.copy_state,
)
SAVES = frozenset((Kind.SAVE_WEIGHTS, Kind.SAVE_FOR_SAMPLER, Kind.SAVE_EXTERNAL))  # these may be detached
