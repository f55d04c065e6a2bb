"""The HTTP API: the tinker wire protocol, OpenAI's and Anthropic's APIs, and the console.

A handler parses, authorizes, makes one journal call and answers. The engine finds the work in the journal.
"""

from tinkerflow.api.app import create_app
from tinkerflow.api.serve import serve

__all__ = ["create_app", "serve"]
