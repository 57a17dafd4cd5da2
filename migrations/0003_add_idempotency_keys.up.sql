-- What a client may repeat. The row of a key is inserted by the transaction that admits its request, so that both are
-- there or neither: whoever repeats the request, at whichever controller, finds what it made. A row that has expired
-- counts as absent; the sweep removes it later. There is no foreign key to projects: rows outlive nothing of value.
CREATE TABLE idempotency_keys (
    project_id text COLLATE "C" NOT NULL,
    key        text COLLATE "C" NOT NULL,
    hash       bytea NOT NULL,                 -- SHA-256 of method, path, query and body of the request
    object_id  text COLLATE "C" NOT NULL,      -- the operation, session or port that it made
    answer     jsonb,                          -- what was made, where its own row does not keep that
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL,
    CONSTRAINT idempotency_keys_pkey PRIMARY KEY (project_id, key),
    CONSTRAINT idempotency_keys_key_check CHECK (key ~ '^[ -~]{1,255}$'),
    CONSTRAINT idempotency_keys_hash_check CHECK (octet_length(hash) = 32)
);
CREATE INDEX idempotency_keys_expiry_idx ON idempotency_keys (expires_at);

GRANT SELECT, INSERT, UPDATE, DELETE ON idempotency_keys TO coppice_app;
ALTER TABLE idempotency_keys ENABLE ROW LEVEL SECURITY;
ALTER TABLE idempotency_keys FORCE ROW LEVEL SECURITY;
CREATE POLICY idempotency_keys_tenant ON idempotency_keys
    USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
    WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system');
