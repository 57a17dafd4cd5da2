-- What runners signed of reseals and the cluster countersigned (docs/adr/0041-signed-reseal-reports.md). Rows are inserted and never changed.
-- Partitions by month; months that are older than the retention are dropped. The digests stay in the audit log.
CREATE TABLE attestations (
    project_id   text COLLATE "C" NOT NULL CONSTRAINT attestations_project_fk REFERENCES projects (id),
    workspace_id text COLLATE "C" NOT NULL,
    epoch        bigint NOT NULL,
    sandbox_id   text COLLATE "C" NOT NULL,
    runner_id    text COLLATE "C" NOT NULL,
    digest       text COLLATE "C" NOT NULL, -- of the envelope: sha256:...
    envelope     bytea NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT attestations_pkey PRIMARY KEY (sandbox_id, created_at),
    CONSTRAINT attestations_envelope_check CHECK (octet_length(envelope) BETWEEN 1 AND 65536),
    CONSTRAINT attestations_digest_check CHECK (digest = 'sha256:' || encode(sha256(envelope), 'hex'))
) PARTITION BY RANGE (created_at);
CREATE INDEX attestations_workspace_idx ON attestations (workspace_id, epoch);
CREATE TABLE attestations_default PARTITION OF attestations DEFAULT;
CREATE TRIGGER attestations_append_only BEFORE UPDATE OR DELETE ON attestations FOR EACH ROW EXECUTE FUNCTION coppice_append_only();
CREATE TRIGGER attestations_no_truncate BEFORE TRUNCATE ON attestations FOR EACH STATEMENT EXECUTE FUNCTION coppice_append_only();

-- The digest goes into the audit log, and so into its chain of hashes.
CREATE FUNCTION coppice_audit_attestations() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO audit_records (project_id, request_id, actor, source, action, object_id, before, after, outcome, operation_id, detail)
    SELECT n.project_id, coppice_origin(4), coppice_origin(1), coppice_origin(2), coppice_origin(3), n.workspace_id, '', '', 'succeeded', coppice_origin(5),
        jsonb_build_object('attestation', n.digest, 'epoch', n.epoch, 'sandbox_id', n.sandbox_id, 'runner_id', n.runner_id) FROM new_rows n;
    RETURN NULL;
END
$$;
CREATE TRIGGER attestations_audit AFTER INSERT ON attestations REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION coppice_audit_attestations();

-- Makes the partitions of this month and the next two, and drops those whose months ended before keep. What a clock that is wrong put into
-- the default partition goes by when it came. It works as coppice_tidy_flows does.
CREATE FUNCTION coppice_tidy_attestations(keep interval) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, public, pg_temp SET lock_timeout = '500ms' SET timezone = 'UTC' AS $$
DECLARE
    month date;
    part  text;
BEGIN
    IF keep IS NULL OR keep < interval '1 day' THEN
        RAISE EXCEPTION 'attestations are kept for a day at least, not for %', keep;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('coppice_tidy_attestations'));
    FOR i IN 0..2 LOOP
        month := (date_trunc('month', now()) + make_interval(months => i))::date;
        part := 'attestations_' || to_char(month, 'YYYYMM');
        IF to_regclass('public.' || part) IS NULL THEN
            BEGIN
                EXECUTE format('CREATE TABLE public.%I PARTITION OF public.attestations FOR VALUES FROM (%L) TO (%L)',
                    part, month::text || ' 00:00:00+00', (month + interval '1 month')::date::text || ' 00:00:00+00');
            EXCEPTION WHEN check_violation THEN NULL;
            END;
        END IF;
    END LOOP;
    FOR part IN
        SELECT c.relname FROM pg_inherits h JOIN pg_class c ON c.oid = h.inhrelid
        WHERE h.inhparent = 'public.attestations'::regclass AND c.relname ~ '^attestations_[0-9]{6}$' ORDER BY c.relname
    LOOP
        IF to_date(right(part, 6), 'YYYYMM') + interval '1 month' <= now() - keep THEN
            EXECUTE format('DROP TABLE public.%I', part);
        END IF;
    END LOOP;
    IF EXISTS (SELECT 1 FROM public.attestations_default WHERE created_at <= now() - keep) THEN
        ALTER TABLE public.attestations_default DISABLE TRIGGER attestations_append_only;
        DELETE FROM public.attestations_default WHERE created_at <= now() - keep;
        ALTER TABLE public.attestations_default ENABLE TRIGGER attestations_append_only;
    END IF;
END
$$;
SELECT coppice_tidy_attestations('400 days');

REVOKE EXECUTE ON FUNCTION coppice_tidy_attestations(interval) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION coppice_tidy_attestations(interval) TO coppice_app;
GRANT SELECT, INSERT ON attestations TO coppice_app;
ALTER TABLE attestations ENABLE ROW LEVEL SECURITY;
ALTER TABLE attestations FORCE ROW LEVEL SECURITY;
CREATE POLICY attestations_tenant ON attestations
    USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
    WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system');
