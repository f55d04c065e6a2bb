"""Prefect observes: operations start immediately and are mirrored as flow and task runs.

Cancel, Suspend, Resume and Retry act on runs. The journal holds the state of all work, and does not depend on Prefect.

Prefect's releases from 3.8.8 to 3.9 are supported. Four uses of Prefect are outside its public client API:

- `prefect.server.api.server.create_app` (server_process.py). Prefect's command line starts the same application, but
  cannot put guard.py in front of it or listen on a socket that is already open.
- `PrefectClient.request` for requests that the client has no method for: `PATCH /artifacts/{id}`,
  `PATCH /task_runs/{id}` (flow_run.py), and `POST /events` (connection.py). Prefect's own events need a websocket.
- The events `prefect.asset.…`, and the static methods of `prefect.context.AssetContext` that make their resources
  (assets.py). Prefect's `materialize` uses them for tasks that Prefect runs itself.
- The key `prefect-password` in the browser's local storage (guard.py), where Prefect's pages store the credential.
"""
