-- What sandboxes sent out, or tried to (docs/adr/0037-the-journal-of-what-left.md).

-- The owner is under row-level security too, unless it is a superuser; this lasts until the migration ends.
SELECT set_config('coppice.project_id', 'system', true);

-- The instant that a checkpoint has, by the clock of the host that captured it, and the sandbox that it was captured from: flows are told
-- by the same clock.
ALTER TABLE checkpoints
    ADD COLUMN sandbox_id text COLLATE "C",
    ADD COLUMN instant_at timestamptz;

-- A flow has up to two rows: when it began, and when all is known of it. Each comes at least once, in any order, and is never changed.
-- Partitions by month of the host's clock; the default one has what a clock that is wrong says.
CREATE TABLE flows (
    project_id     text COLLATE "C" NOT NULL,
    workspace_id   text COLLATE "C" NOT NULL,
    sandbox_id     text COLLATE "C" NOT NULL,
    epoch          bigint NOT NULL,
    id             text COLLATE "C" NOT NULL, -- by the runner, unique for ever
    at             timestamptz NOT NULL,      -- when it began
    final          boolean NOT NULL,
    changes        boolean NOT NULL,          -- core.Flow.Changes
    spoken         text NOT NULL,
    host           text NOT NULL,
    port           integer NOT NULL,
    method         text NOT NULL,
    path           text NOT NULL,
    outcome        text NOT NULL,
    rule           text NOT NULL,
    grant_id       text NOT NULL,             -- whose secret it was given; '' for none
    reason         text NOT NULL,
    status         integer NOT NULL,
    sent_bytes     bigint NOT NULL,
    received_bytes bigint NOT NULL,
    ended_at       timestamptz, -- of the flow
    created_at     timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT flows_pkey PRIMARY KEY (sandbox_id, at, id, final),
    CONSTRAINT flows_spoken_check CHECK (spoken IN ('http', 'tls', 'tcp')),
    CONSTRAINT flows_outcome_check CHECK (outcome IN ('allowed', 'denied', 'failed'))
) PARTITION BY RANGE (at);
CREATE INDEX flows_workspace_idx ON flows (workspace_id, at, id);
CREATE INDEX flows_changes_idx ON flows (sandbox_id, at, id) WHERE changes;
CREATE TABLE flows_default PARTITION OF flows DEFAULT;
CREATE TRIGGER flows_append_only BEFORE UPDATE OR DELETE ON flows FOR EACH ROW EXECUTE FUNCTION coppice_append_only();
CREATE TRIGGER flows_no_truncate BEFORE TRUNCATE ON flows FOR EACH STATEMENT EXECUTE FUNCTION coppice_append_only();

-- Makes the partitions of this month and the next two. A month whose rows are in the default partition already stays there.
CREATE FUNCTION coppice_make_flow_partitions() RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
    month date;
    part  text;
BEGIN
    FOR i IN 0..2 LOOP
        month := (date_trunc('month', now() AT TIME ZONE 'UTC') + make_interval(months => i))::date;
        part := 'flows_' || to_char(month, 'YYYYMM');
        IF to_regclass('public.' || part) IS NULL THEN
            BEGIN
                EXECUTE format('CREATE TABLE public.%I PARTITION OF public.flows FOR VALUES FROM (%L) TO (%L)',
                    part, month::text || ' 00:00:00+00', (month + interval '1 month')::date::text || ' 00:00:00+00');
            EXCEPTION WHEN check_violation THEN NULL;
            END;
        END IF;
    END LOOP;
END
$$;
SELECT coppice_make_flow_partitions();

REVOKE EXECUTE ON FUNCTION coppice_make_flow_partitions() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION coppice_make_flow_partitions() TO coppice_app;
GRANT SELECT, INSERT ON flows TO coppice_app;
ALTER TABLE flows ENABLE ROW LEVEL SECURITY;
ALTER TABLE flows FORCE ROW LEVEL SECURITY;
CREATE POLICY flows_tenant ON flows
    USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
    WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system');
