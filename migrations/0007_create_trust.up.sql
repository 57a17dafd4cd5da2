-- What makes runners of other hosts trustworthy: the cluster's keys, tokens to join with, and the identities that were given out.

-- One row: the controllers of one database are one cluster. Keys are sealed with a key that is not in the database.
CREATE TABLE clusters (
    id            text COLLATE "C" CONSTRAINT clusters_pkey PRIMARY KEY,
    project_id    text COLLATE "C" NOT NULL DEFAULT 'prj_00000000000000000000000000' CONSTRAINT clusters_project_fk REFERENCES projects (id),
    single        boolean NOT NULL DEFAULT true CONSTRAINT clusters_single_key UNIQUE,
    authority     bytea NOT NULL, -- its certificate
    authority_key bytea NOT NULL, -- sealed
    pass_key      bytea NOT NULL, -- sealed
    created_at    timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT clusters_single_check CHECK (single)
);

CREATE TABLE runner_tokens (
    hash       bytea CONSTRAINT runner_tokens_pkey PRIMARY KEY,
    project_id text COLLATE "C" NOT NULL DEFAULT 'prj_00000000000000000000000000' CONSTRAINT runner_tokens_project_fk REFERENCES projects (id),
    runner_id  text COLLATE "C" NOT NULL, -- who joins with it
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL,
    used_at    timestamptz,
    CONSTRAINT runner_tokens_hash_check CHECK (octet_length(hash) = 32)
);
CREATE INDEX runner_tokens_expiry_idx ON runner_tokens (expires_at);

-- A certificate is good while the identity that it names is here and not revoked.
CREATE TABLE runner_identities (
    runner_id  text COLLATE "C" CONSTRAINT runner_identities_pkey PRIMARY KEY,
    project_id text COLLATE "C" NOT NULL DEFAULT 'prj_00000000000000000000000000' CONSTRAINT runner_identities_project_fk REFERENCES projects (id),
    joined_at  timestamptz NOT NULL DEFAULT now(),
    revoked_at timestamptz
);

ALTER TABLE runners ADD COLUMN data_url text NOT NULL DEFAULT ''; -- where users reach its data plane; empty: through the controller
ALTER TABLE runners ADD COLUMN data_own_cert boolean NOT NULL DEFAULT false; -- it shows a certificate of the cluster's authority
ALTER TABLE runners ADD COLUMN removed_at timestamptz;

GRANT SELECT, INSERT ON clusters TO coppice_app;
GRANT SELECT, INSERT, UPDATE, DELETE ON runner_tokens TO coppice_app;
GRANT SELECT, INSERT, UPDATE ON runner_identities TO coppice_app;

DO $$
DECLARE
    tab text;
BEGIN
    FOREACH tab IN ARRAY ARRAY['clusters', 'runner_tokens', 'runner_identities'] LOOP
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', tab);
        EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', tab);
        EXECUTE format($policy$CREATE POLICY %I ON %I
            USING ((SELECT current_setting('coppice.project_id', true)) = 'system')
            WITH CHECK ((SELECT current_setting('coppice.project_id', true)) = 'system')$policy$, tab || '_system', tab);
    END LOOP;
END
$$;
