-- A workspace that was to be suspended is terminated at the end of its time, as all were before.
ALTER TABLE workspaces DROP COLUMN on_ttl, DROP COLUMN ttl_seconds;
