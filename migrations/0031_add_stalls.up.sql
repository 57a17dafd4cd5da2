-- Sandboxes that stand still until the store gives what they wait for (docs/adr/0028-a-process-that-brings-memory.md), as their runner says.
ALTER TABLE sandboxes ADD COLUMN stalled_at timestamptz, -- NULL: it does not
    ADD COLUMN stalled_code text,
    ADD COLUMN stalled_message text,
    ADD CONSTRAINT sandboxes_stalled_check CHECK ((stalled_at IS NULL) = (stalled_code IS NULL) AND (stalled_at IS NULL) = (stalled_message IS NULL));

-- Who changes this has locked the workspace: events of one object follow the order of its changes.
CREATE FUNCTION coppice_stall_events() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO events (project_id, type, workspace_id, checkpoint_id, root_id, data)
    SELECT w.project_id, CASE WHEN n.stalled_at IS NULL THEN 'workspace.unstalled' ELSE 'workspace.stalled' END, w.id,
        coalesce(w.checkpoint_id, w.parent_checkpoint_id),
        (SELECT c.root_id FROM checkpoints c WHERE c.id = coalesce(w.checkpoint_id, w.parent_checkpoint_id)),
        jsonb_strip_nulls(jsonb_build_object('name', w.name, 'epoch', w.epoch, 'code', n.stalled_code, 'message', n.stalled_message))
    FROM new_rows n JOIN old_rows o ON o.id = n.id JOIN workspaces w ON w.id = n.workspace_id
    WHERE o.stalled_at IS DISTINCT FROM n.stalled_at ORDER BY w.id;
    RETURN NULL;
END
$$;
CREATE TRIGGER sandboxes_stall_events AFTER UPDATE ON sandboxes REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION coppice_stall_events();
