-- Flows beyond the quota of rows are counted by host (docs/adr/0037-the-journal-of-what-left.md).

-- The owner is under row-level security too, unless it is a superuser; this lasts until the migration ends.
SELECT set_config('coppice.project_id', 'system', true);

-- This reads all flows, so it comes before anything is locked: controllers go on meanwhile.
CREATE TEMPORARY TABLE counted_flows AS
SELECT f.project_id, coalesce(f.workspace_id, '') AS workspace_id, f.month,
    count(*) FILTER (WHERE NOT f.never_began AND f.method NOT IN ('GET', 'HEAD', 'OPTIONS')) AS effects, count(*) FILTER (WHERE f.never_began) AS denied
FROM (
    SELECT project_id, workspace_id, method, outcome = 'denied' AND (ended_at IS NULL OR last_at IS NOT NULL) AS never_began,
        least(date_trunc('month', at AT TIME ZONE 'UTC'), date_trunc('month', now() AT TIME ZONE 'UTC'))::date AS month FROM flows
) AS f
GROUP BY GROUPING SETS ((f.project_id, f.workspace_id, f.month), (f.project_id, f.month));

-- A row counts the flows of one sandbox to one host and port that began within a minute, or within a day (UTC) once the minute
-- is two hours old. Flows of one kind and minute share at most a few rows by host; further flows share a row without a host.
CREATE TABLE flow_counts (
    project_id     text COLLATE "C" NOT NULL,
    workspace_id   text COLLATE "C" NOT NULL CONSTRAINT flow_counts_workspace_fk REFERENCES workspaces (id) ON DELETE CASCADE,
    sandbox_id     text COLLATE "C" NOT NULL,
    epoch          bigint NOT NULL,
    kind           text COLLATE "C" NOT NULL, -- controller.FlowKind
    daily          boolean NOT NULL,
    from_at        timestamptz NOT NULL, -- when the minute or the day begins
    spoken         text COLLATE "C" NOT NULL,
    opaque         boolean NOT NULL,     -- no request was seen
    host           text COLLATE "C" NOT NULL, -- '' for several; the rule that allowed them, with port 0, for several that had a grant
    port           integer NOT NULL,
    grant_id       text COLLATE "C" NOT NULL, -- '' for none
    rule           text NOT NULL,
    count          bigint NOT NULL, -- 0 if none of them was sent; below 0 if an end came before its beginning
    sent_bytes     bigint NOT NULL,
    received_bytes bigint NOT NULL,
    first_at       timestamptz NOT NULL,
    last_at        timestamptz NOT NULL,
    CONSTRAINT flow_counts_pkey PRIMARY KEY (sandbox_id, kind, daily, from_at, spoken, opaque, host, port, grant_id),
    CONSTRAINT flow_counts_kind_check CHECK (kind IN ('effect', 'read', 'denied'))
);
CREATE INDEX flow_counts_workspace_idx ON flow_counts (workspace_id, first_at);
CREATE INDEX flow_counts_age_idx ON flow_counts (daily, from_at);

-- What the last batches of each runner added to counts, as hashes of flows: a batch that comes twice adds nothing the second time.
CREATE TABLE flow_batches (
    id         bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT flow_batches_pkey PRIMARY KEY,
    project_id text COLLATE "C" NOT NULL DEFAULT 'system',
    runner_id  text COLLATE "C" NOT NULL,
    keys       bigint[] NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX flow_batches_runner_idx ON flow_batches (runner_id, id);
CREATE INDEX flow_batches_age_idx ON flow_batches (created_at);

-- Each kind of flow has a quota of rows of its own. rows is the sum of all three kinds.
ALTER TABLE flow_rows
    ADD COLUMN effects bigint NOT NULL DEFAULT 0,
    ADD COLUMN denied  bigint NOT NULL DEFAULT 0;
UPDATE flow_rows r SET effects = x.effects, denied = x.denied FROM counted_flows x
WHERE x.project_id = r.project_id AND x.workspace_id = r.workspace_id AND x.month = r.month;
DROP TABLE counted_flows;

GRANT SELECT, INSERT, UPDATE, DELETE ON flow_counts, flow_batches TO coppice_app;
DO $$
DECLARE
    tab text;
BEGIN
    FOREACH tab IN ARRAY ARRAY['flow_counts', 'flow_batches'] LOOP
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', tab);
        EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', tab);
        EXECUTE format($policy$CREATE POLICY %I ON %I
            USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
            WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')$policy$, tab || '_tenant', tab);
    END LOOP;
END
$$;
