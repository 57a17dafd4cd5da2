CREATE OR REPLACE FUNCTION coppice_audit_operations() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO audit_records (project_id, request_id, actor, source, action, object_id, before, after, outcome, operation_id)
        SELECT n.project_id, n.request_id, coalesce(nullif(n.actor, ''), 'controller'), n.source, coalesce(nullif(n.action, ''), n.kind),
            coalesce(n.workspace_id, n.checkpoint_id, n.id), '', n.state, 'accepted', n.id FROM new_rows n;
    ELSE
        INSERT INTO audit_records (project_id, request_id, actor, source, action, object_id, before, after, outcome, operation_id, detail)
        SELECT n.project_id, n.request_id, coalesce(nullif(n.actor, ''), 'controller'), n.source, coalesce(nullif(n.action, ''), n.kind),
            coalesce(n.workspace_id, n.checkpoint_id, n.id), o.state, n.state, n.state, n.id, CASE WHEN n.problem_code IS NOT NULL THEN jsonb_build_object('code', n.problem_code) END
        FROM new_rows n JOIN old_rows o ON o.id = n.id WHERE o.state <> n.state AND n.state IN ('succeeded', 'failed');
    END IF;
    RETURN NULL;
END
$$;
ALTER TABLE operations DROP COLUMN cancel_requested_at;
