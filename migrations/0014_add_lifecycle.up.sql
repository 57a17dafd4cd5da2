-- Idle expiry, suspension, pins, retention and usage.

-- A workspace that nobody used for so long is suspended or terminated. Use is kept apart, written in batches: the workspace's own
-- row is not touched by it.
ALTER TABLE workspaces
    ADD COLUMN idle_seconds integer,
    ADD COLUMN on_idle text,
    ADD COLUMN auto_resume boolean NOT NULL DEFAULT false,
    ADD CONSTRAINT workspaces_idle_check CHECK ((idle_seconds IS NULL) = (on_idle IS NULL) AND idle_seconds >= 1 AND on_idle IN ('suspend', 'terminate'));
CREATE INDEX workspaces_idle_idx ON workspaces (id) WHERE idle_seconds IS NOT NULL AND state = 'ready';

CREATE TABLE workspace_uses (
    workspace_id text COLLATE "C" CONSTRAINT workspace_uses_pkey PRIMARY KEY,
    project_id   text COLLATE "C" NOT NULL,
    used_at      timestamptz NOT NULL,
    CONSTRAINT workspace_uses_workspace_fk FOREIGN KEY (project_id, workspace_id) REFERENCES workspaces (project_id, id)
);

ALTER TABLE checkpoints ADD COLUMN pinned boolean NOT NULL DEFAULT false;

-- What is kept of a tree. The node may be another project's (a template), so it is named without a reference.
CREATE TABLE retention_policies (
    project_id    text COLLATE "C" NOT NULL CONSTRAINT retention_policies_project_fk REFERENCES projects (id),
    checkpoint_id text COLLATE "C" NOT NULL,
    policy        jsonb NOT NULL,
    version       bigint NOT NULL DEFAULT 1,
    updated_at    timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT retention_policies_pkey PRIMARY KEY (project_id, checkpoint_id),
    CONSTRAINT retention_policies_version_check CHECK (version >= 1)
);

-- What each sandbox has used since its start, as its runner said: cumulative, so that a sample that is missing loses nothing.
-- Partitions by month; coppice_make_usage_partitions makes them ahead.
CREATE TABLE usage_samples (
    project_id     text COLLATE "C" NOT NULL CONSTRAINT usage_samples_project_fk REFERENCES projects (id),
    workspace_id   text COLLATE "C" NOT NULL,
    sandbox_id     text COLLATE "C" NOT NULL,
    cpu_seconds    double precision NOT NULL,
    sent_bytes     bigint NOT NULL,
    received_bytes bigint NOT NULL,
    created_at     timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT usage_samples_pkey PRIMARY KEY (sandbox_id, created_at),
    CONSTRAINT usage_samples_check CHECK (cpu_seconds >= 0 AND sent_bytes >= 0 AND received_bytes >= 0)
) PARTITION BY RANGE (created_at);
CREATE INDEX usage_samples_workspace_idx ON usage_samples (workspace_id);
CREATE TRIGGER usage_samples_append_only BEFORE UPDATE OR DELETE ON usage_samples FOR EACH ROW EXECUTE FUNCTION coppice_append_only();

CREATE FUNCTION coppice_make_usage_partitions() RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
    month date;
    part  text;
BEGIN
    FOR i IN 0..2 LOOP
        month := (date_trunc('month', now() AT TIME ZONE 'UTC') + make_interval(months => i))::date;
        part := 'usage_samples_' || to_char(month, 'YYYYMM');
        IF to_regclass('public.' || part) IS NULL THEN
            EXECUTE format('CREATE TABLE public.%I PARTITION OF public.usage_samples FOR VALUES FROM (%L) TO (%L)',
                part, month::text || ' 00:00:00+00', (month + interval '1 month')::date::text || ' 00:00:00+00');
        END IF;
    END LOOP;
END
$$;
SELECT coppice_make_usage_partitions();
CREATE TABLE usage_samples_default PARTITION OF usage_samples DEFAULT;

-- A resume that did not succeed leaves the workspace suspended.
CREATE OR REPLACE FUNCTION coppice_workspace_transition() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        IF NEW.state NOT IN ('creating', 'restoring') THEN
            RAISE EXCEPTION 'a workspace cannot begin as %', NEW.state USING ERRCODE = 'check_violation', CONSTRAINT = 'workspaces_transition_check';
        END IF;
        RETURN NEW;
    END IF;
    IF (OLD.state, NEW.state) IN (
        ('creating', 'restoring'), ('creating', 'terminating'), ('creating', 'failed'), ('creating', 'lost'),
        ('restoring', 'quarantined'), ('restoring', 'ready'), ('restoring', 'suspended'), ('restoring', 'terminating'), ('restoring', 'failed'), ('restoring', 'lost'),
        ('quarantined', 'ready'), ('quarantined', 'terminating'), ('quarantined', 'failed'), ('quarantined', 'lost'),
        ('ready', 'checkpointing'), ('ready', 'restoring'), ('ready', 'suspended'), ('ready', 'terminating'), ('ready', 'lost'),
        ('checkpointing', 'ready'), ('checkpointing', 'suspended'), ('checkpointing', 'terminating'), ('checkpointing', 'lost'),
        ('suspended', 'restoring'), ('suspended', 'terminating'),
        ('terminating', 'terminated'), ('failed', 'terminated'), ('lost', 'terminated')
    ) THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'workspace % cannot go from % to %', OLD.id, OLD.state, NEW.state USING ERRCODE = 'check_violation', CONSTRAINT = 'workspaces_transition_check';
END
$$;

REVOKE EXECUTE ON FUNCTION coppice_make_usage_partitions() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION coppice_make_usage_partitions() TO coppice_app;
GRANT SELECT, INSERT, UPDATE ON workspace_uses TO coppice_app;
GRANT SELECT, INSERT, UPDATE, DELETE ON retention_policies TO coppice_app;
GRANT SELECT, INSERT ON usage_samples TO coppice_app;

DO $$
DECLARE
    tab text;
BEGIN
    FOREACH tab IN ARRAY ARRAY['workspace_uses', 'retention_policies', 'usage_samples'] LOOP
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', tab);
        EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', tab);
        EXECUTE format($policy$CREATE POLICY %I ON %I
            USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
            WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')$policy$, tab || '_tenant', tab);
    END LOOP;
END
$$;
