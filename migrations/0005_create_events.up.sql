-- What happened: every change of state of a workspace or a checkpoint and every end of an operation, written by triggers in the
-- transaction of the change, so that none can be forgotten. Rows are never changed and leave by whole partitions (days, UTC).
-- Ids are handed out while the changed row is locked: of one object they follow the order of its changes. Of different objects they
-- may become visible out of order, which readers must mind (docs/adr/0015-event-order.md): CACHE 1 is part of that.
CREATE SEQUENCE events_id_seq AS bigint CACHE 1;
-- The highest id that has left with its partition.
CREATE SEQUENCE events_floor AS bigint MINVALUE 0 START 0 CACHE 1;

-- No foreign keys: the rows are written from rows that have them, and stay when those are gone.
CREATE TABLE events (
    id            bigint NOT NULL DEFAULT nextval('events_id_seq'),
    project_id    text COLLATE "C" NOT NULL,
    type          text NOT NULL, -- object.state
    workspace_id  text COLLATE "C",
    checkpoint_id text COLLATE "C",
    root_id       text COLLATE "C", -- of the tree
    operation_id  text COLLATE "C",
    data          jsonb NOT NULL,
    created_at    timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT events_pkey PRIMARY KEY (id, created_at),
    CONSTRAINT events_type_check CHECK (type ~ '^(workspace|checkpoint|operation)[.][a-z]+$')
) PARTITION BY RANGE (created_at);
CREATE INDEX events_project_idx ON events (project_id, id);
CREATE TABLE events_default PARTITION OF events DEFAULT;
CREATE TRIGGER events_append_only BEFORE UPDATE OR DELETE ON events FOR EACH ROW EXECUTE FUNCTION coppice_append_only();

-- Makes the partitions of today and the next two days and drops those that are older than keep. A day whose rows are in the
-- default partition already, because nobody called for days, stays there; the default partition is emptied when all of it is old.
CREATE FUNCTION coppice_tidy_events(keep interval) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, public, pg_temp SET lock_timeout = '500ms' SET timezone = 'UTC' AS $$
DECLARE
    day  date;
    part text;
    top  bigint;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('coppice_tidy_events'));
    FOR i IN 0..2 LOOP
        day := now()::date + i;
        part := 'events_' || to_char(day, 'YYYYMMDD');
        IF to_regclass('public.' || part) IS NULL THEN
            BEGIN
                EXECUTE format('CREATE TABLE public.%I PARTITION OF public.events FOR VALUES FROM (%L) TO (%L)',
                    part, day::text || ' 00:00:00+00', (day + 1)::text || ' 00:00:00+00');
            EXCEPTION WHEN check_violation THEN NULL;
            END;
        END IF;
    END LOOP;
    FOR part IN
        SELECT c.relname FROM pg_inherits h JOIN pg_class c ON c.oid = h.inhrelid
        WHERE h.inhparent = 'public.events'::regclass AND c.relname ~ '^events_[0-9]{8}$' ORDER BY c.relname
    LOOP
        day := to_date(right(part, 8), 'YYYYMMDD');
        IF day + 1 <= now() - keep THEN
            EXECUTE format('SELECT max(id) FROM public.%I', part) INTO top;
            EXECUTE format('DROP TABLE public.%I', part);
            IF top > (SELECT last_value FROM public.events_floor) THEN
                PERFORM setval('public.events_floor', top);
            END IF;
        END IF;
    END LOOP;
    SELECT max(id) INTO top FROM public.events_default;
    IF top IS NOT NULL AND NOT EXISTS (SELECT 1 FROM public.events_default WHERE created_at > now() - keep) THEN
        TRUNCATE public.events_default;
        IF top > (SELECT last_value FROM public.events_floor) THEN
            PERFORM setval('public.events_floor', top);
        END IF;
    END IF;
END
$$;
SELECT coppice_tidy_events(interval '7 days');

-- One statement writes the events of all rows that it changed. A node's root is looked up by key, row by row.
CREATE FUNCTION coppice_workspace_events() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO events (project_id, type, workspace_id, checkpoint_id, root_id, data)
        SELECT n.project_id, 'workspace.' || n.state, n.id, coalesce(n.checkpoint_id, n.parent_checkpoint_id),
            (SELECT c.root_id FROM checkpoints c WHERE c.id = coalesce(n.checkpoint_id, n.parent_checkpoint_id)),
            jsonb_build_object('name', n.name, 'epoch', n.epoch)
        FROM new_rows n ORDER BY n.id;
    ELSE
        INSERT INTO events (project_id, type, workspace_id, checkpoint_id, root_id, data)
        SELECT n.project_id, 'workspace.' || n.state, n.id, coalesce(n.checkpoint_id, n.parent_checkpoint_id),
            (SELECT c.root_id FROM checkpoints c WHERE c.id = coalesce(n.checkpoint_id, n.parent_checkpoint_id)),
            jsonb_strip_nulls(jsonb_build_object('name', n.name, 'epoch', n.epoch, 'from', o.state, 'code', n.failure_code, 'message', n.failure_message))
        FROM new_rows n JOIN old_rows o ON o.id = n.id WHERE o.state <> n.state ORDER BY n.id;
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER workspaces_begin_events AFTER INSERT ON workspaces REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION coppice_workspace_events();
CREATE TRIGGER workspaces_events AFTER UPDATE ON workspaces REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION coppice_workspace_events();

CREATE FUNCTION coppice_checkpoint_events() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO events (project_id, type, workspace_id, checkpoint_id, root_id, operation_id, data)
        SELECT n.project_id, 'checkpoint.' || n.state, n.workspace_id, n.id, n.root_id, n.operation_id,
            jsonb_strip_nulls(jsonb_build_object('name', n.name, 'epoch', n.workspace_epoch, 'parent_id', n.parent_id))
        FROM new_rows n ORDER BY n.id;
    ELSE
        INSERT INTO events (project_id, type, workspace_id, checkpoint_id, root_id, operation_id, data)
        SELECT n.project_id, 'checkpoint.' || n.state, n.workspace_id, n.id, n.root_id, n.operation_id,
            jsonb_strip_nulls(jsonb_build_object('name', n.name, 'epoch', n.workspace_epoch, 'parent_id', n.parent_id,
                'from', o.state, 'code', n.failure_code, 'message', n.failure_message))
        FROM new_rows n JOIN old_rows o ON o.id = n.id WHERE o.state <> n.state ORDER BY n.id;
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER checkpoints_begin_events AFTER INSERT ON checkpoints REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION coppice_checkpoint_events();
CREATE TRIGGER checkpoints_events AFTER UPDATE ON checkpoints REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION coppice_checkpoint_events();

CREATE FUNCTION coppice_operation_events() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO events (project_id, type, workspace_id, checkpoint_id, root_id, operation_id, data)
    SELECT n.project_id, 'operation.' || n.state, n.workspace_id, n.checkpoint_id,
        coalesce((SELECT c.root_id FROM checkpoints c WHERE c.id = n.checkpoint_id),
            (SELECT c.root_id FROM workspaces w JOIN checkpoints c ON c.id = coalesce(w.checkpoint_id, w.parent_checkpoint_id) WHERE w.id = n.workspace_id)),
        n.id, jsonb_strip_nulls(jsonb_build_object('kind', n.kind, 'from', o.state, 'code', n.problem_code, 'message', n.problem_message))
    FROM new_rows n JOIN old_rows o ON o.id = n.id WHERE n.state IN ('succeeded', 'failed') AND o.state <> n.state ORDER BY n.id;
    RETURN NULL;
END
$$;
CREATE TRIGGER operations_events AFTER UPDATE ON operations REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION coppice_operation_events();

GRANT SELECT, INSERT ON events TO coppice_app;
GRANT SELECT, USAGE ON SEQUENCE events_id_seq TO coppice_app;
GRANT SELECT ON SEQUENCE events_floor TO coppice_app;
REVOKE EXECUTE ON FUNCTION coppice_tidy_events(interval) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION coppice_tidy_events(interval) TO coppice_app;
ALTER TABLE events ENABLE ROW LEVEL SECURITY;
ALTER TABLE events FORCE ROW LEVEL SECURITY;
CREATE POLICY events_tenant ON events
    USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
    WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system');
