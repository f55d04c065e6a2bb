"""Tinkerflow: a self-hosted fine-tuning service for language models.

All our code is imported as `tinkerflow.…`. Its parts are `api`, `flows`, `tasks`, `backend` and `deployments`.
Importing this package loads none of them. `tinkerflow.local` serves a base model for a block, and gives a client of it.
"""

TYPE_CHECKING = False  # as typing's, which is not loaded for it
if TYPE_CHECKING:
    from tinkerflow.deployments.local import local as local

__version__ = "0.2.0"


def __getattr__(name: str) -> object:
    if name == "local":
        from tinkerflow.deployments.local import local

        return local
    raise AttributeError(f"module 'tinkerflow' has no attribute {name!r}")
