"""Small parts that every room uses: errors, ids, time, retries, secrets, files. They import no other room."""

__all__ = [
    "clock",
    "disk",
    "encryption",
    "errors",
    "fairness",
    "ids",
    "joining",
    "plot",
    "retry",
    "suggest",
    "tracing",
]
