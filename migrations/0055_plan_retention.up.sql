-- When a controller applies each stored policy next. A policy waits until its project has changed since its tree was read: every change of a
-- checkpoint, a workspace or an operation has an audit record of its project. It waits no longer than until due_at.
CREATE TABLE retention_rounds (
    project_id     text COLLATE "C" NOT NULL,
    checkpoint_id  text COLLATE "C" NOT NULL,
    policy_version bigint NOT NULL,                          -- the version that was applied last
    audit_id       bigint,                                   -- the newest audit record before the tree was read; null: not known
    next_at        timestamptz NOT NULL DEFAULT now(),       -- the next round begins not before this time
    due_at         timestamptz NOT NULL DEFAULT now(),       -- from this time on, a round begins even without a change
    claimed_until  timestamptz NOT NULL DEFAULT '-infinity', -- until this time, a controller holds the policy
    turn           bigint NOT NULL DEFAULT 1,                -- number of the claim
    CONSTRAINT retention_rounds_pkey PRIMARY KEY (project_id, checkpoint_id),
    CONSTRAINT retention_rounds_policy_fk FOREIGN KEY (project_id, checkpoint_id) REFERENCES retention_policies (project_id, checkpoint_id) ON DELETE CASCADE
);
GRANT SELECT, INSERT, UPDATE, DELETE ON retention_rounds TO coppice_app;
ALTER TABLE retention_rounds ENABLE ROW LEVEL SECURITY;
ALTER TABLE retention_rounds FORCE ROW LEVEL SECURITY;
CREATE POLICY retention_rounds_tenant ON retention_rounds
    USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
    WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system');

-- This index finds the living workspaces that were forked from a checkpoint. The checkpoint may have a million forks that have ended.
CREATE INDEX workspaces_live_parent_idx ON workspaces (parent_checkpoint_id) WHERE ended_at IS NULL;
