-- Heartbeats carry differences, and checksums of what they do not name. docs/adr/0044-heartbeats.md

-- The owner is under row-level security too, unless it is a superuser; this lasts until the migration ends.
SELECT set_config('coppice.project_id', 'system', true);

-- No heartbeat writes copies until this ends: one that held a row would wait for this migration, and this migration for it.
LOCK TABLE checkpoint_copies IN SHARE ROW EXCLUSIVE MODE;

-- What an id adds, by exclusive or, to the checksum of a set of ids.
CREATE FUNCTION coppice_id_sum(id text) RETURNS bigint LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT ('x' || encode(substring(sha256(convert_to(id, 'UTF8')) FROM 1 FOR 8), 'hex'))::bit(64)::bigint
$$;

-- A copy ends in the transaction that deletes its checkpoint.
DELETE FROM checkpoint_copies k USING checkpoints c WHERE c.id = k.checkpoint_id AND c.state NOT IN ('captured', 'sealed');

CREATE OR REPLACE FUNCTION coppice_forget_stored() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM seals WHERE checkpoint_id = NEW.id;
    DELETE FROM checkpoint_copies WHERE checkpoint_id = NEW.id;
    DELETE FROM checkpoint_objects WHERE checkpoint_id = NEW.id AND NOT EXISTS (SELECT 1 FROM store_holds h WHERE h.checkpoint_id = NEW.id);
    RETURN NULL;
END
$$;

-- The policies of the table need the projects, so the index has them: a sum is read from the index alone. A copy that was recorded
-- before, or by a controller of an older version, has no sum until its runner sends its whole list; it is computed each time then.
-- Copies are read while the index is made, and not written. 0054 drops the index that it replaces: that needs a stronger lock.
CREATE INDEX checkpoint_copies_sums_idx ON checkpoint_copies (runner_id) INCLUDE (id_sum, checkpoint_id, project_id, shared);
