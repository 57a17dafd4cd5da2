-- Images that a project has built. An image is a checkpoint with a name; the checkpoint cannot be deleted while an image has it.
CREATE TABLE project_images (
    project_id    text COLLATE "C" NOT NULL CONSTRAINT project_images_project_fk REFERENCES projects (id),
    name          text COLLATE "C" NOT NULL,
    checkpoint_id text COLLATE "C" NOT NULL CONSTRAINT project_images_checkpoint_fk REFERENCES checkpoints (id),
    version       bigint NOT NULL DEFAULT 1,
    source        text NOT NULL,                   -- as FROM names it
    config        bytea NOT NULL,                  -- JSON
    operation_id  text COLLATE "C" NOT NULL,       -- that built it
    steps         integer NOT NULL,
    cached_steps  integer NOT NULL,
    labels        jsonb NOT NULL DEFAULT '{}',
    created_at    timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT project_images_pkey PRIMARY KEY (project_id, name)
);
CREATE INDEX project_images_checkpoint_idx ON project_images (checkpoint_id);

-- The output of builds, in parts.
CREATE TABLE build_logs (
    operation_id text COLLATE "C" NOT NULL CONSTRAINT build_logs_operation_fk REFERENCES operations (id) ON DELETE CASCADE,
    project_id   text COLLATE "C" NOT NULL,
    at           bigint NOT NULL,                  -- bytes before it
    data         bytea NOT NULL,
    CONSTRAINT build_logs_pkey PRIMARY KEY (operation_id, at)
);
CREATE INDEX build_logs_first_idx ON build_logs (project_id, operation_id DESC) WHERE at = 0;

-- The checkpoint of an image that was built from an image of the operator: its forks may reach what a workspace of the project may.
ALTER TABLE checkpoints ADD COLUMN published boolean NOT NULL DEFAULT false;
CREATE INDEX checkpoints_build_key_idx ON checkpoints (project_id, (labels ->> 'coppice.build/key')) WHERE labels ? 'coppice.build/key';
CREATE INDEX operations_builds_idx ON operations (project_id) WHERE kind = 'build_image' AND state IN ('pending', 'running');

CREATE TRIGGER project_images_audit AFTER INSERT OR UPDATE OR DELETE ON project_images FOR EACH ROW EXECUTE FUNCTION coppice_audit_row('name');
GRANT SELECT, INSERT, UPDATE, DELETE ON project_images, build_logs TO coppice_app;
ALTER TABLE project_images ENABLE ROW LEVEL SECURITY;
ALTER TABLE project_images FORCE ROW LEVEL SECURITY;
CREATE POLICY project_images_tenant ON project_images
    USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
    WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system');
ALTER TABLE build_logs ENABLE ROW LEVEL SECURITY;
ALTER TABLE build_logs FORCE ROW LEVEL SECURITY;
CREATE POLICY build_logs_tenant ON build_logs
    USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
    WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system');
