-- Projects that come and go, keys that are made of keys, and quotas that admissions keep to.

-- The owner is under row-level security too, unless it is a superuser; this lasts until the migration ends.
SELECT set_config('coppice.project_id', 'system', true);

-- A deleted project keeps its row, because what it left behind refers to it; its name is free again.
ALTER TABLE projects ADD COLUMN deleted_at timestamptz;
ALTER TABLE projects DROP CONSTRAINT projects_name_key;
CREATE UNIQUE INDEX projects_live_name_key ON projects (name) WHERE deleted_at IS NULL;

ALTER TABLE api_keys
    ADD COLUMN parent_id    text COLLATE "C" CONSTRAINT api_keys_parent_fk REFERENCES api_keys (id), -- the key that made it: revoking that revokes it
    ADD COLUMN last_used_at timestamptz; -- to within seconds
CREATE INDEX api_keys_project_idx ON api_keys (project_id, id);
CREATE INDEX api_keys_parent_idx ON api_keys (parent_id) WHERE parent_id IS NOT NULL;

-- Who asked for the token: an attachment ends with the key.
ALTER TABLE attach_tokens ADD COLUMN key_id text COLLATE "C" CONSTRAINT attach_tokens_key_fk REFERENCES api_keys (id);

-- What a project may have, and what it has. An admission adds to the counts as the last thing that it does, so that the row
-- is locked for the length of a commit and two admissions cannot both take the last place. The counts of workspaces and
-- forks are upper bounds: nothing is taken off when one ends, so that an end locks nothing. An admission that goes over a
-- limit by them counts anew, under the same lock, and decides by that.
CREATE TABLE quotas (
    project_id           text COLLATE "C" CONSTRAINT quotas_pkey PRIMARY KEY CONSTRAINT quotas_project_fk REFERENCES projects (id),
    version              bigint NOT NULL DEFAULT 1, -- of the limits, for compare-and-set
    max_workspaces       bigint NOT NULL DEFAULT 10000,
    max_forks_in_flight  bigint NOT NULL DEFAULT 4096,
    max_checkpoints      bigint NOT NULL DEFAULT 1000000,
    max_checkpoint_bytes bigint NOT NULL DEFAULT 109951162777600, -- 100 TiB
    max_depth            bigint NOT NULL DEFAULT 10000,
    max_children         bigint NOT NULL DEFAULT 10000,
    max_keys             bigint NOT NULL DEFAULT 1000,
    workspaces           bigint NOT NULL DEFAULT 0, -- upper bound
    forks_in_flight      bigint NOT NULL DEFAULT 0, -- upper bound
    checkpoints          bigint NOT NULL DEFAULT 0,
    checkpoint_bytes     bigint NOT NULL DEFAULT 0,
    CONSTRAINT quotas_limits_check CHECK (least(max_workspaces, max_forks_in_flight, max_checkpoints, max_checkpoint_bytes, max_depth, max_children, max_keys) >= 0)
) WITH (fillfactor = 50); -- its updates stay on the page

INSERT INTO quotas (project_id, workspaces, forks_in_flight, checkpoints, checkpoint_bytes)
SELECT p.id,
    (SELECT count(*) FROM workspaces w WHERE w.project_id = p.id AND w.state NOT IN ('terminated', 'failed', 'lost')),
    (SELECT count(*) FROM workspaces w WHERE w.project_id = p.id AND w.state IN ('creating', 'restoring', 'quarantined')),
    (SELECT count(*) FROM checkpoints c WHERE c.project_id = p.id AND c.kind = 'user' AND c.state IN ('capturing', 'captured', 'sealed')),
    (SELECT coalesce(sum(c.delta_bytes + c.device_state_bytes + c.disk_bytes), 0) FROM checkpoints c WHERE c.project_id = p.id AND c.kind = 'user' AND c.state IN ('captured', 'sealed'))
FROM projects p;

CREATE FUNCTION coppice_make_quotas() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO quotas (project_id) VALUES (NEW.id);
    RETURN NULL;
END
$$;
CREATE TRIGGER projects_quotas AFTER INSERT ON projects FOR EACH ROW EXECUTE FUNCTION coppice_make_quotas();

-- Checkpoints are counted exactly, whoever changes them. At the commit, so that the row is locked last and shortly.
CREATE FUNCTION coppice_count_checkpoint() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE quotas SET
        checkpoints = greatest(0, checkpoints - CASE WHEN NEW.state IN ('failed', 'deleted') AND OLD.state NOT IN ('failed', 'deleted') THEN 1 ELSE 0 END),
        checkpoint_bytes = greatest(0, checkpoint_bytes
            + CASE WHEN OLD.captured_at IS NULL AND NEW.captured_at IS NOT NULL THEN NEW.delta_bytes + NEW.device_state_bytes + NEW.disk_bytes ELSE 0 END
            - CASE WHEN OLD.captured_at IS NOT NULL AND NEW.state = 'deleted' THEN OLD.delta_bytes + OLD.device_state_bytes + OLD.disk_bytes ELSE 0 END)
    WHERE project_id = NEW.project_id;
    RETURN NULL;
END
$$;
CREATE CONSTRAINT TRIGGER checkpoints_count AFTER UPDATE ON checkpoints DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (NEW.kind = 'user' AND OLD.state IS DISTINCT FROM NEW.state) EXECUTE FUNCTION coppice_count_checkpoint();

-- For the width of the tree below one node, as one project sees it: templates have children of many.
CREATE INDEX checkpoints_children_idx ON checkpoints (parent_id, project_id) WHERE state IN ('capturing', 'captured', 'sealed');

GRANT SELECT, INSERT, UPDATE, DELETE ON quotas TO coppice_app;
ALTER TABLE quotas ENABLE ROW LEVEL SECURITY;
ALTER TABLE quotas FORCE ROW LEVEL SECURITY;
CREATE POLICY quotas_tenant ON quotas
    USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
    WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system');
