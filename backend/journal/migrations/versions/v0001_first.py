"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema here."""
    op.create_table(
        "api_key",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("key_hash", sa.String(), nullable=False),
        sa.Column("prefix", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("project", sa.String(), nullable=False),
        sa.Column("admin", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_api_key"),
        sa.UniqueConstraint("key_hash", name="uq_api_key_key_hash"),
    )
    op.create_table(
        "audit_event",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("model_id", sa.String(), nullable=True),
        sa.Column("tinker_path", sa.String(), nullable=True),
        sa.Column("purpose", sa.String(), nullable=True),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit_event"),
    )
    op.create_index("ix_audit_event_at", "audit_event", ["at"], unique=False)
    op.create_index("ix_audit_event_owner_at", "audit_event", ["owner", "at"], unique=False)
    op.create_table(
        "base_model",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("card", sa.String(), nullable=False),
        sa.Column("registered_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("progress", sa.String(), nullable=True),
        sa.Column("warmth", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("name", name="pk_base_model"),
    )
    op.create_table(
        "checkpoint",
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("train_attn", sa.Boolean(), nullable=False),
        sa.Column("train_mlp", sa.Boolean(), nullable=False),
        sa.Column("train_unembed", sa.Boolean(), nullable=False),
        sa.Column("optimizer", sa.String(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("public", sa.Boolean(), nullable=False),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("attempt", sa.String(), nullable=False),
        sa.Column("purged_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("noted", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("path", name="pk_checkpoint"),
    )
    op.create_index(
        "ix_checkpoint_to_note",
        "checkpoint",
        ["path"],
        unique=False,
        sqlite_where=sa.text("deleted_at IS NULL AND NOT noted"),
        postgresql_where=sa.text("deleted_at IS NULL AND NOT noted"),
    )
    op.create_index(
        "ix_checkpoint_to_expire",
        "checkpoint",
        ["expires_at"],
        unique=False,
        sqlite_where=sa.text("deleted_at IS NULL AND expires_at IS NOT NULL"),
        postgresql_where=sa.text("deleted_at IS NULL AND expires_at IS NOT NULL"),
    )
    op.create_index(
        "ix_checkpoint_to_purge",
        "checkpoint",
        ["deleted_at"],
        unique=False,
        sqlite_where=sa.text("deleted_at IS NOT NULL AND purged_at IS NULL"),
        postgresql_where=sa.text("deleted_at IS NOT NULL AND purged_at IS NULL"),
    )
    op.create_table(
        "weights_share",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("token_hash", sa.String(), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("attempt", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_weights_share"),
        sa.UniqueConstraint("token_hash", name="uq_weights_share_token_hash"),
    )
    op.create_index("ix_weights_share_path", "weights_share", ["path"], unique=False)
    op.create_index("ix_checkpoint_owner_created_at", "checkpoint", ["owner", "created_at"], unique=False)
    op.create_index(
        "ix_checkpoint_stored_by_owner",
        "checkpoint",
        ["owner", "size_bytes", "deleted_at"],
        unique=False,
        sqlite_where=sa.text("deleted_at IS NULL"),
        postgresql_where=sa.text("deleted_at IS NULL"),
    )
    op.create_index(
        "ix_checkpoint_run_id_kind_created_at", "checkpoint", ["run_id", "kind", "created_at"], unique=False
    )
    op.create_table(
        "service_secret",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_service_secret"),
    )
    op.create_table(
        "session",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("key_id", sa.String(), nullable=False),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("sdk_version", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=True),
        sa.Column("display_name", sa.String(), nullable=True),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("detail", sa.String(), nullable=True),
        sa.Column("finish_reason", sa.String(), nullable=True),
        sa.Column("failure", sa.JSON(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_session"),
    )
    op.create_index("ix_session_owner_created_at", "session", ["owner", "created_at"], unique=False)
    op.create_index("ix_session_state_last_seen_at", "session", ["state", "last_seen_at"], unique=False)
    op.create_table(
        "usage_bucket",
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("bucket_start", sa.DateTime(timezone=True), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("quantity", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["session_id"], ["session.id"], name="fk_usage_bucket_session_id"),
        sa.PrimaryKeyConstraint("session_id", "bucket_start", "base_model", "kind", name="pk_usage_bucket"),
    )
    op.create_index("ix_usage_bucket_bucket_start", "usage_bucket", ["bucket_start"], unique=False)
    op.create_table(
        "model",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("train_attn", sa.Boolean(), nullable=False),
        sa.Column("train_mlp", sa.Boolean(), nullable=False),
        sa.Column("train_unembed", sa.Boolean(), nullable=False),
        sa.Column("optimizer", sa.String(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=True),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("detail", sa.String(), nullable=True),
        sa.Column("progress", sa.String(), nullable=True),
        sa.Column("held", sa.String(), nullable=True),
        sa.Column("next_seq", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_request_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["session_id"], ["session.id"], name="fk_model_session_id"),
        sa.PrimaryKeyConstraint("id", name="pk_model"),
    )
    op.create_index("ix_model_owner_state", "model", ["owner", "state"], unique=False)
    op.create_index("ix_model_session_id", "model", ["session_id"], unique=False)
    op.create_index("ix_model_state_base_model", "model", ["state", "base_model"], unique=False)
    op.create_table(
        "sampler",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("model_path", sa.String(), nullable=True),
        sa.Column("snapshot_id", sa.String(), nullable=True),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("detail", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_completion", sa.BigInteger(), nullable=False),
        sa.Column("clones", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["session_id"], ["session.id"], name="fk_sampler_session_id"),
        sa.PrimaryKeyConstraint("id", name="pk_sampler"),
    )
    op.create_index("ix_sampler_owner", "sampler", ["owner"], unique=False)
    op.create_index("ix_sampler_session_id", "sampler", ["session_id"], unique=False)
    op.create_index("ix_sampler_state_base_model", "sampler", ["state", "base_model"], unique=False)
    op.create_table(
        "request",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("model_id", sa.String(), nullable=True),
        sa.Column("sampler_id", sa.String(), nullable=True),
        sa.Column("seq_id", sa.BigInteger(), nullable=True),
        sa.Column("content_hash", sa.String(), nullable=False),
        sa.Column("payload_type", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("result_type", sa.String(), nullable=False),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("category", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("read_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("dropped_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("replays", sa.Boolean(), nullable=False),
        sa.Column("completion", sa.BigInteger(), nullable=True),
        sa.Column("waiting_tokens", sa.BigInteger(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("result", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["model_id"], ["model.id"], name="fk_request_model_id"),
        sa.ForeignKeyConstraint(["sampler_id"], ["sampler.id"], name="fk_request_sampler_id"),
        sa.ForeignKeyConstraint(["session_id"], ["session.id"], name="fk_request_session_id"),
        sa.PrimaryKeyConstraint("id", name="pk_request"),
        sa.UniqueConstraint("model_id", "seq_id", name="uq_request_model_id_seq_id"),
        sa.UniqueConstraint("sampler_id", "seq_id", name="uq_request_sampler_id_seq_id"),
    )
    op.create_index(
        "ix_request_pending_of_owner",
        "request",
        ["owner", "kind", "waiting_tokens", "state"],
        unique=False,
        sqlite_where=sa.text("state = 'pending'"),
        postgresql_where=sa.text("state = 'pending'"),
    )
    op.create_index(
        "ix_request_completions",
        "request",
        ["sampler_id", "completion", "seq_id"],
        unique=False,
        sqlite_where=sa.text("completion IS NOT NULL"),
        postgresql_where=sa.text("completion IS NOT NULL"),
    )
    op.create_index(
        "ix_request_finished_with_bytes",
        "request",
        ["finished_at"],
        unique=False,
        sqlite_where=sa.text("dropped_at IS NULL AND finished_at IS NOT NULL"),
        postgresql_where=sa.text("dropped_at IS NULL AND finished_at IS NOT NULL"),
    )
    op.create_index(
        "ix_request_pending_of_model",
        "request",
        ["model_id", "seq_id", "created_at"],
        unique=False,
        sqlite_where=sa.text("state = 'pending' AND model_id IS NOT NULL"),
        postgresql_where=sa.text("state = 'pending' AND model_id IS NOT NULL"),
    )
    op.create_index(
        "ix_request_pending_samples",
        "request",
        ["created_at", "sampler_id"],
        unique=False,
        sqlite_where=sa.text("state = 'pending' AND sampler_id IS NOT NULL"),
        postgresql_where=sa.text("state = 'pending' AND sampler_id IS NOT NULL"),
    )
    op.create_table(
        "custom_loss",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("seq_id", sa.Integer(), nullable=False),
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("definition", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["session_id"], ["session.id"], name="fk_custom_loss_session_id"),
        sa.PrimaryKeyConstraint("id", name="pk_custom_loss"),
        sa.UniqueConstraint("session_id", "seq_id", name="uq_custom_loss_session_id_seq_id"),
    )
    op.create_table(
        "stability_info",
        sa.Column("sequence_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("used_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tokens", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["session_id"], ["session.id"], name="fk_stability_info_session_id"),
        sa.PrimaryKeyConstraint("sequence_id", name="pk_stability_info"),
    )
    op.create_index("ix_stability_info_session_id", "stability_info", ["session_id"], unique=False)
    op.create_index("ix_stability_info_used_at", "stability_info", ["used_at"], unique=False)
    op.create_index(
        "ix_request_replays",
        "request",
        ["model_id", "seq_id"],
        unique=False,
        sqlite_where=sa.text("replays = 1"),
        postgresql_where=sa.text("replays"),
    )
    op.create_table(
        "recovery_snapshot",
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("snapshot_id", sa.String(), nullable=True),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["model_id"], ["model.id"], name="fk_recovery_snapshot_model_id"),
        sa.PrimaryKeyConstraint("path", name="pk_recovery_snapshot"),
        sa.UniqueConstraint("snapshot_id", name="uq_recovery_snapshot_snapshot_id"),
    )
    op.create_index("ix_recovery_snapshot_model_id_seq_id", "recovery_snapshot", ["model_id", "seq_id"], unique=False)
    op.create_table(
        "suspect",
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("deaths", sa.Integer(), nullable=False),
        sa.Column("crashes", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["request_id"], ["request.id"], name="fk_suspect_request_id"),
        sa.PrimaryKeyConstraint("request_id", name="pk_suspect"),
    )
    op.create_table(
        "process",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("holder", sa.String(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("began_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("beat_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_process"),
    )
