-- Who changed what: one row per change of a state, written by triggers in the transaction of the change, so that no code
-- forgets one and no change is without its row. Changes that leave no row of their own (inside a guest) are written by the
-- controller. Who, from where and by what comes from the transaction's setting coppice.origin: actor, source, action,
-- request and operation, with a space between each two. Rows are inserted and never changed or removed, by the owner either. Partitions by month.
CREATE TABLE audit_records (
    id           bigint NOT NULL GENERATED ALWAYS AS IDENTITY,
    project_id   text COLLATE "C" NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT now(),
    request_id   text NOT NULL,
    actor        text COLLATE "C" NOT NULL, -- the id of a key or runner, or "controller"
    source       text NOT NULL,             -- the address that the request came from
    action       text NOT NULL,             -- the API's operationId, or the name of the controller's own work
    object_id    text COLLATE "C" NOT NULL,
    before       text NOT NULL,             -- states; '' where there is none
    after        text NOT NULL,
    outcome      text NOT NULL,
    operation_id text COLLATE "C" NOT NULL,
    detail       jsonb,
    xid          xid8 NOT NULL DEFAULT pg_current_xact_id(), -- the order in which seals take rows
    CONSTRAINT audit_records_outcome_check CHECK (outcome IN ('accepted', 'succeeded', 'failed'))
) PARTITION BY RANGE (created_at);
CREATE INDEX audit_records_project_idx ON audit_records (project_id, id);
CREATE INDEX audit_records_xid_idx ON audit_records (xid);
CREATE TABLE audit_records_default PARTITION OF audit_records DEFAULT;
CREATE TRIGGER audit_records_append_only BEFORE UPDATE OR DELETE ON audit_records FOR EACH ROW EXECUTE FUNCTION coppice_append_only();
CREATE TRIGGER audit_records_no_truncate BEFORE TRUNCATE ON audit_records FOR EACH STATEMENT EXECUTE FUNCTION coppice_append_only();

-- A seal covers the rows of one project whose transactions lie in [lower, upper), in the order of (xid, id): all of them had
-- ended when it was made. Each holds the hash of the one before.
CREATE TABLE audit_seals (
    project_id text COLLATE "C" NOT NULL,
    seq        bigint NOT NULL,
    lower      xid8 NOT NULL,
    upper      xid8 NOT NULL,
    records    bigint NOT NULL,
    previous   bytea NOT NULL,
    hash       bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT audit_seals_pkey PRIMARY KEY (project_id, seq)
);
CREATE TRIGGER audit_seals_append_only BEFORE UPDATE OR DELETE ON audit_seals FOR EACH ROW EXECUTE FUNCTION coppice_append_only();
CREATE TRIGGER audit_seals_no_truncate BEFORE TRUNCATE ON audit_seals FOR EACH STATEMENT EXECUTE FUNCTION coppice_append_only();
CREATE INDEX audit_seals_upper_idx ON audit_seals (upper);

-- What of a row is sealed.
CREATE FUNCTION coppice_audit_text(r audit_records) RETURNS bytea LANGUAGE sql IMMUTABLE AS $$
    SELECT convert_to(jsonb_build_array(r.id, r.project_id, extract(epoch FROM r.created_at), r.request_id, r.actor, r.source, r.action, r.object_id,
        r.before, r.after, r.outcome, r.operation_id, r.detail)::text, 'UTF8')
$$;

-- The hash of a project's rows between two transactions, after another hash.
CREATE FUNCTION coppice_audit_hash(project text, lower_xid xid8, upper_xid xid8, previous bytea, OUT hash bytea, OUT records bigint) LANGUAGE sql STABLE AS $$
    SELECT sha256(previous || coalesce(string_agg(sha256(coppice_audit_text(r)), ''::bytea ORDER BY r.xid, r.id), ''::bytea)), count(*)
    FROM audit_records r WHERE r.project_id = project AND r.xid >= lower_xid AND r.xid < upper_xid
$$;

-- Seals every row whose transaction has ended. One at a time; who comes second has nothing to do.
CREATE FUNCTION coppice_seal_audit() RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    horizon xid8;
    start   xid8;
    sealed  bigint;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('coppice_seal_audit'));
    horizon := pg_snapshot_xmin(pg_current_snapshot());
    start := coalesce((SELECT s.upper FROM audit_seals s ORDER BY s.upper DESC LIMIT 1), '0'::xid8);
    WITH last AS (
        SELECT p.project_id, coalesce(s.seq, 0) AS seq, coalesce(s.hash, '\x'::bytea) AS hash
        FROM (SELECT DISTINCT project_id FROM audit_records WHERE xid >= start AND xid < horizon) p
        LEFT JOIN LATERAL (SELECT seq, hash FROM audit_seals WHERE project_id = p.project_id ORDER BY seq DESC LIMIT 1) s ON true
    ), made AS (
        INSERT INTO audit_seals (project_id, seq, lower, upper, records, previous, hash)
        SELECT l.project_id, l.seq + 1, start, horizon, h.records, l.hash, h.hash
        FROM last l CROSS JOIN LATERAL coppice_audit_hash(l.project_id, start, horizon, l.hash) h
        RETURNING records
    )
    SELECT coalesce(sum(records), 0) INTO sealed FROM made;
    RETURN sealed;
END
$$;

-- One part of the transaction's origin; '' when it is not set.
CREATE FUNCTION coppice_origin(part integer) RETURNS text LANGUAGE sql STABLE AS $$ SELECT split_part(coalesce(current_setting('coppice.origin', true), ''), ' ', part) $$;

-- Operations remember who asked, so that what they do later is his.
ALTER TABLE operations
    ADD COLUMN actor  text NOT NULL DEFAULT coppice_origin(1),
    ADD COLUMN source text NOT NULL DEFAULT coppice_origin(2),
    ADD COLUMN action text NOT NULL DEFAULT coppice_origin(3);

-- One statement writes the records of all rows that it changed.
CREATE FUNCTION coppice_audit_workspaces() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    who text := coppice_origin(1); origin text := coppice_origin(2); request text := coppice_origin(4);
    what text := coppice_origin(3); op text := coppice_origin(5);
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO audit_records (project_id, request_id, actor, source, action, object_id, before, after, outcome, operation_id)
        SELECT n.project_id, request, who, origin, what, n.id, '', n.state, 'succeeded', op FROM new_rows n;
    ELSE
        INSERT INTO audit_records (project_id, request_id, actor, source, action, object_id, before, after, outcome, operation_id, detail)
        SELECT n.project_id, request, who, origin, what, n.id, o.state, n.state, CASE WHEN n.state IN ('failed', 'lost') AND o.state <> n.state THEN 'failed' ELSE 'succeeded' END, op,
            CASE WHEN n.version <> o.version THEN jsonb_build_object('version', n.version, 'labels', n.labels, 'expires_at', n.expires_at)
                WHEN n.epoch <> o.epoch THEN jsonb_build_object('epoch', n.epoch, 'checkpoint_id', n.checkpoint_id)
                WHEN n.state IN ('failed', 'lost') THEN jsonb_build_object('code', n.failure_code) END
        FROM new_rows n JOIN old_rows o ON o.id = n.id WHERE (n.state, n.version, n.epoch) IS DISTINCT FROM (o.state, o.version, o.epoch);
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER workspaces_begin_audit AFTER INSERT ON workspaces REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION coppice_audit_workspaces();
CREATE TRIGGER workspaces_audit AFTER UPDATE ON workspaces REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION coppice_audit_workspaces();

CREATE FUNCTION coppice_audit_checkpoints() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    who text := coppice_origin(1); origin text := coppice_origin(2); request text := coppice_origin(4);
    what text := coppice_origin(3); op text := coppice_origin(5);
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO audit_records (project_id, request_id, actor, source, action, object_id, before, after, outcome, operation_id)
        SELECT n.project_id, request, who, origin, what, n.id, '', n.state, 'succeeded', coalesce(n.operation_id, op) FROM new_rows n;
    ELSE
        INSERT INTO audit_records (project_id, request_id, actor, source, action, object_id, before, after, outcome, operation_id, detail)
        SELECT n.project_id, request, who, origin, what, n.id, o.state, n.state, CASE WHEN n.state = 'failed' AND o.state <> n.state THEN 'failed' ELSE 'succeeded' END, op,
            CASE WHEN n.version <> o.version THEN jsonb_build_object('version', n.version, 'name', n.name, 'labels', n.labels)
                WHEN n.state = 'failed' THEN jsonb_build_object('code', n.failure_code) END
        FROM new_rows n JOIN old_rows o ON o.id = n.id WHERE (n.state, n.version) IS DISTINCT FROM (o.state, o.version);
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER checkpoints_begin_audit AFTER INSERT ON checkpoints REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION coppice_audit_checkpoints();
CREATE TRIGGER checkpoints_audit AFTER UPDATE ON checkpoints REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION coppice_audit_checkpoints();

-- The object of an operation is what it was asked to act on.
CREATE FUNCTION coppice_audit_operations() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO audit_records (project_id, request_id, actor, source, action, object_id, before, after, outcome, operation_id)
        SELECT n.project_id, n.request_id, coalesce(nullif(n.actor, ''), 'controller'), n.source, coalesce(nullif(n.action, ''), n.kind),
            coalesce(n.workspace_id, n.checkpoint_id, n.id), '', n.state, 'accepted', n.id FROM new_rows n;
    ELSE
        INSERT INTO audit_records (project_id, request_id, actor, source, action, object_id, before, after, outcome, operation_id, detail)
        SELECT n.project_id, n.request_id, coalesce(nullif(n.actor, ''), 'controller'), n.source, coalesce(nullif(n.action, ''), n.kind),
            coalesce(n.workspace_id, n.checkpoint_id, n.id), o.state, n.state, n.state, n.id, CASE WHEN n.problem_code IS NOT NULL THEN jsonb_build_object('code', n.problem_code) END
        FROM new_rows n JOIN old_rows o ON o.id = n.id WHERE o.state <> n.state AND n.state IN ('succeeded', 'failed');
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER operations_begin_audit AFTER INSERT ON operations REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION coppice_audit_operations();
CREATE TRIGGER operations_audit AFTER UPDATE ON operations REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION coppice_audit_operations();

-- For tables that change rarely: what changed, without secrets and without what changes by itself. The argument of the trigger
-- names the column with the object's id.
CREATE FUNCTION coppice_audit_row() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    was     jsonb := CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD) ELSE '{}' END;
    now_    jsonb := CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW) ELSE '{}' END;
    either  jsonb := CASE WHEN TG_OP = 'DELETE' THEN was ELSE now_ END;
    changed jsonb;
BEGIN
    SELECT jsonb_object_agg(k, CASE WHEN k ~ 'hash|secret|sealed|private|_key$' THEN 'null'::jsonb ELSE now_ -> k END) INTO changed
    FROM jsonb_object_keys(was || now_) AS k
    WHERE was -> k IS DISTINCT FROM now_ -> k
        AND k NOT IN ('project_id', 'created_at', 'last_used_at', 'heartbeat_at', 'lease_expires_at', 'allocated', 'disk_free_mb', 'updated_at');
    IF changed IS NULL OR TG_OP = 'UPDATE' AND changed - ARRAY['workspaces', 'forks_in_flight', 'checkpoints', 'checkpoint_bytes'] = '{}' THEN
        RETURN NULL;
    END IF;
    INSERT INTO audit_records (project_id, request_id, actor, source, action, object_id, before, after, outcome, operation_id, detail)
    VALUES (either ->> 'project_id', coppice_origin(4), coppice_origin(1), coppice_origin(2), coppice_origin(3), either ->> TG_ARGV[0],
        CASE TG_OP WHEN 'INSERT' THEN '' ELSE 'there' END, CASE TG_OP WHEN 'DELETE' THEN '' ELSE 'there' END, 'succeeded', coppice_origin(5),
        jsonb_build_object('of', TG_TABLE_NAME, 'changed', changed));
    RETURN NULL;
END
$$;
CREATE TRIGGER projects_audit AFTER INSERT OR UPDATE OR DELETE ON projects FOR EACH ROW EXECUTE FUNCTION coppice_audit_row('id');
CREATE TRIGGER api_keys_audit AFTER INSERT OR UPDATE OR DELETE ON api_keys FOR EACH ROW EXECUTE FUNCTION coppice_audit_row('id');
CREATE TRIGGER quotas_audit AFTER UPDATE ON quotas FOR EACH ROW WHEN (OLD.version IS DISTINCT FROM NEW.version) EXECUTE FUNCTION coppice_audit_row('project_id');
CREATE TRIGGER retention_policies_audit AFTER INSERT OR UPDATE OR DELETE ON retention_policies FOR EACH ROW EXECUTE FUNCTION coppice_audit_row('checkpoint_id');
CREATE TRIGGER runners_audit AFTER INSERT OR UPDATE OR DELETE ON runners FOR EACH ROW EXECUTE FUNCTION coppice_audit_row('id');
CREATE TRIGGER runner_tokens_audit AFTER INSERT OR UPDATE ON runner_tokens FOR EACH ROW EXECUTE FUNCTION coppice_audit_row('runner_id');
CREATE TRIGGER runner_identities_audit AFTER INSERT OR UPDATE ON runner_identities FOR EACH ROW EXECUTE FUNCTION coppice_audit_row('runner_id');
CREATE TRIGGER ports_audit AFTER INSERT OR UPDATE OR DELETE ON ports FOR EACH ROW EXECUTE FUNCTION coppice_audit_row('id');
CREATE TRIGGER attach_tokens_audit AFTER INSERT OR UPDATE ON attach_tokens FOR EACH ROW EXECUTE FUNCTION coppice_audit_row('session_id');
-- A session that a fork inherited gets its row when it is first listed, which is no start.
CREATE TRIGGER sessions_audit AFTER INSERT ON sessions FOR EACH ROW WHEN (NEW.id = NEW.guest_id) EXECUTE FUNCTION coppice_audit_row('id');

-- Makes the partitions of this month and the next two.
CREATE FUNCTION coppice_make_audit_partitions() RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
    month date;
    part  text;
BEGIN
    FOR i IN 0..2 LOOP
        month := (date_trunc('month', now() AT TIME ZONE 'UTC') + make_interval(months => i))::date;
        part := 'audit_records_' || to_char(month, 'YYYYMM');
        IF to_regclass('public.' || part) IS NULL THEN
            EXECUTE format('CREATE TABLE public.%I PARTITION OF public.audit_records FOR VALUES FROM (%L) TO (%L)',
                part, month::text || ' 00:00:00+00', (month + interval '1 month')::date::text || ' 00:00:00+00');
        END IF;
    END LOOP;
END
$$;
SELECT coppice_make_audit_partitions();

REVOKE EXECUTE ON FUNCTION coppice_make_audit_partitions() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION coppice_make_audit_partitions() TO coppice_app;
GRANT SELECT, INSERT ON audit_records, audit_seals TO coppice_app;
DO $$
DECLARE
    tab text;
BEGIN
    FOREACH tab IN ARRAY ARRAY['audit_records', 'audit_seals'] LOOP
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', tab);
        EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', tab);
        EXECUTE format($policy$CREATE POLICY %I ON %I
            USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
            WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')$policy$, tab || '_tenant', tab);
    END LOOP;
END
$$;
