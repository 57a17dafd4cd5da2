-- Uploads of a project: files for builds of images. They are in the database in parts, so that every controller has them. A row whose sha256 is
-- null is being received.
CREATE TABLE uploads (
    data_id    text COLLATE "C" NOT NULL CONSTRAINT uploads_pkey PRIMARY KEY, -- of one transfer
    project_id text COLLATE "C" NOT NULL CONSTRAINT uploads_project_fk REFERENCES projects (id),
    id         text COLLATE "C" NOT NULL,                -- as the client calls it
    bytes      bigint NOT NULL DEFAULT 0,
    parts      integer NOT NULL DEFAULT 0,
    sha256     text COLLATE "C",
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL
);
CREATE UNIQUE INDEX uploads_id_key ON uploads (project_id, id) WHERE sha256 IS NOT NULL;
CREATE INDEX uploads_project_idx ON uploads (project_id);
CREATE INDEX uploads_expiry_idx ON uploads (expires_at);
CREATE TABLE upload_parts (
    data_id    text COLLATE "C" NOT NULL CONSTRAINT upload_parts_upload_fk REFERENCES uploads (data_id) ON DELETE CASCADE,
    project_id text COLLATE "C" NOT NULL,
    index      integer NOT NULL,
    data       bytea NOT NULL,
    CONSTRAINT upload_parts_pkey PRIMARY KEY (data_id, index)
);
ALTER TABLE upload_parts ALTER COLUMN data SET STORAGE EXTERNAL; -- archives are compressed already, or are read once
CREATE TRIGGER uploads_audit AFTER UPDATE ON uploads FOR EACH ROW WHEN (OLD.sha256 IS NULL AND NEW.sha256 IS NOT NULL) EXECUTE FUNCTION coppice_audit_row('id');
CREATE TRIGGER uploads_end_audit AFTER DELETE ON uploads FOR EACH ROW WHEN (OLD.sha256 IS NOT NULL) EXECUTE FUNCTION coppice_audit_row('id');
GRANT SELECT, INSERT, UPDATE, DELETE ON uploads, upload_parts TO coppice_app;
ALTER TABLE uploads ENABLE ROW LEVEL SECURITY;
ALTER TABLE uploads FORCE ROW LEVEL SECURITY;
CREATE POLICY uploads_tenant ON uploads
    USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
    WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system');
ALTER TABLE upload_parts ENABLE ROW LEVEL SECURITY;
ALTER TABLE upload_parts FORCE ROW LEVEL SECURITY;
CREATE POLICY upload_parts_tenant ON upload_parts
    USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
    WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system');
