-- What workspaces may reach through the egress proxy, under deny-all (docs/adr/0035-rules-of-a-tree.md).

-- The owner is under row-level security too, unless it is a superuser; this lasts until the migration ends.
SELECT set_config('coppice.project_id', 'system', true);

ALTER TABLE workspaces
    ADD COLUMN egress_allow   text[] NOT NULL DEFAULT '{}', -- in the only form of egress/policy, sorted
    ADD COLUMN egress_version bigint NOT NULL DEFAULT 1,    -- one more with each change of egress_allow
    ADD COLUMN egress_applied bigint NOT NULL DEFAULT 0,    -- the version that the runner of the present sandbox is known to have
    ADD CONSTRAINT workspaces_egress_check CHECK (cardinality(egress_allow) <= 256 AND (egress_policy = 'deny-all' OR egress_allow = '{}')),
    ADD CONSTRAINT workspaces_egress_version_check CHECK (egress_version >= 1 AND egress_applied BETWEEN 0 AND egress_version);
-- Those of before have none, which is what their runners do.
UPDATE workspaces SET egress_applied = 1;
CREATE INDEX workspaces_egress_pending_idx ON workspaces (id) WHERE egress_applied < egress_version AND state IN ('ready', 'checkpointing');

CREATE OR REPLACE FUNCTION coppice_audit_workspaces() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    who text := coppice_origin(1); origin text := coppice_origin(2); request text := coppice_origin(4);
    what text := coppice_origin(3); op text := coppice_origin(5);
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO audit_records (project_id, request_id, actor, source, action, object_id, before, after, outcome, operation_id, detail)
        SELECT n.project_id, request, who, origin, what, n.id, '', n.state, 'succeeded', op,
            CASE WHEN n.egress_allow <> '{}' THEN jsonb_build_object('egress_allow', n.egress_allow) END
        FROM new_rows n;
    ELSE
        INSERT INTO audit_records (project_id, request_id, actor, source, action, object_id, before, after, outcome, operation_id, detail)
        SELECT n.project_id, request, who, origin, what, n.id, o.state, n.state, CASE WHEN n.state IN ('failed', 'lost') AND o.state <> n.state THEN 'failed' ELSE 'succeeded' END, op,
            CASE WHEN n.egress_version <> o.egress_version THEN jsonb_build_object('version', n.version, 'labels', n.labels, 'expires_at', n.expires_at,
                    'egress_version', n.egress_version, 'egress_allow', n.egress_allow, 'egress_before', o.egress_allow)
                WHEN n.version <> o.version THEN jsonb_build_object('version', n.version, 'labels', n.labels, 'expires_at', n.expires_at)
                WHEN n.epoch <> o.epoch THEN jsonb_build_object('epoch', n.epoch, 'checkpoint_id', n.checkpoint_id)
                WHEN n.state IN ('failed', 'lost') THEN jsonb_build_object('code', n.failure_code) END
        FROM new_rows n JOIN old_rows o ON o.id = n.id WHERE (n.state, n.version, n.epoch, n.egress_version) IS DISTINCT FROM (o.state, o.version, o.epoch, o.egress_version);
    END IF;
    RETURN NULL;
END
$$;
