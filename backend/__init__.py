"""Everything below Prefect and HTTP: journal (the truth), pool, compute (JAX), store (files), wire (protobuf)."""
