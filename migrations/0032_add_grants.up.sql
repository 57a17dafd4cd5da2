-- Permission to use secrets, by workspace (docs/adr/0038-grants-of-a-tree.md).

-- The owner is under row-level security too, unless it is a superuser; this lasts until the migration ends.
SELECT set_config('coppice.project_id', 'system', true);

-- Values that are encrypted with a key each, which is here only as a master key has wrapped it. A row is never changed but by another master key.
CREATE TABLE secrets (
    id         text COLLATE "C" CONSTRAINT secrets_pkey PRIMARY KEY,
    project_id text COLLATE "C" NOT NULL CONSTRAINT secrets_project_fk REFERENCES projects (id),
    master_id  text COLLATE "C" NOT NULL, -- which master key has wrapped the key
    sealed_key bytea NOT NULL,
    sealed     bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT secrets_size_check CHECK (length(sealed) <= 32768)
);
CREATE INDEX secrets_project_idx ON secrets (project_id);
CREATE INDEX secrets_master_idx ON secrets (master_id);

-- The authority that the guests of a project trust for the hosts that the egress proxy has grants for.
CREATE TABLE project_authorities (
    project_id  text COLLATE "C" CONSTRAINT project_authorities_pkey PRIMARY KEY CONSTRAINT project_authorities_project_fk REFERENCES projects (id),
    certificate bytea NOT NULL, -- X.509 in DER
    secret_id   text COLLATE "C" NOT NULL CONSTRAINT project_authorities_secret_fk REFERENCES secrets (id), -- its private key, PKCS#8 in DER
    created_at  timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX project_authorities_secret_idx ON project_authorities (secret_id);

-- A grant as it was given to a workspace. Its forks have the same row, each by a row of grant_holders.
CREATE TABLE grants (
    id           text COLLATE "C" CONSTRAINT grants_pkey PRIMARY KEY,
    project_id   text COLLATE "C" NOT NULL,
    workspace_id text COLLATE "C" NOT NULL CONSTRAINT grants_workspace_fk REFERENCES workspaces (id), -- that it was given to
    name         text COLLATE "C" NOT NULL, -- what its owner calls it
    provider     text NOT NULL,
    mode         text NOT NULL,
    vault_ref    text NOT NULL, -- where the secret is; '' where it is in secrets
    secret_id    text COLLATE "C" CONSTRAINT grants_secret_fk REFERENCES secrets (id),
    hosts        text[] NOT NULL, -- host:port, the first is what the base URL stands for
    header       text NOT NULL,
    methods      text[] NOT NULL,
    paths        text[] NOT NULL,
    env          text NOT NULL, -- name of the variable that has the placeholder; '' for none
    base_env     text NOT NULL, -- likewise the base URL
    base_path    text NOT NULL, -- what the base URL has after its host
    max_bytes    bigint NOT NULL,
    per_minute   integer NOT NULL,
    version      bigint NOT NULL DEFAULT 1, -- one more with each change
    expires_at   timestamptz,
    created_at   timestamptz NOT NULL DEFAULT now(),
    updated_at   timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT grants_name_key UNIQUE (workspace_id, name),
    CONSTRAINT grants_mode_check CHECK (mode IN ('header', 'base_url')),
    CONSTRAINT grants_secret_check CHECK ((vault_ref = '') = (secret_id IS NOT NULL))
);
CREATE INDEX grants_project_idx ON grants (project_id);
CREATE INDEX grants_secret_idx ON grants (secret_id);

-- Who has a grant, each by a placeholder of its own: that of another workspace is worth nothing.
CREATE TABLE grant_holders (
    workspace_id text COLLATE "C" NOT NULL CONSTRAINT grant_holders_workspace_fk REFERENCES workspaces (id),
    name         text COLLATE "C" NOT NULL,
    project_id   text COLLATE "C" NOT NULL,
    grant_id     text COLLATE "C" NOT NULL CONSTRAINT grant_holders_grant_fk REFERENCES grants (id) ON DELETE CASCADE,
    placeholder  text COLLATE "C" NOT NULL CONSTRAINT grant_holders_placeholder_key UNIQUE,
    created_at   timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT grant_holders_pkey PRIMARY KEY (workspace_id, name)
);
CREATE INDEX grant_holders_grant_idx ON grant_holders (grant_id);

CREATE TRIGGER secrets_audit AFTER INSERT OR UPDATE OR DELETE ON secrets FOR EACH ROW EXECUTE FUNCTION coppice_audit_row('id');

-- A grant is given, changed and revoked; a workspace that has it as a fork can be rid of it alone. A row has no secret.
CREATE FUNCTION coppice_audit_grants() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    r jsonb := CASE TG_OP WHEN 'DELETE' THEN to_jsonb(OLD) ELSE to_jsonb(NEW) END;
BEGIN
    INSERT INTO audit_records (project_id, request_id, actor, source, action, object_id, before, after, outcome, operation_id, detail)
    VALUES (r ->> 'project_id', coppice_origin(4), coppice_origin(1), coppice_origin(2), coppice_origin(3), r ->> 'workspace_id',
        CASE TG_OP WHEN 'INSERT' THEN '' ELSE 'there' END, CASE TG_OP WHEN 'DELETE' THEN '' ELSE 'there' END, 'succeeded', coppice_origin(5),
        jsonb_build_object('of', TG_TABLE_NAME, 'grant', r ->> 'name', 'changed',
            CASE TG_OP WHEN 'DELETE' THEN '{}' ELSE r - ARRAY['id', 'project_id', 'workspace_id', 'name', 'secret_id', 'created_at', 'updated_at'] END));
    RETURN NULL;
END
$$;
CREATE TRIGGER grants_audit AFTER INSERT OR UPDATE OR DELETE ON grants FOR EACH ROW EXECUTE FUNCTION coppice_audit_grants();
CREATE TRIGGER grant_holders_audit AFTER DELETE ON grant_holders FOR EACH ROW EXECUTE FUNCTION coppice_audit_grants();
CREATE TRIGGER project_authorities_audit AFTER INSERT OR UPDATE OR DELETE ON project_authorities FOR EACH ROW EXECUTE FUNCTION coppice_audit_row('project_id');

-- What grants are sealed for, and where their base URLs lead: the egress process of a host says so, and another process has another key.
ALTER TABLE runners
    ADD COLUMN egress_key bytea NOT NULL DEFAULT '',
    ADD COLUMN egress_url text NOT NULL DEFAULT '';

-- The key that a workspace's grants were last sealed for, and when they have to be sealed anew; NULL where there are none.
ALTER TABLE workspaces
    ADD COLUMN grants_key bytea,
    ADD COLUMN grants_until timestamptz,
    ADD CONSTRAINT workspaces_grants_check CHECK ((grants_key IS NULL) = (grants_until IS NULL));
CREATE INDEX workspaces_grants_idx ON workspaces (id) WHERE grants_until IS NOT NULL AND state IN ('ready', 'checkpointing');

GRANT SELECT, INSERT, UPDATE, DELETE ON secrets, project_authorities, grants, grant_holders TO coppice_app;
DO $$
DECLARE
    t text;
BEGIN
    FOREACH t IN ARRAY ARRAY['secrets', 'project_authorities', 'grants', 'grant_holders'] LOOP
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', t);
        EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', t);
        EXECUTE format($p$CREATE POLICY %I ON %I
            USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
            WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')$p$, t || '_tenant', t);
    END LOOP;
END
$$;
