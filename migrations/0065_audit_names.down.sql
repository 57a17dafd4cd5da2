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
