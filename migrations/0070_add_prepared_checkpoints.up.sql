-- For which checkpoints machines are prepared, because a client has asked for them. A row stays when the ask has ended: it has the counts.
CREATE TABLE prepared_checkpoints (
    checkpoint_id      text COLLATE "C" CONSTRAINT prepared_checkpoints_pkey PRIMARY KEY,
    project_id         text COLLATE "C" NOT NULL CONSTRAINT prepared_checkpoints_project_fk REFERENCES projects (id),
    count              integer NOT NULL,           -- machines that should wait; 0: the ask has ended
    expires_at         timestamptz NOT NULL,
    version            bigint NOT NULL DEFAULT 1,  -- changes with each request
    runner_id          text COLLATE "C",           -- that was asked last
    moves              bigint NOT NULL DEFAULT 0,  -- how often another runner was asked
    most               integer NOT NULL DEFAULT 0, -- machines that this runner keeps for all
    ready              integer NOT NULL DEFAULT 0,
    memory_bytes       bigint NOT NULL DEFAULT 0,
    given_up           boolean NOT NULL DEFAULT false,
    hits               bigint NOT NULL DEFAULT 0,
    misses             bigint NOT NULL DEFAULT 0,
    wasted             bigint NOT NULL DEFAULT 0,
    taken_cpu_seconds  double precision NOT NULL DEFAULT 0,
    wasted_cpu_seconds double precision NOT NULL DEFAULT 0,
    instance           text NOT NULL DEFAULT '',   -- of the counts that were seen last; they are in the sums above
    seen_hits          bigint NOT NULL DEFAULT 0,
    seen_misses        bigint NOT NULL DEFAULT 0,
    seen_wasted        bigint NOT NULL DEFAULT 0,
    seen_taken_cpu     double precision NOT NULL DEFAULT 0,
    seen_wasted_cpu    double precision NOT NULL DEFAULT 0,
    CONSTRAINT prepared_checkpoints_count_check CHECK (count BETWEEN 0 AND 16),
    CONSTRAINT prepared_checkpoints_checkpoint_fk FOREIGN KEY (project_id, checkpoint_id) REFERENCES checkpoints (project_id, id) ON DELETE CASCADE
) WITH (fillfactor = 70);
CREATE INDEX prepared_checkpoints_asked_idx ON prepared_checkpoints (checkpoint_id) WHERE count > 0;
CREATE INDEX prepared_checkpoints_project_idx ON prepared_checkpoints (project_id) WHERE count > 0;
GRANT SELECT, INSERT, UPDATE ON prepared_checkpoints TO coppice_app;
ALTER TABLE prepared_checkpoints ENABLE ROW LEVEL SECURITY;
ALTER TABLE prepared_checkpoints FORCE ROW LEVEL SECURITY;
CREATE POLICY prepared_checkpoints_tenant ON prepared_checkpoints
    USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
    WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system');
CREATE TRIGGER prepared_checkpoints_begin_audit AFTER INSERT ON prepared_checkpoints FOR EACH ROW EXECUTE FUNCTION coppice_audit_row('checkpoint_id');
CREATE TRIGGER prepared_checkpoints_audit AFTER UPDATE ON prepared_checkpoints FOR EACH ROW WHEN (OLD.version IS DISTINCT FROM NEW.version) EXECUTE FUNCTION coppice_audit_row('checkpoint_id');
