-- Rows of sessions end with the machine that they ran in, and a workspace and a project have so many at most.
GRANT DELETE ON sessions TO coppice_app;
CREATE INDEX sessions_workspace_idx ON sessions (workspace_id, sandbox_id);

-- How many rows each project has, as a chore counts them now and then: exact counts at each insert would make all the
-- programs that a project starts wait for one another.
CREATE TABLE session_counts (
    project_id text COLLATE "C" CONSTRAINT session_counts_pkey PRIMARY KEY,
    rows       bigint NOT NULL,
    counted_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT session_counts_project_fk FOREIGN KEY (project_id) REFERENCES projects (id) ON DELETE CASCADE
);
GRANT SELECT, INSERT, UPDATE, DELETE ON session_counts TO coppice_app;
ALTER TABLE session_counts ENABLE ROW LEVEL SECURITY;
ALTER TABLE session_counts FORCE ROW LEVEL SECURITY;
CREATE POLICY session_counts_tenant ON session_counts
    USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
    WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system');
