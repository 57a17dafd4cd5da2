-- Denied flows are counted, and a quota bounds the rows of flows (docs/adr/0037-the-journal-of-what-left.md).

-- The owner is under row-level security too, unless it is a superuser; this lasts until the migration ends.
SELECT set_config('coppice.project_id', 'system', true);

-- How many rows of flows came in a month, for each workspace and, without one, for the whole project; and how many flows were left out because
-- that was as many as they may be.
CREATE TABLE flow_rows (
    project_id       text COLLATE "C" NOT NULL,
    workspace_id     text COLLATE "C" NOT NULL, -- '' for the project
    month            date NOT NULL,
    rows             bigint NOT NULL,
    omitted          bigint NOT NULL DEFAULT 0,
    omitted_first_at timestamptz,
    omitted_last_at  timestamptz,
    CONSTRAINT flow_rows_pkey PRIMARY KEY (project_id, workspace_id, month),
    CONSTRAINT flow_rows_check CHECK (rows >= 0 AND omitted >= 0)
);
-- What is there counts as of its own month. A row of the future counts as of this one.
INSERT INTO flow_rows (project_id, workspace_id, month, rows)
SELECT f.project_id, coalesce(f.workspace_id, ''), f.month, count(*)
FROM (SELECT project_id, workspace_id, least(date_trunc('month', at AT TIME ZONE 'UTC'), date_trunc('month', now() AT TIME ZONE 'UTC'))::date AS month FROM flows) AS f
GROUP BY GROUPING SETS ((f.project_id, f.workspace_id, f.month), (f.project_id, f.month));

GRANT SELECT, INSERT, UPDATE, DELETE ON flow_rows TO coppice_app;
ALTER TABLE flow_rows ENABLE ROW LEVEL SECURITY;
ALTER TABLE flow_rows FORCE ROW LEVEL SECURITY;
CREATE POLICY flow_rows_tenant ON flow_rows
    USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
    WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system');

-- This comes last: until the migration ends nobody else can read or write the table.
-- A row may stand for many flows that were denied: at is when the first one was, last_at when the last one was.
ALTER TABLE flows
    ADD COLUMN count   bigint NOT NULL DEFAULT 1,
    ADD COLUMN last_at timestamptz;
ALTER TABLE flows ADD CONSTRAINT flows_count_check CHECK (count >= 1 AND (count = 1 OR outcome = 'denied')) NOT VALID;
