"""The first tables."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "v0001"
down_revision = None

_TYPES: dict[str, sa.types.TypeEngine[Any]] = {
    "bool": sa.Boolean(),
    "bytes": sa.LargeBinary(),
    "int": sa.Integer(),
    "json": sa.JSON(),
    "long": sa.BigInteger(),
    "str": sa.String(),
    "time": sa.DateTime(timezone=True),
}
# A table, its columns as `name:type`, and its unique constraints and indexes. `?`: may be NULL. `*`: of the primary
# key. `>table`: the id of a row there. An index with its own name may have a condition.
_TABLES = """
api_key
  id:str* key_hash:str prefix:str name:str project:str admin:bool created_at:time last_used_at:time? revoked_at:time?
  unique key_hash
audit_event
  id:int* owner:str at:time event:str model_id:str? tinker_path:str? purpose:str? details:json
  index at
  index owner at
base_model
  name:str* card:str registered_at:time generation:int progress:str? warmth:str?
checkpoint
  path:str* run_id:str kind:str name:str owner:str base_model:str rank:int
  train_attn:bool train_mlp:bool train_unembed:bool optimizer:str step:int size_bytes:long user_metadata:json
  created_at:time expires_at:time? public:bool deleted_at:time? attempt:str purged_at:time? noted:bool
  index to_note = path WHERE deleted_at IS NULL AND NOT noted
  index to_expire = expires_at WHERE deleted_at IS NULL AND expires_at IS NOT NULL
  index to_purge = deleted_at WHERE deleted_at IS NOT NULL AND purged_at IS NULL
  index owner created_at
  index stored_by_owner = owner size_bytes deleted_at WHERE deleted_at IS NULL
  index run_id kind created_at
weights_share
  id:str* token_hash:str path:str attempt:str created_at:time expires_at:time? revoked_at:time?
  unique token_hash
  index path
service_secret
  name:str* value:bytes created_at:time
session
  id:str* owner:str key_id:str tags:json user_metadata:json sdk_version:str project_id:str? display_name:str?
  state:str detail:str? finish_reason:str? failure:json? created_at:time last_seen_at:time ended_at:time?
  index owner created_at
  index state last_seen_at
usage_bucket
  session_id:str*>session bucket_start:time* base_model:str* kind:str* quantity:long
  index bucket_start
model
  id:str* session_id:str>session owner:str base_model:str rank:int train_attn:bool train_mlp:bool train_unembed:bool
  optimizer:str seed:long? user_metadata:json state:str detail:str? progress:str? held:str? next_seq:long step:int
  created_at:time last_request_at:time
  index owner state
  index session_id
  index state base_model
sampler
  id:str* session_id:str>session owner:str base_model:str model_path:str? snapshot_id:str? state:str detail:str?
  created_at:time last_completion:long clones:int
  index owner
  index session_id
  index state base_model
request
  id:str* kind:str owner:str session_id:str>session model_id:str?>model sampler_id:str?>sampler seq_id:long?
  content_hash:str payload_type:str state:str result_type:str error:str? category:str?
  created_at:time started_at:time? finished_at:time? read_at:time? dropped_at:time?
  replays:bool completion:long? waiting_tokens:long payload:bytes result:bytes?
  unique model_id seq_id
  unique sampler_id seq_id
  index pending_of_owner = owner kind waiting_tokens state WHERE state = 'pending'
  index completions = sampler_id completion seq_id WHERE completion IS NOT NULL
  index finished_with_bytes = finished_at WHERE dropped_at IS NULL AND finished_at IS NOT NULL
  index pending_of_model = model_id seq_id created_at WHERE state = 'pending' AND model_id IS NOT NULL
  index pending_samples = created_at sampler_id WHERE state = 'pending' AND sampler_id IS NOT NULL
  index replays = model_id seq_id WHERE replays
custom_loss
  id:str* session_id:str>session owner:str seq_id:int request_id:str name:str definition:str? created_at:time
  unique session_id seq_id
stability_info
  sequence_id:str* session_id:str>session used_at:time tokens:bytes logprobs:bytes
  index session_id
  index used_at
recovery_snapshot
  path:str* model_id:str>model seq_id:long snapshot_id:str? step:int size_bytes:long created_at:time
  unique snapshot_id
  index model_id seq_id
suspect
  request_id:str*>request deaths:int crashes:int
process
  name:str* holder:str epoch:int began_at:time beat_at:time
"""


def upgrade() -> None:
    for text in _TABLES.strip().replace("\n  ", "\t").splitlines():
        table, *lines = text.split("\t")
        columns = [word for line in lines for word in line.split() if ":" in word]
        _make(table, columns, [line for line in lines if ":" not in line])


def _make(table: str, columns: list[str], keys: list[str]) -> None:
    """Make a table, and its indexes. columns, keys: words and lines of _TABLES."""
    parts: list[sa.Column[Any] | sa.Constraint] = []
    primary, foreign = [], []
    for column in columns:
        name, _, rest = column.partition(":")
        kind, _, other = rest.partition(">")
        parts.append(sa.Column(name, _TYPES[kind.rstrip("?*")], nullable="?" in kind))
        primary += [name] if "*" in kind else []
        foreign += [(name, other)] if other else []
    parts += [sa.ForeignKeyConstraint([name], [f"{of}.id"], name=f"fk_{table}_{name}") for name, of in sorted(foreign)]
    parts.append(sa.PrimaryKeyConstraint(*primary, name=f"pk_{table}"))
    unique = [line.split()[1:] for line in keys if line.startswith("unique")]
    parts += [sa.UniqueConstraint(*names, name=f"uq_{table}_{'_'.join(names)}") for names in unique]
    op.create_table(table, *parts)
    for line in (line.removeprefix("index ") for line in keys if line.startswith("index")):
        wanted, _, where = line.partition(" WHERE ")
        own, _, listed = wanted.rpartition(" = ")
        names = listed.split()
        on_sqlite = "replays = 1" if where == "replays" else where
        only: Any = {"sqlite_where": sa.text(on_sqlite), "postgresql_where": sa.text(where)} if where else {}
        op.create_index(f"ix_{table}_{own or '_'.join(names)}", table, names, **only)
