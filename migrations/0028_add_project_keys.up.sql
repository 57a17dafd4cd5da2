-- Encryption of what projects have in the store (docs/adr/0032-encryption-by-attempt.md). A key is here only as a master key has wrapped it,
-- which is in no database. To remove a row is to make unreadable whatever is encrypted with it.

-- The owner is under row-level security too, unless it is a superuser; this lasts until the migration ends.
SELECT set_config('coppice.project_id', 'system', true);

ALTER TABLE projects ADD COLUMN encryption text NOT NULL DEFAULT 'none', -- of checkpoints that are stored from now on
    ADD CONSTRAINT projects_encryption_check CHECK (encryption IN ('none', 'envelope'));

CREATE TABLE project_keys (
    project_id text COLLATE "C" NOT NULL CONSTRAINT project_keys_project_fk REFERENCES projects (id),
    version    bigint NOT NULL, -- names of objects have it
    master_id  text COLLATE "C" NOT NULL, -- which master key has wrapped it
    sealed_key bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT project_keys_pkey PRIMARY KEY (project_id, version),
    CONSTRAINT project_keys_version_check CHECK (version >= 1)
);
CREATE INDEX project_keys_master_idx ON project_keys (master_id);
CREATE TRIGGER project_keys_audit AFTER INSERT OR UPDATE OR DELETE ON project_keys FOR EACH ROW EXECUTE FUNCTION coppice_audit_row('project_id');

GRANT SELECT, INSERT, UPDATE, DELETE ON project_keys TO coppice_app;
ALTER TABLE project_keys ENABLE ROW LEVEL SECURITY;
ALTER TABLE project_keys FORCE ROW LEVEL SECURITY;
CREATE POLICY project_keys_tenant ON project_keys
    USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
    WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system');
