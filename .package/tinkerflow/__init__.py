"""Tinkerflow: a self-hosted fine-tuning service for language models.

All our code is imported as `tinkerflow.…`. Its parts are `api`, `flows`, `tasks`, `backend` and `deployments`.
Importing this package loads none of them.
"""

__version__ = "0.2.0"
