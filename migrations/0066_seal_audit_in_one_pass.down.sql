-- Seals every row whose transaction has ended. One at a time; who comes second has nothing to do.
CREATE OR REPLACE FUNCTION coppice_seal_audit() RETURNS bigint LANGUAGE plpgsql AS $$
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
