-- Checkpoints that came as a file. One has no parent, no workspace and no runner: it begins a tree, and is in the store only.

ALTER TABLE checkpoints
    ADD COLUMN imported jsonb, -- what the file said of where it is from: nothing that was checked
    DROP CONSTRAINT checkpoints_user_check,
    ADD CONSTRAINT checkpoints_user_check CHECK (kind <> 'user' OR imported IS NOT NULL OR (parent_id IS NOT NULL AND workspace_id IS NOT NULL AND workspace_epoch IS NOT NULL)),
    DROP CONSTRAINT checkpoints_captured_check,
    ADD CONSTRAINT checkpoints_captured_check CHECK (state NOT IN ('captured', 'sealed') OR (captured_at IS NOT NULL AND runner_class IS NOT NULL AND class_key IS NOT NULL
        AND (imported IS NOT NULL OR (runner_id IS NOT NULL AND base_id IS NOT NULL)))),
    ADD CONSTRAINT checkpoints_imported_check CHECK (imported IS NULL OR (kind = 'user' AND parent_id IS NULL AND workspace_id IS NULL AND runner_id IS NULL AND NOT shared));
CREATE TRIGGER checkpoints_imported_immutable BEFORE UPDATE ON checkpoints FOR EACH ROW WHEN (OLD.imported IS DISTINCT FROM NEW.imported)
    EXECUTE FUNCTION coppice_checkpoint_immutable();

-- Imports under way: there is a row before there is an object, and the checkpoint's row comes when this one goes. A controller works on it as
-- long as it renews the lease.
CREATE TABLE imports (
    checkpoint_id    text COLLATE "C" CONSTRAINT imports_pkey PRIMARY KEY, -- that it is to be
    project_id       text COLLATE "C" NOT NULL CONSTRAINT imports_project_fk REFERENCES projects (id),
    begun_at         timestamptz NOT NULL DEFAULT now(),
    lease_expires_at timestamptz NOT NULL
);
CREATE INDEX imports_lease_idx ON imports (lease_expires_at);

-- One that ends without its checkpoint leaves debris, however it ends.
CREATE FUNCTION coppice_abandon_import() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT 1 FROM checkpoints c WHERE c.id = OLD.checkpoint_id) THEN
        INSERT INTO store_debris (prefix, project_id) VALUES (coppice_seal_prefix(OLD.project_id, OLD.checkpoint_id, 1), OLD.project_id) ON CONFLICT DO NOTHING;
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER imports_abandon AFTER DELETE ON imports FOR EACH ROW EXECUTE FUNCTION coppice_abandon_import();

GRANT SELECT, INSERT, UPDATE, DELETE ON imports TO coppice_app;
ALTER TABLE imports ENABLE ROW LEVEL SECURITY;
ALTER TABLE imports FORCE ROW LEVEL SECURITY;
CREATE POLICY imports_tenant ON imports
    USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
    WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system');
