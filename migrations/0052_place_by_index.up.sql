-- Placement reads the few runners that it may choose instead of all of them. The row of a runner's load has what decides: whether
-- the runner takes new sandboxes, of which class it is, and how full it is, in sixteenths. Sixteenths change rarely, so most
-- updates of a load still change no index and stay on their page. docs/adr/0046-placement-reads-few-rows.md

-- The owner is under row-level security too, unless it is a superuser; this lasts until the migration ends.
SELECT set_config('coppice.project_id', 'system', true);

-- In the order of a heartbeat, which changes a runner before its load.
LOCK TABLE runners IN SHARE ROW EXCLUSIVE MODE;

ALTER TABLE runner_loads
    ADD COLUMN class_key      text COLLATE "C" NOT NULL DEFAULT '',
    ADD COLUMN open           boolean NOT NULL DEFAULT false, -- neither draining nor given up nor removed
    ADD COLUMN cap_sandboxes  bigint NOT NULL DEFAULT 0,      -- 0 is not limited, as in the runner's row
    ADD COLUMN cap_vcpus      bigint NOT NULL DEFAULT 0,
    ADD COLUMN cap_memory_mib bigint NOT NULL DEFAULT 0,
    ADD COLUMN images_sum     text NOT NULL DEFAULT '';       -- of the list of images that was recorded last

-- The columns of a load that follow the row of its runner.
CREATE FUNCTION coppice_load_of(r runners, OUT class_key text, OUT open boolean, OUT cap_sandboxes bigint, OUT cap_vcpus bigint, OUT cap_memory_mib bigint)
    LANGUAGE sql IMMUTABLE AS $$
    SELECT r.class_key, NOT r.draining AND r.fenced_at IS NULL AND r.removed_at IS NULL,
        coalesce((r.capacity ->> 'sandboxes')::bigint, 0), coalesce((r.capacity ->> 'vcpus')::bigint, 0), coalesce((r.capacity ->> 'memory_mib')::bigint, 0)
$$;
UPDATE runner_loads l SET (class_key, open, cap_sandboxes, cap_vcpus, cap_memory_mib) = (SELECT * FROM coppice_load_of(r)) FROM runners r WHERE r.id = l.runner_id;

-- The fullest of the dimensions that are limited; 16 is full.
ALTER TABLE runner_loads ADD COLUMN fill smallint NOT NULL GENERATED ALWAYS AS (least(16, greatest(
    CASE WHEN cap_sandboxes > 0 THEN sandboxes * 16::bigint / cap_sandboxes ELSE 0 END,
    CASE WHEN cap_vcpus > 0 THEN vcpus * 16::bigint / cap_vcpus ELSE 0 END,
    CASE WHEN cap_memory_mib > 0 THEN memory_mib * 16::bigint / cap_memory_mib ELSE 0 END))) STORED;
CREATE INDEX runner_loads_class_idx ON runner_loads (class_key, fill, runner_id) WHERE open;
CREATE INDEX runner_loads_fill_idx ON runner_loads (fill, runner_id) WHERE open;
-- Which runners were given up, of which there are few: heartbeats change neither column.
CREATE INDEX runners_fenced_idx ON runners (id) WHERE fenced_at IS NOT NULL;
-- The images that have a name, one by one, and who holds an image.
CREATE INDEX image_locations_named_idx ON image_locations (name, image_id, runner_id);
DROP INDEX image_locations_name_idx;

CREATE OR REPLACE FUNCTION coppice_make_runner_load() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO runner_loads (runner_id, class_key, open, cap_sandboxes, cap_vcpus, cap_memory_mib) SELECT NEW.id, x.* FROM coppice_load_of(NEW) x;
    RETURN NULL;
END
$$;
-- The rows are the system's, whoever changes the runner.
CREATE FUNCTION coppice_follow_runner() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    scope text := coalesce(current_setting('coppice.project_id', true), '');
BEGIN
    PERFORM set_config('coppice.project_id', 'system', true);
    UPDATE runner_loads l SET (class_key, open, cap_sandboxes, cap_vcpus, cap_memory_mib) = (SELECT * FROM coppice_load_of(NEW)) WHERE l.runner_id = NEW.id;
    PERFORM set_config('coppice.project_id', scope, true);
    RETURN NULL;
END
$$;
CREATE TRIGGER runners_follow AFTER UPDATE ON runners FOR EACH ROW WHEN (
    (OLD.class_key, OLD.capacity, OLD.draining) IS DISTINCT FROM (NEW.class_key, NEW.capacity, NEW.draining)
    OR (OLD.fenced_at IS NULL, OLD.removed_at IS NULL) IS DISTINCT FROM (NEW.fenced_at IS NULL, NEW.removed_at IS NULL)
) EXECUTE FUNCTION coppice_follow_runner();
