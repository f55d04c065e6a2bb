"""The console: pages for people at `/`, made by the API out of the journal.

`pages/` holds one module for each subject, with its routes. `templates/` and `static/` are HTML, one style sheet and
one script of our own; nothing is loaded from elsewhere. `visit.py` says who looks, `render.py` and `charts.py` draw.
"""

from tinkerflow.api.console.pages import routers

__all__ = ["routers"]
