"""What executes operations: their order, their answers, recovery snapshots, and the restoring of a model."""
