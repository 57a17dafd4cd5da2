-- Who started an operation may want its end. The controller that works on it finds the mark and undoes what the operation has begun.
ALTER TABLE operations ADD COLUMN cancel_requested_at timestamptz;
CREATE INDEX operations_cancel_idx ON operations (lease_owner) WHERE cancel_requested_at IS NOT NULL AND state = 'running';

-- The record of a cancellation names who asked for it, not who started the operation.
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
        FROM new_rows n JOIN old_rows o ON o.id = n.id WHERE o.state <> n.state AND n.state IN ('succeeded', 'failed')
        UNION ALL
        SELECT n.project_id, coppice_origin(4), coppice_origin(1), coppice_origin(2), coppice_origin(3), n.id, n.state, n.state, 'accepted', n.id, NULL::jsonb
        FROM new_rows n JOIN old_rows o ON o.id = n.id WHERE o.cancel_requested_at IS NULL AND n.cancel_requested_at IS NOT NULL;
    END IF;
    RETURN NULL;
END
$$;
