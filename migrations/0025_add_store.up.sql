-- Checkpoints in the store. What a checkpoint needs there is a row each of checkpoint_objects, from the moment that an attempt to
-- seal it builds on it until the checkpoint is deleted or the attempt is given up. Needs are taken over from a living checkpoint or
-- come with the object's own row, so an object that nothing needs is needed by nothing ever again: it is condemned, after a while its bytes are
-- deleted, and then its row. docs/adr/0026-what-keeps-an-object.md says why this order is safe.

-- The owner is under row-level security too, unless it is a superuser; this lasts until the migration ends.
SELECT set_config('coppice.project_id', 'system', true);

ALTER TABLE checkpoints
    ADD COLUMN sealed_at       timestamptz,
    ADD COLUMN manifest_key    text COLLATE "C",
    ADD COLUMN manifest_digest text COLLATE "C", -- the manifest in the store is believed only with this
    ADD COLUMN manifest_bytes  bigint,
    ADD COLUMN stored_bytes    bigint, -- of what was written for it
    ADD CONSTRAINT checkpoints_sealed_check CHECK (state <> 'sealed' OR (sealed_at IS NOT NULL AND manifest_key IS NOT NULL
        AND manifest_digest IS NOT NULL AND manifest_bytes IS NOT NULL AND stored_bytes IS NOT NULL)),
    ADD CONSTRAINT checkpoints_manifest_check CHECK (manifest_digest ~ '^sha256:[0-9a-f]{64}$' AND manifest_bytes > 0 AND stored_bytes >= 0);
CREATE TRIGGER checkpoints_sealed_immutable BEFORE UPDATE ON checkpoints FOR EACH ROW WHEN (
    OLD.sealed_at IS NOT NULL AND (OLD.sealed_at, OLD.manifest_key, OLD.manifest_digest, OLD.manifest_bytes, OLD.stored_bytes)
        IS DISTINCT FROM (NEW.sealed_at, NEW.manifest_key, NEW.manifest_digest, NEW.manifest_bytes, NEW.stored_bytes)
) EXECUTE FUNCTION coppice_checkpoint_immutable();
-- A template may be taken over from another runner.
CREATE INDEX checkpoints_sealed_template_idx ON checkpoints (image_digest, class_key, vcpus, memory_mib) WHERE kind = 'template' AND state = 'sealed';

-- Who has a checkpoint's bytes. The checkpoint's own runner_id is where it was captured.
CREATE TABLE checkpoint_copies (
    checkpoint_id text COLLATE "C" NOT NULL,
    runner_id     text COLLATE "C" NOT NULL CONSTRAINT checkpoint_copies_runner_fk REFERENCES runners (id) ON DELETE CASCADE,
    project_id    text COLLATE "C" NOT NULL, -- of the checkpoint
    shared        boolean NOT NULL DEFAULT false, -- likewise
    CONSTRAINT checkpoint_copies_pkey PRIMARY KEY (checkpoint_id, runner_id),
    CONSTRAINT checkpoint_copies_checkpoint_fk FOREIGN KEY (project_id, checkpoint_id) REFERENCES checkpoints (project_id, id) ON DELETE CASCADE
);
CREATE INDEX checkpoint_copies_runner_idx ON checkpoint_copies (runner_id);
INSERT INTO checkpoint_copies (checkpoint_id, runner_id, project_id, shared)
SELECT id, runner_id, project_id, shared FROM checkpoints WHERE state = 'captured';

-- The newest attempt to seal a checkpoint that is captured.
CREATE TABLE seals (
    checkpoint_id    text COLLATE "C" CONSTRAINT seals_pkey PRIMARY KEY,
    project_id       text COLLATE "C" NOT NULL,
    runner_id        text COLLATE "C" NOT NULL CONSTRAINT seals_runner_fk REFERENCES runners (id),
    lease_epoch      bigint NOT NULL, -- of the runner, which is another after it was lost
    attempt          bigint NOT NULL, -- of the checkpoint; every one writes below a prefix of its own
    reference_id     text COLLATE "C", -- the checkpoint that it builds on
    state            text NOT NULL,
    problem_category text,
    problem_code     text,
    problem_message  text, -- of the attempt before, until one succeeds
    begun_at         timestamptz NOT NULL DEFAULT now(),
    ended_at         timestamptz,
    CONSTRAINT seals_checkpoint_fk FOREIGN KEY (project_id, checkpoint_id) REFERENCES checkpoints (project_id, id),
    CONSTRAINT seals_state_check CHECK (state IN ('uploading', 'failed')),
    CONSTRAINT seals_attempt_check CHECK (attempt >= 1 AND lease_epoch >= 1),
    CONSTRAINT seals_failed_check CHECK (state <> 'failed' OR (problem_code IS NOT NULL AND ended_at IS NOT NULL)),
    CONSTRAINT seals_problem_check CHECK ((problem_code IS NULL) = (problem_message IS NULL) AND (problem_code IS NULL) = (problem_category IS NULL))
);
CREATE INDEX seals_runner_idx ON seals (runner_id) WHERE state = 'uploading';

-- Every object that an attempt which was taken has written. Others belong to store_debris.
CREATE TABLE store_objects (
    key           text COLLATE "C" CONSTRAINT store_objects_pkey PRIMARY KEY,
    project_id    text COLLATE "C" NOT NULL CONSTRAINT store_objects_project_fk REFERENCES projects (id),
    checkpoint_id text COLLATE "C" NOT NULL, -- for which it was written
    attempt       bigint NOT NULL,
    bytes         bigint NOT NULL,
    condemned_at  timestamptz, -- nothing needs it, and nothing ever will
    CONSTRAINT store_objects_bytes_check CHECK (bytes >= 0)
);
CREATE INDEX store_objects_condemned_idx ON store_objects (condemned_at) WHERE condemned_at IS NOT NULL;

-- The needs. The reference makes it impossible to remove the row of an object that is needed.
CREATE TABLE checkpoint_objects (
    checkpoint_id text COLLATE "C" NOT NULL,
    key           text COLLATE "C" NOT NULL CONSTRAINT checkpoint_objects_object_fk REFERENCES store_objects (key),
    project_id    text COLLATE "C" NOT NULL, -- of the checkpoint
    CONSTRAINT checkpoint_objects_pkey PRIMARY KEY (checkpoint_id, key),
    CONSTRAINT checkpoint_objects_checkpoint_fk FOREIGN KEY (project_id, checkpoint_id) REFERENCES checkpoints (project_id, id)
);
CREATE INDEX checkpoint_objects_key_idx ON checkpoint_objects (key);

-- A condemned object is never needed again.
CREATE FUNCTION coppice_need_object() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM new_rows n JOIN store_objects o ON o.key = n.key WHERE o.condemned_at IS NOT NULL) THEN
        RAISE EXCEPTION 'an object is condemned' USING ERRCODE = 'check_violation', CONSTRAINT = 'checkpoint_objects_condemned_check';
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER checkpoint_objects_need AFTER INSERT ON checkpoint_objects REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION coppice_need_object();

-- Objects that may have become useless: one that loses a need is looked at later, by one controller, when the loss is committed.
CREATE TABLE store_released (
    id         bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT store_released_pkey PRIMARY KEY,
    project_id text COLLATE "C" NOT NULL,
    key        text COLLATE "C" NOT NULL
);
CREATE FUNCTION coppice_release_objects() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO store_released (project_id, key) SELECT project_id, key FROM old_rows ORDER BY key;
    RETURN NULL;
END
$$;
CREATE TRIGGER checkpoint_objects_release AFTER DELETE ON checkpoint_objects REFERENCING OLD TABLE AS old_rows
    FOR EACH STATEMENT EXECUTE FUNCTION coppice_release_objects();

-- Where attempts that were given up may have left objects. None of them has a row.
CREATE TABLE store_debris (
    prefix     text COLLATE "C" CONSTRAINT store_debris_pkey PRIMARY KEY,
    project_id text COLLATE "C" NOT NULL CONSTRAINT store_debris_project_fk REFERENCES projects (id),
    since      timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT store_debris_prefix_check CHECK (prefix ~ '/$')
);

CREATE FUNCTION coppice_seal_prefix(project text, checkpoint text, attempt bigint) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT 'v1/' || project || '/' || checkpoint || '/' || attempt || '/'
$$;

-- An attempt that ends without its commit leaves debris, however it ends.
CREATE FUNCTION coppice_abandon_seal() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (SELECT c.state FROM checkpoints c WHERE c.id = OLD.checkpoint_id) <> 'sealed' THEN
        INSERT INTO store_debris (prefix, project_id) VALUES (coppice_seal_prefix(OLD.project_id, OLD.checkpoint_id, OLD.attempt), OLD.project_id)
        ON CONFLICT DO NOTHING;
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER seals_abandon AFTER UPDATE ON seals FOR EACH ROW
    WHEN (OLD.state = 'uploading' AND (NEW.state <> 'uploading' OR NEW.attempt <> OLD.attempt)) EXECUTE FUNCTION coppice_abandon_seal();
CREATE TRIGGER seals_abandon_deleted AFTER DELETE ON seals FOR EACH ROW WHEN (OLD.state = 'uploading') EXECUTE FUNCTION coppice_abandon_seal();

-- A deleted checkpoint needs nothing any more, and whatever seals it has lost.
CREATE FUNCTION coppice_forget_stored() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM seals WHERE checkpoint_id = NEW.id;
    DELETE FROM checkpoint_objects WHERE checkpoint_id = NEW.id;
    RETURN NULL;
END
$$;
CREATE TRIGGER checkpoints_forget_stored AFTER UPDATE ON checkpoints FOR EACH ROW
    WHEN (NEW.state = 'deleted' AND OLD.state IN ('captured', 'sealed')) EXECUTE FUNCTION coppice_forget_stored();

GRANT SELECT, INSERT, UPDATE, DELETE ON checkpoint_copies, seals, store_objects, checkpoint_objects, store_released, store_debris TO coppice_app;
DO $$
DECLARE
    tab text;
BEGIN
    FOREACH tab IN ARRAY ARRAY['checkpoint_copies', 'seals', 'store_objects', 'checkpoint_objects', 'store_released', 'store_debris'] LOOP
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', tab);
        EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', tab);
        EXECUTE format($policy$CREATE POLICY %I ON %I
            USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
            WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')$policy$, tab || '_tenant', tab);
    END LOOP;
    CREATE POLICY checkpoint_copies_shared ON checkpoint_copies FOR SELECT USING (shared AND (SELECT current_setting('coppice.project_id', true)) <> '');
END
$$;
