-- How much is placed on each runner, kept exact by triggers: to place a fork one row is read instead of all that live there. A
-- transaction that places or ends sandboxes holds the row until it has ended, so that what it read of it stays true.

-- The owner is under row-level security too, unless it is a superuser; this lasts until the migration ends.
SELECT set_config('coppice.project_id', 'system', true);

CREATE TABLE runner_loads (
    runner_id  text COLLATE "C" CONSTRAINT runner_loads_pkey PRIMARY KEY CONSTRAINT runner_loads_runner_fk REFERENCES runners (id),
    project_id text COLLATE "C" NOT NULL DEFAULT 'prj_00000000000000000000000000' CONSTRAINT runner_loads_project_fk REFERENCES projects (id),
    sandboxes  integer NOT NULL DEFAULT 0,
    vcpus      integer NOT NULL DEFAULT 0,
    memory_mib bigint NOT NULL DEFAULT 0,
    CONSTRAINT runner_loads_check CHECK (least(sandboxes, vcpus, memory_mib) >= 0)
) WITH (fillfactor = 20); -- its updates stay on the page

INSERT INTO runner_loads (runner_id, sandboxes, vcpus, memory_mib)
SELECT r.id, count(s.id), coalesce(sum(s.vcpus), 0), coalesce(sum(s.memory_mib), 0)
FROM runners r LEFT JOIN sandboxes s ON s.runner_id = r.id AND s.ended_at IS NULL GROUP BY r.id;

CREATE FUNCTION coppice_make_runner_load() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO runner_loads (runner_id) VALUES (NEW.id);
    RETURN NULL;
END
$$;
CREATE TRIGGER runners_load AFTER INSERT ON runners FOR EACH ROW EXECUTE FUNCTION coppice_make_runner_load();

-- The rows are the system's, whoever's sandboxes are counted.
CREATE FUNCTION coppice_count_sandboxes() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    scope text := coalesce(current_setting('coppice.project_id', true), '');
BEGIN
    PERFORM set_config('coppice.project_id', 'system', true);
    IF TG_OP = 'INSERT' THEN
        UPDATE runner_loads l SET sandboxes = l.sandboxes + d.sandboxes, vcpus = l.vcpus + d.vcpus, memory_mib = l.memory_mib + d.memory_mib
        FROM (SELECT runner_id, count(*) AS sandboxes, sum(vcpus) AS vcpus, sum(memory_mib) AS memory_mib
            FROM new_rows WHERE ended_at IS NULL GROUP BY runner_id) AS d
        WHERE l.runner_id = d.runner_id;
    ELSE
        UPDATE runner_loads l SET sandboxes = l.sandboxes - d.sandboxes, vcpus = l.vcpus - d.vcpus, memory_mib = l.memory_mib - d.memory_mib
        FROM (SELECT o.runner_id, count(*) AS sandboxes, sum(o.vcpus) AS vcpus, sum(o.memory_mib) AS memory_mib
            FROM old_rows o JOIN new_rows n ON n.id = o.id WHERE o.ended_at IS NULL AND n.ended_at IS NOT NULL GROUP BY o.runner_id) AS d
        WHERE l.runner_id = d.runner_id;
    END IF;
    PERFORM set_config('coppice.project_id', scope, true);
    RETURN NULL;
END
$$;
CREATE TRIGGER sandboxes_begin_load AFTER INSERT ON sandboxes REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION coppice_count_sandboxes();
CREATE TRIGGER sandboxes_load AFTER UPDATE ON sandboxes REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION coppice_count_sandboxes();

GRANT SELECT, INSERT, UPDATE ON runner_loads TO coppice_app;
ALTER TABLE runner_loads ENABLE ROW LEVEL SECURITY;
ALTER TABLE runner_loads FORCE ROW LEVEL SECURITY;
CREATE POLICY runner_loads_system ON runner_loads
    USING ((SELECT current_setting('coppice.project_id', true)) = 'system')
    WITH CHECK ((SELECT current_setting('coppice.project_id', true)) = 'system');
