"""Everything below Prefect and HTTP: journal (source of truth), pool, compute (JAX), store (files), wire (protobuf)."""
