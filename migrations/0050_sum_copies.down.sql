CREATE OR REPLACE FUNCTION coppice_forget_stored() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM seals WHERE checkpoint_id = NEW.id;
    DELETE FROM checkpoint_objects WHERE checkpoint_id = NEW.id AND NOT EXISTS (SELECT 1 FROM store_holds h WHERE h.checkpoint_id = NEW.id);
    RETURN NULL;
END
$$;
DROP INDEX checkpoint_copies_runner_idx;
CREATE INDEX checkpoint_copies_runner_idx ON checkpoint_copies (runner_id);
ALTER TABLE sandboxes DROP COLUMN id_sum;
ALTER TABLE checkpoint_copies DROP COLUMN id_sum;
DROP FUNCTION coppice_id_sum(text);
