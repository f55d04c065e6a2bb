"""The HTTP edge: it speaks the tinker wire protocol, and nothing else.

Handlers parse, authorise, make one journal call and answer. Work is done elsewhere: the engine finds it in the journal.
"""

from tinkerflow.api.app import create_app
from tinkerflow.api.serve import serve

__all__ = ["create_app", "serve"]
