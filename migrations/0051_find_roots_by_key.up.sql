-- The events of a statement look up the root of each row's node by its key. The look-up was written with coalesce before.
-- PostgreSQL takes an expression of that kind for one that could tell rows to somebody who may not see them. Under row-level
-- security it applies such a condition only after the policy, and so it read all checkpoints for each row. It knows CASE to
-- be safe, and uses the key.
CREATE OR REPLACE FUNCTION coppice_workspace_events() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO events (project_id, type, workspace_id, checkpoint_id, root_id, data)
        SELECT n.project_id, 'workspace.' || n.state, n.id, coalesce(n.checkpoint_id, n.parent_checkpoint_id),
            (SELECT c.root_id FROM checkpoints c WHERE c.id = CASE WHEN n.checkpoint_id IS NULL THEN n.parent_checkpoint_id ELSE n.checkpoint_id END),
            jsonb_build_object('name', n.name, 'epoch', n.epoch)
        FROM new_rows n ORDER BY n.id;
    ELSE
        INSERT INTO events (project_id, type, workspace_id, checkpoint_id, root_id, data)
        SELECT n.project_id, 'workspace.' || n.state, n.id, coalesce(n.checkpoint_id, n.parent_checkpoint_id),
            (SELECT c.root_id FROM checkpoints c WHERE c.id = CASE WHEN n.checkpoint_id IS NULL THEN n.parent_checkpoint_id ELSE n.checkpoint_id END),
            jsonb_strip_nulls(jsonb_build_object('name', n.name, 'epoch', n.epoch, 'from', o.state, 'code', n.failure_code, 'message', n.failure_message))
        FROM new_rows n JOIN old_rows o ON o.id = n.id WHERE o.state <> n.state ORDER BY n.id;
    END IF;
    RETURN NULL;
END
$$;

CREATE OR REPLACE FUNCTION coppice_operation_events() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO events (project_id, type, workspace_id, checkpoint_id, root_id, operation_id, data)
    SELECT n.project_id, 'operation.' || n.state, n.workspace_id, n.checkpoint_id,
        coalesce((SELECT c.root_id FROM checkpoints c WHERE c.id = n.checkpoint_id),
            (SELECT c.root_id FROM workspaces w JOIN checkpoints c ON c.id = CASE WHEN w.checkpoint_id IS NULL THEN w.parent_checkpoint_id ELSE w.checkpoint_id END WHERE w.id = n.workspace_id)),
        n.id, jsonb_strip_nulls(jsonb_build_object('kind', n.kind, 'from', o.state, 'code', n.problem_code, 'message', n.problem_message))
    FROM new_rows n JOIN old_rows o ON o.id = n.id WHERE n.state IN ('succeeded', 'failed') AND o.state <> n.state ORDER BY n.id;
    RETURN NULL;
END
$$;

CREATE OR REPLACE FUNCTION coppice_stall_events() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO events (project_id, type, workspace_id, checkpoint_id, root_id, data)
    SELECT w.project_id, CASE WHEN n.stalled_at IS NULL THEN 'workspace.unstalled' ELSE 'workspace.stalled' END, w.id,
        coalesce(w.checkpoint_id, w.parent_checkpoint_id),
        (SELECT c.root_id FROM checkpoints c WHERE c.id = CASE WHEN w.checkpoint_id IS NULL THEN w.parent_checkpoint_id ELSE w.checkpoint_id END),
        jsonb_strip_nulls(jsonb_build_object('name', w.name, 'epoch', w.epoch, 'code', n.stalled_code, 'message', n.stalled_message))
    FROM new_rows n JOIN old_rows o ON o.id = n.id JOIN workspaces w ON w.id = n.workspace_id
    WHERE o.stalled_at IS DISTINCT FROM n.stalled_at ORDER BY w.id;
    RETURN NULL;
END
$$;
