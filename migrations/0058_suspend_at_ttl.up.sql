-- At the end of its time a workspace is terminated, or suspended. A resume gives the time anew, so it is kept. A suspension that fails is
-- tried again after a pause, which grows with the number of tries.
ALTER TABLE workspaces
    ADD COLUMN on_ttl text NOT NULL DEFAULT 'terminate',
    ADD COLUMN ttl_seconds bigint,
    ADD COLUMN suspend_next_at timestamptz,
    ADD COLUMN suspend_tries int NOT NULL DEFAULT 0,
    ADD CONSTRAINT workspaces_on_ttl_check CHECK (on_ttl IN ('suspend', 'terminate'));

-- A workspace that sleeps past the end of its time stays so: it is in neither index.
CREATE INDEX workspaces_overdue_idx ON workspaces ((greatest(suspend_next_at, expires_at))) WHERE on_ttl = 'suspend' AND state = 'ready' AND ended_at IS NULL;
DROP INDEX workspaces_expiry_idx;
CREATE INDEX workspaces_expiry_idx ON workspaces (expires_at) WHERE on_ttl = 'terminate' AND expires_at IS NOT NULL AND ended_at IS NULL;
