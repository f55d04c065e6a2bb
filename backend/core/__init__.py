"""Small parts that every room uses: errors, ids, time, retries, secrets, files, threads. They import no other room."""

__all__ = [
    "clock",
    "disk",
    "encryption",
    "environment",
    "errors",
    "fairness",
    "hosts",
    "ids",
    "joining",
    "log_levels",
    "plot",
    "prefect_access",
    "process_identity",
    "retry",
    "single_flight",
    "suggest",
    "threads",
    "tracing",
]
