"""The HTTP edge: the tinker wire protocol, OpenAI's and Anthropic's, and the console.

A handler parses, authorises, makes one journal call and answers. The engine finds the work in the journal.
"""

from tinkerflow.api.app import create_app
from tinkerflow.api.serve import serve

__all__ = ["create_app", "serve"]
