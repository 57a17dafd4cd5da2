-- Seals the records of all projects in one pass over the range. The function before read the range once for each project in it.
CREATE OR REPLACE FUNCTION coppice_seal_audit() RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    horizon xid8;
    start   xid8;
    sealed  bigint;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('coppice_seal_audit'));
    horizon := pg_snapshot_xmin(pg_current_snapshot());
    start := coalesce((SELECT s.upper FROM audit_seals s ORDER BY s.upper DESC LIMIT 1), '0'::xid8);
    WITH fresh AS MATERIALIZED ( -- as coppice_audit_hash computes it
        SELECT r.project_id, string_agg(sha256(coppice_audit_text(r)), ''::bytea ORDER BY r.xid, r.id) AS digests, count(*) AS records
        FROM audit_records r WHERE r.xid >= start AND r.xid < horizon GROUP BY r.project_id
    ), made AS (
        INSERT INTO audit_seals (project_id, seq, lower, upper, records, previous, hash)
        SELECT f.project_id, coalesce(l.seq, 0) + 1, start, horizon, f.records, coalesce(l.hash, '\x'::bytea), sha256(coalesce(l.hash, '\x'::bytea) || f.digests)
        FROM fresh f LEFT JOIN LATERAL (SELECT seq, hash FROM audit_seals WHERE project_id = f.project_id ORDER BY seq DESC LIMIT 1) l ON true
        RETURNING records
    )
    SELECT coalesce(sum(records), 0) INTO sealed FROM made;
    RETURN sealed;
END
$$;
