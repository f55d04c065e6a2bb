"""Everything below Prefect and HTTP: the journal (source of truth), the pool, JAX, the store and the wire protocol."""
