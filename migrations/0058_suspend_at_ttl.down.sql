-- A workspace that was to be suspended is terminated at the end of its time, as all were before. The indexes on these columns go with them.
ALTER TABLE workspaces DROP COLUMN on_ttl, DROP COLUMN ttl_seconds, DROP COLUMN suspend_next_at, DROP COLUMN suspend_tries;
CREATE INDEX workspaces_expiry_idx ON workspaces (expires_at) WHERE expires_at IS NOT NULL AND ended_at IS NULL;
