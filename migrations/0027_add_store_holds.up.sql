-- Holds: what a runner reads of a checkpoint in the store stays there until it has all of it, whatever becomes of the checkpoint. A hold is taken
-- while the checkpoint is sealed, and keeps its needs from then on. docs/adr/0026-what-keeps-an-object.md

-- The owner is under row-level security too, unless it is a superuser; this lasts until the migration ends.
SELECT set_config('coppice.project_id', 'system', true);

-- It ends when the runner does not say any more that it fetches the checkpoint, when its lease is given up, and with the runner.
CREATE TABLE store_holds (
    checkpoint_id text COLLATE "C" NOT NULL,
    runner_id     text COLLATE "C" NOT NULL CONSTRAINT store_holds_runner_fk REFERENCES runners (id) ON DELETE CASCADE,
    project_id    text COLLATE "C" NOT NULL, -- of the checkpoint
    since         timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT store_holds_pkey PRIMARY KEY (checkpoint_id, runner_id),
    CONSTRAINT store_holds_checkpoint_fk FOREIGN KEY (project_id, checkpoint_id) REFERENCES checkpoints (project_id, id)
);
CREATE INDEX store_holds_runner_idx ON store_holds (runner_id);

-- A deleted checkpoint needs nothing any more, unless somebody still reads it.
CREATE OR REPLACE FUNCTION coppice_forget_stored() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM seals WHERE checkpoint_id = NEW.id;
    DELETE FROM checkpoint_objects WHERE checkpoint_id = NEW.id AND NOT EXISTS (SELECT 1 FROM store_holds h WHERE h.checkpoint_id = NEW.id);
    RETURN NULL;
END
$$;

-- The last hold of a deleted checkpoint takes its needs with it. Whoever deletes the checkpoint, or the other of its last two holds, has the same
-- row locked: one of them comes later, and finds nothing that holds it.
CREATE FUNCTION coppice_end_hold() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    now_is text;
BEGIN
    SELECT state INTO now_is FROM checkpoints WHERE id = OLD.checkpoint_id FOR NO KEY UPDATE;
    IF now_is = 'deleted' AND NOT EXISTS (SELECT 1 FROM store_holds h WHERE h.checkpoint_id = OLD.checkpoint_id) THEN
        DELETE FROM checkpoint_objects WHERE checkpoint_id = OLD.checkpoint_id;
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER store_holds_end AFTER DELETE ON store_holds FOR EACH ROW EXECUTE FUNCTION coppice_end_hold();

GRANT SELECT, INSERT, UPDATE, DELETE ON store_holds TO coppice_app;
ALTER TABLE store_holds ENABLE ROW LEVEL SECURITY;
ALTER TABLE store_holds FORCE ROW LEVEL SECURITY;
CREATE POLICY store_holds_tenant ON store_holds
    USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
    WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system');
