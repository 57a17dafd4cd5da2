-- What the operator decides for a project, besides the other quotas. Forwarded ports have a quota. A workspace that has ended forwards nothing, so its rows go with it.
ALTER TABLE quotas
    ADD COLUMN max_ports bigint NOT NULL DEFAULT 256,
    ADD CONSTRAINT quotas_ports_check CHECK (max_ports >= 0),
    -- whether sandboxes may have the egress policy allow-all
    ADD COLUMN allow_all_egress text NOT NULL DEFAULT 'default' CONSTRAINT quotas_allow_all_check CHECK (allow_all_egress IN ('default', 'allowed', 'denied'));

CREATE INDEX ports_project_idx ON ports (project_id);

-- The table forces row security on its owner. This runs for every project.
SELECT set_config('coppice.project_id', 'system', true), set_config('coppice.origin', 'migration  0039_bound_ports', true); -- who the audit log says it was
DELETE FROM ports p USING workspaces w WHERE w.id = p.workspace_id AND w.state IN ('terminated', 'failed', 'lost');

CREATE FUNCTION coppice_end_ports() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM ports WHERE workspace_id = NEW.id;
    RETURN NULL;
END
$$;
CREATE TRIGGER workspaces_end_ports AFTER UPDATE OF state ON workspaces FOR EACH ROW
    WHEN (NEW.state IN ('terminated', 'failed', 'lost') AND OLD.state NOT IN ('terminated', 'failed', 'lost')) EXECUTE FUNCTION coppice_end_ports();
