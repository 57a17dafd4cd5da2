-- This fails if two living sandboxes have the same address: terminate one of them first.
CREATE OR REPLACE FUNCTION coppice_load_of(r runners, OUT class_key text, OUT open boolean, OUT cap_sandboxes bigint, OUT cap_vcpus bigint, OUT cap_memory_mib bigint)
    LANGUAGE sql IMMUTABLE AS $$
    SELECT r.class_key, NOT r.draining AND r.fenced_at IS NULL AND r.removed_at IS NULL,
        coalesce((r.capacity ->> 'sandboxes')::bigint, 0), coalesce((r.capacity ->> 'vcpus')::bigint, 0), coalesce((r.capacity ->> 'memory_mib')::bigint, 0)
$$;
CREATE UNIQUE INDEX sandboxes_live_ip_key ON sandboxes (ip) WHERE ended_at IS NULL;
CREATE INDEX sandboxes_live_runner_idx ON sandboxes (runner_id) INCLUDE (vcpus, memory_mib) WHERE ended_at IS NULL;
DROP INDEX sandboxes_live_tree_ip_key;
DROP INDEX sandboxes_live_runner_ip_key;
DROP TRIGGER sandboxes_default_tree ON sandboxes;
DROP FUNCTION coppice_default_tree();
ALTER TABLE sandboxes DROP COLUMN tree_id;
