-- Heartbeats have numbers: one that comes again, or late, changes nothing. docs/adr/0044-heartbeats.md
ALTER TABLE runners
    ADD COLUMN beat       bigint NOT NULL DEFAULT 0, -- number of the newest heartbeat that was applied
    ADD COLUMN beat_epoch bigint NOT NULL DEFAULT 0, -- the lease epoch that it is of; of another epoch none was applied
    -- heartbeat_at as that heartbeat has left it. When heartbeat_at differs, a controller that does not know the numbers has
    -- applied a heartbeat since.
    ADD COLUMN beat_at    timestamptz;

-- See 0050. A column without a default is there at once; it is apart from the index, whose making takes longer.
ALTER TABLE checkpoint_copies ADD COLUMN id_sum bigint;

-- Heartbeats are not changes of a runner that the audit log has.
CREATE OR REPLACE FUNCTION coppice_audit_row() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    was     jsonb := CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD) ELSE '{}' END;
    now_    jsonb := CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW) ELSE '{}' END;
    either  jsonb := CASE WHEN TG_OP = 'DELETE' THEN was ELSE now_ END;
    changed jsonb;
BEGIN
    SELECT jsonb_object_agg(k, CASE WHEN k ~ 'hash|secret|sealed|private|_key$' THEN 'null'::jsonb ELSE now_ -> k END) INTO changed
    FROM jsonb_object_keys(was || now_) AS k
    WHERE was -> k IS DISTINCT FROM now_ -> k
        AND k NOT IN ('project_id', 'created_at', 'last_used_at', 'heartbeat_at', 'lease_expires_at', 'allocated', 'disk_free_mb', 'updated_at',
            'beat', 'beat_epoch', 'beat_at', 'data_log', 'data_recorded');
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
