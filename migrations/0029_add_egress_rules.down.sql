SELECT set_config('coppice.project_id', 'system', true);
CREATE OR REPLACE FUNCTION coppice_audit_workspaces() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    who text := coppice_origin(1); origin text := coppice_origin(2); request text := coppice_origin(4);
    what text := coppice_origin(3); op text := coppice_origin(5);
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO audit_records (project_id, request_id, actor, source, action, object_id, before, after, outcome, operation_id)
        SELECT n.project_id, request, who, origin, what, n.id, '', n.state, 'succeeded', op FROM new_rows n;
    ELSE
        INSERT INTO audit_records (project_id, request_id, actor, source, action, object_id, before, after, outcome, operation_id, detail)
        SELECT n.project_id, request, who, origin, what, n.id, o.state, n.state, CASE WHEN n.state IN ('failed', 'lost') AND o.state <> n.state THEN 'failed' ELSE 'succeeded' END, op,
            CASE WHEN n.version <> o.version THEN jsonb_build_object('version', n.version, 'labels', n.labels, 'expires_at', n.expires_at)
                WHEN n.epoch <> o.epoch THEN jsonb_build_object('epoch', n.epoch, 'checkpoint_id', n.checkpoint_id)
                WHEN n.state IN ('failed', 'lost') THEN jsonb_build_object('code', n.failure_code) END
        FROM new_rows n JOIN old_rows o ON o.id = n.id WHERE (n.state, n.version, n.epoch) IS DISTINCT FROM (o.state, o.version, o.epoch);
    END IF;
    RETURN NULL;
END
$$;
DROP INDEX workspaces_egress_pending_idx;
ALTER TABLE workspaces
    DROP CONSTRAINT workspaces_egress_check,
    DROP CONSTRAINT workspaces_egress_version_check,
    DROP COLUMN egress_allow,
    DROP COLUMN egress_version,
    DROP COLUMN egress_applied;
