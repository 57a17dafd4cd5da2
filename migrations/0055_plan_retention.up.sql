-- When each stored policy is applied next, and by whom. A policy whose project has not changed since its tree was read is left alone: every
-- change of a checkpoint, a workspace or an operation has an audit record of its project.
CREATE TABLE retention_rounds (
    project_id     text COLLATE "C" NOT NULL,
    checkpoint_id  text COLLATE "C" NOT NULL,
    policy_version bigint NOT NULL,                          -- that was applied last
    audit_id       bigint,                                   -- the newest audit record before the tree was read; null: not known
    next_at        timestamptz NOT NULL DEFAULT now(),       -- not before
    due_at         timestamptz NOT NULL DEFAULT now(),       -- then also without any change
    claimed_until  timestamptz NOT NULL DEFAULT '-infinity', -- a controller works on it
    turn           bigint NOT NULL DEFAULT 1,                -- of the claim
    CONSTRAINT retention_rounds_pkey PRIMARY KEY (project_id, checkpoint_id),
    CONSTRAINT retention_rounds_policy_fk FOREIGN KEY (project_id, checkpoint_id) REFERENCES retention_policies (project_id, checkpoint_id) ON DELETE CASCADE
);
GRANT SELECT, INSERT, UPDATE, DELETE ON retention_rounds TO coppice_app;
ALTER TABLE retention_rounds ENABLE ROW LEVEL SECURITY;
ALTER TABLE retention_rounds FORCE ROW LEVEL SECURITY;
CREATE POLICY retention_rounds_tenant ON retention_rounds
    USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
    WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system');

-- What holds a source of living workspaces. A node may have a million forks that have ended.
CREATE INDEX workspaces_live_parent_idx ON workspaces (parent_checkpoint_id) WHERE ended_at IS NULL;
