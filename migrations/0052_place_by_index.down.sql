DROP TRIGGER runners_follow ON runners;
DROP FUNCTION coppice_follow_runner();
CREATE OR REPLACE FUNCTION coppice_make_runner_load() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO runner_loads (runner_id) VALUES (NEW.id);
    RETURN NULL;
END
$$;
CREATE INDEX image_locations_name_idx ON image_locations (name);
DROP INDEX image_locations_named_idx;
DROP INDEX runners_fenced_idx;
ALTER TABLE runner_loads DROP COLUMN fill;
ALTER TABLE runner_loads DROP COLUMN class_key, DROP COLUMN open, DROP COLUMN cap_sandboxes, DROP COLUMN cap_vcpus, DROP COLUMN cap_memory_mib, DROP COLUMN images_sum;
DROP FUNCTION coppice_load_of(runners);
