"""The console: pages for people at `/`, which the API renders from the journal.

`pages/` holds one module with routes for each subject. `templates/` and `static/` hold our own HTML, one style sheet
and one script; nothing is loaded from elsewhere. `visit.py` authenticates visitors; `render.py` and `charts.py` draw.
"""

from tinkerflow.api.console.pages import routers

__all__ = ["routers"]
